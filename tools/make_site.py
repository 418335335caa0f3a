"""Make the course a website: build/site, which any browser opens from disk, without a network.

    make site

The pages are the notebooks with their stored outputs, the solutions, the pages in Markdown and the
code that they link to. Where npm can fetch Pyodide, explorers, puzzles and exercises run in the pages
(living_pages.py); elsewhere the pages show what is stored. No page loads anything from elsewhere.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import living_pages
import living_site
import make_hosted
import nbformat
import search_index
import site_index
import site_page
from answers import answers_of, folded
from exercises import OTHER_CONTENT, notebook_of
from formulas import with_formulas
from jinja2 import TemplateError
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import InvalidNotebook
from own_git import ask_git
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from schedule_map import draw_map  # noqa: E402

from files.claims import LOCK, ClaimError, content_of, lock_folder, unlock_folder  # noqa: E402
from files.inputs import InputError, printable, read_text  # noqa: E402
from files.outputs import new_file_beside, not_written  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files, shortened  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

SITE = ROOT / "build" / "site"
PAGES = (".md", ".ipynb")  # what becomes a page; other files are shown as they are
PICTURES = (".svg", ".png")
OF_A_HOST = ".git", ".nojekyll", "CNAME"  # what a published site has beside its pages
SETS_UP = r"(import|from) .*^warm_up\("  # the first cell of a lesson, without a picture
# What formulas.py, nbconvert and the cells that show an explorer raise for content they cannot show.
NOT_SHOWN = (
    *OTHER_CONTENT, ArithmeticError, ImportError, InvalidNotebook, LookupError, RuntimeError,
    SyntaxError, TemplateError, nbformat.ValidationError,
)  # fmt: skip
NOT_ATTEMPTED = "Not attempted yet"  # what a check says of a stub
CHECKED_ELSEWHERE = (
    '<p class="panel">The check of this exercise runs in JupyterLab: <code>make lab</code>.</p>'
)


class Course(NamedTuple):
    """What the pages of the site are made from; all paths but `root` itself are from the root."""

    root: Path
    files: list
    folders: set
    titles: dict  # of the pages, by path
    lives: bool  # whether pages run Python
    address: str = ""  # of the published site, with a slash at its end


@in_one_sentence()
def main():
    arguments = parse_arguments()
    site = Path(os.path.realpath(arguments.into))  # also of a loop of links
    try:
        check_is_site(site)
        check_is_course(Path(arguments.of))
        site.mkdir(parents=True, exist_ok=True)
        new_file_beside(site / "index.html").unlink()
        lock = lock_folder("--into", site)[0]  # another run would remove what this one has begun
    except OSError as error:
        sys.exit(f"make_site.py: {site} cannot be written ({error.strerror}); name another --into")
    except ClaimError as error:
        sys.exit(f"make_site.py: {error}")
    try:
        return make(arguments, site)
    finally:
        unlock_folder(lock, site)


def make(arguments, site):
    """Make the site in a folder that is locked for it. Returns the exit status."""
    fix = f"mend that, and start again; the site goes into {site}"
    with naming_files(fix=fix), tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=site) as folder:
        made = Path(folder) / site.name
        (made / SCRIPTS).mkdir(parents=True)
        for name in OWN_SCRIPTS:
            shutil.copy(living_site.BROWSER / name, made / SCRIPTS)
        missing = "" if arguments.static else try_to_live(made / SCRIPTS)
        if missing and arguments.live:
            print(f"make_site.py --live: {missing}", file=sys.stderr)
            return 1
        lives = not missing and not arguments.static
        course = read_course(Path(os.path.realpath(arguments.of)), lives, arguments.address, site)
        write_pages(made, course)
        replace_content(site, made, keep=[Path(folder).name, LOCK, *OF_A_HOST])
    kind = "run in the pages" if course.lives else "are pictures and text"
    print(
        f"{os.path.relpath(site)}/index.html: {len(lessons_of(course))} lessons, "
        f"{len(course.files)} pages and files; explorers, puzzles and exercises {kind}"
    )
    if missing:
        print(f"This is the static site, because {missing}.")
    return int(bool(not_written))


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument(
        "--into", default=SITE, metavar="FOLDER", help="the folder, which is made anew"
    )
    parser.add_argument("--of", default=ROOT, metavar="FOLDER", help="the folder of the course")
    parser.add_argument("--address", metavar="URL", help="where the site is published: https://...")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--static", action="store_true", help="no Python in the pages")
    kind.add_argument("--live", action="store_true", help="fail where Pyodide cannot be had")
    arguments = parser.parse_args()
    if not os.path.isdir(arguments.of):
        parser.error(f"--of {arguments.of} is not a folder; name that of the course")
    if arguments.address:
        named = re.match(r"https?://[^\s\"<>]+$", arguments.address)
        if not (named and arguments.address.isprintable()):
            parser.error(f"--address must start with https://, not '{arguments.address}'")
    arguments.address = f"{arguments.address.rstrip('/')}/" if arguments.address else ""
    return arguments


def check_is_site(folder):
    """End the program if the folder, which will be removed, has something else than a site."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        sys.exit(f"make_site.py: {folder} is not a folder; name a new one")
    of_a_site = all(os.path.isfile(folder / SCRIPTS / name) for name in OWN_SCRIPTS)
    there = content_of(folder) if os.path.isdir(folder) else []
    if not of_a_site and not all(name.startswith(UNFINISHED) for name in there):
        sys.exit(f"make_site.py: in {folder} is something else than a site; name a new folder")


