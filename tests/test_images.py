"""The figures of the pages: each is drawn by tools/make_images.py, as the course draws today."""

import re

import idea_pictures
import make_images
import nbformat
import order_pictures
import pytest
import stored_pictures
from further import first_of
from idea_pictures import COSTS
from PIL import Image
from preview_picture import LEFT, SIZE, preview
from preview_picture import WIDTH as WIDE
from schedule_pictures import COMPARISONS

from course.launch import ROOT
from lab.figures import draw_timelines
from lab.simulator import Costs, simulate
from pipeline.schedules import SCHEDULES, gpipe, one_f_one_b, pipedream, zb_h1

IDEAS = idea_pictures.IDEAS | order_pictures.ORDERS
FIGURES = sorted((ROOT / "images").glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("notebooks/*.ipynb")]
NOTEBOOKS = sorted(ROOT.glob("notebooks/**/*.ipynb"))
TITLE = r"<title>(.*?)</title>"


def test_every_figure_is_made_by_a_command_and_every_other_one_is_gone():
    assert {path.stem for path in FIGURES} == {*SCHEDULES, *IDEAS, *COMPARISONS}, "run make images"


@pytest.mark.parametrize("name", IDEAS)
def test_a_picture_of_an_idea_is_what_the_command_draws_and_stands_in_a_lesson(name):
    picture = IDEAS[name]()
    assert (ROOT / "images" / f"{name}.svg").read_text() == picture.svg, "run make images"
    lessons = [path.read_text() for path in ROOT.glob("notebooks/*.ipynb")]
    assert sum(f"![{picture.alt}](../images/{name}.svg)" in text for text in lessons) == 1


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_picture_that_compares_schedules_is_what_the_command_draws_with_its_own_words(name):
    picture = COMPARISONS[name]()
    assert (ROOT / "images" / f"{name}.svg").read_text() == picture.svg, "run make images"
    page = (ROOT / "images" / "README.md").read_text() + (ROOT / "README.md").read_text()
    assert f"images/{name}.svg)" in page or f"]({name}.svg)" in page


def test_the_preview_of_a_link_has_the_size_that_previews_expect_and_is_what_is_drawn_today():
    with Image.open(ROOT / "images" / "preview.png") as stored:
        assert stored.size == SIZE == (1200, 630)
        blocks = (LEFT, 134, LEFT + WIDE, SIZE[1])  # without letters, which depend on a library
        assert stored.crop(blocks).tobytes() == preview().crop(blocks).tobytes()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_beside_every_stored_drawing_is_a_png_of_the_same_drawing_and_size(path):
    notebook = nbformat.read(path, as_version=4)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        svg = output.get("data", {}).get("image/svg+xml")
        if svg:
            assert output.data.get("text/plain"), "and its words"
            assert stored_pictures.drawn_from(output.data) == stored_pictures.digest_of(svg), (
                "run tools/stored_pictures.py"
            )
            width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
            wide, tall = stored_pictures.image_of(output.data).size
            assert wide / tall == pytest.approx(float(width) / float(height), rel=0.02)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (5, 4)])
def test_every_rank_of_gpipe_waits_for_p_minus_1_forwards_and_p_minus_1_backwards(p, m):
    timeline = simulate(gpipe(p, m), COSTS)
    for rank in range(p):
        kinds = [event.action.kind for event, *_ in idea_pictures.waited_for(timeline, rank)]
        assert sorted(kinds) == ["B"] * (p - 1) + ["F"] * (p - 1)


def test_a_micro_batch_of_1f1b_is_under_way_for_p_minus_r_times_a_forward_and_a_backward():
    trips = idea_pictures.trips(simulate(one_f_one_b(4, 8), COSTS), 4)
    assert [end - start for start, end in trips] == [120, 90, 60, 30]


