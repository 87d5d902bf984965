"""Journals of runs with random changes, and all functions that read journals. With a changed
journal, a function must work, or raise an error of fedstill that names the file and the line.

``python tests/changed_journals.py 1000`` tries 1,000 changes of every run's journal.
"""

from __future__ import annotations

import collections
import copy
import io
import json
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import fedstill
import toys
from fedstill.benchmark.scoring import score_of
from fedstill.cli import call
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.report.comparison import Comparison
from fedstill.report.page import write_page
from fedstill.report.table_files import export, run_frames, write_tables
from fedstill.running.directory import settings_of
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from fedstill.running.trackers import AboutRun, HowEnded, send_late

Event = dict[str, Any]

RUNS: Mapping[str, Mapping[str, Any]] = {
    "measured": {
        "method": "fedavg",
        "measure": ["divergence", "local", "epochs", "alignment"],
        "measure_every": 1,
    },
    "tasks": {"method": "fedavg", "rounds": 2, "stream": {"kind": "drift", "tasks": 2}},
    "chain": {
        "method": "fedseq",
        "rounds": 2,
        "topology": {"kind": "sequential", "clients": 6, "sampled": 3},
        "measure": ["chain"],
        "measure_every": 1,
    },
    "contributions": {"method": "fedavg", "measure": ["contributions"], "measure_every": 1},
    "public": {
        "method": "fedmd",
        "rounds": 2,
        "data": {"public": toys.PUBLIC},
        "measure": ["private_public"],
        "measure_every": 1,
    },
    "queries": {
        "method": "qkt_var_e",
        "rounds": 1,
        "data": {"public": 50},
        "topology": {"clients": 6},
        "query": {"draw": "single", "fewer_than": 5},
        "measure": ["local", "boundaries"],
    },
    "failing": {
        "method": {"name": "toy_failing", "who": 1, "how": "nan"},
        "clients": toys.TOLERANT,
    },
}
"""Runs whose journals have all kinds of events, and most of their fields."""

REPLACEMENTS: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    7,
    -0.5,
    1e308,
    2**70,
    "",
    "text",
    "-3",
    True,
    [],
    [[]],
    [1, 2],
    {},
    {"a": 1},
    {"0": "x"},
)
"""Values that replace those of a journal."""


def make_runs(folder: Path) -> list[Path]:
    """Execute ``RUNS``, each in a folder below ``folder``."""
    for name, settings in RUNS.items():
        values = dict(settings)
        run(toys.toy(values.pop("method"), **values), folder / name, toys.blobs())
    return [folder / name for name in RUNS]


# Changes of a journal.


def changed(journal: bytes, draw: random.Random) -> bytes:
    """A journal with one to three random changes of its values or lines; sometimes cut off."""
    events: list[Event] = [json.loads(line) for line in journal.splitlines()]
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.75:
            change_value(events, draw)
        else:
            change_lines(events, draw)
    text = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    if draw.random() < 0.1:
        text = text[: draw.randrange(len(text))]
    return text


