"""Opens a page in headless Chromium, where that is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-quic", "--enable-logging=stderr"]
SECONDS = 120


def open_page(page: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """Return the page's document after its scripts ran, and the lines of its console; skip without Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed, so the page is not opened")
    words = [browser, *QUIET, f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", *flags]
    done = subprocess.run(
        [*words, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