def test_rank_r_of_pipedream_has_at_most_p_minus_r_storages_and_the_last_clones_nothing():
    timeline = simulate(pipedream(4, 8), COSTS)
    for rank in range(4):
        storages = idea_pictures.storages_of(timeline, rank)
        spans = [(storage.versions[0][1], storage.end) for storage in storages]
        assert max(sum(a <= t < b for a, b in spans) for t, _ in spans) == 4 - rank
        versions = [version for storage in storages for version, _ in storage.versions]
        assert versions == list(range(9))
    assert len(storages) == 1


def test_a_warm_up_has_the_passages_that_lesson_05_says():
    p, v = order_pictures.RANKS, order_pictures.CHUNKS
    assert order_pictures.warm_ups() == [(v - 1) * p + 2 * (p - 1 - rank) for rank in range(p)]


def test_the_last_rank_of_zb_h1_defers_p_minus_1_weight_gradients_and_ends_with_them():
    order = zb_h1(order_pictures.RANKS, order_pictures.MICROBATCHES).orders[-1]
    found = order_pictures.deferred_after(order)
    assert [len(deferred) for action, deferred in found if action.kind == "W"] == [3] * 5 + [
        2,
        1,
        0,
    ]
    assert [action.microbatch for action, _ in found if action.kind == "W"] == list(range(8))


def test_the_matrices_of_the_picture_are_those_that_lesson_10b_multiplies():
    text = (ROOT / "notebooks" / "10b_three_dimensions.ipynb").read_text()
    assert f"x = torch.tensor({order_pictures.X})" in text
    assert f"matrix = torch.tensor({order_pictures.W})" in text


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_a_page_shows_the_figure(path):
    assert any(f"{path.name})" in page.read_text() for page in PAGES)


def redrawn(name, monkeypatch):
    """The Picture that make_images would save if the ranks had kept exactly to the prediction."""
    saved = []
    monkeypatch.setattr(
        make_images,
        "perform",
        lambda name, schedule, script, costs: simulate(schedule, costs),
    )
    monkeypatch.setattr(make_images.Path, "write_text", lambda path, text, **_: saved.append(text))
    make_images.draw(name, make_images.schedule_of(name), "", Costs(10, 20, 10))
    return saved[0]


def parts_of(svg):
    """What a reader meets: the kinds of elements with their colours, the legend, the actions."""
    predicted, performed = re.search(r'aria-label="(.*?); (performed: .*?)"', svg).groups()
    actions = [re.sub(r",? [\d.]+ to [\d.]+ ms.*", "", title) for title in re.findall(TITLE, svg)]
    return {
        "predicted": predicted,
        "actions": sorted(actions[1:]),
        "colours": sorted(re.findall(r'<rect [^>]*fill="([^"]*)"', svg)),
        "legend": re.findall(r'font-size="13"[^>]*>(?!rank|\d|predicted|performed)([^<]*)<', svg),
    }


@pytest.mark.parametrize("name", first_of(SCHEDULES, 3))
def test_the_figure_is_what_the_command_draws_today_but_for_the_milliseconds_of_the_run(
    name, monkeypatch
):
    stored = (ROOT / "images" / f"{name}.svg").read_text()
    new = redrawn(name, monkeypatch)
    assert parts_of(stored) == parts_of(new)
    # The upper half is a prediction: there the milliseconds are the same, too.
    upper = re.findall(TITLE, draw_timelines({"predicted": simulated(name)}).svg)[1:]
    assert re.findall(TITLE, stored)[1 : 1 + len(upper)] == upper


def simulated(name):
    return simulate(make_images.schedule_of(name), Costs(10, 20, 10))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_words_for_a_figure_have_the_numbers_that_are_predicted(name):
    text = (ROOT / "images" / "README.md").read_text()
    found = re.search(rf"!\[([^\]]*)\]\({name}\.svg\)", text)
    assert found, f"images/README.md has no section for {name}"
    alt, timeline = found[1], simulated(name)
    assert f"{timeline.makespan:.0f} ms" in alt
    if "%" in alt:
        assert f"{timeline.bubble_over_total:.1%}".replace("%", " %") in alt