def change_value(events: list[Event], draw: random.Random) -> None:
    """Delete, nest or replace a value."""
    if not events:
        return
    kind = draw.choice(sorted({event["event"] for event in events}))
    index = draw.choice([i for i, event in enumerate(events) if event["event"] == kind])
    events[index] = copy.deepcopy(events[index])
    container, key = draw.choice(list(places(events[index])))
    match draw.randrange(4):
        case 0:
            del container[key]
        case 1:
            container[key] = draw.choice(([container[key]], {"in": container[key]}))
        case _:
            container[key] = draw.choice(REPLACEMENTS)
    if not isinstance(events[index].get("event"), str):
        events[index]["event"] = kind


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The keys of a tree of lists and dictionaries, each with its container."""
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = list(range(len(tree)))
    else:
        return
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def change_lines(events: list[Event], draw: random.Random) -> None:
    """Swap two lines, delete a line, or repeat one."""
    first = draw.randrange(len(events))
    second = draw.randrange(len(events))
    match draw.randrange(3):
        case 0:
            events[first], events[second] = events[second], events[first]
        case 1:
            del events[first]
        case _:
            events.insert(second, events[first])


# Readers of journals.


class CheckingTracker:
    """A tracker that only checks the types of the numbers it gets."""

    def __init__(self, folder: Path | None = None) -> None: ...

    def ready(self) -> None: ...

    def begin(self, run: AboutRun, memo: dict[str, Any], last: int) -> int:
        return last

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        assert all(isinstance(value, float) for value in numbers.values())

    def end(self, how: HowEnded, summary: Mapping[str, Any]) -> None: ...


def _command(*arguments: str) -> None:
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = call(list(arguments))
    assert "Traceback" not in errors.getvalue(), errors.getvalue()
    assert code in (0, 1, 2), errors.getvalue()


def _shown(folder: Path) -> None:
    compared = Comparison.of(folder)
    repr(compared)
    compared._repr_html_()
    compared.table()
    compared.runs()


def _result(folder: Path) -> None:
    result = fedstill.Result.of(folder)
    repr(result)
    result._repr_html_()
    result.rounds()
    result.clients()
    result.label_counts()


READERS: Mapping[str, Callable[[Path, Path], object]] = {
    "load_runs": lambda folder, out: fedstill.load_runs(folder),
    "frames of a run": lambda folder, out: run_frames(folder),
    "page": lambda folder, out: write_page([folder], out / "report.html"),
    "table files": lambda folder, out: write_tables(groups([folder]), out / "tables"),
    "comparison": lambda folder, out: _shown(folder),
    "result": lambda folder, out: _result(folder),
    "exported tracker": lambda folder, out: export([folder], out / "tracked", CheckingTracker),
    "late tracker": lambda folder, out: send_late(
        folder, settings_of(folder), {"tracker": CheckingTracker()}, {}
    ),
    "score": lambda folder, out: score_of(folder, 2),
    "resume": lambda folder, out: resume(folder, toys.blobs()),
    "why": lambda folder, out: _command("why", str(folder)),
    "forgetting": lambda folder, out: _command("forgetting", str(folder)),
    "report": lambda folder, out: _command("report", str(folder), "--out", str(out / "r.html")),
}
"""Functions that read a journal. Their arguments are the run's folder and a folder for output."""


def problem_of(reader: str, folder: Path) -> str:
    """The traceback of a reader that raises an unexpected error; empty if it works, or if its error
    is a ConfigError or names the line.
    """
    with tempfile.TemporaryDirectory() as out:
        try:
            READERS[reader](folder, Path(out))
        except ConfigError:
            return ""
        except CorruptFile as error:
            # A score is computed from several lines.
            if re.search(r"(journal|why)\.jsonl(, line \d+| cannot be scored)", str(error)):
                return ""
            return traceback.format_exc()
        except Exception:
            return traceback.format_exc()
    return ""


def tried(original: Path, draw: random.Random, readers: list[str]) -> Iterator[str]:
    """The problems of some readers with one change of a run's journal."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        shutil.copytree(original, folder)
        shutil.rmtree(folder / "checkpoints")  # They contain the hash of the journal.
        journal = folder / "journal.jsonl"
        journal.write_bytes(changed(journal.read_bytes(), draw))
        content = journal.read_bytes()
        for reader in readers:
            problem = problem_of(reader, folder)
            if problem:
                yield f"{reader}: {problem}"
            # Some readers, such as resume, write to the journal.
            journal.write_bytes(content)


def main(trials: int) -> None:
    """Print each kind of problem with its number of occurrences."""
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as place:
        runs = make_runs(Path(place))
        for number in range(trials):
            for original in runs:
                draw = random.Random(f"{original.name} {number}")
                for problem in tried(original, draw, list(READERS)):
                    kind = "\n".join(problem.strip().splitlines()[-4:])
                    counts[f"{problem.partition(':')[0]}: {kind}"] += 1
    for kind, count in counts.most_common():
        print(f"{count} x {kind}\n")
    print(f"{sum(counts.values())} problems in {trials * len(RUNS)} changed journals")


if __name__ == "__main__":
    main(int(sys.argv[1]))
