"""The instructor's pack says what is there: minutes that add up, exercises, slides that fit."""

import html
import json
import os
import re
import subprocess
import sys

import make_slides
import pytest
from minutes import minutes_of

from course.launch import ROOT

TEXT = (ROOT / "docs" / "instructors.md").read_text()
MACHINES = (ROOT / "docs" / "machines.md").read_text()
PLANS = (ROOT / "docs" / "lesson-plans.md").read_text()
LESSONS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
SLIDES = ROOT / "build" / "slides"


def section(heading):
    return re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL)[1]


def rows_of(part):
    """(minute of the day, minutes, what, how) of each row of an agenda."""
    rows = re.findall(r"^\| (\d+):(\d\d) \| (\d+) \| (.*?) \| ?(.*?) ?\|$", part, re.MULTILINE)
    return [(60 * int(h) + int(m), int(minutes), *rest) for h, m, minutes, *rest in rows]


AGENDAS = dict(
    zip(("half", "day", "second"), re.split(r"\*\*One day|\*\*Two days", section("Agendas")))
)


@pytest.mark.parametrize(("name", "hours"), [("half", 4), ("day", 8), ("second", 8)])
def test_the_minutes_of_each_agenda_add_up_and_have_breaks(name, hours):
    rows = rows_of(AGENDAS[name])
    if name == "day":  # it has the morning of the half day
        rows = [row for row in rows_of(AGENDAS["half"]) if row[0] < rows[0][0]] + rows
    assert sum(minutes for _, minutes, *_ in rows) == hours * 60
    sitting = 0
    for (begins, minutes, what, _), (after, *_) in zip(
        rows, [*rows[1:], (rows[0][0] + hours * 60,)]
    ):
        assert begins + minutes == after, f"{what} begins at minute {begins} of the day"
        sitting = 0 if what in ("break", "lunch") else sitting + minutes
        assert sitting <= 90, f"no break before the end of {what}"


def minutes_of_lesson(path):
    cells = json.loads(path.read_text())["cells"]
    first = "".join("".join(cell["source"]) for cell in cells[:2])
    return int(re.search(r"\*\*Time:\*\* (\d+) min", first)[1])


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_an_agenda_gives_a_lesson_its_minutes_or_says_which_part(path):
    number = path.stem.split("_")[0]
    rows = [row for part in AGENDAS.values() for row in rows_of(part) if row[2].startswith(number)]
    for _, minutes, what, _ in rows:
        whole = re.fullmatch(rf"{number} [^,]*", what)
        assert not whole or minutes >= minutes_of_lesson(path), what
    assert rows or number in section("Agendas").split("**More time")[1]


def plan_of(path):
    """(the text, [(minutes, title of the first slide) of each row]) of a lesson's minute plan."""
    number = path.stem.split("_")[0]
    (text,) = re.findall(rf"^## {number} .*?\n(.*?)(?=^## |\Z)", PLANS, re.M | re.S) or [""]
    rows = re.findall(r"^\| (\d+) \| (.*?) \| .+? \|$", text, re.MULTILINE)
    return text, [(int(minutes), title) for minutes, title in rows]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_plan_of_a_lesson_fills_its_minutes_and_names_its_slides_in_order(path):
    _, plan = plan_of(path)
    assert plan, f"write a plan for {path.stem} in docs/lesson-plans.md"
    taken, least = sum(each for each, _ in plan), minutes_of_lesson(path)
    estimated = minutes_of(path)
    assert least - 5 <= taken <= least + estimated.exercises + estimated.more + 5
    cells = json.loads(path.read_text())["cells"]
    titles = ["Title", *(slide.name for slide in make_slides.slides_of(cells)[1:])]
    assert len(titles) == len(set(titles)), "a title names one slide"
    named = [title for _, title in plan]
    assert set(named) <= set(titles)
    told = [titles.index(title) for title in named if not title.startswith("Exercise")]
    assert told == sorted(told) and named[0] == "Title"


