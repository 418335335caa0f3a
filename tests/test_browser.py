"""A lesson in a real browser: JupyterLab on loopback, headless Chromium, every cell run."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAB = [
    "--allow-root",
    "--no-browser",
    "--ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--IdentityProvider.token=",
    "--ServerApp.password=",
    f"--ServerApp.root_dir={ROOT}",
    "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
]
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab server that ends with the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", f"--port={port}", *LAB],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(f"{address}/api", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)


def wait_until_it_answers(address, server):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "JupyterLab ended before it answered"
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("JupyterLab did not answer within 60 s")


def test_lesson_01_runs_in_jupyterlab_without_an_error_or_a_request_that_leaves(chromium, lab):
    playwright = pytest.importorskip("playwright.sync_api")
    problems, elsewhere = [], []
    # A copy, since JupyterLab saves what it shows.
    copy = ROOT / "build" / "browser" / "01_naive_model_parallelism.ipynb"
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "notebooks" / copy.name, copy)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=CHROMIUM)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((lab, "data:", "blob:", lab.replace("http", "ws")))
                else elsewhere.append(request.url)
            ),
        )
        page.goto(f"{lab}/lab/tree/{copy.relative_to(ROOT)}?reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        page.wait_for_selector(
            ".jp-Notebook-ExecutionIndicator[data-status=idle]", state="attached", timeout=60_000
        )
        page.get_by_text("Edit", exact=True).first.click()
        page.locator('.lm-Menu-item[data-command="editmenu:clear-all"]').click()
        assert executed(page) == [], "what is stored does not count"
        page.get_by_text("Run", exact=True).first.click()
        page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
        # The last check of the lesson stands at its very end, so all cells have run by then.
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(executed(page)) < 2:
            page.wait_for_timeout(500)
            page.keyboard.press("End")
        text = "\n".join(executed(page))
        page.screenshot(path=copy.with_suffix(".png"))
        browser.close()
    assert text.count("Not attempted yet") == 2
    assert problems == []
    assert elsewhere == []


def executed(page):
    """The answers of the checks that are in the page by now."""
    outputs = page.locator(".jp-OutputArea-output").all_inner_texts()
    return [output for output in outputs if re.search("Not attempted yet", output)]
