"""The instructor's pack says what is there: minutes that add up, every exercise, slides that fit."""

import html
import json
import re
import subprocess
import sys

import pytest

from course.launch import ROOT
from lab.simulator import Costs, simulate
from pipeline.schedules import gpipe, interleaved_1f1b, one_f_one_b

TEXT = (ROOT / "docs" / "instructors.md").read_text()
LESSONS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
SLIDES = ROOT / "build" / "slides"


def section(heading):
    return re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL)[1]


def minutes(part):
    return [int(n) for n in re.findall(r"^\| (\d+) \|", part, re.MULTILINE)]


def test_the_minutes_of_each_agenda_add_up():
    half, day, second = re.split(r"\*\*One day|\*\*Two days", section("Agendas"))
    assert sum(minutes(half)) == 4 * 60
    assert sum(minutes(day)) == 8 * 60
    assert sum(minutes(second)) == 8 * 60


def test_the_plan_of_lesson_02_fills_its_time_and_names_its_parts():
    plan = section("One lesson, minute by minute")
    (agenda,) = set(re.findall(r"^\| (\d+) \| 02 GPipe", section("Agendas"), re.MULTILINE))
    assert sum(minutes(plan)) == int(agenda)
    cells = json.loads((ROOT / "notebooks" / "02_gpipe.ipynb").read_text())["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    headings = re.findall(r"^## (.*)$", prose, re.MULTILINE)
    slides = ";".join(re.findall(r"^\| \d+ \| (.*?) \|", plan, re.MULTILINE))
    named = [name for name in re.split(r"; ?|, (?=Compare)", slides) if "Exercise" not in name]
    assert set(named) <= set(headings), set(named) - set(headings)


def exercises_of(path):
    cells = json.loads(path.read_text())["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.findall(r"^\*\*\d+\. (.*?)\.?\*\*", prose, re.MULTILINE)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_has_its_exercises_and_a_sheet(path):
    exercises = exercises_of(path)
    table = section(f"Lesson {path.stem.split('_')[0]}")
    assert len(exercises) >= 2
    for exercise in exercises:
        assert f"| {exercise} |" in table, f"say what is answered wrongly in '{exercise}'"
    assert re.search(
        rf"^\*\*{path.stem.split('_')[0]} ", section("A sheet for each lesson"), re.MULTILINE
    )


def test_the_sheets_on_messages_say_what_the_schedules_and_the_simulator_do():
    sheets = section("A sheet for each lesson")
    assert "(p·v − 1)/(p − 1) times as many, 2.33 for p = 4 and v = 2" in sheets
    for p, v in ((2, 2), (4, 2), (4, 4), (16, 4)):
        ratio = len(interleaved_1f1b(p, p, v).messages) / len(one_f_one_b(p, p).messages)
        assert ratio == (p * v - 1) / (p - 1)
    assert round((4 * 2 - 1) / (4 - 1), 2) == 2.33
    assert "crosses the network n − 1 times each way, and n times with interleaving" in sheets
    for schedule, crossings in ((one_f_one_b(8, 8), 3), (interleaved_1f1b(8, 8), 4)):
        on_node = [(source // 2, destination // 2) for source, destination in schedule.pairs]
        assert sum(a != b for a, b in on_node) == 2 * crossings  # 4 nodes of 2 ranks
    # Over a hop that takes longer than a stage, 10 and 20 ms: what 8 micro-batches more cost.
    for kind, expected in (("transfer", {"gpipe": 240, "1f1b": 480}),
                           ("occupancy", {"gpipe": 480, "1f1b": 480})):  # fmt: skip
        costs = Costs(10, 20, **{kind: {(1, 2): 30, (2, 1): 30}})
        for make in (gpipe, one_f_one_b):
            more = simulate(make(4, 24), costs).makespan - simulate(make(4, 16), costs).makespan
            assert more == expected[make(4, 8).name]


def test_the_readme_gives_the_minutes_of_the_lessons():
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"\]\((notebooks/[\w.]+)\) \| (\d+) \|", readme))
    for path in LESSONS:
        cells = json.loads(path.read_text())["cells"]
        first = "".join("".join(cell["source"]) for cell in cells[:2])
        assert rows[f"notebooks/{path.name}"] == re.search(r"\*\*Time:\*\* (\d+) min", first)[1]


def test_the_routes_of_the_readme_take_the_minutes_that_it_gives():
    readme = (ROOT / "README.md").read_text()
    lessons = re.findall(
        r"^\| (\w+) \| \[.*?\| (\d+) \| .* \| ([●◐]?) ?\| ([●◐]?) ?\| ([●◐]?) ?\|$", readme, re.M
    )
    assert len(lessons) == len(LESSONS)
    assert [lesson for lesson, *marks in lessons if "◐" in marks] == ["12b"]
    part = int(re.search(r"◐ is lesson 12b .*?, (\d+) minutes", readme)[1])
    routes = re.findall(r"^\| (?:90 minutes|one day|everything) \| (\d+) \|", readme, re.M)
    assert len(routes) == 3
    for column, total in enumerate(routes, 2):
        taken = [row for row in lessons if row[column]]
        spent = [int(row[1]) if row[column] == "●" else part for row in taken]
        assert sum(spent) == int(total)


def test_what_the_pack_names_is_there():
    for name in re.findall(r"\b(?:slurm|source_code|notebooks)/[\w./]+\w", TEXT):
        assert (ROOT / name).exists(), name
    site = (ROOT / "slurm" / "site.env").read_text()
    for name in set(re.findall(r"\bCOURSE_[A-Z_]+\b", TEXT)) - {"COURSE_"}:
        assert f"\n{name}=" in site, name
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make (\w+)", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.fixture(scope="module")
def slides():
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_slides.py"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    return {path.stem: (SLIDES / f"{path.stem}.html").read_text() for path in LESSONS}


def test_slides_of_every_lesson_are_whole_and_need_no_network(slides):
    for name, page in slides.items():
        assert page.count("<section>") >= 12, name
        assert not re.search(r"""(?:src|href)=["']?(?!data:|#)\w""", page), name
        assert "Not attempted yet" not in page and "check." not in page, name
        assert all('role="img" aria-label="' in svg for svg in re.findall(r"<svg [^>]*>", page))


def test_slides_tell_the_exercises_and_not_the_answers(slides):
    for path in LESSONS:
        page = html.unescape(slides[path.stem])
        for exercise in exercises_of(path):
            assert exercise.replace("`", "") in re.sub("</?code>", "", page), exercise
        assert "Right: " not in page, path.stem  # what a check says of an answer


def test_what_asks_for_a_prediction_is_on_a_slide_before_the_answer(slides):
    asking = [
        slide
        for page in slides.values()
        for slide in page.split("<section>")
        if re.search(r"\b[Gg]uess\b|\b[Ww]rite down\b", slide)
    ]
    assert len(asking) > 10
    for slide in asking:
        assert "<figure>" not in slide and 'class="output"' not in slide, slide


def test_every_slide_fits_its_page_and_is_read_from_the_back(slides, chromium):
    from playwright.sync_api import sync_playwright

    program = """slides.map(slide => {
        slide.style.display = 'block';
        const page = slide.getBoundingClientRect(), box = slide.firstElementChild.getBoundingClientRect();
        const zoom = parseFloat(slide.firstElementChild.style.zoom || '100');
        const broken = [...slide.querySelectorAll('pre')].some(pre => pre.scrollWidth > pre.clientWidth);
        slide.style.display = '';
        return [(box.bottom - page.top) / page.height, (box.right - page.left) / page.width, zoom, broken];
    })"""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        for name in slides:
            page.goto((SLIDES / f"{name}.html").as_uri())
            for number, (bottom, right, zoom, broken) in enumerate(page.evaluate(program), 1):
                assert bottom <= 0.97 and right <= 1.0 and not broken, f"{name}, slide {number}"
                assert zoom >= 75, f"{name}, slide {number} is too small to read"
        browser.close()


def test_the_loop_over_participants_names_those_whose_preflight_has_not_passed(tmp_path):
    (loop,) = re.findall(r"^```\n(for name in .*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "participants.txt").write_text("ada\ngrace\nemmy\n")
    (tmp_path / "ada.out").write_text("all checks passed\nstatus 0\n")
    (tmp_path / "grace.out").write_text("one check failed\nstatus 1\n")
    words = ["bash", "-c", loop.replace("/shared/signed-in", str(tmp_path))]
    printed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert (printed.stdout, printed.stderr) == ("grace\nemmy\n", "")
