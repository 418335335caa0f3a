"""Make slides of the notebooks: build/slides/NN_name.html, one file a lesson, no network needed.

make slides                                 # all lessons
python tools/make_slides.py 02 03           # some

A slide is a piece of a notebook: the prose before a code cell, the code if it is short, and what
the cell has stored as its output. Exercises come without their answers. Arrow keys, Page keys,
space and a click turn the page; printed, every slide is a page.
"""

import html
import json
import re
import sys
from pathlib import Path

from formulas import with_formulas

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SLIDES = ROOT / "build" / "slides"
MOST_CODE = 16  # lines; longer code is in the notebook
MOST_OUTPUT = 18
MOST_SOURCE = 19
# Pixels of a slide of 1280 x 720, as the style below has them; a little more is made to fit.
ROOM = 665
H1, H2 = 230, 65
TEXT_LINE, TEXT_WIDTH = 38, 80
CODE_LINE, CODE_WIDTH = 27, 93
LEFT_OUT = ("Sources", "Where to go from here")


def main():
    wanted = sys.argv[1:]
    lessons = sorted(NOTEBOOKS.glob("*.ipynb"))
    chosen = [path for path in lessons if not wanted or path.stem.split("_")[0] in wanted]
    if not chosen:
        sys.exit(
            f"no lesson {' '.join(wanted)}; there are {' '.join(p.stem.split('_')[0] for p in lessons)}"
        )
    SLIDES.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        slides = slides_of(json.loads(path.read_text())["cells"])
        file = SLIDES / f"{path.stem}.html"
        file.write_text(page_of(path.stem, slides))
        print(f"build/slides/{file.name}: {len(slides)} slides")
    return 0


def slides_of(cells):
    """The slides of a notebook, each a text of HTML; its heading stands on each slide again."""
    slides, heading, prose, subject, shown = [], "", [], "", []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for paragraph in paragraphs_of(source):
                if paragraph.startswith("#"):
                    add_slides(slides, heading, prose)
                    prose, subject = [], paragraph.lstrip("# ")
                    heading = html_of(paragraph)
                elif subject not in LEFT_OUT and not is_navigation(paragraph):
                    starts_exercise = re.match(r"\*\*\d+\. ", paragraph)
                    if starts_exercise or paragraph.startswith("**Next.**"):
                        add_slides(slides, heading, prose)
                        prose = []
                    prose.append(paragraph)
        elif subject not in LEFT_OUT and subject != "Exercises":
            before, shown = shown, printed_by(cell)
            blocks = blocks_of(source, cell)
            if blocks and (prose or not shown or not set(shown) <= set(before)):
                # What asks for a prediction stands alone: the answer is on the next slide.
                last = [prose.pop()] if prose and not asks(prose[-1]) else []
                add_slides(slides, heading, prose)
                add_slides(slides, heading, last, blocks)
                prose = []
    add_slides(slides, heading, prose)
    return slides


def paragraphs_of(markdown):
    """The paragraphs of a cell; a fenced block stays whole."""
    return [
        part.strip()
        for part in re.split(r"\n\n(?=(?:[^`]|`(?!``)|```[\s\S]*?```)*$)", markdown)
        if part.strip()
    ]


def is_navigation(paragraph):
    return paragraph.startswith(("Solutions are in", "[Previous", "[All lessons", "The first cell"))


def asks(paragraph):
    return re.search(r"\?|[Ww]rite .*down|[Bb]efore you|[Gg]uess|[Ss]ay it", paragraph)


def add_slides(slides, heading, paragraphs, blocks=()):
    """Add what belongs together on as few slides as show it without making it small."""
    page, height = [], 0
    room = ROOM - (H1 - H2 if heading.startswith("<h1") or "\n<h1" in heading else 0)
    for more, part in [*((height_of(p), html_of(p)) for p in paragraphs), *blocks]:
        if page and height + more > room:
            slides.append(heading + "".join(page))
            page, height = [], 0
        page.append(part)
        height += more
    if page:
        slides.append(heading + "".join(page))


