"""The website of the course: every page is there, and none of them asks for anything from elsewhere."""

import json
import re
import subprocess
import sys
from urllib.parse import unquote

import living_site
import make_site
import pytest
import search_index
import site_page
import slide_page

from course.launch import ROOT

pytestmark = pytest.mark.further  # the whole website

SITE = ROOT / "build" / "tests" / "site"
COURSE = make_site.Course(ROOT, [], set(), {}, False)  # without a page
PANELS = ("explore(", "time_machine(")  # what a cell calls that shows one


@pytest.fixture(scope="module")
def pages():
    """Every page of the site without Python in its pages, by its address, made anew."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_site.py", "--static", "--into", SITE],
        check=True,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "skipped: " not in made.stdout, "a file or a link of the course"
    found = {path.relative_to(SITE).as_posix(): path for path in SITE.rglob("*.html")}
    # Slides are copied as they are, where another test has made them.
    return {at: path.read_text() for at, path in found.items() if not at.startswith("slides/")}


def test_every_lesson_and_every_solution_is_a_page_that_all_pages_of_lessons_lead_to(pages):
    lessons = [path.with_suffix(".html").name for path in ROOT.glob("notebooks/*.ipynb")]
    assert lessons
    for lesson in lessons:
        assert f"notebooks/solutions/{lesson}" in pages
        for other in lessons:
            assert f'href="{other}"' in pages[f"notebooks/{lesson}"], lesson


def links_at_the_end(page):
    return re.findall(r'href="([^"]*)"', re.search(r'<p class="turn">(.*?)</p>', page)[1])


def test_below_solutions_is_the_way_to_their_lesson_and_a_lesson_leads_to_its_solutions(pages):
    for path in ROOT.glob("notebooks/*.ipynb"):
        lesson = path.with_suffix(".html").name
        assert links_at_the_end(pages[f"notebooks/solutions/{lesson}"]) == [f"../{lesson}"]
        assert f'href="solutions/{lesson}"' in pages[f"notebooks/{lesson}"]


def test_every_page_says_where_it_is_and_leads_to_the_first_page_and_the_glossary(pages):
    for address, page in pages.items():
        links = [unquote(link) for link in re.findall(r'<a href="([^"#]*)"', page)]
        targets = {(SITE / address).parent.joinpath(link).resolve() for link in links}
        assert {SITE / "index.html", SITE / "docs/glossary.html"} <= targets, address
        if address != "index.html":
            assert re.search(r'<p class="place"><a href="[^"]*">course</a> / ', page), address


def test_every_page_lists_the_course_and_the_further_lessons_apart(pages):
    course, further = (
        re.findall(r'href="[^"]*notebooks/(\w+)\.html"', part)
        for part in re.search(
            "<h2>The course</h2>(.*?)<h2>Further lessons</h2>(.*?)<h2>", pages["README.html"], re.S
        ).groups()
    )
    assert (len(course), len(further)) == (14, 8)
    assert "03_1f1b" in course and "10d_experts" in further


def test_every_page_has_a_preview_a_description_and_an_icon_that_are_there(pages):
    for address, page in pages.items():
        picture = re.search(r'<meta property="og:image" content="([^"]*)">', page)[1]
        icon = re.search(r'<link rel="icon" type="image/svg\+xml" href="([^"]*)">', page)[1]
        for file in (picture, icon):
            assert (SITE / address).parent.joinpath(file).is_file(), f"{address}: {file}"
        for name in ("og:title", "og:description", "og:image:alt"):
            assert re.search(rf'<meta property="{name}" content="[^"]+">', page), address
        assert re.search(r'<meta name="description" content="[^"]{50,200}">', page), address


def test_with_an_address_a_preview_names_it_and_the_page_not_found_leads_there():
    head = site_page.head_of("T", "../", "docs/x.html", "https://a.example/b/")
    assert 'content="https://a.example/b/images/preview.png"' in head
    assert '"og:url" content="https://a.example/b/docs/x.html"' in head


def test_a_long_page_has_a_list_of_its_headings_and_a_short_one_has_none(pages):
    long, short = pages["notebooks/02_gpipe.html"], pages["source_code/gpipe.py.html"]
    listed = re.search(r'<details class="contents">.*?</details>', long, re.S)[0]
    anchors = re.findall(r'href="#([^"]*)"', listed)
    assert len(anchors) >= 5 and all(f'<h2 id="{anchor}">' in long for anchor in anchors)
    assert 'class="contents"' not in short


def test_every_lesson_folds_its_imports_and_a_search_finds_them_as_code(pages):
    for path in ROOT.glob("notebooks/*.ipynb"):
        page = pages[f"notebooks/{path.stem}.html"]
        folded, *_ = re.findall(r'<details class="folded">.*?</details>', page, re.S)
        assert "warm_up" in folded and page.count(">import</span>") > folded.count(">import</span>")
        _, _, _, prose, code = search_index.sections_of(path.stem, "", folded)[0]
        assert not prose and "import" in code


def test_no_folder_of_the_site_is_one_that_a_host_leaves_out(pages):
    assert not [address for address in pages if re.search(r"(^|/)\.", address)]
    assert any("workflows/tests.yml" in address for address in pages)


def test_the_first_page_leads_to_lesson_00_the_map_and_one_file_and_is_not_the_readme(pages):
    page = re.search(r"<main>(.*)</main>", pages["index.html"], re.S)[1]
    for target in ("notebooks/00_start_here.html", "images/README.html", "README.html"):
        assert f'href="{target}' in page
    for picture in ("gpipe-above-1f1b.svg", "map-of-schedules.svg"):
        assert f'src="images/{picture}"' in page
    assert 'href="source_code/small/pipeline.py.html"' in page


def test_the_list_of_slides_leads_back_to_the_first_page(tmp_path):
    course = COURSE._replace(root=tmp_path)
    made = make_site.slides_of(course)
    made.parent.mkdir(parents=True)
    made.write_text(slide_page.index_of({"99_x": "X"}))
    make_site.copy_slides(tmp_path / "site", course)
    links = re.findall(r'href="([^"]*)"', (tmp_path / "site" / make_site.SLIDES).read_text())
    assert links == ["../index.html", "99_x.html"]


def test_the_glossary_leads_to_every_lesson_in_its_own_text(pages):
    glossary = re.search(r"<main>(.*)</main>", pages["docs/glossary.html"], re.DOTALL)[1]
    assert "<td>bubble</td>" in glossary
    for path in ROOT.glob("notebooks/*.ipynb"):
        assert f'href="../notebooks/{path.stem}.html"' in glossary, path.stem


def test_below_each_stored_picture_of_a_panel_stands_that_it_is_one(pages):
    panels = 0
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        shown = sum("\n" + start in "\n" + code for code in codes for start in PANELS)
        page = pages[f"notebooks/{path.stem}.html"]
        assert page.count(make_site.PANEL) == shown, path.name
        panels += shown
    assert panels > 3


def test_every_link_of_the_site_leads_to_a_file_of_the_site_and_to_an_anchor_that_is_there(pages):
    for address, page in pages.items():
        for link in re.findall(r'<(?:a|img)\b[^>]*?\b(?:href|src)="([^"]*)"', page):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (SITE / address).parent / path if path else SITE / address
            assert target.is_file(), f"{address}: {link}"
            if anchor:
                assert f'id="{anchor}"' in target.read_text(), f"{address}: {link}"


def test_a_stored_loss_a_figure_and_a_formula_are_in_the_page_of_lesson_02(pages):
    page = pages["notebooks/02_gpipe.html"]
    assert re.search(r"loss \d\.\d{6}", page)
    assert "<svg" in page and 'role="img"' in page
    assert "<mfrac>" in page and "$$" not in page


def test_a_stub_that_the_page_cannot_check_leads_to_jupyterlab(pages):
    asked = 0
    for path in ROOT.glob("notebooks/*.ipynb"):
        page = pages[f"notebooks/{path.with_suffix('.html').name}"]
        assert "Not attempted yet" not in page, path.name
        told = page.count("The check of this exercise runs in JupyterLab")
        assert bool(told) == ('"Not attempted yet' in path.read_text()), path.name
        asked += told
    assert asked >= 40


def test_a_formula_in_a_line_is_not_broken():
    shown = make_site.with_formulas(
        "idle for (p − 1)/(m + p − 1) of a step, and (p − 1)/(v·m) of it"
    )
    assert shown.split(" ") == [
        *("idle", "for", "(p\xa0−\xa01)/(m\xa0+\xa0p\xa0−\xa01)", "of", "a", "step,", "and"),
        *("(p\xa0−\xa01)/(v·m)", "of", "it"),
    ]


def test_the_answer_to_a_question_is_behind_a_click_and_on_the_page(pages):
    page = pages["notebooks/03_1f1b.html"]
    answers = re.findall(r"<details><summary>Show the output</summary>(.*?)</details>", page, re.S)
    (rehearsed,) = [answer for answer in answers if "queued" in answer]
    assert "queued: gradient 0 from rank 1" in rehearsed
    page, describes = pages["notebooks/04_pipedream.html"], "without a stash turn back up"
    opened = re.sub(r"<details.*?</details>", "", page, flags=re.S)
    assert describes in page and describes not in opened


def test_the_index_of_the_search_has_every_page_and_its_headings(pages):
    text = (SITE / make_site.SCRIPTS / "search_index.js").read_text()
    sections = json.loads(text.removeprefix("globalThis.searchIndex = ").removesuffix(";\n"))
    assert {address.partition("#")[0] for address, *_ in sections} == pages.keys() - {"404.html"}
    for address, title, heading, words, code in sections:
        path, _, anchor = address.partition("#")
        assert title and (words or heading or code)
        assert not anchor or f'id="{anchor}"' in pages[path], address
    assert any("Deadlock" in heading or "deadlock" in words for *_, heading, words, _ in sections)


def test_a_section_of_the_index_ends_where_the_next_heading_begins():
    body = '<p>a &amp; b</p><h1 id="one">One<a class="anchor-link" href="#one">¶</a></h1>text <svg>no</svg>'
    assert search_index.sections_of("x.html", "X", body) == [
        ["x.html", "X", "", "a & b", ""],
        ["x.html#one", "X", "One", "text", ""],
    ]


def test_code_is_apart_from_prose_and_a_row_of_the_glossary_is_a_section():
    body = "<h1>T</h1><p>why</p><pre>x = 1</pre><table><tr><td>weight stash</td><td>kept</td></tr></table>"
    sections = search_index.sections_of("g.html", "G", search_index.with_terms(body))
    assert [section[4] for section in sections] == ["x = 1", ""]
    assert sections[1][:4] == ["g.html#term-weight-stash", "G", "weight stash", "kept"]


def test_without_npm_the_site_is_static_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(living_site, "DOWNLOADED", tmp_path / "npm")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(
        make_site, "read_course", lambda root, lives, *_: COURSE._replace(lives=lives)
    )
    monkeypatch.setattr(make_site, "write_pages", lambda site, course: None)
    monkeypatch.setattr(sys, "argv", ["make_site.py", "--into", str(tmp_path / "site")])
    assert make_site.main() == 0
    assert "This is the static site, because npm is not installed." in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--live"])
    assert make_site.main() == 1
    assert "npm is not installed" in capsys.readouterr().err


@pytest.mark.processes
def test_where_npm_reaches_no_registry_its_code_says_why(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho npm error code ECONNREFUSED >&2\necho a log >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(living_site, "DOWNLOADED", tmp_path / "downloaded")
    with pytest.raises(living_site.NoRuntime, match="npm failed: ECONNREFUSED$"):
        living_site.pyodide()


def test_another_file_than_the_expected_one_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(living_site, "DOWNLOADED", tmp_path)
    archive = tmp_path / f"pyodide-{living_site.VERSION}.tgz"
    archive.write_bytes(b"something else")
    with pytest.raises(living_site.NoRuntime, match="another hash"):
        living_site.pyodide()
    assert not archive.exists()


# The pages of source code are alike: one in eight stands for them, and all with `make soak`.
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_no_page_asks_for_a_file_of_the_network_or_complains_or_is_wider_than_a_phone(
    chromium, pages, every
):
    playwright = pytest.importorskip("playwright.sync_api")
    asked, complaints, wide = [], [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        code = [address for address in pages if address.endswith(".py.html")]
        visited = sorted({*pages} - {*code}) + code[::every]
        for address in visited:
            page.goto((SITE / address).as_uri(), timeout=30_000)
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide.append(address)
        browser.close()
    assert len(asked) >= len(visited) >= 75 and len(code) >= 300
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
    assert wide == []


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_way_to_the_top_covers_nothing_of_the_first_screen_and_is_then_in_sight(
    chromium, pages, size
):
    playwright = pytest.importorskip("playwright.sync_api")
    wide, tall = size
    in_sight = """() => { const box = document.querySelector(".top a").getBoundingClientRect();
        return box.top < innerHeight && box.bottom <= innerHeight && box.right <= innerWidth; }"""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": wide, "height": tall})
        page.goto((SITE / "notebooks/03_1f1b.html").as_uri(), timeout=30_000)
        seen = [page.evaluate(in_sight)]
        for to in (3 * tall, 6 * tall):
            page.evaluate(f"scrollTo(0, {to})")
            seen.append(page.evaluate(in_sight))
        page.click(".top a")
        seen.append(page.evaluate(in_sight))
        browser.close()
    assert seen == [False, True, True, False]