def replace_content(folder, made, keep=()):
    """Move what is in `made`, on the same disk, into `folder`, and remove what was there before.

    The older content stays until the new one is whole, and a full disk cannot stop a move.
    """
    names = os.listdir(made)
    for name in names:
        remove(folder / name)
        os.rename(made / name, folder / name)
    for name in set(os.listdir(folder)).difference(names, keep):
        remove(folder / name)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_is_course(folder):
    """End the program if the folder has no list of lessons, before a search of all that is in it."""
    if not os.path.isfile(folder / LESSONS):
        sys.exit(f"make_site.py: --of {folder} is not a copy of the course; name one")


def try_to_live(folder):
    """Write what lets pages run Python into `folder`; return why that is not possible, or ""."""
    try:
        living_site.write_runtime(folder)
    except living_site.NoRuntime as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder} cannot be used ({error.strerror})"
    return ""


def read_course(root, lives, address="", site=None):
    """The Course in `root`, without an older `site` that lies in it."""
    files = [file for file in files_of_the_course(root) if site not in (root / file).parents]
    files = [file for file in files if is_readable(root, file)]
    folders = {parent for file in files for parent in file.parents}
    titles = {file: title_of(root / file) for file in files if file.suffix in PAGES}
    titles |= {INDEX: COURSE, LOST: "This page is not there"}
    titles |= {EXPLORER: "The explorer"} if lives else {}
    titles |= {PUZZLES: "The puzzles"} if lives and site_index.PUZZLE_LESSON in files else {}
    return Course(root, files, folders, titles, lives, address)


