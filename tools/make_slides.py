"""Make slides of the notebooks: build/slides/NN_name.html, one file per lesson, no network needed.

    make slides                                 # all lessons
    python tools/make_slides.py 02 03           # some

A mark in a lesson's prose, <!-- slide: TITLE -->, makes a slide of the sentence after it, and
stands on the line above where the sentence begins its line. The figure of the slide is a table or a
picture of its own text, otherwise the next figure of the lesson, or the one above: a picture, a
stored drawing, or lines of output or code. Pictures with small letters are not for slides. The text
between the sentence and the next mark becomes the speaker's note. A sentence that asks for a
prediction has no figure. <!-- slide: TITLE; above --> takes the last figure above, "; drawing" the
last drawing above, and "; words" none. Exercises and the question at the end need no mark.
docs/lesson-plans.md gives the minutes, what to do, and what to ask at an exercise.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from formulas import FormulaError, with_formulas
from make_hosted import notebook_in

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from slide_figures import figure_of, picture  # noqa: E402
from slide_layout import (  # noqa: E402
    height_of_figure,
    said_on_the_slide,
    size_of,
    with_subject,
    without_title,
)
from slide_page import index_of, page_of  # noqa: E402

from files.inputs import InputError, read_text  # noqa: E402
from files.outputs import not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
SLIDES = ROOT / "build" / "slides"
PLANS = ROOT / "docs" / "lesson-plans.md"
MARK = r"<!-- slide: (.*?)(?:; (above|drawing|words))? -->"
PARTS = r"(?=<!-- slide: )|(?=^#)|(?=^\*\*\d+\. )|(?=^\*\*Next\.\*\*)"
NOT_SAID = r"```.*?```|^\|.*$|<!--(?:(?!<!--).)*?-->|\$\$.*?\$\$|!\[[^][]*\]\([^()]*\)"  # of a note
MOST_WORDS = 90  # of a note


@dataclass
class Slide:
    """One slide. `note` is Markdown; `minutes` are those of an exercise."""

    title: str
    sentence: str
    figure: str | None = None
    note: str = ""
    minutes: str | None = None
    is_first: bool = False

    @property
    def name(self):
        """The name of the slide in a plan; exercises are without their numbers."""
        return re.sub(r"^Exercise \d+:", "Exercise:", self.title)


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("lessons", nargs="*", help="such as 02 12b; all unless given")
    wanted = parser.parse_args().lessons
    lessons = sorted(NOTEBOOKS.glob("*.ipynb"))
    there = [path.stem.split("_")[0] for path in lessons]
    if not there or set(wanted) - set(there):
        shown = " ".join(there) or "none, get them back with: git checkout notebooks"
        sys.exit(f"no lesson {' '.join(sorted(set(wanted) - set(there)))}; there are {shown}")
    chosen = [path for path, number in zip(lessons, there) if not wanted or number in wanted]
    with naming_files():
        write_slides(chosen, lessons)
    return int(bool(not_written))


def write_slides(chosen, lessons):
    """Write the slides of the lessons `chosen`, and an index of those that have slides."""
    SLIDES.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        number = path.stem.split("_")[0]
        try:
            slides = slides_of(cells_of(path), number)
            page = page_of(path.stem, texts_of(slides, plan_of(number)))
        except FormulaError as error:
            raise InputError(f"{path}: {error}") from None
        file = SLIDES / f"{path.stem}.html"
        write_whole(file, page)
        print(f"build/slides/{file.name}: {len(slides)} slides")
    made = [path for path in lessons if (SLIDES / f"{path.stem}.html").is_file()]
    index = index_of({path.stem: title_of(path) for path in made})
    write_whole(SLIDES / "index.html", index)


def cells_of(path):
    return notebook_in(read_text(path), path)["cells"]


def title_of(path):
    return "".join(cells_of(path)[0]["source"]).partition("\n")[0].strip("# ")


def slides_of(cells, number=""):
    """The slides of a notebook, in order."""
    prose = "".join(cells[0]["source"])
    after = re.search(r"\*\*After this lesson\*\* .*", prose)
    slides = [Slide(prose.partition("\n")[0].strip("# "), after[0] if after else "", is_first=True)]
    waiting, shown = None, []  # the slide that still has no figure, and the figures of its section
    for cell in cells:
        if cell["cell_type"] == "code":
            if figure := figure_of(cell):
                shown.append(figure)
                if waiting:
                    waiting.figure, waiting = figure, None
            continue
        before = ""
        for part in re.split(PARTS, "".join(cell["source"]), flags=re.M):
            made = slide_of(part, number) if part.strip() else None
            if waiting and (made or part.startswith("#")):
                waiting.figure, waiting = last_of(shown, "drawing") or last_of(shown), None
            if part.startswith("#"):
                shown = []
            if made and re.match(MARK, part):
                made.sentence = with_subject(made.sentence, before, asks(made))
            before += part
            if shown_here := picture_in(part):
                shown.append(shown_here)
                if waiting and not made:
                    waiting.figure, waiting = shown_here, None
            if made:
                slides.append(made)
                option = re.match(MARK, part)[2] if re.match(MARK, part) else "words"
                if option in ("above", "drawing"):
                    made.figure = last_of(shown, option)
                elif option is None and not made.figure and not asks(made):
                    waiting = made
    return slides


def last_of(figures, kind=""):
    kinds = [figure for figure in figures if kind != "drawing" or "<figure>" in figure]
    return kinds[-1] if kinds else None


def slide_of(part, number):
    """The slide of a part of the prose, or None."""
    if mark := re.match(MARK, part):
        sentence, note = first_sentence(part[mark.end() :])
        slide = Slide(mark[1], capital(sentence), None, shortened(note))
        if mark[2] != "words":
            slide.figure = table_in(part) or (None if asks(slide) else picture_in(part))
        return slide
    if exercise := re.match(
        r"\*\*(\d+)\. (.*?)\.?\*\*\s*\((?:(\d+)(?: more)? minutes|[^)]*)\)\.?\s*", part
    ):
        title = f"Exercise {exercise[1]}: {exercise[2]}"
        task = enough_of(part[exercise.end() :].partition("\n\n")[0])
        return Slide(title, task, None, question_for(number, exercise[2]), exercise[3])
    if part.startswith("**Next.**"):
        sentences = sentences_of(without_links(part.removeprefix("**Next.**").partition("\n\n")[0]))
        asked = max([i for i, one in enumerate(sentences) if one.endswith("?")], default=0)
        question = " ".join(sentences[max(0, asked - 1) : asked + 1])
        return Slide("Next", question if len(question.split()) < 42 else sentences[asked])
    return None


def first_sentence(markdown):
    """(first sentence of a part of the prose, the text after it)."""
    text = markdown.strip()
    paragraph, rest = (re.split(r"\n\n|\n(?=- )", text, maxsplit=1) + [""])[:2]
    paragraph = " ".join(paragraph.split())
    label = re.match(r"\*\*[^*]+[.:]\*\*\s+", paragraph)  # as in **Perform.**
    start = label.end() if label and len(label[0].split()) < 5 else 0
    end = re.search(r"(?<=[.?!])[)*]*\s+(?=[A-Z0-9*`(\"$])", paragraph[start:])
    if not end:
        return paragraph, rest
    return paragraph[: start + end.end()].rstrip(), paragraph[start + end.end() :] + "\n\n" + rest


def capital(sentence):
    """The sentence with a capital at its start, because a mark may be inside a sentence."""
    return re.sub(r"^(\*{0,2})([a-z])", lambda start: start[1] + start[2].upper(), sentence)


def sentences_of(text):
    return re.split(r"(?<=[.?!])\s+", " ".join(text.split()))


def enough_of(text, most=42):
    """The first sentences of `text`, with at most `most` words."""
    kept = []
    for sentence in sentences_of(text):
        if kept and len(" ".join([*kept, sentence]).split()) > most:
            break
        kept.append(sentence)
    return " ".join(kept)


def shortened(note):
    """The first sentences of a note, without code, tables, pictures and marks."""
    text = re.sub(NOT_SAID, "", note, flags=re.S | re.M)
    return enough_of(text, MOST_WORDS)


def table_in(part):
    """A table or a formula of the prose, as HTML."""
    found = re.search(r"(?:^\|.*\n?)+|\$\$.*?\$\$", part, flags=re.S | re.M)
    return html_of(found[0]) if found else None


def picture_in(part):
    """The first picture of the prose that can be read on a slide, as HTML, or None."""
    found = re.findall(r"!\[[^][]*\]\(\.\./(images/[\w.-]+\.svg)\)", part)
    drawn = (picture(read_text(ROOT / file)) for file in found)
    return next(filter(None, drawn), None)


def asks(slide):
    """Whether the slide asks for a prediction, which the figure would answer."""
    words = r"\?|[Ww]rite .*down|[Bb]efore you|[Gg]uess|[Pp]redict the|[Ss]ay (it|a number)"
    return re.search(words, slide.sentence) or "guess" in slide.title.lower()


def plan_text(number):
    """The section of a lesson on the page of plans."""
    plans = read_text(PLANS)
    found = re.search(rf"^## {number} .*?\n(.*?)(?=^## |\Z)", plans, re.M | re.S)
    return found[1] if found else ""


def question_for(number, exercise):
    """What to ask people who do not understand the check of an exercise, or ""."""
    name = re.escape(exercise)
    found = re.search(rf"^- \*\*{name}:\*\* (.*)$", plan_text(number), re.MULTILINE)
    return found[1] if found else ""


def plan_of(number):
    """{title of a slide: (its first minute, what to do)} of a lesson."""
    begins, plan = 0, {}
    rows = re.findall(r"^\| (\d{1,4}) \| (.*?) \| (.*?) \|$", plan_text(number), re.MULTILINE)
    for minutes, title, do in rows:
        plan[title] = begins, do
        begins += int(minutes)
    return plan


def texts_of(slides, plan):
    """Each slide as a <section> of HTML."""
    texts = []
    for slide, following in zip(slides, [*slides[1:], Slide("", "")]):
        begins, said = plan.get("Title" if slide.is_first else slide.name, (None, ""))
        heading = "h1" if slide.is_first else "h2"
        figure = height_of_figure(slide.figure) + (150 if slide.minutes else 0)
        figure += (184 if len(slide.title) > 32 else 110) if slide.is_first else 0
        may_go_on = not (slide.is_first or slide.minutes or asks(slide) or slide.title == "Next")
        words, note = slide.sentence, slide.note
        if may_go_on:
            words, note = without_title(words, slide.title, note)
        words, note = said_on_the_slide(words, note, figure, may_go_on, following.sentence)
        size = size_of(words, slide.title, figure)
        note = html_of("\n\n".join(filter(None, [said, note])))
        texts.append(
            "<section"
            + (f' data-begins="{begins}"' if begins is not None else "")
            + f"><{heading}>{inline(slide.title)}</{heading}>"
            + f'<p style="font-size:{size}px">{inline(words)}</p>'
            + with_own_names(slide.figure or "", len(texts))
            + (minutes_of(slide.minutes) if slide.minutes else "")
            + f"<aside>{note}</aside></section>"
        )
    return texts


def with_own_names(figure, number):
    """The drawing with unique names: a browser draws nothing by a name in a hidden slide."""
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>s{number}-", figure)


def minutes_of(minutes):
    return f'<div class="minutes"><b data-minutes="{minutes}">{minutes}:00</b>c starts the minutes</div>'


def inline(markdown):
    return re.sub(r"^<p>(.*)</p>$", r"\1", html_of(markdown).strip(), flags=re.S)


def html_of(markdown):
    from nbconvert.filters import markdown2html

    return markdown2html(with_formulas(without_links(markdown))).strip()


def without_links(markdown):
    """The text without its links: they lead nowhere, because a slide is not a repository page."""
    return re.sub(r"\[([^][]*)\]\([^()\s]*\)", r"\1", markdown)


if __name__ == "__main__":
    sys.exit(main())
