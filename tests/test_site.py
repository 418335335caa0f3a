"""The website of the course: every page is there, and none of them asks for anything from elsewhere."""

import re
import subprocess
import sys
from urllib.parse import unquote

import pytest

from pipeline.notebook.launch import ROOT

SITE = ROOT / "build" / "site"


@pytest.fixture(scope="module")
def pages():
    """Every page of the site, by its address, made anew."""
    subprocess.run(
        [sys.executable, ROOT / "notebooks" / "make_site.py"],
        check=True,
        capture_output=True,
        timeout=180,
    )
    return {path.relative_to(SITE).as_posix(): path.read_text() for path in SITE.rglob("*.html")}


def test_every_lesson_and_every_solution_is_a_page_that_all_pages_of_lessons_lead_to(pages):
    lessons = [path.with_suffix(".html").name for path in ROOT.glob("notebooks/*.ipynb")]
    assert lessons
    for lesson in lessons:
        assert f"notebooks/solutions/{lesson}" in pages
        for other in lessons:
            assert f'href="{other}"' in pages[f"notebooks/{lesson}"], lesson


def test_the_glossary_is_a_page_that_every_page_leads_to_and_that_leads_to_every_lesson(pages):
    lessons = [path.with_suffix(".html").name for path in ROOT.glob("notebooks/*.ipynb")]
    glossary = pages["GLOSSARY.html"].partition("<main>")[2]
    assert "<td>bubble</td>" in glossary
    assert all(f'href="notebooks/{lesson}"' in glossary for lesson in lessons)
    assert all(re.search(r'href="(\.\./)*GLOSSARY.html"', page) for page in pages.values())


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


def test_no_page_asks_for_a_file_of_the_network_or_complains(chromium, pages):
    playwright = pytest.importorskip("playwright.sync_api")
    asked, complaints = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        for address in pages:
            page.goto((SITE / address).as_uri(), timeout=30_000)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        browser.close()
    assert len(asked) >= len(pages)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
    assert wide <= 0
