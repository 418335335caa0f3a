"""Measure the website's explorer in Chromium: how long it takes to start, and to answer a slider.

    .venv/bin/python tools/benchmark_page.py

The program builds the site, opens its explorer from disk, and prints the times of several tries and
the best of them. Each try opens the page in a new browser, so only the disk cache is warm.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from guard.one_sentence import in_one_sentence  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

TRIES = 5
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
# Moves one slider as a user would, and waits until the new picture has been painted.
MOVE = """async ([name, value]) => {
    const slider = document.querySelector(`.live-choices input[aria-label="${name}"]`);
    const drawing = document.querySelector(".live-drawing");
    const begun = performance.now();
    const drawn = new Promise((done) => new MutationObserver((_, observer) => {
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(done));
    }).observe(drawing, { childList: true }));
    slider.value = value;
    slider.dispatchEvent(new Event("input"));
    await drawn;
    return performance.now() - begun;
}"""


@in_one_sentence()
def main():
    Parser(__doc__).parse_args()
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        command = [sys.executable, ROOT / "tools" / "make_site.py", "--live", "--into", site]
        subprocess.run(command, check=True)
        with sync_playwright() as driver:
            measure(driver, (site / "explorer.html").as_uri())
    return 0


def measure(driver, address):
    """Print the times of starts, and of a slider moved at 8 ranks with 32 micro-batches."""
    starts, moves = [], {name: [] for name in SCHEDULES}
    for _ in range(TRIES):
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        begun = perf_counter()
        page.goto(address)
        page.locator(".live-now", has_text="at 0 ms").wait_for(timeout=60_000)
        starts.append((perf_counter() - begun) * 1000)
        for name in SCHEDULES:
            page.goto(f"{address}#schedule={name}&compare=nothing&ranks=8&microbatches=32")
            page.locator(f'svg[aria-label*="{name}, 8 ranks"]').wait_for(timeout=60_000)
            moves[name] += [page.evaluate(MOVE, ["forward of a rank, ms", t]) for t in (11, 12, 13)]
        browser.close()
    print(told("start, from the address to the first answer", starts))
    for name, times in moves.items():
        print(told(f"slider, {name}, 8 ranks and 32 micro-batches", times))


def told(what, times):
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2]
    return f"{what}: best {ordered[0]:.0f} ms, median {middle:.0f}, worst {ordered[-1]:.0f}"


if __name__ == "__main__":
    sys.exit(main())
