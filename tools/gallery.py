"""Draws the pictures of docs/gallery.md.

``python tools/gallery.py`` runs the commands of the page in a folder, and takes a picture of each
section of their reports, once for light and once for dark pages. It needs Chromium with its driver,
and selenium. ``--runs DIR`` keeps the runs in a folder and continues those that are there.
``--only NAME`` takes the pictures of one section, from such runs. Few colours keep the files small.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from fedstill.cli import call

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
WIDTH = 760
"""Pixels."""
LARGEST_HEIGHT = 620
"""Pixels."""
COLOURS = 96
SECONDS_TO_DRAW = 120
"""The time limit for a page to draw its figures."""

PARTS = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```|gallery/(\w+)-light\.png', re.DOTALL)


@dataclass(frozen=True)
class FileScene:
    """A file that the page shows."""

    name: str
    text: str


@dataclass(frozen=True)
class CommandScene:
    """A command of the page, without the word ``fedstill``."""

    command: str

    @property
    def folder(self) -> str:
        """The folder in which the command writes its report."""
        words = shlex.split(self.command)
        return words[words.index("--out") + 1].removesuffix("/report.html")


@dataclass(frozen=True)
class PictureScene:
    """A picture of the page: the name of a section, and the folder of the report."""

    name: str
    folder: str


Scene = FileScene | CommandScene | PictureScene


def scenes(text: str) -> Iterator[Scene]:
    """The files, commands and pictures of the page, in their order."""
    folder = ""
    for language, title, body, picture in PARTS.findall(text):
        if picture:
            yield PictureScene(picture, folder)
        elif title:
            yield FileScene(title, body)
        elif language == "console":
            for line in body.strip().splitlines():
                scene = CommandScene(line.removeprefix("$ fedstill "))
                folder = scene.folder
                yield scene


def report_of(folder: Path) -> Path:
    """The page that a command wrote."""
    report = folder / "report.html"
    if report.is_file():
        return report
    return folder / "tuning.html"


def _quietly(command: str) -> list[str]:
    """The words of a command that prints no progress; ``fedstill report`` never prints any."""
    words = shlex.split(command)
    if words[0] == "report":
        return words
    return [*words, "--quiet"]


def draw(runs: Path, section: str) -> None:
    """Write the page's files, run its commands, and take its pictures.

    section: the only section of which pictures are taken, without running commands; empty for all.
    """
    sections: dict[str, list[str]] = {}
    for scene in scenes(PAGE.read_text(encoding="utf-8")):
        if isinstance(scene, FileScene):
            (runs / scene.name).write_text(scene.text, encoding="utf-8")
        elif isinstance(scene, PictureScene):
            if section in ("", scene.name):
                sections.setdefault(scene.folder, []).append(scene.name)
        elif not section and call(_quietly(scene.command)):
            raise SystemExit(f"fedstill {scene.command} failed")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with _browser() as window:
        for folder, names in sections.items():
            for theme in ("light", "dark"):
                _open(window, report_of(runs / folder), theme)
                _take_pictures(window, names, theme)


def _take_pictures(window: Any, sections: list[str], theme: str) -> None:
    """Write a picture of each section of the page in the window."""
    for section in sections:
        data = _picture(window, section)
        path = PICTURES / f"{section}-{theme}.png"
        path.write_bytes(data)
        print(f"{path.name}: {len(data) / 1e3:.0f} kB", flush=True)


def _open(window: Any, page: Path, theme: str) -> None:
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    window.set_window_size(WIDTH, 1000)
    window.get(page.as_uri())
    deadline = time.monotonic() + SECONDS_TO_DRAW
    is_drawn = (
        "return document.body.dataset.drawn || document.querySelector('.plotly-graph-div "
        ".main-svg')"
    )
    while not window.execute_script(is_drawn):
        if time.monotonic() > deadline:
            raise SystemExit(f"{page}: no figures after {SECONDS_TO_DRAW} seconds; try again")
        time.sleep(0.1)
    window.execute_script("for (const each of document.querySelectorAll('.save')) each.remove();")


def _picture(window: Any, section: str) -> bytes:
    """The upper part of a section of the page in the window, as a PNG file."""
    top, bottom = window.execute_script(
        "const box = document.getElementById(arguments[0]).getBoundingClientRect();"
        "return [box.top + scrollY - 12, box.bottom + scrollY + 12];",
        section,
    )
    height = min(LARGEST_HEIGHT, bottom - top)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": height, "scale": 1}
    options = {"clip": clip, "captureBeyondViewport": True}
    screenshot = window.execute_cdp_cmd("Page.captureScreenshot", options)
    data = base64.b64decode(screenshot["data"])
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    few_colours = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    few_colours.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _browser() -> Any:
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        raise SystemExit("gallery: no chromium with a chromedriver on the PATH; install both")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def main() -> None:
    """Draw the pictures that the command line selects."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="the folder of the runs; by default temporary")
    parser.add_argument("--only", default="", metavar="NAME", help="one section, from these runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = (options.runs or Path(folder)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        os.chdir(runs)
        draw(runs, options.only)


if __name__ == "__main__":
    main()
