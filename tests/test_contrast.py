"""Words and marks of the drawings can be read: their contrast, computed from the colours (WCAG 2.1)."""

import re
from xml.etree import ElementTree

import pytest
import site_page
from schedule_map import WHOLE

from course.views.stepping import STYLE
from lab.curves import CHOSEN, COMPARED
from lab.drawing import FILL, NUMBER, OUTLINE, TEXT, WHITE_NUMBER, shade_of
from lab.figures import draw_timelines
from lab.held_curve import HELD
from lab.simulator import Costs, simulate
from pipeline.schedules import gpipe

SVG = "{http://www.w3.org/2000/svg}"
WHITE, BLACK = "#ffffff", "#000000"
JUPYTERLAB_DARK = "#111111"
PICTURE = draw_timelines({"predicted": simulate(gpipe(2, 3), Costs(10, 20))})


def luminance(colour):
    """Relative luminance of #RRGGBB, WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    """The contrast ratio of two colours, WCAG 2.1."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def blended(colour, opacity, ground):
    """The colour #RRGGBB that is seen where a colour lies on a ground."""
    both = [[int(each[i : i + 2], 16) for i in (1, 3, 5)] for each in (colour, ground)]
    return "#" + "".join(f"{round(c * opacity + g * (1 - opacity)):02X}" for c, g in zip(*both))


@pytest.mark.parametrize("kind", "FBIW")
def test_each_stage_of_a_rank_has_a_shade_on_which_its_number_stands_out_more(kind):
    shades = [shade_of(kind, chunk) for chunk in range(4)]
    assert len(set(shades)) == 4
    contrasts = [contrast(shade, NUMBER[kind]) for shade in shades]
    assert contrasts == sorted(contrasts)


def test_words_have_a_contrast_of_4_5_on_white_on_black_and_on_the_pages_of_the_website():
    assert contrast(TEXT, WHITE) >= 4.5 and contrast(TEXT, BLACK) >= 4.5
    # A drawing in a notebook does not learn the theme. No grey reaches 4.5 on white and here.
    assert contrast(TEXT, JUPYTERLAB_DARK) >= 4.1
    themes = re.findall(r"--text: (#\w{6}); --page: (#\w{6});", site_page.STYLE)
    assert len(themes) == 2
    for text, page in themes:
        assert contrast(text, page) >= 4.5
    assert f'svg text:is([fill="{TEXT}"]' in site_page.STYLE
    assert f'svg text[fill="{TEXT}"] {{ fill: currentColor; }}' in STYLE


def test_a_drawing_that_a_page_shows_as_a_picture_takes_the_colours_of_the_pages_words():
    svg = site_page.with_words_of_the_page(PICTURE.svg)
    ElementTree.fromstring(svg)
    themes = re.findall(r"--text: (#\w{6}); --page: (#\w{6});", site_page.STYLE)
    rule = re.escape(f'text:is([fill="{TEXT}"], [style*="{TEXT}"])') + r" {{ fill: {}"
    light, dark = (re.search(rule.format(text), svg).start() for text, _ in themes)
    assert light < svg.index("prefers-color-scheme: dark") < dark
    assert svg.count(f'fill="{TEXT}"') > 4, "the words have that grey"


def test_numbers_have_a_contrast_of_4_5_with_what_is_around_them():
    around = float(re.search(r"stroke: #000; stroke-opacity: ([\d.]+)", WHITE_NUMBER)[1])
    for kind in FILL:
        for chunk in range(4):
            ground = shade_of(kind, chunk)
            if NUMBER[kind] == WHITE:
                ground = blended(BLACK, around, ground)
            assert contrast(NUMBER[kind], ground) >= 4.5, (kind, chunk)
    assert f'text[fill="{WHITE}"] {{ {WHITE_NUMBER} }}' in PICTURE.svg


@pytest.mark.parametrize("page", [WHITE, BLACK, JUPYTERLAB_DARK])
def test_marks_have_a_contrast_of_3_with_the_page_and_waiting_is_framed(page):
    for kind in FILL:
        for chunk in range(2):
            block = shade_of(kind, chunk)
            assert max(contrast(block, page), contrast(OUTLINE, page)) >= 3, (kind, chunk)
    for mark in (TEXT, CHOSEN, COMPARED, HELD, WHOLE):
        assert contrast(mark, page) >= 3, mark
    root = ElementTree.fromstring(PICTURE.svg)
    (rows,) = [path for path in root.iter(f"{SVG}path") if path.get("fill-opacity")]
    assert rows.get("stroke") == TEXT
    assert root.find(f"{SVG}g[@class='blocks']").get("stroke") == OUTLINE