def exercises_of(path):
    cells = json.loads(path.read_text())["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.findall(r"^\*\*\d+\. (.*?)\.?\*\*", prose, re.MULTILINE)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_the_questions_of_a_plan_name_exercises_of_the_lesson_and_are_in_the_slides(path):
    asked = re.findall(r"^- \*\*(.*?):\*\* (.*)$", plan_of(path)[0], re.MULTILINE)
    assert asked and len(exercises_of(path)) >= 2
    assert {exercise for exercise, _ in asked} <= set(exercises_of(path))
    number = path.stem.split("_")[0]
    notes = [s.note for s in make_slides.slides_of(json.loads(path.read_text())["cells"], number)]
    assert all(question in notes for _, question in asked)


def test_the_routes_take_the_minutes_that_the_list_of_lessons_gives():
    page = (ROOT / "docs" / "lessons.md").read_text()
    lessons = re.findall(
        r"^\| (\w+) \| \[.*?\| (\d+) \| .* \| ([●◐]?) ?\| ([●◐]?) ?\| ([●◐]?) ?\|$", page, re.M
    )
    assert [lesson for lesson, *marks in lessons if "◐" in marks] == ["12b"]
    part = int(re.search(r"◐ is lesson 12b .*?, (\d+) minutes", page)[1])
    routes = re.findall(r"^\| (?:90 minutes|one day|the course) \| (\d+) \|", page, re.M)
    assert len(routes) == 3
    for column, total in enumerate(routes, 2):
        taken = [row for row in lessons if row[column]]
        spent = [int(row[1]) if row[column] == "●" else part for row in taken]
        assert sum(spent) == int(total)


def test_what_the_pack_names_is_there():
    for name in re.findall(r"\b(?:slurm|source_code|notebooks)/[\w./]+\w", TEXT + PLANS + MACHINES):
        assert (ROOT / name).exists(), name
    site = (ROOT / "slurm" / "site.env").read_text()
    progress = (ROOT / "source_code" / "course" / "progress.py").read_text()
    for name in set(re.findall(r"\bCOURSE_[A-Z_]+\b", TEXT + PLANS + MACHINES)) - {"COURSE_"}:
        assert f"\n{name}=" in site or f'"{name}"' in progress, name
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


def shown(page):
    """The slides of a page, without what only the speaker sees."""
    return [
        re.sub(r"<aside>.*?</aside>", "", slide, flags=re.S) for slide in page.split("<section")
    ]


def test_slides_of_every_lesson_are_few_and_need_no_network(slides):
    for name, page in slides.items():
        assert 10 <= page.count("<section") <= 25, name
        assert not re.search(r"""(?:src|href)=["']?(?!data:|#)\w""", page), name
        assert "Not attempted yet" not in page and "check." not in page, name
        assert all('role="img" aria-label="' in svg for svg in re.findall(r"<svg [^>]*>", page))


def test_a_slide_is_a_sentence_and_at_most_one_figure_and_has_something_to_say(slides):
    for name, page in slides.items():
        silent = 0
        for number, slide in enumerate(shown(page)[1:], 1):
            words = re.sub(r"<[^>]*>", " ", re.search(r"<p[^>]*>(.*?)</p>", slide, re.S)[1]).split()
            assert 3 <= len(words) <= (70 if number == 1 else 48), f"{name}, slide {number}"
            assert slide.count("<figure>") + slide.count("<pre") + slide.count("<table") <= 1
        for slide in page.split("<section")[1:]:
            silent += "<aside></aside>" in slide
        assert silent <= page.count("<section") / 3, name


def test_the_sentence_of_a_slide_changes_with_the_notebook():
    cells = [
        {"cell_type": "markdown", "source": ["# Lesson 99: X\n\n**After this lesson** you can y."]},
        {"cell_type": "markdown", "source": ["## A\n\nOne. <!-- slide: T -->Two waits. Three."]},
        {"cell_type": "code", "source": [], "outputs": [{"name": "stdout", "text": ["330 ms\n"]}]},
        {"cell_type": "markdown", "source": ["<!-- slide: U -->How long? It is 330."]},
        {"cell_type": "code", "source": [], "outputs": [{"name": "stdout", "text": ["no\n"]}]},
    ]
    first, second, third = make_slides.slides_of(cells)
    assert (first.title, first.sentence) == ("Lesson 99: X", "**After this lesson** you can y.")
    assert (second.title, second.sentence, second.note) == ("T", "Two waits.", "Three.")
    assert "330 ms" in second.figure
    assert third.figure is None, "what asks shows no answer"
    cells[1]["source"] = ["## A\n\nOne. <!-- slide: T -->Two stands still. Three."]
    assert make_slides.slides_of(cells)[1].sentence == "Two stands still."


def test_a_picture_of_the_prose_is_on_a_slide_if_its_letters_are_large_enough():
    mark, large, small = "<!-- slide: T -->", "idea-mesh", "idea-cut-graph"
    for picture, shown in ((large, True), (small, False)):
        prose = f"{mark}One. Two.\n\n![x](../images/{picture}.svg)"
        assert bool(make_slides.slide_of(prose, "99").figure) == shown
    asking = f"{mark}How long?\n\n![x](../images/{large}.svg)"
    assert make_slides.slide_of(asking, "99").figure is None


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
        for slide in shown(page)
        if re.search(
            r"<(p[^>]*|h2)>[^<]*(\b[Gg]uess\b|\b[Ww]rite down\b|\bPredict the\b|\?</p>)", slide
        )
    ]
    assert len(asking) > 10
    for slide in asking:
        assert "<figure>" not in slide and 'class="output"' not in slide, slide