def write_pages(site, course):
    # Cleaning is for notebooks of strangers; it changes nothing in the course's own, and takes seconds.
    exporter = HTMLExporter(template_name="basic", filters={"clean_html": lambda text: text})
    bodies = bodies_of(exporter, course)
    sections = []

    def write(path, body):
        address = address_of(path, course.folders)
        (site / address).parent.mkdir(parents=True, exist_ok=True)
        page = page_of(path, body, course)
        # An output may have half of a surrogate pair, which no file in UTF-8 can have.
        (site / address).write_text(page, encoding="utf-8", errors="backslashreplace")
        title = course.titles.get(path, str(path))
        sections.extend(search_index.sections_of(address.as_posix(), title, body))

    for file in course.files:
        if file.suffix in PICTURES:
            where = site / address_of(file, course.folders)
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(course.root / file, where)
            if file.suffix == ".svg":
                drawing = site_page.with_words_of_the_page(read_text(where))
                where.write_text(drawing, encoding="utf-8")
        else:
            body = with_links(bodies[file], file, course)
            write(file, search_index.with_terms(body) if file == GLOSSARY else body)
    write(INDEX, with_links(index_page(exporter, course), INDEX, course))
    if course.lives:
        explorer = living_pages.whole_explorer()
        write(EXPLORER, site_index.EXPLORER_PAGE + explorer + site_index.ABOUT_EXPLORER)
    if PUZZLES in course.titles:
        write(PUZZLES, with_links(puzzles_page(exporter, course), PUZZLES, course))
    if slides_of(course).is_file():
        copy_slides(site, course)
    for folder in course.folders - {Path(".")}:
        write(folder, list_of(folder, course))
    (site / "favicon.svg").write_text(site_page.FAVICON, encoding="utf-8")
    lost = page_of(LOST, site_index.NOT_FOUND, course)
    if course.address:  # a host shows this page at any address
        lost = lost.replace("<title>", f'<base href="{course.address}"><title>', 1)
    (site / "404.html").write_text(lost, encoding="utf-8")
    index = search_index.as_script(sections)
    script = site / SCRIPTS / "search_index.js"
    script.write_text(index, encoding="utf-8", errors="backslashreplace")


def bodies_of(exporter, course):
    """Return {file: the HTML of its page}; name each file that cannot be shown, and leave it out."""
    bodies = {}
    for file in [file for file in course.files if file.suffix not in PICTURES]:
        try:
            bodies[file] = body_of(file, exporter, course)
        except NOT_SHOWN as error:
            why = shortened(f"{type(error).__name__}: {error}".partition("\n")[0])
            print(f"skipped: {file} cannot be shown ({why}); mend it")
            course.files.remove(file)
            course.titles.pop(file, None)
    return bodies


def slides_of(course):
    """The list of the slides that `make slides` made, which may not be there."""
    return course.root / "build" / "slides" / "index.html"


def copy_slides(site, course):
    """The slides, whose list leads back to the first page only where there is one."""
    shutil.copytree(slides_of(course).parent, site / SLIDES.parent)
    back = f'<p><a href="../{address_of(INDEX, course.folders)}">{html.escape(COURSE)}</a></p>'
    text = read_text(site / SLIDES)
    (site / SLIDES).write_text(text.replace("<body>", f"<body>{back}", 1), encoding="utf-8")


def index_page(exporter, course):
    teaches = site_index.PACK in course.files
    address = make_hosted.address_of(course.root)
    row = make_hosted.row_of(address)
    text = site_index.index_of(
        course.lives, draw_map().alt, teaches, slides_of(course).is_file(), row
    )
    return html_of([nbformat.v4.new_markdown_cell(text)], exporter)


def puzzles_page(exporter, course):
    notebook = notebook_of(course.root / site_index.PUZZLE_LESSON)
    cells = site_index.puzzles_of(notebook.cells)
    living = living_pages.bring_to_life(cells, site_index.PUZZLE_LESSON.stem, "")
    return html_of(cells, exporter, living)


def lessons_of(course):
    return sorted(page for page in course.titles if page.match("notebooks/*.ipynb"))


def further_lessons_of(course):
    """The lessons that docs/lessons.md lists below the course."""
    text = read_text(course.root / LESSONS)
    listed = text.partition("## Further lessons")[2]
    return [lesson for lesson in lessons_of(course) if f"/{lesson.name})" in listed]


def further_pages_of(course):
    """The pages beside the lessons that the way on every page names, by title."""
    pages = [page for page in course.titles if page.suffix == ".md" and len(page.parts) <= 2]
    return sorted(set(pages) - {*MADE}, key=lambda page: course.titles[page].lower())


