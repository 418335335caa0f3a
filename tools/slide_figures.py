"""Stored outputs of a notebook, enlarged for the last row of a room: at least 18 pt on a slide.

A slide has 1280 x 720 pixels; a figure takes WIDTH x HEIGHT of them. The text of a drawing is
enlarged to a height of LEAST pixels. Numbers of blocks that are too narrow for that are left out,
and a timeline's legend becomes a line of text below it.
"""

import html
import re
import xml.etree.ElementTree as ElementTree

from lab.drawing import FILL, FONT, LEFT, ROW, TEXT
from pipeline.schedule import KINDS

WIDTH, HEIGHT = 1168, 420
LEAST = 24.6  # pixels: 18 pt, plus a margin for rounding
LINES, COLUMNS = 12, 79  # of printed output and code
DARK = "#3a3a3a"  # the drawings' grey is for a page; a projector needs more contrast
PINK = "#D3006E"  # a longest path
LETTER = 0.58  # width of a letter over its height, rounded up
BOLD = 0.68
SVG = "http://www.w3.org/2000/svg"


def figure_of(cell):
    """The first stored output of a code cell that fits on a slide, as HTML; or None."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            return drawing("".join(data["image/svg+xml"]))
        if "text/markdown" in data:
            code = "".join(data["text/markdown"])
            if lines := fitting(re.sub(r"(?m)^(`.*`|```\w*)$", "", code).strip("\n").splitlines()):
                return preformatted("code", lines)
    stdout = (o["text"] for o in cell.get("outputs", []) if o.get("name") == "stdout")
    lines = "".join("".join(text) for text in stdout).rstrip().splitlines()
    lines = fitting([line for line in lines if not line.startswith("$ ")])
    return preformatted("output", lines) if lines else None


def fitting(lines):
    return lines if len(lines) <= LINES and all(len(line) <= COLUMNS for line in lines) else None


def preformatted(kind, lines):
    """Lines of output or code as HTML; few and short lines are written larger."""
    columns = max(len(line) for line in lines)
    size = min(46.0, WIDTH / (0.62 * columns + 0.5), HEIGHT / (1.3 * len(lines)))
    text = html.escape(chr(10).join(lines))
    return f'<pre class="{kind}" style="font-size:{max(24.0, size):.1f}px">{text}</pre>'


def if_of_the_course(draw):
    """`draw`, but it returns None for another program's drawing, whose sizes may be no numbers."""

    def drawn(svg):
        try:
            return draw(svg)
        except (ValueError, TypeError, ZeroDivisionError):
            return None

    return drawn


@if_of_the_course
def drawing(svg):
    """An SVG text scaled to a slide, with its legend below; None if it cannot be scaled."""
    root = parsed(svg)
    if root is None:
        return None
    legend = ""
    if root.find(f".//{{{SVG}}}g[@class='blocks']") is not None:
        legend = cut_off_legend(root)
        leave_out_upper_axes(root)
    enlarge(root, HEIGHT - (46 if legend else 0))
    return figure_from(root, legend)


@if_of_the_course
def picture(svg):
    """A picture of the prose scaled to a slide; None if its letters would be too small there."""
    root = parsed(svg)
    if root is None:
        return None
    _, _, width, tall = view_box(root)
    scale = min(WIDTH / width, HEIGHT / tall)
    sizes = [float(words.get("font-size", 0)) for words in root.iter(f"{{{SVG}}}text")]
    if scale * min(sizes) < LEAST:
        return None
    set_size(root, width * scale, tall * scale)
    return figure_from(root)


