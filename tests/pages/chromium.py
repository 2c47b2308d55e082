"""Opens a page in headless Chromium, where that is installed."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-quic", "--enable-logging=stderr"]
SECONDS = 120


# Written into the document when all plots are drawn: what a reader of the page has before their eyes.
PROBE = """
<script>
function luminance(colour) {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
setTimeout(() => {
  const paper = getComputedStyle(document.body).backgroundColor;
  const plots = [...document.querySelectorAll(".plot svg")];
  const texts = [...document.querySelectorAll(".plot svg text")].filter((text) => text.textContent.trim());
  const seen = {
    width: innerWidth,
    is_dark: luminance(paper) < 0.2,
    page_width: document.documentElement.scrollWidth,
    rightmost_plot: Math.max(0, ...plots.map((plot) => plot.getBoundingClientRect().right)),
    smallest_text: Math.min(...texts.map((text) => parseFloat(getComputedStyle(text).fontSize))),
    plot_contrast: Math.min(...texts.map((text) => contrast(getComputedStyle(text).fill, paper))),
    text_contrast: contrast(getComputedStyle(document.body).color, paper),
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
  };
  seen.document = document.documentElement.outerHTML;
  parent.postMessage(seen, "*");
}, 5000);
</script>
"""


# A window is never narrower than 500 pixels: the page stands in a frame of the width.
FRAME = """<!doctype html><body style="margin: 0">
<script>addEventListener("message", (event) => { document.body.dataset.seen = JSON.stringify(event.data); })</script>
<iframe src="PAGE" style="width: WIDTHpx; height: 2000px; border: 0"></iframe>"""


def look_at_page(page: Path, folder: Path, width: int, *, is_dark: bool) -> tuple[str, list[str]]:
    """Open a page at a width in a colour scheme, see that it can be read there, and return what `open_page` does."""
    probed, frame = page.with_suffix(".probed.html"), page.with_suffix(".frame.html")
    text = page.read_text(encoding="utf-8").rstrip().removesuffix("</html>").rstrip().removesuffix("</body>")
    probed.write_text(f"{text}{PROBE}</body></html>", encoding="utf-8")
    frame.write_text(FRAME.replace("PAGE", probed.name).replace("WIDTH", str(width)), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    document, console = open_page(frame, folder, "--window-size=1400,2100", scheme)
    found = re.search(r' data-seen="(.*?)"', document)
    assert found, console
    seen = json.loads(html.unescape(found[1]))
    document = seen.pop("document")
    assert (seen["width"], seen["is_dark"]) == (width, is_dark)
    assert max(seen["page_width"], seen["rightmost_plot"]) <= width, seen
    assert seen["smallest_text"] >= 10, seen
    assert seen["plot_contrast"] >= 4.5, seen
    assert seen["text_contrast"] >= 7, seen
    assert seen["requests"] == []
    return document, console


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
