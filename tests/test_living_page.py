"""The website's pages run the course's Python in a real Chromium, from disk, and answer as it does here."""

import html
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import unquote

import living_pages
import living_site
import nbformat
import pytest

from course.browser.explorer_page import CHOICES, OWN, START
from course.browser.page import answer
from course.checks.puzzles import PUZZLES
from course.launch import ROOT
from pipeline.schedules import one_f_one_b
from pipeline.schedules.text_form import to_csv

pytestmark = [pytest.mark.processes, pytest.mark.further]  # a browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site whose pages run Python."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RES_OPTIONS", raising=False)  # npm asks a name server
            living_site.pyodide()
    except living_site.NoRuntime as error:
        pytest.skip(f"{error}; .ci/run installs what is missing on Debian")
    folder = tmp_path_factory.mktemp("living") / "site"
    command = [sys.executable, ROOT / "tools" / "make_site.py", "--live", "--into", folder]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert "run in the pages" in done.stdout and "skipped: " not in done.stdout
    return folder


@pytest.fixture
def browser(chromium):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser, site, address, **kind):
    """A page of the site; `asked` are its requests and `complaints` its errors."""
    page = browser.new_context(**kind).new_page()
    page.asked, page.complaints = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda message: page.complaints.append(message.text))
    path, mark, anchor = address.partition("#")
    page.goto((site / path).as_uri() + mark + anchor)
    return page


def expect(locator):
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=30_000)  # instead of 5 s, which a busy machine may take
    return playwright.expect(locator)


def is_content(page):
    """Whether a page has complained of nothing and has asked for nothing but its own files."""
    assert page.complaints == []
    elsewhere = [url for url in page.asked if not url.startswith(("file:", "data:", "blob:"))]
    assert elsewhere == []
    return True


PHONE = {"viewport": {"width": 375, "height": 800}, "has_touch": True, "is_mobile": True}


def settings_on_a_grid():
    """Settings of every schedule in small, odd and large sizes, with costs that do not fit, too."""
    for schedule in CHOICES["schedule"]:
        for ranks, microbatches, costs in [
            (4, 8, {}),
            (
                3,
                7,
                {
                    "forward": 7.5,
                    "backward": 16,
                    "weight": 5.5,
                    "transfer": 2.5,
                    "work": "one long, last",
                },
            ),
            (8, 32, {"occupancy": 1.5, "compare": "zb-h2"}),
            (1, 1, {"weight": 30, "chunks": 3}),
        ]:
            size = {"schedule": schedule, "ranks": ranks, "microbatches": microbatches}
            yield START | {"rows": to_csv(one_f_one_b(2, 3))} | costs | size


def asked_here(question):
    return json.loads(answer(json.dumps(question)))


def questions():
    for settings in settings_on_a_grid():
        small = settings["microbatches"] < 20
        yield {"do": "explore", "settings": settings, "longest_path": small, "table": small}
        if not asked_here({"do": "explore", "settings": settings})["refusal"]:
            yield {"do": "moment", "settings": settings, "time": 33.5}
            yield {"do": "point", "settings": settings, "x": 200.5, "y": 45}
    for number, puzzle in PUZZLES.items():
        rows = ["0F0,0F1,0B0"] + [""] * (puzzle.num_ranks - 1)
        yield {"do": "solve", "number": number, "rows": rows}
    yield {"do": "solve", "number": 4, "rows": to_csv(one_f_one_b(3, 4)).split()}


def test_the_page_answers_every_question_on_a_grid_as_python_does_here(site, browser):
    page = opened(browser, site, "notebooks/12_your_own_schedule.html")
    refused = 0
    for question in questions():
        there = page.evaluate("question => python.ask(question)", question)
        here = asked_here(question)
        assert there == here, question
        refused += bool(here.get("refusal"))
    assert refused >= 4
    assert is_content(page)


