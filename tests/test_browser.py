"""A lesson in a real browser: JupyterLab on loopback, headless Chromium, every cell run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

from course import launch
from guard.free_port import free_port

pytestmark = pytest.mark.further  # a browser

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
SETTINGS = "tools/jupyter"  # of JupyterLab
LAB = [
    "--allow-root",
    "--no-browser",
    "--ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--IdentityProvider.token=",
    "--ServerApp.password=",
    "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
]
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The address of a JupyterLab server that `make lab` would start; it ends with the test."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))  # signatures of its own
    assert f"lab: export JUPYTER_CONFIG_PATH := $(CURDIR)/{SETTINGS}" in MAKEFILE
    port = free_port()
    flags = f"LAB_FLAGS={shlex.join([f'--port={port}', *LAB])}"
    lines = subprocess.check_output(["make", "--dry-run", "lab", flags], cwd=ROOT, text=True)
    (line,) = [line for line in lines.splitlines() if "-m jupyterlab" in line]
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path),
        "JUPYTER_CONFIG_PATH": str(ROOT / SETTINGS),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
    }
    address = f"http://127.0.0.1:{port}"
    log = tmp_path / "lab.log"
    with log.open("w") as said:
        server = subprocess.Popen(
            [sys.executable, *shlex.split(line, comments=True)[1:]],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=said,
        )
        try:
            wait_until_it_answers(f"{address}/api", server)
            yield address
        finally:
            server.terminate()
            server.wait(timeout=20)
            print(log.read_text())  # a failed test shows it


def wait_until_it_answers(address, server):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "JupyterLab ended before it answered"
        try:
            urllib.request.urlopen(address, timeout=20)
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("JupyterLab did not answer within 60 s")


@contextmanager
def open_notebook(chromium, lab, path):
    """The page of a notebook under ROOT, and the lists of its errors and of requests elsewhere."""
    playwright = pytest.importorskip("playwright.sync_api")
    problems, elsewhere = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=CHROMIUM)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: (
                problems.append(f"{message.text} {message.location}")
                if message.type == "error"
                else None
            ),
        )
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((lab, "data:", "blob:", lab.replace("http", "ws")))
                else elsewhere.append(request.url)
            ),
        )
        page.goto(f"{lab}/lab/tree/{path.relative_to(ROOT)}?reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        page.wait_for_selector(
            ".jp-Notebook-ExecutionIndicator[data-status=idle]", state="attached", timeout=60_000
        )
        # The indicator is idle before there is a kernel; a cell run by then asks which one to take.
        page.get_by_text(re.compile(r"ipykernel\) \| Idle")).wait_for(timeout=60_000)
        yield page, problems, elsewhere
        browser.close()


def run_all_cells(page):
    page.get_by_text("Run", exact=True).first.click()
    page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()


def copy_of(name):
    """A copy of a lesson, since JupyterLab saves what it shows, and of the pictures beside it."""
    copy = ROOT / "build" / "browser" / f"{name}.ipynb"
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "notebooks" / copy.name, copy)
    shutil.copytree(ROOT / "images", ROOT / "build" / "images", dirs_exist_ok=True)
    return copy


def test_a_lesson_that_was_never_run_shows_its_pictures(chromium, lab):
    copy = copy_of("02_gpipe")
    sign = [sys.executable, "-m", "nbformat.sign", copy]  # as make lab does
    subprocess.run(sign, check=True, timeout=60, capture_output=True)
    with open_notebook(chromium, lab, copy) as (page, problems, _):
        picture = page.locator(".jp-RenderedSVG").first
        picture.wait_for(timeout=30_000)
        assert picture.locator("img, svg").count() > 0
        page.wait_for_timeout(2000)
        assert page.get_by_text("notified about official").count() == 0, (
            "a pop-up before the lesson"
        )
        assert problems == []


def test_lesson_01_runs_in_jupyterlab_without_an_error_or_a_request_that_leaves(chromium, lab):
    copy = copy_of("01_naive_model_parallelism")
    subprocess.run(
        [sys.executable, "-m", "nbconvert", "--clear-output", "--inplace", copy],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    with open_notebook(chromium, lab, copy) as (page, problems, elsewhere):
        run_all_cells(page)
        deadline = time.monotonic() + 180
        while not (cells := executed(page, copy)):
            assert time.monotonic() < deadline, "not all cells have run"
        page.screenshot(path=copy.with_suffix(".png"))
    assert answers(cells) == answers(nbformat.read(ROOT / "notebooks" / copy.name, 4).cells)
    assert len(answers(cells)) >= 3
    assert problems == []
    assert elsewhere == []


def executed(page, path):
    """The cells as JupyterLab saves them, once each has run (it shows only those in sight)."""
    page.wait_for_timeout(2000)
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1000)
    try:
        cells = nbformat.read(path, as_version=4).cells
    except nbformat.reader.NotJSONError:  # it is being saved
        return None
    return cells if all(c.execution_count for c in cells if c.cell_type == "code") else None


def answers(cells):
    """What the checks say, the first line of each."""
    texts = ["".join(o.get("text", "") for o in c.get("outputs", [])) for c in cells]
    return [text for text in texts if text.startswith("Not attempted yet")]


EXPLORER = """
import sys
sys.path.insert(0, "{folder}")
from course.views.explorer import explore
explore("gpipe", compare="1f1b")
"""


# Each panel in one theme, and in the other with `make soak`.
@pytest.mark.parametrize("theme", ["Light", pytest.param("Dark", marks=pytest.mark.soak)])
def test_the_explorer_redraws_steps_and_tells_with_the_keyboard_alone(
    chromium, lab, tmp_path, theme
):
    choose_theme(tmp_path, theme)
    path = ROOT / "build" / "browser" / f"explorer_{theme.lower()}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_notebook(path, EXPLORER.format(folder=ROOT / "source_code").strip())
    with open_notebook(chromium, lab, path) as (page, problems, elsewhere):
        run_all_cells(page)
        panel = page.locator(".pipeline-explorer")
        picture = panel.locator("svg[role=img]").first  # the second: what is held
        picture.wait_for(timeout=60_000)
        assert picture.get_attribute("aria-label") == (
            "predicted: gpipe, 4 ranks, 330 ms, 27.3% idle; "
            "to compare: 1f1b, 4 ranks, 330 ms, 27.3% idle"
        )
        smallest = min(picture.locator("text:visible").evaluate_all(HEIGHTS_IN_PIXELS))
        assert smallest >= 12  # which is 9 pt

        # A slider, by name, with the arrow keys.
        slider = panel.get_by_role("slider", name="micro-batches")
        slider.focus()
        page.keyboard.press("ArrowRight")
        becomes(picture, r"gpipe, 4 ranks, 360 ms, 25.0% idle")
        expect(panel.locator(".blocks > g")).to_have_count(2 * 2 * 4 * 9)

        # Another schedule, one that refuses, and one that does not.
        choose = panel.get_by_label("schedule", exact=True)
        choose.focus()
        page.keyboard.press("l")  # one key: a loaded machine takes several for several searches
        becomes(picture, r"predicted: looped-bfs")
        panel.get_by_role("slider", name="micro-batches").focus()
        for _ in range(2):
            page.keyboard.press("ArrowLeft")
        becomes(picture, r"looped-bfs.*1f1b, 4 ranks, 300 ms")
        choose.focus()
        page.keyboard.press("End")  # of the list: dualpipe-v
        panel.get_by_role("alert").wait_for()
        assert "at least two micro-batches per rank" in panel.get_by_role("alert").inner_text()
        page.keyboard.press("Home")
        becomes(picture, r"predicted: naive")
        page.keyboard.press("ArrowDown")
        becomes(picture, r"predicted: gpipe")

        # The cursor, with buttons and with the arrow keys.
        now = panel.locator(".pipeline-explorer-now")
        panel.get_by_role("button", name="step on").focus()
        page.keyboard.press("Enter")
        now.get_by_text("at 10 ms").wait_for()
        panel.get_by_role("slider", name="cursor").focus()
        page.keyboard.press("ArrowRight")
        now.get_by_text("at 20 ms").wait_for()
        told = panel.get_by_text("waited 20 ms for the activation of micro-batch 0 from rank 1")
        told.locator("visible=true").first.wait_for()
        expect(panel.locator(".pipeline-explorer-cursor svg rect")).to_have_count(6)
        panel.get_by_role("button", name="play").focus()
        page.keyboard.press("Enter")
        # A loaded machine shows only some of the moments that it plays.
        expect(now).to_have_text(re.compile(r"at ([3-9]0|\d{3}) ms"), timeout=30_000)
        page.keyboard.press("Enter")

        # A block's story is there as soon as it is pointed at, and the table has all of them.
        panel.locator(".blocks > g > rect").nth(9).hover()
        shown = panel.locator(".blocks text:visible")
        assert shown.count() == 1 and shown.text_content().startswith("forward of micro-batch")
        page.screenshot(path=path.with_suffix(".png"))
        panel.get_by_role("button", name="table").focus()
        page.keyboard.press("Enter")
        panel.get_by_role("region").first.wait_for()
        expect(panel.get_by_role("region").first.locator("tbody tr")).to_have_count(2 * 4 * 7)
        expect(picture).to_be_hidden()
    assert problems == []
    assert elsewhere == []


TIME_MACHINE = """
import sys
sys.path.insert(0, "{folder}")
from course.debugging.time_machine import time_machine
time_machine("{broken}", compare="{healthy}")
"""


@pytest.mark.parametrize("theme", ["Dark", pytest.param("Light", marks=pytest.mark.soak)])
def test_the_time_machine_goes_both_ways_and_finds_the_first_difference_with_the_keyboard_alone(
    chromium, lab, tmp_path, theme
):
    choose_theme(tmp_path, theme)
    folders = {name: tmp_path / name for name in ("broken", "healthy")}
    for name, flag in (("broken", ""), ("healthy", " --cured")):
        call = f"broken_pipelines.py --case 4{flag} --record {folders[name]}"
        launch.run(call, warm=True, show=False, limit=60)
    path = ROOT / "build" / "browser" / f"time_machine_{theme.lower()}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_notebook(path, TIME_MACHINE.format(folder=ROOT / "source_code", **folders).strip())
    with open_notebook(chromium, lab, path) as (page, problems, elsewhere):
        run_all_cells(page)
        panel = page.locator(".pipeline-explorer")
        picture = panel.locator("svg[role=img]")
        picture.wait_for(timeout=60_000)
        assert "recorded: 1f1b, 4 ranks" in picture.get_attribute("aria-label")
        smallest = min(picture.locator("text:visible").evaluate_all(HEIGHTS_IN_PIXELS))
        assert smallest >= 12  # which is 9 pt
        panel.get_by_text("First difference: step 0, 2B0 on rank 2: made").wait_for()

        # To the first difference, on, and back again.
        now = panel.locator(".pipeline-explorer-now")
        panel.get_by_text("compared with: 1f1b, step 0, at 0 ms").wait_for()
        panel.get_by_role("button", name="to the first difference").focus()
        page.keyboard.press("Enter")
        row = panel.locator("tr").filter(has=page.get_by_role("rowheader", name="rank 2")).first
        row.get_by_text("backward of micro-batch 0 on stage 2, rank 2").wait_for()
        said = row.inner_text()
        assert re.search(r"; uses version 0\b", said)
        assert re.search(r"[0-9a-f]{6} \(norm [\d.]+\), as rank 3 sent it", said)
        expect(now).not_to_have_text("at 0 ms")
        there = now.inner_text()
        marks = panel.locator(".pipeline-explorer-cursor svg text")
        expect(marks).to_have_text(["≠"] * 2)  # in both timelines
        panel.get_by_role("button", name="step back").focus()
        page.keyboard.press("Enter")
        expect(now).not_to_have_text(there)
        panel.get_by_role("slider", name="cursor").focus()
        page.keyboard.press("ArrowRight")
        expect(now).to_have_text(there)
        page.screenshot(path=path.with_suffix(".png"), full_page=True)

        # Another step has no mark and other versions.
        choose = panel.get_by_label("step", exact=True)
        choose.focus()
        page.keyboard.press("ArrowDown")
        panel.get_by_text("recorded: 1f1b, step 1, at").first.wait_for()
        expect(marks).to_have_count(0)
        page.keyboard.press("ArrowUp")
        panel.get_by_text("recorded: 1f1b, step 0, at").first.wait_for()

        # A block tells its story when it is pointed at; the table has all of them, in both runs.
        panel.locator(".blocks > g > rect").nth(9).hover()
        shown = panel.locator(".blocks text:visible")
        assert shown.count() == 1 and shown.text_content().endswith("; uses version 0")
        panel.get_by_role("button", name="table").focus()
        page.keyboard.press("Enter")
        panel.get_by_role("region").first.wait_for()
        expect(panel.get_by_role("region").first.locator("tbody tr")).to_have_count(64)
        expect(picture).to_be_hidden()
    assert problems == []
    assert elsewhere == []


HEIGHTS_IN_PIXELS = """texts => texts.map(text =>
    parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)"""


def expect(locator):
    """Playwright's assertions, which wait for what they assert."""
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=30_000)  # instead of 5 s, which a busy machine may take
    return playwright.expect(locator)


def becomes(picture, pattern):
    """Wait until the picture's words match."""
    expect(picture).to_have_attribute("aria-label", re.compile(pattern))


def choose_theme(tmp_path, theme):
    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    chosen = json.dumps({"theme": f"JupyterLab {theme}"})
    (settings / "themes.jupyterlab-settings").write_text(chosen)


def write_notebook(path, *cells):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell, id=f"cell-{i}") for i, cell in enumerate(cells)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(notebook, path)