def height_of(paragraph):
    """About how many of a slide's pixels a paragraph of Markdown takes."""
    lines = paragraph.splitlines()
    if paragraph.startswith("```"):
        return CODE_LINE * len(lines) + 34
    if paragraph.startswith("|"):
        return 46 * len(lines)
    return sum(TEXT_LINE * -(-len(line) // TEXT_WIDTH) for line in lines or [""]) + 16


def html_of(markdown):
    from nbconvert.filters import markdown2html

    # A slide is no page of the repository: its links lead nowhere, and their text stays.
    return re.sub(
        r'<a [^>]*class="anchor-link"[^>]*>.*?</a>|</?a\b[^>]*>',
        "",
        markdown2html(with_formulas(markdown)),
    )


def blocks_of(source, cell):
    """What a code cell puts on slides: pairs of a height in pixels and a piece of HTML.

    That is its code if it is the point, then what it has stored; long source in several parts.
    """
    blocks = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            svg = "".join(data["image/svg+xml"])
            blocks.append((height_of_figure(svg), f"<figure>{svg}</figure>"))
        elif "text/markdown" in data:
            where, *code = "".join(data["text/markdown"]).replace("```python\n", "").splitlines()
            for part in parts_of([line for line in code if line != "```"]):
                text = "\n".join([where, "```python", *part, "```"])
                blocks.append((54 + CODE_LINE * len(part) + 34, html_of(text)))
    code = re.sub(r"^# NBVAL_CHECK_OUTPUT\n", "", source).strip()
    length, lines = len(code.splitlines()), printed_by(cell)
    if not blocks and length <= MOST_CODE and "sys.path" not in code and lines:
        text = f'<pre class="code">{html.escape(code)}</pre>'
        blocks.append((CODE_LINE * length + 34, text))
    if lines:
        rows = sum(-(-len(line) // CODE_WIDTH) for line in lines)
        text = f'<pre class="output">{html.escape(chr(10).join(lines))}</pre>'
        blocks.append((CODE_LINE * rows + 34, text))
    return blocks


def printed_by(cell):
    """The lines that a code cell has printed, with ... in place of too many."""
    stdout = (o["text"] for o in cell.get("outputs", []) if o.get("name") == "stdout")
    lines = "".join("".join(text) for text in stdout).rstrip().splitlines()
    return [*lines[: MOST_OUTPUT - 1], "..."] if len(lines) > MOST_OUTPUT else lines


def parts_of(code):
    """The lines of `code` in parts about equally long, cut at empty lines where there are some."""
    count = -(-len(code) // MOST_SOURCE)
    parts, start = [], 0
    for left in range(count, 1, -1):
        middle = start + -(-(len(code) - start) // left)
        near = range(max(start + 1, middle - 4), min(middle + 4, start + MOST_SOURCE) + 1)
        ends = [i for i in near if i < len(code) and not code[i].strip()]
        end = min(ends, key=lambda i: abs(i - middle)) if ends else middle
        parts.append(code[start:end])
        start = end + 1 if ends else end
    return [*parts, code[start:]]


def height_of_figure(svg):
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    return min(480, 1120 * height / width)


def page_of(title, slides):
    """A whole page of HTML that needs no other file."""
    sections = "\n".join(f"<section><div>{slide}</div></section>" for slide in slides)
    return PAGE.replace("TITLE", html.escape(title)).replace("SECTIONS", sections)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<style>
body { margin: 0; background: #fff; color: #1a1a1a; font: 26px/1.45 Helvetica, Arial, sans-serif; }
section { display: none; box-sizing: border-box; width: 1280px; height: 720px; padding: 36px 64px 44px;
  overflow: hidden; position: relative; margin: 0 auto; transform-origin: top center; }
section.on { display: block; }
h1 { font-size: 56px; line-height: 1.15; margin: 120px 0 40px; color: #0b5c8a; }
h2 { font-size: 34px; margin: 0 0 18px; color: #0b5c8a; border-bottom: 3px solid #56B4E9; }
p, ul, ol { margin: 0 0 16px; }
pre { font: 20px/1.35 Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 0 0 14px; padding: 10px 16px;
  white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 6px; }
pre.code, .highlight pre { background: #f2f4f6; white-space: pre; }
pre.output { border-left: 5px solid #009E73; background: #fafafa; }
code { font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .92em; }
table { border-collapse: collapse; } td, th { padding: 4px 14px; border-bottom: 1px solid #ccc; }
figure { margin: 0; text-align: center; }
figure svg { width: 1120px !important; height: auto !important; max-width: 100%; max-height: 480px; }
.number { position: absolute; right: 24px; bottom: 12px; font-size: 16px; color: #777; }
@media print { @page { size: 1280px 720px; margin: 0; } section { display: block; page-break-after: always; } }
</style></head><body>
SECTIONS
<script>
const slides = [...document.querySelectorAll("section")];
slides.forEach((slide, i) => {
  const number = document.createElement("div");
  number.className = "number";
  number.textContent = document.title + "  " + (i + 1) + " / " + slides.length;
  slide.append(number);
  // What does not fit is made smaller, until it does.
  slide.style.display = "block";
  const content = slide.firstElementChild;
  // A line of code a little too long is made smaller, and one much too long is broken.
  for (const pre of slide.querySelectorAll("pre.code, .highlight pre")) {
    for (let size = 20; size > 18 && pre.scrollWidth > pre.clientWidth; size -= 0.5) pre.style.fontSize = size - 0.5 + "px";
    if (pre.scrollWidth > pre.clientWidth) pre.style.whiteSpace = "pre-wrap";
  }
  for (let size = 100; size > 45 && content.getBoundingClientRect().height > 630; size -= 3) content.style.zoom = size + "%";
  slide.style.display = "";
});
let at = Math.max(0, Math.min(slides.length - 1, (parseInt(location.hash.slice(1)) || 1) - 1));
function show(i) {
  slides[at].classList.remove("on");
  at = Math.max(0, Math.min(slides.length - 1, i));
  slides[at].classList.add("on");
  slides[at].style.zoom = Math.min(innerWidth / 1280, innerHeight / 720);
  history.replaceState(null, "", "#" + (at + 1));
}
addEventListener("keydown", e => {
  if (["ArrowRight", "ArrowDown", "PageDown", " "].includes(e.key)) show(at + 1);
  if (["ArrowLeft", "ArrowUp", "PageUp"].includes(e.key)) show(at - 1);
  if (e.key === "Home") show(0);
  if (e.key === "End") show(slides.length - 1);
});
addEventListener("click", () => show(at + 1));
addEventListener("resize", () => show(at));
show(at);
</script></body></html>
"""


if __name__ == "__main__":
    sys.exit(main())