# Of each slide: how far it reaches, the smallest text in pixels of 1280 x 720, and what is broken.
MEASURE = """slides.map(slide => {
    slide.style.display = 'block';
    slide.style.zoom = 1;
    const page = slide.getBoundingClientRect();
    let bottom = 0, right = 0, least = 99;
    for (const e of slide.querySelectorAll('*')) {
        const box = e.getBoundingClientRect();
        if (e.closest('aside') || !box.width) continue;
        right = Math.max(right, box.right - page.left);
        if (!e.closest('.number')) bottom = Math.max(bottom, box.bottom - page.top);
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
        let size = parseFloat(getComputedStyle(e).fontSize);
        if (e.ownerSVGElement) {
            const m = e.getScreenCTM();
            size *= Math.hypot(m.a, m.b);
        }
        least = Math.min(least, size);
    }
    const cut = [...slide.querySelectorAll('pre')].some(pre => pre.scrollWidth > pre.clientWidth);
    const words = [...slide.querySelectorAll('svg text')].map(e => e.getBoundingClientRect());
    const lie = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 3
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 12;  // pixels
    const broken = cut || words.some((a, i) => words.slice(i + 1).some(b => lie(a, b)));
    slide.style.display = '';
    return [bottom, right, least, broken];
})"""


def test_every_slide_fits_its_page_and_no_text_is_below_18_points(slides, chromium):
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        for name in slides:
            page.goto((SLIDES / f"{name}.html").as_uri())
            for number, (bottom, right, least, broken) in enumerate(page.evaluate(MEASURE), 1):
                assert bottom <= 700 and right <= 1281 and not broken, f"{name}, slide {number}"
                assert least >= 24, f"{name}, slide {number}: text of {least:.1f} pixels"
        browser.close()


HEIGHTS = """() => slides.map((slide, number) => {
    show(number);
    const parts = [...slide.querySelectorAll('h1, h2, p, pre, figure, table, math, .minutes')];
    const boxes = parts.map(part => part.getBoundingClientRect()).filter(box => box.height);
    return Math.max(...boxes.map(box => box.bottom)) - Math.min(...boxes.map(box => box.top));
})"""


