"""The report in a browser without a screen: what it shows, and that it asks for nothing."""

import json
import re
import shutil
import subprocess
from html import unescape
from urllib.parse import urlsplit

import pytest
import torch
from matplotlib.image import imread

from consilience.lab.report import write_report
from made_runs import make_run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OWN = ("google.com", "googleapis.com", "gvt1.com")
"""Hosts that the browser itself asks about updates and the time, whatever page it shows."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def browse(page, folder, *flags):
    """Open a page; return what the browser prints, its console, and the addresses it asked for."""
    log = folder / "net.json"
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        f"--log-net-log={log}",
        *flags,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)  # noqa: S603
    console = re.findall(r":CONSOLE.*?\] (.*)", done.stderr)
    asked = set(re.findall(r'"url":"([^"]+)"', log.read_text()))
    outside = {a for a in asked if not (urlsplit(a).hostname or "").endswith(OWN)}
    return done.stdout, console, outside


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    weight = torch.tensor([-3.0, 0, 0, 0, 0, 0, 0, 0])
    for seed in (0, 1):
        make_run(folder, "and-mask", seed=seed, weight=weight, test_accuracy=1.0)
        make_run(folder, "erm", seed=seed, test_accuracy=0.5)
    make_run(folder, "erm", seed=2, epochs=2, done=False)
    return write_report(folder)


PROBE = """<script>
addEventListener("load", () => {
  const seen = {};
  const back = () => getComputedStyle(document.body).backgroundColor;
  const button = document.getElementById("theme");
  seen.before = back(); button.click(); seen.after = back(); button.click(); seen.again = back();
  const chart = document.querySelector("#curves svg.chart");
  const now = chart.parentElement.querySelector(".now");
  const box = chart.getBoundingClientRect();
  const move = (x) => chart.dispatchEvent(new PointerEvent("pointermove", { clientX: x }));
  seen.rest = now.textContent;
  move(box.right); seen.last = now.textContent;
  move(box.left); seen.first = now.textContent;
  chart.dispatchEvent(new PointerEvent("pointerleave")); seen.left = now.textContent;
  seen.overflow = document.documentElement.scrollWidth - innerWidth;
  seen.images = [...document.images].concat([...document.querySelectorAll("image")]).length;
  seen.copies = [...document.querySelectorAll("button.copy")].map((b) => b.hidden);
  seen.empty = [...document.querySelectorAll("svg.chart, svg.plane")]
    .filter((svg) => svg.getBoundingClientRect().height < 5).length;
  document.body.dataset.seen = JSON.stringify(seen);
});
</script></body>"""


def test_the_page_in_a_browser(report, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report.read_text().replace("</body>", PROBE))
    dom, console, asked = browse(page, tmp_path, "--dump-dom", "--window-size=560,900")
    assert console == []
    assert asked == set()
    seen = json.loads(unescape(re.search(r'data-seen="([^"]+)"', dom)[1]))
    assert seen["before"] == seen["again"] != seen["after"]  # the button changes the theme
    assert seen["rest"] == seen["left"] == "2 seeds"
    assert seen["last"] == "epoch 5: train 100%, test 100%"
    assert seen["first"] == "epoch 1: train 60.0%, test 60.0%"
    assert seen["overflow"] <= 0  # nothing sticks out, even on a narrow screen
    assert seen["images"] == 8  # four planes of two methods
    assert seen["copies"] == [False]
    assert seen["empty"] == 0
    for title in ("Results", "Learning curves", "What the networks learned", "Kept against chance"):
        assert f"<h2>{title}</h2>" in dom


def brightness(report, folder, scheme, size="1200,900"):
    path = folder / f"{scheme}-{size}.png"
    browse(
        report,
        folder,
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--screenshot={path}",
        f"--window-size={size}",
    )
    image = imread(path)
    assert image.shape[:2] == tuple(map(int, reversed(size.split(","))))
    assert image.std() > 0.05  # something is there
    return image[..., :3].mean()


def test_it_is_light_or_dark_as_the_system_is(report, tmp_path):
    assert brightness(report, tmp_path, "1") > 0.85
    assert brightness(report, tmp_path, "0") < 0.25


def test_the_browser_would_tell_of_errors_and_of_addresses(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/a.png"><script>nothing.here()</script>')
    _, console, asked = browse(page, tmp_path, "--dump-dom")
    assert "nothing is not defined" in " ".join(console)
    assert asked == {"http://127.0.0.1:9/a.png"}
