"""The outputs of commands that ``tools/golden.py`` compares: tables, exports, numbers of a page."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Fields = dict[str, Any]

NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")

DATE = re.compile(r"\d{4}-\d\d-\d\d( \d\d:\d\d)?")

TIME = re.compile(r'("seconds\w*": ?)-?\d[\d.e+-]*')
"""A field of a journal or a summary that holds a time."""

RESOLVED = re.compile(r"^([a-z_]+(?:\.\w+)*) (.+?) (?:default|file|command line)\b")
"""A line of ``explain`` with a key, its value and the value's origin."""

SETTINGS = """
rounds = 2
method = "fedntd"
engine = "serial"
threads = [1, 1]
reuse = false
[data]
train_size = 300
test_size = 100
[model]
name = "mlp"
hidden = [8]
[partition]
kind = "dirichlet"
alpha = 1.0
min_size = 2
[topology]
clients = 6
sampled = 3
[plan]
epochs = 5
lr = 0.1
"""

EVERYBODY = ["-s", "topology={ clients = 6 }"]

EXPLAINED = {
    "parallel": [],
    "a chain": ["-s", "method=sfedkd", "-s", "rounds=3"],
    "peers": ["-s", "method=qkt", "-s", "query.draw=single", "-s", "rounds=1", *EVERYBODY],
    "public logits": ["-s", "method=hiper_fedkd", "-s", "data.public=50"],
    "tasks": ["-s", "stream=classes", "-s", "rounds=10"],
    "secure sums": ["-s", "method=fedavg", "-s", "privacy.secure_sum=true"],
    "private training": ["-s", "privacy.gradient_clip=1", "-s", "engine=pooled"],
}
"""Changes to the settings that ``explain`` resolves, by name."""


class VisibleText(HTMLParser):
    """Collects the text of a page without scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Enter an element."""
        if tag in ("script", "style"):
            self.hidden += 1

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        if tag in ("script", "style"):
            self.hidden -= 1

    def handle_data(self, data: str) -> None:
        """Keep a text that a reader sees."""
        if not self.hidden:
            self.texts.append(data)


def command(*arguments: str) -> str:
    """What a command of fedstill prints; raises RuntimeError if it fails."""
    printed = io.StringIO()
    errors = io.StringIO()
    arguments_before = sys.argv
    sys.argv = ["fedstill", *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            runpy.run_module("fedstill", run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            message = f"fedstill {' '.join(arguments)} ended with {stop.code}: {errors.getvalue()}"
            raise RuntimeError(message) from stop
    finally:
        sys.argv = arguments_before
    return printed.getvalue()


def numbers(text: str) -> list[str]:
    """The numbers of a text, in their order."""
    return NUMBER.findall(text)


def lines(text: str) -> list[str]:
    """The lines of a text without their indentation, frames and repeated blanks."""
    plain = [re.sub(r"[\s│─]+", " ", line).strip() for line in text.splitlines()]
    return [line for line in plain if line]


def table_fields(folder: Path) -> Fields:
    """The tables of a folder, one field a file."""
    paths = sorted(folder.glob("*"))
    return {path.name: lines(path.read_text(encoding="utf-8")) for path in paths}


def set_times(folder: Path) -> None:
    """Replace every time in the journals and summaries below a folder by one second.

    Checkpoints are deleted, because they know the journals' digests.
    """
    for checkpoints in list(folder.rglob("checkpoints")):
        shutil.rmtree(checkpoints)
    for path in [*folder.rglob("journal.jsonl"), *folder.rglob("summary.json")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(TIME.sub(r"\g<1>1.0", text), encoding="utf-8")
    for path in folder.rglob("summary.json"):
        summary = json.loads(path.read_text(encoding="utf-8"))
        measures = summary.get("seconds_measures", {})
        summary["seconds_measures"] = dict.fromkeys(measures, 1.0)
        path.write_text(json.dumps(summary), encoding="utf-8")


def explained(config: Path) -> Iterator[tuple[str, Fields]]:
    """The resolved values and the numbers that ``explain`` prints of several settings.

    The words beside them are not compared: they follow the docstrings.
    """
    for name, changes in EXPLAINED.items():
        text = command("explain", str(config), *changes)
        matches = [RESOLVED.match(line) for line in lines(text)]
        values = {match[1]: match[2] for match in matches if match}
        arithmetic = text[text.index("stages a round") :]
        yield f"outputs/explain {name}", {**values, "numbers": numbers(arithmetic)}


def compared(config: Path, folder: Path) -> Iterator[tuple[str, Fields]]:
    """The tables and the page of a comparison."""
    options = ["--methods", "fedavg,fedntd", "--seeds", "1,2", "--out", str(folder), "-q"]
    command("compare", str(config), *options, "--jobs", "1")
    set_times(folder)
    tables = folder.with_name("tables")
    command("report", str(folder), "--tables", str(tables))
    yield "outputs/compare tables", table_fields(tables)
    page = VisibleText()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    visible_text = " ".join(page.texts).replace(str(folder), "FOLDER")
    yield "outputs/report page", {"numbers": numbers(DATE.sub("", visible_text))}


def exported(config: Path, folder: Path) -> Iterator[tuple[str, Fields]]:
    """The exports of a run, as files and as programs that answer."""
    run = folder / "run"
    command("run", str(config), "--out", str(run), "-q")
    shared = folder / "shared"
    tables = folder / "tables"
    program = folder / "model.pt2"
    set_times(run)
    command("export", str(run), "--folder", str(shared))
    command("export", str(run), "--csv", str(tables))
    command("export", str(run), "--pt2", str(program))
    weights = next(shared.glob("*.safetensors"))
    tensors = safetensors.torch.load(weights.read_bytes())
    yield "outputs/export folder", {"files": sorted(p.name for p in shared.iterdir())}
    yield "outputs/export weights", {name: digest(v) for name, v in sorted(tensors.items())}
    yield "outputs/export tables", table_fields(tables)
    module = torch.export.load(program).module()
    shades = torch.arange(2 * 64).reshape(2, 1, 8, 8).to(torch.uint8)
    yield "outputs/export program", {"logits": digest(module(shades))}


def explained_forgetting(config: Path, folder: Path) -> Iterator[tuple[str, Fields]]:
    """The numbers that ``why`` and ``forgetting`` print."""
    run = folder / "measured"
    tasks = folder / "tasks"
    command("run", str(config), "--out", str(run), "-q", "-s", "keep_checkpoints_every=1")
    answer = command("why", str(run), "-q").replace(str(run), "RUN")
    yield "outputs/why", {"numbers": numbers(answer)}
    stream = ["-s", "stream.kind=classes", "-s", "stream.tasks=2"]
    command("run", str(config), "--out", str(tasks), "-q", *stream)
    answer = command("forgetting", str(tasks)).replace(str(tasks), "RUN")
    yield "outputs/forgetting", {"numbers": numbers(answer)}


def digest(value: torch.Tensor) -> str:
    """The SHA-256 of a tensor's values."""
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()


def output_cells(folder: Path) -> dict[str, Fields]:
    """The outputs of all commands, by cell."""
    folder.mkdir(parents=True)
    config = folder / "settings.toml"
    config.write_text(SETTINGS, encoding="utf-8")
    os.environ["COLUMNS"] = "100"
    families = (
        explained(config),
        compared(config, folder / "compared"),
        exported(config, folder / "exported"),
        explained_forgetting(config, folder / "forgetting"),
    )
    table: dict[str, Fields] = {}
    for family in families:
        began = time.perf_counter()
        for name, fields in family:
            table[name] = {**fields, "seconds": time.perf_counter() - began}
    return table