def test_at_most_a_tenth_of_the_slides_use_less_than_half_of_the_height(slides, chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        heights = []
        for name in slides:
            page.goto((SLIDES / f"{name}.html").as_uri())
            heights += page.evaluate(HEIGHTS)
        browser.close()
    assert len(heights) >= 10 * len(slides)
    assert sum(height < 360 for height in heights) <= len(heights) / 10


def test_the_list_of_slides_leads_to_every_deck(slides):
    listed = re.findall(r'<a href="([^"]*)">', (SLIDES / "index.html").read_text())
    assert listed == [f"{name}.html" for name in sorted(slides)]


def test_a_sentence_that_points_back_comes_with_the_sentence_before_it():
    cells = [
        {"cell_type": "markdown", "source": ["# Lesson 99: X\n\n**After this lesson** you can y."]},
        {"cell_type": "markdown", "source": ["A rank waits. <!-- slide: T -->Its input is late."]},
    ]
    assert make_slides.slides_of(cells)[1].sentence == "A rank waits. Its input is late."


def test_a_slide_says_no_sentence_twice_neither_its_title_nor_what_the_next_slide_begins_with(
    slides,
):
    cells = [
        {"cell_type": "markdown", "source": ["# Lesson 99: X\n\n**After this lesson** you can y."]},
        {
            "cell_type": "markdown",
            "source": ["<!-- slide: Rank 2 waits -->Rank 2 waits. It idles."],
        },
        {
            "cell_type": "markdown",
            "source": ["<!-- slide: Two rules -->There are two rules. One is q. R."],
        },
        {"cell_type": "markdown", "source": ["<!-- slide: S -->A b. C d.<!-- slide: T -->It e."]},
    ]
    made = make_slides.slides_of(cells)
    words = [re.search(r"<p[^>]*>(.*?)</p>", text)[1] for text in make_slides.texts_of(made, {})]
    assert words[1] == "Rank 2 waits. It idles.", "what is left would point back to nothing"
    assert words[2:] == ["One is q. R.", "A b.", "C d. It e."]
    for name, page in slides.items():
        telling = [slide for slide in shown(page)[1:] if 'class="minutes"' not in slide]
        said = [re.search(r"<p[^>]*>(.*?)</p>", slide, re.S)[1] for slide in telling]
        for one, following in zip(said, said[1:]):
            last = re.split(r"(?<=[.?!])\s+", one)[-1]
            assert not following.startswith(last), f"{name}: {last}"


def test_what_a_rank_holds_stays_below_its_timeline_on_a_slide(slides):
    (slide,) = [s for s in shown(slides["02_gpipe"]) if ">The price: memory</h2>" in s]
    _, _, _, tall = map(float, re.search(r'viewBox="([^"]*)"', slide)[1].split())
    top = float(re.search(r'<g transform="translate\(0 ([\d.]+)\)"><text [^>]*>micro-b', slide)[1])
    axis = max(float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>0 ms<', slide))
    assert axis < top < tall - 80, "below the axis, and all of it"


def test_keys_turn_slides_show_what_to_say_and_count_the_minutes(slides, chromium):
    from playwright.sync_api import expect, sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto((SLIDES / "02_gpipe.html").as_uri())
        assert not page.locator("#notes").is_visible()
        page.keyboard.press("n")
        do = re.search(r"^## 02 .*?\| Title \| (.*?)[.;?]", PLANS, re.M | re.S)[1]
        assert do in page.locator("#notes").inner_text()
        page.keyboard.press("ArrowRight")
        assert page.locator("section.on h2").inner_text() == "Three ranks wait"
        with page.context.expect_page() as opened:
            page.keyboard.press("s")
        assert "Next:" in opened.value.locator("body").inner_text()
        exercise = page.evaluate("slides.findIndex(slide => slide.querySelector('.minutes'))")
        page.evaluate(f"show({exercise})")
        minutes = page.locator("section.on .minutes b")
        before = minutes.inner_text()
        page.keyboard.press("c")
        expect(minutes).not_to_have_text(before)
        browser.close()


def test_on_a_phone_a_tap_turns_the_slides_which_are_as_wide_as_the_screen(slides, chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
        page = browser.new_context(**phone).new_page()
        page.goto((SLIDES / "02_gpipe.html").as_uri())
        seen = [page.evaluate("at")]
        for x in (330, 330, 40):
            page.touchscreen.tap(x, 500)
            seen.append(page.evaluate("at"))
        assert seen == [0, 1, 2, 1]
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        browser.close()


def test_the_loop_over_participants_names_those_whose_preflight_has_not_passed(tmp_path):
    (loop,) = re.findall(r"^```\n(for name in .*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "participants.txt").write_text("ada\ngrace\nemmy\nalan\nkurt\n")
    (tmp_path / "ada.out").write_text("all checks passed\nstatus 0\n")
    (tmp_path / "grace.out").write_text("one check failed\nstatus 1\n")
    os.mkfifo(tmp_path / "alan.out")  # all may make what they like in that folder
    (tmp_path / "kurt.out").symlink_to("ada.out")
    words = ["timeout", "5", "bash", "-c", loop.replace("/shared/signed-in", str(tmp_path))]
    printed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert (printed.stdout, printed.stderr) == ("grace\nemmy\nalan\nkurt\n", "")
