"""The figures of the pages: each is drawn by tools/make_images.py, as the course draws today."""

import re

import make_images
import pytest

from course.launch import ROOT
from lab.figures import draw_timelines
from lab.simulator import Costs, simulate
from pipeline.schedules import SCHEDULES

FIGURES = sorted((ROOT / "images").glob("*.svg"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("notebooks/*.ipynb")]
TITLE = r"<title>(.*?)</title>"


def test_every_figure_is_made_by_a_command_and_every_other_one_is_gone():
    assert {path.stem for path in FIGURES} == set(SCHEDULES)


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
    monkeypatch.setattr(make_images.Path, "write_text", lambda path, text: saved.append(text))
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


@pytest.mark.parametrize("name", SCHEDULES)
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


def test_the_same_run_is_drawn_into_the_same_file_byte_by_byte(monkeypatch):
    assert redrawn("zb-v", monkeypatch) == redrawn("zb-v", monkeypatch)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_words_for_a_figure_have_the_numbers_that_are_predicted(name):
    text = (ROOT / "images" / "README.md").read_text()
    alt = re.search(rf"!\[([^\]]*)\]\({name}\.svg\)", text)[1]
    timeline = simulated(name)
    assert f"{timeline.makespan:.0f} ms" in alt
    if "%" in alt:
        assert f"{timeline.bubble_over_total:.1%}".replace("%", " %") in alt