def parsed(svg):
    """The drawing in an SVG text; None for one that is damaged, or has no box to be scaled by."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")  # marks of a curve
    try:
        root = ElementTree.fromstring(svg[svg.index("<svg") :])
    except ElementTree.ParseError:
        return None
    return root if re.fullmatch(r"(-?[\d.]+ ){3}[\d.]+", root.get("viewBox", "")) else None


def set_size(root, width, height):
    root.set("width", f"{width:.0f}")
    root.set("height", f"{height:.0f}")
    root.attrib.pop("style", None)


def figure_from(root, legend=""):
    for element in root.findall(f"{{{SVG}}}metadata") + root.findall(f"{{{SVG}}}title"):
        root.remove(element)
    text = ElementTree.tostring(root, encoding="unicode").replace(TEXT, DARK)
    return f"<figure>{text}{legend}</figure>"


def cut_off_legend(root):
    """Remove the legend of a timeline; return it as a line of HTML."""
    signs = [e for e in root if e.tag == f"{{{SVG}}}rect" and e.get("height") == "18"]
    if not signs:
        return ""
    top = min(float(sign.get("y")) for sign in signs) - 6
    for element in list(root):
        heights = [element.get(name) for name in ("y", "y1") if element.get(name)]
        heights += re.findall(r"^M[\d.]+ ([\d.]+)", element.get("d", ""))
        if heights and float(heights[0]) >= top:
            root.remove(element)
    x, y, width, tall = view_box(root)
    bottom = top - y + 8  # its axis has larger words, too
    for curve in root.findall(f"{{{SVG}}}g[@transform]"):  # what a rank holds, below the legend
        before = float(re.fullmatch(r"translate\(0 ([\d.]+)\)", curve.get("transform"))[1])
        curve.set("transform", f"translate(0 {bottom + 22})")
        bottom += 22 + tall - before
    root.set("viewBox", f"{x} {y} {width} {bottom}")
    stories = " ".join(e.text or "" for e in root.iter(f"{{{SVG}}}title"))
    kinds = [kind for kind in FILL if f"{KINDS[kind]} of" in stories]
    recomputed = root.find(f".//{{{SVG}}}g[@class='recomputed']") is not None
    entries = [(f"background:{FILL[kind]}", KINDS[kind]) for kind in kinds]
    entries += [(f"background:{FILL['F']};border:2px dashed #555", "run again")] * recomputed
    entries.append(("background:var(--waiting)", "waiting"))
    if root.find(f"{{{SVG}}}path[@stroke='{PINK}']") is not None:
        entries.append((f"background:{PINK};height:4px;border:0;margin-bottom:7px", "longest path"))
    boxes = [f'<span><i style="{style}"></i>{words}</span>' for style, words in entries]
    return f"<figcaption>{' '.join(boxes)}</figcaption>"


def leave_out_upper_axes(root):
    """Remove the axis numbers above each further timeline, whose caption needs their room.

    All timelines of a drawing have one scale, and the lowest one keeps its numbers.
    """
    words = root.findall(f"{{{SVG}}}text")
    captions = [float(each.get("y")) for each in words if each.get("font-size") == "15"]
    for each in words:
        above = [caption - float(each.get("y")) for caption in captions]
        if each.get("text-anchor") == "middle" and any(0 < gap <= 30 for gap in above):
            root.remove(each)


def view_box(root):
    return [float(number) for number in root.get("viewBox").split()]


def enlarge(root, height):
    """Set the size of a drawing, and the size of its text to LEAST pixels."""
    x, y, width, tall = view_box(root)
    is_timeline = root.find(f".//{{{SVG}}}g[@class='blocks']") is not None
    ends = [e for e in root.iter(f"{{{SVG}}}text") if "text-anchor: end" in e.get("style", "")]
    numbers = LETTER * max((len(e.text or "") for e in ends), default=0)  # beside a vertical axis
    for _ in range(3):  # room on the left makes the rest smaller, so the text needs more room
        size = LEAST / min(WIDTH / width, height / tall)
        larger = max(0.0, size - 10)
        more = max(0.0, 7 * LETTER * size - LEFT) if is_timeline else (0.9 + numbers) * larger
        x, width = -more, view_box(root)[2] + more + 8  # the last label may stick out
    if not is_timeline:
        tall += 0.9 * 0.9 * larger
    scale = min(WIDTH / width, height / tall)
    root.set("viewBox", f"{x:.1f} {y} {width:.1f} {tall:.1f}")
    set_size(root, width * scale, tall * scale)
    blocks = [
        [float(block.get(name)) for name in ("x", "y", "width")]
        for block in root.iter(f"{{{SVG}}}rect")
        if block.get("x") and block.get("width")
    ]
    for group in root.iter(f"{{{SVG}}}g"):
        if group.get("class") == "numbers":
            group.set("font-size", f"{size:.1f}")
            for number in list(group):
                number.set("y", f"{float(number.get('y')) + 0.35 * (size - FONT):.1f}")
                if not has_room(number, blocks, BOLD * size * len(number.text) + 2):
                    group.remove(number)
    for element in root.iter():
        if (element.get("id") or "").startswith("legend"):
            texts = [text for text in element.iter(f"{{{SVG}}}text") if text.get("x")]
            widest = max((len(text.text or "") for text in texts), default=0)
            # Where there is no axis to its left, longer text grows to the left.
            if texts and float(texts[0].get("x")) > 0.25 * width:
                element.set("transform", f"translate({-LETTER * (size - 10) * widest:.1f} 0)")
        elif element.get("transform", "").startswith("rotate(-90"):  # the name of the y axis
            element.set(
                "transform",
                f"translate({-(0.3 + numbers) * larger:.1f} 0) {element.get('transform')}",
            )
    for element in root.iter(f"{{{SVG}}}text"):
        if element.get("font-size"):
            if is_timeline:
                put_in_place(element, size, 4 - more)
            element.set("font-size", f"{max(size, float(element.get('font-size'))):.1f}")
        style = element.get("style", "")
        element.set("style", re.sub(r"font-size: [\d.]+px", f"font-size: {size:.1f}px", style))


def put_in_place(words, size, left):
    """Keep enlarged words of a timeline beside their row or below their axis, and captions at `left`."""
    if words.get("font-weight") == "bold":
        words.set("x", f"{left:.1f}")
    lower = {"end": 0.35, "middle": 0.5}.get(words.get("text-anchor"), 0)
    words.set("y", f"{float(words.get('y')) + lower * max(0, size - FONT):.1f}")


def has_room(number, blocks, width):
    x, y = float(number.get("x")), float(number.get("y")) - ROW / 4
    return any(
        left <= x <= left + wide and top <= y <= top + 26 and wide >= width
        for left, top, wide in blocks
    )
