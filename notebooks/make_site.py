"""Make the course a website: build/site, which any browser opens from disk, without a network.

    make site

The pages are the notebooks with their stored outputs, the solutions, the pages in Markdown and the
code that they link to. Nothing is computed anew, and no page loads anything from elsewhere.
"""

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, unquote

import nbformat
from formulas import with_formulas
from nbconvert import HTMLExporter
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
PAGES = (".md", ".ipynb")  # what becomes a page; other files are shown as they are
PICTURES = (".svg", ".png")


def main():
    shutil.rmtree(SITE, ignore_errors=True)
    files = files_of_the_course()
    folders = {parent for file in files for parent in file.parents}
    lessons = sorted(file for file in files if file.match("notebooks/*.ipynb"))
    titles = {lesson: title_of(lesson) for lesson in lessons}
    exporter = HTMLExporter(template_name="basic")
    for file in files:
        where = SITE / address_of(file, folders)
        where.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in PICTURES:
            shutil.copy(ROOT / file, where)
        else:
            body = with_links(body_of(file, exporter), file, files, folders)
            where.write_text(page_of(file, body, titles, folders))
    for folder in folders - {Path(".")}:
        where = SITE / address_of(folder, folders)
        where.write_text(page_of(folder, list_of(folder, files, folders), titles, folders))
    print(f"build/site/index.html: {len(lessons)} lessons, {len(files)} pages and files")
    return 0


def files_of_the_course():
    """What a reader may want to see, as paths from the root: all that git keeps but the tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = [Path(line) for line in listed.splitlines()]
    hidden = [
        file
        for file in files
        if file.parts[0] == "tests" or any(part.startswith(".") for part in file.parts)
    ]
    return [file for file in files if file not in hidden and (ROOT / file).is_file()]


def address_of(path, folders):
    """Where a file or a folder of the repository is in the site."""
    if path in folders:
        return path / "files.html"
    if path == Path("README.md"):
        return Path("index.html")
    if path.suffix in PAGES:
        return path.with_suffix(".html")
    return path if path.suffix in PICTURES else path.with_name(f"{path.name}.html")


def body_of(file, exporter):
    """The HTML of a page, from a notebook, from Markdown or from code."""
    if file.suffix not in PAGES:
        return code_of(file)
    if file.suffix == ".ipynb":
        notebook = nbformat.read(ROOT / file, as_version=4)
    else:
        text = (ROOT / file).read_text()
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_formulas(cell.source)
        else:
            cell.source = cell.source.removeprefix("# NBVAL_CHECK_OUTPUT\n")
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                picture = output.get("data", {}).pop("image/svg+xml", None)
                if (
                    picture
                ):  # as a part of the page: it takes the page's colours and keeps its words
                    output.data["text/html"] = picture[picture.index("<svg") :]
    body, _ = exporter.from_notebook_node(notebook)
    return re.sub(r'<(h\d) id="([^"]*)">', lambda m: f'<{m[1]} id="{anchor_of(m[2])}">', body)


def code_of(file):
    """The HTML of a file that is no page, with its colours where it is Python or a shell's."""
    language = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".env": "bash"}
    lexer = get_lexer_by_name(language.get(file.suffix, "text"))
    code = highlight((ROOT / file).read_text(), lexer, HtmlFormatter())
    return f"<h1>{html.escape(str(file))}</h1>{code}"


def anchor_of(identifier):
    """The anchor of a heading as the links in the repository name it, which is GitHub's way."""
    words = html.unescape(unquote(identifier)).replace("-", " ").lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def with_links(body, file, files, folders):
    """Links and pictures of `file`, pointed at pages of the site."""

    def target(match):
        attribute, link = match[1], html.unescape(match[2])
        path, _, anchor = unquote(link).partition("#")
        anchor = f"#{anchor_of(anchor)}" if anchor else ""
        if re.match(r"[a-z]+:", link) or not path:
            return f'{attribute}="{anchor or link}"'
        found = Path(os.path.normpath(file.parent / path))
        if found not in files and found not in folders:
            raise SystemExit(f"{file}: the link to {link} leads to no page of the site")
        return f'{attribute}="{relative(found, file, folders)}{anchor}"'

    return re.sub(r'(<(?:a|img)\b[^>]*?\b(?:href|src))="([^"]*)"', target, body)


