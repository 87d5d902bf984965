from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.benchmark.maps import AXES, MapCell, MethodMap
from fedstill.benchmark.page import write_ranking_page
from fedstill.benchmark.scoring import Score
from fedstill.benchmark.standings import RankedRow, standings
from fedstill.benchmark.suites import load_suite
from fedstill.report.page import write_page

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A headless Chromium with nothing in it, which logs what it does."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("there is no Chromium with a chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    window.get("about:blank")
    window.get_log("performance")  # what the browser's own first page asked for
    yield window
    window.quit()


def opened(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
    wait_until_drawn(browser)


def wait_until_drawn(browser: Any) -> None:
    end = time.monotonic() + 60
    while not browser.execute_script("return document.body.dataset.drawn"):
        assert time.monotonic() < end, "the figures were not drawn within a minute"
        time.sleep(0.1)


def requests(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in sent if not url.startswith(("data:", "blob:"))]


@pytest.mark.parametrize("width", [1280, 420])
def test_a_real_browser_draws_all_figures(
    browser: Any, finished: Path, tmp_path: Path, width: int
) -> None:
    page = write_page([finished], tmp_path / "report.html")
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(browser, page)
    charts = browser.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.main-svg "
        ".subplot.xy').length)"
    )
    assert charts == [1] * page.read_text().count('class="chart"')
    traces = "return document.querySelectorAll('.scatterlayer .trace').length"
    assert browser.execute_script(traces) >= 2 * (2 + 2 + 2 + 2 + 1 + 1)
    assert (
        browser.execute_script("return document.querySelectorAll('.heatmaplayer image').length")
        == 3
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    assert requests(browser) == [page.as_uri()]


BELOW_AXIS_TITLES = """
const texts = [...document.querySelectorAll("p, h2, figcaption, table, summary, footer")];
return [...document.querySelectorAll(".chart .xtitle")].map((title) => {
  const own = title.getBoundingClientRect(), chart = title.closest(".chart");
  const below = texts.filter((text) => !chart.contains(text) && text.offsetParent)
    .map((text) => text.getBoundingClientRect())
    .filter((box) => box.top > own.top && box.left < own.right && own.left < box.right);
  return Math.min(...below.map((box) => box.top - own.bottom));
});
"""
"""The pixels between each title of a horizontal axis and the next text below it."""


@pytest.mark.parametrize("width", [1280, 420])
def test_no_text_touches_the_title_of_an_axis(
    browser: Any, finished: Path, tmp_path: Path, width: int
) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(browser, write_page([finished], tmp_path / "report.html"))
    gaps = browser.execute_script(BELOW_AXIS_TITLES)
    assert len(gaps) > 5
    assert min(gaps) >= 12


@pytest.mark.parametrize("width", [1280, 420])
def test_the_list_of_sections_stays_at_the_top_and_leads_to_each(
    browser: Any, finished: Path, tmp_path: Path, width: int
) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(browser, write_page([finished], tmp_path / "report.html"))
    link = browser.find_element("css selector", 'nav a[href="#cost"]')
    link.send_keys("\n")  # as from a keyboard
    end = time.monotonic() + 10
    while link.get_attribute("aria-current") != "true":
        assert time.monotonic() < end, "the section that is shown is not marked"
        time.sleep(0.1)
    selectors = ["nav", "#cost h2", "nav a[aria-current]"]
    bar, heading, current = (
        browser.execute_script(
            "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector
        )
        for selector in selectors
    )
    assert bar["top"] == pytest.approx(0, abs=1)
    assert bar["bottom"] <= heading["top"] < 300
    assert current["left"] >= 0
    assert current["right"] <= width
    assert bar["height"] < 100


def test_a_selector_shows_another_seed(browser: Any, finished: Path, tmp_path: Path) -> None:
    select = pytest.importorskip("selenium.webdriver.support.select")
    opened(browser, write_page([finished], tmp_path / "report.html"))
    shown = "return document.querySelector('[data-name=classes]').data[0].z"
    mean = browser.execute_script(shown)
    select.Select(
        browser.find_element("css selector", "[data-controls=classes]")
    ).select_by_visible_text("seed 7")
    assert browser.execute_script(shown) != mean
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []


def test_a_selector_and_its_figures_agree_after_back(
    browser: Any, finished: Path, tmp_path: Path
) -> None:
    select = pytest.importorskip("selenium.webdriver.support.select")
    page = write_page([finished], tmp_path / "report.html")
    other = tmp_path / "other.html"
    other.write_text("<p>Another page</p>")
    # As of a browser that restores controls in spite of autocomplete="off".
    page.write_text(page.read_text().replace('autocomplete="off"', ""))
    opened(browser, page)
    shown = "return document.querySelector('[data-name=classes]').data[0].z"
    control = browser.find_element("css selector", "[data-controls=classes]")
    select.Select(control).select_by_visible_text("seed 7")
    of_seed = browser.execute_script(shown)
    browser.get(other.as_uri())
    browser.back()
    wait_until_drawn(browser)
    control = browser.find_element("css selector", "[data-controls=classes]")
    assert select.Select(control).first_selected_option.text == "seed 7"
    assert browser.execute_script(shown) == of_seed


def made_up_map() -> MethodMap:
    """36 cells that are all alike."""
    scores = [
        {s: Score(a, 0.9, a / 0.9, 0.1, nan, nan, 1, 1, 1.0, 30) for s in range(3)}
        for a in (0.6, 0.5)
    ]
    each = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return MethodMap("FedNTD", AXES, [MapCell(values, *scores) for values in each])


@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_of_the_ranking_is_drawn_and_sorted_on_a_click(
    browser: Any, tmp_path: Path, width: int
) -> None:
    suite = load_suite("digits-space")
    draw = np.random.default_rng(0)
    scores = {
        name: {
            (c, s): Score(a, 0.9, a / 0.9, 0.1, nan, nan, 1, 1, 1.0, 30)
            for c in suite.columns_of(name)
            for s in range(5)
        }
        for name, a in zip(("FedAvg", "FedNTD", "joint"), draw.uniform(0.4, 0.8, 3), strict=True)
    }
    one = standings(suite, [RankedRow(name, own) for name, own in scores.items()])
    page = write_ranking_page([one], tmp_path / "index.html", {"fedntd": made_up_map()})
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(browser, page)
    assert (
        browser.execute_script("return document.querySelectorAll('.main-svg .subplot.xy').length")
        == 2 + 3
    )
    browser.execute_script("document.querySelector('#maps details').open = true")
    wide = (
        "return [...document.querySelectorAll('#maps .chart')].map(c => "
        "c.getBoundingClientRect().width)"
    )
    assert all(100 < v <= width for v in browser.execute_script(wide))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    table = "document.querySelector('table.sortable')"
    column = f"return [...{table}.tBodies[0].rows].map((r) => r.cells[4].textContent)"
    click = f"{table}.tHead.rows[0].cells[4].querySelector('button').click()"
    browser.execute_script(click)
    down = browser.execute_script(column)
    assert [float(v) for v in down] == sorted(map(float, down), reverse=True)
    browser.execute_script(click)
    assert browser.execute_script(column) == down[::-1]
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    assert requests(browser) == [page.as_uri()]