def solutions():
    """(what the page has of an exercise, the solution's code, what its check says), all that live."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        places = living_pages.bring_to_life(cells_of(path), path.stem, "")
        solved = cells_of(path.parent / "solutions" / path.name)
        puzzles = path.name.startswith("12_")
        for place in places:
            attribute = html.unescape(re.search(r'data-exercise="([^"]*)"', place)[1])
            given = json.loads(attribute)
            call = given.get("call") or f"check.puzzle({given.get('number')}, "
            at = next(i for i, cell in enumerate(solved) if call in cell.source)
            said = "".join(output.get("text", "") for output in solved[at].outputs)
            given["setup"] += "".join(map(living_pages.imports_for_a_page, sources_of(solved[:at])))
            # A later answer may build on an earlier one.
            earlier = [
                code for code in sources_of(solved[:at]) if re.match("rows_|def rows_", code)
            ]
            code = earlier if puzzles else []
            yield given, "\n".join([*code, solved[at - 1].source]), said


def sources_of(cells):
    return [cell.source for cell in cells if cell.cell_type == "code"]


def cells_of(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if "solutions" not in path.parts or cell.cell_type == "code"]


def test_every_solution_gets_in_the_page_what_the_solutions_notebook_says(site, browser):
    page = opened(browser, site, "notebooks/02_gpipe.html")
    checked = 0
    for given, code, said in solutions():
        if "number" in given:
            code = f"{code}\nrows = rows_{given['number']}"
            question = {"do": "solve", "number": given["number"], "code": code}
            question["setup"] = given["setup"]
        else:
            question = {"do": "check", "code": code}
            question |= {name: given[name] for name in ("lesson", "call", "setup")}
        there = page.evaluate("question => python.ask(question)", question)
        assert there["said"] == said and said.startswith("Right: "), given["id"]
        checked += 1
    assert checked >= 25
    assert is_content(page)


def test_the_explorer_draws_anew_with_the_keyboard_and_its_address_leads_back(site, browser):
    page = opened(browser, site, "explorer.html", viewport={"width": 1300, "height": 900})
    picture = page.locator(".live-drawing svg")
    expect(page.locator(".live-now")).to_have_text("at 0 ms", timeout=60_000)
    page.get_by_role("slider", name="micro-batches").focus()
    page.keyboard.press("ArrowRight")
    expect(picture).to_have_attribute(
        "aria-label", re.compile("gpipe, 4 ranks, 360 ms, 25.0% idle")
    )
    page.get_by_label("schedule", exact=True).focus()
    # Not the whole name: each letter draws anew, and on a busy machine the next comes too late.
    for name in ("zb-h1", "zb-h2", "zb-v"):
        page.keyboard.press("z")
        expect(picture).to_have_attribute("aria-label", re.compile(f"predicted: {name}"))
    page.get_by_role("checkbox", name="longest path").focus()
    page.keyboard.press("Space")
    expect(page.locator(".longest-path")).to_have_count(2)
    expect(page.locator(".live-reasons table")).to_have_count(2)
    page.get_by_role("button", name="step on").focus()
    page.keyboard.press("Enter")
    now = page.locator(".live-now")
    expect(now).to_have_text("at 5 ms")
    page.locator(".live-drawing .blocks rect").nth(12).click()
    expect(page.locator(".live-story")).to_contain_text("micro-batch")
    expect(now).not_to_have_text("at 5 ms")

    again = opened(browser, site, f"explorer.html#{page.url.partition('#')[2]}")
    expect(again.locator(".live-now")).to_have_text(now.inner_text(), timeout=60_000)
    expect(again.locator(".longest-path")).to_have_count(2)
    seen = picture.get_attribute("aria-label")
    expect(again.locator(".live-drawing svg")).to_have_attribute("aria-label", seen)
    assert is_content(page) and is_content(again)


EDGES = """element => {
    const box = element.getBoundingClientRect();
    return [box.left, box.top, box.right, box.bottom];
}"""


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_after_any_slider_of_the_explorer_the_changed_picture_is_wholly_in_view(
    site, browser, size
):
    width, height = size
    page = opened(browser, site, "explorer.html", viewport={"width": width, "height": height})
    expect(page.locator(".live-now")).to_have_text("at 0 ms", timeout=60_000)
    page.get_by_label("schedule", exact=True).select_option("interleaved-1f1b")
    page.get_by_label("compare with").select_option("zb-v")
    page.locator(".live-more summary").click()
    sliders = page.locator(".live-choices input[type=range]:not(:disabled)")
    expect(sliders.nth(9)).to_be_visible(timeout=60_000)  # once Python knows the schedule's options
    work = page.get_by_label("work of micro-batches")
    for control in [*sliders.all(), work]:
        control.focus()
        page.keyboard.press("ArrowDown" if control == work else "ArrowRight")
        for part in (".live-drawing svg", ".live-held svg"):
            left, top, right, bottom = page.locator(part).evaluate(EDGES)
            assert 0 <= left <= right <= width and 0 <= top <= bottom <= height, part
        _, top, _, bottom = page.locator(".live-view").evaluate(EDGES)
        _, upper, _, lower = control.evaluate(EDGES)
        assert -1 <= upper and lower <= height + 1, "the control is in view, too"
        assert not top < (upper + lower) / 2 < bottom, "and not below the picture"
    expect(page.locator(".live-figures")).to_contain_text("of a stage, on average")
    assert "work=one+long" in page.url
    for part in page.locator(".live-moment").all():
        assert part.evaluate("e => e.scrollWidth <= e.clientWidth"), "what each rank does is cut"
    assert is_content(page)


def test_a_puzzle_in_view_starts_python_and_shows_an_empty_board(site, browser):
    page = opened(browser, site, "puzzles.html#puzzle-2")
    board = page.locator(".live-exercise").nth(1).locator(".live-picture svg")
    expect(board).to_have_attribute(
        "aria-label", re.compile("yours so far: 0 of 360 ms, 3 ranks"), timeout=60_000
    )
    assert page.locator(".live-exercise").count() == len(PUZZLES)
    assert is_content(page)


def test_a_link_brings_no_value_that_the_controls_do_not_have(site, browser):
    bad = (
        "schedule=<b>&ranks=999&microbatches=x&transfer=-3&forward=1e9&compare=zb-h1&at=1e12&own=1"
    )
    page = opened(browser, site, f"explorer.html#{bad}")
    picture = page.locator(".live-drawing svg")
    expect(picture).to_have_attribute(
        "aria-label", re.compile("predicted: gpipe, 8 ranks, .* zb-h1, 8 ranks"), timeout=60_000
    )
    assert page.get_by_role("slider", name="forward of a rank").input_value() == "50"
    assert is_content(page)


def test_own_rows_are_drawn_as_they_are_typed_and_wrong_ones_get_a_sentence(site, browser):
    page = opened(browser, site, "explorer.html")
    page.get_by_label("schedule", exact=True).select_option(OWN)
    rows = page.get_by_label("one row per rank")
    rows.fill("0F0,0B0\n1F0,1B0")
    picture = page.locator(".live-drawing svg")
    expect(picture).to_have_attribute(
        "aria-label", re.compile("yours, 2 ranks, 60 ms"), timeout=60_000
    )
    rows.fill("0F0,0B0\n1F0")
    expect(page.locator(".live-status")).to_contain_text("never runs the backward of micro-batch 0")
    assert "rows=0F0" in unquote(page.url) and is_content(page)


def test_a_puzzle_is_solved_on_a_phone_with_taps_alone(site, browser):
    page = opened(browser, site, "notebooks/12_your_own_schedule.html", **PHONE)
    puzzle = page.locator(".live-exercise").nth(3)
    for rank, order in enumerate(one_f_one_b(3, 4).orders):
        for action in order:
            button = puzzle.get_by_role("button", name=f"rank {rank}: {action}")
            button.tap()
    expect(puzzle.locator(".live-said")).to_contain_text("Right: legal; 360 ms", timeout=60_000)
    expect(puzzle.locator(".live-name")).to_have_text("You have built 1F1B.")
    expect(puzzle.locator(".longest-path")).to_have_count(1)
    assert puzzle.locator(".live-reasons tbody tr").count() == 9
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    heights = puzzle.locator("button").evaluate_all("all => all.map(each => each.offsetHeight)")
    assert min(heights) >= 36, "of a finger"

    link = puzzle.get_by_role("link", name="link to these rows").get_attribute("href")
    other = opened(browser, site, f"notebooks/12_your_own_schedule.html{link}")
    expect(other.locator(".live-name").nth(3)).to_have_text("You have built 1F1B.", timeout=60_000)
    assert is_content(page) and is_content(other)


NO_MOMENT = """() => {
    const ask = python.ask;
    python.ask = question => question.do === "moment" ? new Promise(() => {}) : ask.call(python, question);
}"""


def test_an_exercise_answers_in_its_lesson_and_a_lesson_loads_no_python_before(site, browser):
    page = opened(browser, site, "notebooks/02_gpipe.html")
    exercise = page.locator(".live-exercise").first
    expect(exercise.get_by_role("button", name="check")).to_be_visible()
    assert not [url for url in page.asked if "runtime.js" in url]
    exercise.locator("textarea").focus()
    page.keyboard.press("Control+Enter")
    said = exercise.locator(".live-said")
    expect(said).to_have_text(re.compile("^Not attempted yet"), timeout=60_000)
    page.evaluate(NO_MOMENT)  # the link does not wait for it: it leads to the picture beside it
    page.locator(".live-explorer input").first.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".live-drawing svg")).to_have_attribute("aria-label", re.compile("3 ranks"))
    assert "ranks=3" in page.get_by_role("link", name="open in the explorer").get_attribute("href")
    assert is_content(page)


def test_an_endless_loop_ends_with_a_sentence_and_python_is_there_again(site, browser):
    page = opened(browser, site, "notebooks/02_gpipe.html")
    exercise = page.locator(".live-exercise").first
    code, said = exercise.locator("textarea"), exercise.locator(".live-said")
    check = exercise.get_by_role("button", name="check")
    check.click()
    expect(said).to_have_text(re.compile("^Not attempted yet"), timeout=60_000)
    page.evaluate("python.limit = 1500")
    code.fill("while True: pass")
    check.click()
    expect(said).to_contain_text("no answer within 1.5 s")
    page.evaluate("python.limit = 60000")
    code.fill("def own_gpipe(p, m): return 3")
    check.click()
    expect(said).to_have_text(re.compile("^Not yet: "), timeout=60_000)
    assert is_content(page)


REACH = """
import js
async def reach():
    for ask in (js.fetch, lambda url: js.eval("import('" + url + "')")):
        try:
            await ask("{url}")
        except Exception:
            pass
