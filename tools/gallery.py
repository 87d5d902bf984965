"""The pictures of docs/gallery.md: runs the page's commands in a folder, and takes each section of
their reports.

``python tools/gallery.py`` needs Chromium with its driver, and selenium. ``--runs DIR``: keep the
runs there, and go on with those that are there. ``--only NAME``: one section, of such runs. A
picture is made once for light and once for dark pages, with few enough colours to be small.
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
from pathlib import Path
from typing import Any

from PIL import Image

from fedstill.cli import call

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
WIDTH, TALLEST, COLOURS = 760, 620, 96
"""Pixels of a picture, and how many colours it has."""

PARTS = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```|gallery/(\w+)-light\.png', re.DOTALL)


def scenes(text: str) -> Iterator[tuple[str, str, str]]:
    """What the page has: ("file", name, text), ("command", words, folder), ("picture", name, folder
    of its runs).
    """
    folder = ""
    for kind, title, body, picture in PARTS.findall(text):
        if picture:
            yield "picture", picture, folder
        elif title:
            yield "file", title, body
        elif kind == "console":
            for line in body.strip().splitlines():
                words = line.removeprefix("$ fedstill ")
                arguments = shlex.split(words)
                folder = arguments[arguments.index("--out") + 1].removesuffix("/report.html")
                yield "command", words, folder


def report_of(folder: Path) -> Path:
    """The page that a command wrote."""
    return next(
        path for name in ("report.html", "tuning.html") if (path := folder / name).is_file()
    )


def _quietly(command: str) -> list[str]:
    """The words of a command without progress; ``fedstill report`` has none."""
    words = shlex.split(command)
    if words[0] == "report":
        return words
    return [*words, "--quiet"]


def draw(runs: Path, only: str) -> None:
    """Carry out what the page says in a folder, and take its pictures."""
    pictures: dict[str, list[str]] = {}
    for kind, name, what in scenes(PAGE.read_text(encoding="utf-8")):
        if kind == "file":
            (runs / name).write_text(what, encoding="utf-8")
        elif kind == "command" and not only and call(_quietly(name)):
            raise SystemExit(f"fedstill {name} failed")
        elif kind == "picture" and only in ("", name):
            pictures.setdefault(what, []).append(name)
    PICTURES.mkdir(parents=True, exist_ok=True)
    with _browser() as window:
        for folder, names in pictures.items():
            for theme in ("light", "dark"):
                _open(window, report_of(runs / folder), theme)
                for name in names:
                    data = _taken(window, name)
                    (PICTURES / f"{name}-{theme}.png").write_bytes(data)
                    print(f"{name}-{theme}.png: {len(data) / 1e3:.0f} kB", flush=True)


def _open(window: Any, page: Path, theme: str) -> None:
    scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    window.set_window_size(WIDTH, 1000)
    window.get(page.as_uri())
    until = time.monotonic() + 120
    drawn = (
        "return document.body.dataset.drawn || document.querySelector('.plotly-graph-div "
        ".main-svg')"
    )
    while not window.execute_script(drawn):
        if time.monotonic() > until:
            raise SystemExit(f"{page}: the figures were not drawn within two minutes")
        time.sleep(0.1)
    window.execute_script("for (const each of document.querySelectorAll('.save')) each.remove();")


def _taken(window: Any, section: str) -> bytes:
    """A section of the page that is open, from its top on."""
    top, bottom = window.execute_script(
        "const box = document.getElementById(arguments[0]).getBoundingClientRect();"
        "return [box.top + scrollY - 12, box.bottom + scrollY + 12];",
        section,
    )
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(TALLEST, bottom - top), "scale": 1}
    shot = window.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    out = io.BytesIO()
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


def _browser() -> Any:
    from selenium import webdriver

    chromium, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    if not chromium or not driver:
        raise SystemExit("there is no Chromium with a chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = (asked.runs or Path(folder)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        os.chdir(runs)
        draw(runs, asked.only)


if __name__ == "__main__":
    main()