def relative(path, start, folders):
    """The link to `path` from the page of `start`."""
    here = address_of(start, folders).parent
    return quote(os.path.relpath(address_of(path, folders), here))


def list_of(folder, files, folders):
    """The page of a folder: its files and folders, each a link."""
    inside = {path for path in [*files, *folders] if path.parent == folder and path != folder}
    rows = "".join(
        f'<li><a href="{relative(path, folder / "x", folders)}">{html.escape(path.name)}</a></li>'
        for path in sorted(inside)
    )
    return f"<h1>{html.escape(str(folder))}</h1><ul>{rows}</ul>"


def title_of(file):
    """The heading that a notebook starts with."""
    first = nbformat.read(ROOT / file, as_version=4).cells[0].source
    return first.splitlines()[0].lstrip("# ")


def page_of(path, body, titles, folders):
    """A whole page: the way to all lessons, then the body."""
    start = path / "x" if path in folders else path
    links = "".join(
        f'<li><a href="{relative(lesson, start, folders)}"{here}>{html.escape(title)}</a></li>'
        for lesson, title in titles.items()
        for here in [' aria-current="page"' if lesson == path else ""]
    )
    title = titles.get(path) or (str(path) if path != Path("README.md") else COURSE)
    home = relative(Path("README.md"), start, folders)
    return PAGE.format(
        title=html.escape(title), style=style(), home=home, course=COURSE, links=links, body=body
    )


def style():
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{STYLE}"


COURSE = "Pipeline parallelism: predict, perform, compare"

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style></head><body>
<nav aria-label="the course"><a href="{home}"><b>{course}</b></a><ol>{links}</ol></nav>
<main>{body}</main>
</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --quiet: #f2f4f6; --line: #d0d4d8;
  --link: #0b5c8a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6e8; --page: #16191c; --quiet: #22272b; --line: #454b50; --link: #7cc4ee; } }
body { margin: 0; background: var(--page); color: var(--text); display: flex;
  font: 17px/1.6 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
nav { flex: 0 0 250px; box-sizing: border-box; height: 100vh; overflow: auto; position: sticky; top: 0;
  padding: 22px 20px; border-right: 1px solid var(--line); font-size: 15px; line-height: 1.4; }
nav ol { list-style: none; padding: 0; } nav li { margin: 8px 0; }
nav a { text-decoration: none; } nav [aria-current] { font-weight: bold; color: var(--text); }
main { flex: 1; min-width: 0; max-width: 980px; padding: 12px 44px 80px; }
a { color: var(--link); } a.anchor-link { visibility: hidden; padding-left: .3em; }
:is(h1, h2, h3):hover a.anchor-link { visibility: visible; }
h1, h2, h3 { line-height: 1.25; margin: 1.6em 0 .5em; } h1 { margin-top: .6em; }
pre, code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { font-size: 14px; line-height: 1.45; overflow-x: auto; margin: 0; padding: 10px 14px;
  background: var(--quiet); border-radius: 6px; }
code { font-size: .9em; } pre code { font-size: inherit; }
.highlight { background: var(--quiet) !important; border-radius: 6px; margin: 10px 0; }
.output_wrapper pre, .output pre { border-left: 4px solid #009E73; border-radius: 0;
  background: none; }
.output .highlight pre { border-left: 0; background: var(--quiet); }
.output_svg, .output_html { overflow-x: auto; }
.prompt { display: none; }
svg, img { max-width: 100%; height: auto; }
.jp-Mermaid svg { display: none; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 15px; }
td, th { padding: 5px 12px; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
@media (max-width: 800px) { body { display: block; }
  nav { height: auto; position: static; border: 0; border-bottom: 1px solid var(--line); }
  main { padding: 8px 18px 60px; } }
@media print { nav { display: none; } }
"""


if __name__ == "__main__":
    sys.exit(main())