try:
    request = js.XMLHttpRequest.new()
    request.open("GET", "{url}", False)
    request.send()
except Exception:
    pass
try:
    js.WebSocket.new("{url}".replace("http", "ws"))
except Exception:
    pass
import asyncio
asyncio.ensure_future(reach())
own_gpipe = 3
"""


def test_a_readers_code_reaches_no_server(site, browser):
    reached = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            reached.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = opened(browser, site, "notebooks/02_gpipe.html")
        code = REACH.replace("{url}", f"http://127.0.0.1:{server.server_port}/")
        call = {"lesson": "lesson_02", "call": "check.own_gpipe(own_gpipe)", "code": code}
        told = page.evaluate("question => python.ask(question)", {"do": "check", **call})
        assert "asks for a function" in told["said"], "the code ran to its end"
        page.evaluate("python.ask({do: 'solve', number: 1, rows: ['', '']})")
        page.wait_for_timeout(300)
        server.shutdown()
    assert reached == []


def test_no_page_that_lives_complains_or_is_wider_than_a_phone(site, browser):
    addresses = [path.relative_to(site) for path in site.rglob("*.html")]
    living = [a for a in addresses if '<div class="live-' in (site / a).read_text()]
    assert len(living) >= 10
    for address in living:
        page = opened(browser, site, address.as_posix(), **PHONE)
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), address
        assert is_content(page), address
        page.context.close()


def test_the_search_finds_sections_of_all_pages_with_the_keyboard(site, browser):
    page = opened(browser, site, "notebooks/05_interleaved.html")
    assert not [url for url in page.asked if "search_index" in url]
    page.keyboard.press("/")
    page.keyboard.type("bubble over IDEAL megatron")
    expect(page.locator(".found p")).to_contain_text("sections")
    texts = " ".join(page.locator(".found a").all_inner_texts())
    assert "Lesson 02: GPipe" in texts and "timeline.py" in texts
    page.keyboard.press("ArrowDown")
    first = page.evaluate("document.activeElement.href")
    page.keyboard.press("Escape")
    expect(page.locator(".found")).to_be_hidden()
    page.keyboard.press("ArrowDown")
    page.goto(first)
    assert page.title()
    assert is_content(page)
