"""Make slides of the notebooks: build/slides/NN_name.html, one file a lesson, no network needed.

make slides                                 # all lessons
python notebooks/make_slides.py 02 03       # some

A slide is a piece of a notebook: the prose before a code cell, the code if it is short, and what
the cell has stored as its output. Exercises come without their answers. Arrow keys, Page keys,
space and a click turn the page; printed, every slide is a page.
"""

import html
import json
import re
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent
SLIDES = NOTEBOOKS.parent / "build" / "slides"
MOST_CODE = 16  # lines; longer code is in the notebook
MOST_OUTPUT = 18
MOST_SOURCE = 27
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
    slides, heading, prose, subject = [], "", [], ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for paragraph in paragraphs_of(source):
                if paragraph.startswith("#"):
                    add_slide(slides, heading, prose, [])
                    prose, subject = [], paragraph.lstrip("# ")
                    heading = html_of(paragraph)
                elif subject not in LEFT_OUT and not is_navigation(paragraph):
                    starts_exercise = re.match(r"\*\*\d+\. ", paragraph)
                    if starts_exercise or paragraph.startswith("**Next.**"):
                        add_slide(slides, heading, prose, [])
                        prose = []
                    prose.append(paragraph)
        elif subject not in LEFT_OUT and subject != "Exercises":
            first, *further = pages_of(source, cell.get("outputs", []))
            if first:
                add_slide(slides, heading, prose, first)
                prose = []
            slides += [heading + "".join(page) for page in further]
    add_slide(slides, heading, prose, [])
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


def add_slide(slides, heading, prose, shown):
    """Add what belongs together; prose that would not fit beside an output gets its own slide."""
    if not prose and not shown:
        return
    prose = list(prose)
    if shown:
        last = [prose.pop()] if prose else []
        add_prose(slides, heading, prose)
        slides.append(heading + "".join(map(html_of, last)) + "".join(shown))
    else:
        add_prose(slides, heading, prose)


def add_prose(slides, heading, paragraphs, most=900):
    """Paragraphs on as few slides as hold them, by the number of characters."""
    page, size = [], 0
    for paragraph in paragraphs:
        if page and size + len(paragraph) > most:
            slides.append(heading + "".join(map(html_of, page)))
            page, size = [], 0
        page.append(paragraph)
        size += len(paragraph)
    if page:
        slides.append(heading + "".join(map(html_of, page)))


def html_of(markdown):
    from nbconvert.filters import markdown2html

    # A slide is no page of the repository: its links lead nowhere, and their text stays.
    return re.sub(
        r'<a [^>]*class="anchor-link"[^>]*>.*?</a>|</?a\b[^>]*>', "", markdown2html(markdown)
    )


def pages_of(source, outputs):
    """What a code cell puts on slides, a list of blocks for each of them.

    That is its code if it is the point, then what it has stored; long source goes over several.
    """
    pictures, text, further = [], "", []
    for output in outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            pictures.append("<figure>" + "".join(data["image/svg+xml"]) + "</figure>")
        elif "text/markdown" in data:
            where, *code = "".join(data["text/markdown"]).replace("```python\n", "").splitlines()
            code = [line for line in code if line != "```"]
            count = -(-len(code) // -(-len(code) // MOST_SOURCE))  # equally long parts
            parts = [code[i : i + count] for i in range(0, len(code), count)]
            parts = [html_of("\n".join([where, "```python", *part, "```"])) for part in parts]
            pictures.append(parts[0])
            further += [[part] for part in parts[1:]]
        elif output.get("name") == "stdout":
            text += "".join(output["text"])
    code = re.sub(r"^# NBVAL_CHECK_OUTPUT\n", "", source).strip()
    lines = text.rstrip().splitlines()
    if len(lines) > MOST_OUTPUT:
        lines = [*lines[: MOST_OUTPUT - 1], "..."]
    blocks = list(pictures)
    if not pictures and len(code.splitlines()) <= MOST_CODE and "sys.path" not in code and lines:
        blocks.append(f'<pre class="code">{html.escape(code)}</pre>')
    if lines:
        blocks.append(f'<pre class="output">{html.escape(chr(10).join(lines))}</pre>')
    return [blocks, *further]


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
  white-space: pre-wrap; border-radius: 6px; }
pre.code, .highlight pre { background: #f2f4f6; }
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