def files_of_the_course(root):
    """What a reader may want to see, as paths from the root: all that git keeps but the tests."""
    if root != ROOT:  # a copy, in which all files are wanted
        files = [path.relative_to(root) for path in root.rglob("[!.]*") if os.path.isfile(path)]
        return sorted(file for file in files if file.parts[0] != ".git")
    try:
        listed = ask_git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except (OSError, subprocess.SubprocessError):
        sys.exit("make_site.py: git does not list the course's files; use a clone of your own")
    files = [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
    shown = [file for file in files if file.parts[0] != "tests" and not file.name.startswith(".")]
    return [file for file in shown if os.path.isfile(root / file)]


def is_readable(root, file):
    """Whether a file can become a page; if not, as a damaged notebook, its name is printed."""
    if not str(file).isprintable():  # no address has a line break, or half of a surrogate pair
        print(f"skipped: {str(file)!r} cannot be the name of a page")
        return False
    try:
        if file.suffix == ".ipynb":
            for cell in notebook_of(root / file).cells:
                for output in cell.get("outputs", ()):
                    nbformat.validate(output, "output", version=4)  # nbconvert shows no other
        elif file.suffix != ".png":
            read_text(root / file)
    except (InputError, nbformat.ValidationError):
        kind = {".ipynb": "notebook", ".svg": "picture"}.get(file.suffix, "text")
        print(f"skipped: {file} is not a {kind}")
        return False
    return True


def address_of(path, folders):
    """Where a file or a folder of the repository is in the site."""
    # A host of pages may leave out folders whose names begin with a dot.
    shown = Path(*(part.removeprefix(".") for part in path.parts))
    if path in folders:
        return shown / "files.html"
    if path == SLIDES:
        return path
    if path.suffix in PAGES:
        return shown.with_suffix(".html")
    return shown if path.suffix in PICTURES else shown.with_name(f"{shown.name}.html")


def body_of(file, exporter, course):
    """The HTML of a page, from a notebook, from Markdown or from code."""
    if file.suffix not in PAGES:
        return code_of(file, course)
    if file.suffix == ".ipynb":
        notebook = notebook_of(course.root / file)
        notebook.cells = [cell for cell in notebook.cells if not make_hosted.is_first(cell)]
    else:
        text = read_text(course.root / file)
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    answers = answers_of(notebook)  # cells, because those of other programs may have no id
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_formulas(cell.source)
        elif cell.cell_type == "code":
            is_answer = cell in answers  # before it changes
            prepare_code(cell)
            if is_answer:
                cell.outputs = [folded(cell.outputs)]
            fold_code(cell)
    living = []
    if course.lives and file in lessons_of(course):
        explorer = Path(os.path.relpath(address_of(EXPLORER, course.folders), file.parent))
        living = living_pages.bring_to_life(notebook.cells, file.stem, explorer.as_posix())
    return html_of(notebook.cells, exporter, living)


def html_of(cells, exporter, living=()):
    """The HTML of cells; `living` are the places that replace their marks."""
    body, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    for number, place in enumerate(living):
        body = body.replace(f"<p>{living_pages.MARK.format(number)}</p>", place)
    body = re.sub(r"<table\b.*?</table>", wide_if_many, body, flags=re.DOTALL)
    return re.sub(r'<(h\d) id="([^"]*)">', lambda m: f'<{m[1]} id="{anchor_of(m[2])}">', body)


def prepare_code(cell):
    """Change a cell of code for its page: its pictures become parts of the page."""
    cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    if any(output.get("text", "").startswith(NOT_ATTEMPTED) for output in cell.outputs):
        cell.outputs = [nbformat.v4.new_output("display_data", {"text/html": CHECKED_ELSEWHERE})]
    for output in cell.outputs:
        picture = output.get("data", {}).pop("image/svg+xml", None)
        if picture:
            output.data.pop("image/png", None)
            # As a part of the page it takes the page's colours and keeps its words.
            panel = PANEL if re.search(r"^(explore|time_machine)\(", cell.source, re.M) else ""
            output.data["text/html"] = picture[picture.index("<svg") :] + panel


def fold_code(cell):
    """Fold a cell's code if it sets a lesson up, or the notebook folds it for an answer."""
    sets_up = re.match(SETS_UP, cell.source, re.S | re.M)
    if not sets_up and not cell.metadata.get("jupyter", {}).get("source_hidden"):
        return
    cell.metadata["transient"] = {"remove_source": True}  # nbconvert then shows outputs alone
    code = highlight(cell.source, get_lexer_by_name("python"), HtmlFormatter())
    words = "imports and settings of this lesson" if sets_up else "the code of this cell"
    shown = f'<details class="folded"><summary>{words}</summary>{code}</details>'
    cell.outputs.insert(0, nbformat.v4.new_output("display_data", {"text/html": shown}))


def wide_if_many(table):
    """A table of four columns or more in a frame of its own, which scrolls on a narrow screen."""
    many = table[0].split("</tr>")[0].count("</th>") >= 4
    return f'<div class="wide">{table[0]}</div>' if many else table[0]


def code_of(file, course):
    """The HTML of a file that is not a page, with its colours where it is Python or a shell's."""
    language = {".py": "python", ".diff": "diff", ".sh": "bash", ".sbatch": "bash", ".env": "bash"}
    lexer = get_lexer_by_name(language.get(file.suffix, "text"))
    code = highlight(read_text(course.root / file), lexer, HtmlFormatter())
    return f"<h1>{html.escape(str(file))}</h1>{code}"


def anchor_of(identifier):
    """The anchor of a heading as the links in the repository name it, which is GitHub's way."""
    words = html.unescape(unquote(identifier)).replace("-", " ").lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def with_links(body, file, course):
    """Links and pictures of `file`, pointed at pages of the site; names of files become links.

    It names each link whose target is not a page of the site, and keeps only the link's text.
    """

    known = {*course.files, *course.folders, *course.titles}
    known |= {SLIDES} if slides_of(course).is_file() else set()
    dead = {}  # in the order of the page

    def target(match):
        attribute, link = match[1], html.unescape(match[2])
        path, _, anchor = unquote(link).partition("#")
        anchor = f"#{anchor_of(anchor)}" if anchor else ""
        if re.match(r"[a-z]+:", link, re.I) or not path:
            return f'{attribute}="{anchor or link}"'
        found = Path(os.path.normpath(file.parent / path))
        if found not in known:
            dead[link] = True
            return re.sub(r"\s*\w+$", "", attribute)  # the words of a link, or of a picture, stay
        return f'{attribute}="{relative(found, file, course)}{anchor}"'

    def link_to_file(match):
        named = Path(match[1] or "")
        if not match[1] or "/" not in match[1] or named not in course.files:
            return match[0]
        return f'<a href="{relative(named, file, course)}">{match[0]}</a>'

    body = re.sub(r'(<(?:a|img)\b[^>]*?\b(?:href|src))="([^"]*)"', target, body)
    for name in dead:
        print(
            f"skipped: the link to {printable(name)} in {file} leads to no page of the site; correct it, or "
            "mend the file that it names if that was skipped"
        )
    return re.sub(
        r"<(?:a|pre)\b.*?</(?:a|pre)>|<code>([\w./-]+)</code>", link_to_file, body, flags=re.S
    )


def relative(path, start, course):
    """The link to `path` from the page of `start`."""
    here = address_of(start, course.folders).parent
    return quote(os.path.relpath(address_of(path, course.folders), here))


def link(path, start, course, text, mark=""):
    return f'<a href="{relative(path, start, course)}"{mark}>{html.escape(text)}</a>'


def list_of(folder, course):
    """The page of a folder: its files and folders, each a link, with the titles of pages."""
    inside = {p for p in [*course.files, *course.folders] if p.parent == folder and p != folder}
    rows = "".join(
        f"<li>{link(path, folder / 'x', course, path.name)} {course.titles.get(path, '')}</li>"
        for path in sorted(inside)
    )
    return f"<h1>{html.escape(str(folder))}</h1><ul>{rows}</ul>"


def title_of(page):
    """The heading that a page starts with, or its name if there is none."""
    text = "" if page.suffix == ".ipynb" else read_text(page)
    if page.suffix == ".ipynb":
        text = "".join(cell.source for cell in notebook_of(page).cells[:1])
    return text.splitlines()[0].lstrip("# ") if text.startswith("# ") else page.name


def page_of(path, body, course):
    """A whole page: where it is, the body, the way to all others."""
    start = path / "x" if path in course.folders else path
    lessons, further = lessons_of(course), further_lessons_of(course)
    ways = {"The course": [lesson for lesson in lessons if lesson not in further]}
    ways |= {"Further lessons": further, "Beside the lessons": further_pages_of(course)}
    if course.lives:
        made = [page for page in (EXPLORER, PUZZLES) if page in course.titles]
        ways = {"To play with": made} | ways
    title = course.titles.get(path, str(path))
    address = address_of(path, course.folders)
    above = "../" * (len(address.parts) - 1)
    scripts = ["elements.js", "search.js"]
    scripts += ["python.js", "explorer.js"] if '<div class="live-explorer"' in body else []
    scripts += ["python.js", "exercises.js"] if '<div class="live-exercise"' in body else []
    return site_page.PAGE.format(
        above=f"{above}{SCRIPTS}",
        scripts="".join(
            f'<script defer src="{above}{SCRIPTS}/{name}"></script>'
            for name in dict.fromkeys(scripts)
        ),
        head=site_page.head_of(title, above, address.as_posix(), course.address),
        style=site_page.style(),
        home=link(INDEX, start, course, COURSE),
        here=place_of(path, start, course),
        body=site_page.with_contents(body),
        turn=turn_of(path, course),
        ways="".join(
            f"<h2>{heading}</h2><ol>{ways_to(pages, path, start, course)}</ol>"
            for heading, pages in ways.items()
        ),
    )


def ways_to(pages, path, start, course):
    marks = {path: ' aria-current="page"'}
    return "".join(
        f"<li>{link(page, start, course, course.titles[page], marks.get(page, ''))}</li>"
        for page in pages
    )


def place_of(path, start, course):
    """The folders of a page, each a link, and its own name."""
    if path == INDEX:
        return ""
    above = [link(folder, start, course, folder.name) for folder in path.parents][-2::-1]
    name = course.titles[path] if path in MADE else path.name
    return " / ".join([link(INDEX, start, course, "course"), *above, html.escape(name)])


def turn_of(path, course):
    """The link below a page of solutions, to its lesson; "" for other pages."""
    if path.parent == SOLUTIONS and path.suffix == ".ipynb":
        return link(SOLUTIONS.parent / path.name, path, course, "Back to the lesson")
    return ""


COURSE = "Pipeline parallelism: predict, perform, compare"
SOLUTIONS = Path("notebooks/solutions")
PANEL = """<p class="panel">This is the panel's picture. In JupyterLab (<code>make lab</code>) it has
sliders, a cursor and a table.</p>"""

SCRIPTS = "live"  # the folder of the site for scripts
UNFINISHED = ".unfinished-"  # begins the name of a folder that takes another one's place when whole
OWN_SCRIPTS = ("elements.js", "search.js", "live.css")  # that every site has there
# Pages that the site adds, with paths as if they were in the repository.
INDEX, EXPLORER, PUZZLES = Path("index.md"), Path("explorer.md"), Path("puzzles.md")
LOST = Path("404.md")
GLOSSARY, LESSONS = Path("docs/glossary.md"), Path("docs/lessons.md")
MADE = (INDEX, EXPLORER, PUZZLES, LOST)
SLIDES = Path("slides/index.html")  # a page of its own kind


if __name__ == "__main__":
    sys.exit(main())
