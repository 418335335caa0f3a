"""Put a PNG beside each drawing that a notebook has stored, for viewers that show no SVG.

    python tools/stored_pictures.py                          # all notebooks
    python tools/stored_pictures.py notebooks/02_gpipe.ipynb

Chromium draws it on a transparent ground. The PNG has the digest of its drawing, so that only a
drawing that has changed is drawn again.
"""

import base64
import hashlib
import io
import shutil
import sys
from pathlib import Path

import nbformat
from exercises import notebook_of
from PIL import Image, PngImagePlugin
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from files.outputs import not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
COLOURS = 32  # of a picture; more would not be seen, and would make the notebooks larger
DRAWN_FROM = "drawn from"  # the entry of a PNG that has the digest of its drawing


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="all unless given")
    paths = parser.parse_args().notebooks or sorted(NOTEBOOKS.rglob("*.ipynb"))
    with naming_files():
        changed = {path: drawings_without_png(path) for path in paths}
    if not any(drawings for _, drawings in changed.values()):
        return 0
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit(
            "tools/stored_pictures.py needs Chromium for the PNG beside each stored drawing; "
            "install the package chromium and run it again"
        )
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for path, (notebook, drawings) in changed.items():
            for data in drawings:
                data["image/png"] = png_of(data["image/svg+xml"], page)
            if drawings:
                with naming_files(path):
                    write_whole(path, nbformat.writes(notebook) + "\n")
                print(f"{path.name:36} {len(drawings):2} pictures")
        browser.close()
    return int(bool(not_written))


def drawings_without_png(path):
    """The notebook, and the data of its outputs whose PNG is missing or of another drawing."""
    notebook = notebook_of(path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawings = [output.data for output in outputs if "image/svg+xml" in output.get("data", {})]
    return notebook, [
        data for data in drawings if drawn_from(data) != digest_of(data["image/svg+xml"])
    ]


def drawn_from(data):
    """The digest of the drawing from which the PNG of an output was made; None without a PNG."""
    try:
        return image_of(data).text.get(DRAWN_FROM) if "image/png" in data else None
    except (AttributeError, OSError, ValueError):  # damaged, or no PNG
        return None


def image_of(data):
    return Image.open(io.BytesIO(base64.b64decode(data["image/png"])))


def digest_of(svg):
    return hashlib.sha256(svg.encode()).hexdigest()[:16]


def png_of(svg, page):
    """A drawing as a PNG in base64, as large as a notebook shows it."""
    page.set_content(f'<body style="margin:0">{svg[svg.index("<svg") :]}</body>')
    taken = page.locator("svg").first.screenshot(omit_background=True, timeout=30_000)
    image = Image.open(io.BytesIO(taken)).quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    about = PngImagePlugin.PngInfo()
    about.add_text(DRAWN_FROM, digest_of(svg))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, pnginfo=about)
    return base64.b64encode(file.getvalue()).decode() + "\n"


if __name__ == "__main__":
    sys.exit(main())
