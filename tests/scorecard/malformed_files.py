"""The row on malformed files: configs, journals, payloads and data that are changed at random are
read, or are an error of one line.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.core.codec import decode, encode
from fedstill.core.errors import FedstillError, on_one_line
from fedstill.core.records import Payload
from fedstill.data.sources.load import load_dataset
from fedstill.running.runner import run
from fedstill.running.runs import find
from scorecard.trials import Trials, problem_unless, scratch, small_run

NASTY: tuple[Any, ...] = (
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 10_000,
    [],
    [[]],
    {},
    True,
    "\x00",
    2**70,
)

NASTY_LETTERS = [chr(code) for code in (0, 10, 34, 61, 91, 93, 955, 0xFFFF)]

Probe = Callable[[random.Random], str]
"""Changes a file at random and reads it; returns the problem."""


def malformed(trials: int) -> Trials:
    """Each trial: a config, a journal, a payload or a data file is changed at random. Five of eight
    are configs.
    """
    problems = dict[str, str]()
    draw = random.Random(2)
    with scratch() as place:
        letters = _letters_of_config(place)
        journal = _journal(place)
        payload = _payload()
        data_file = _data_file(place)
        probes = [
            ("a config", letters),
            ("a config", _values_of_config),
            ("a config", letters),
            ("a config", _values_of_config),
            ("a config", letters),
            ("a journal", journal),
            ("a payload", payload),
            ("a data file", data_file),
        ]
        for trial in range(trials):
            name, probe = probes[trial % len(probes)]
            problems[f"{name}, {trial}"] = probe(draw)
    return Trials.of(problems)


def _letters_of_config(place: Path) -> Probe:
    """Exchanges letters of a config."""
    text = resolve(small_run("fedntd")).toml
    config = place / "config.toml"

    def probe(draw: random.Random) -> str:
        letters = list(text)
        for _ in range(draw.randint(1, 5)):
            position = draw.randrange(len(letters))
            letters[position] = draw.choice(NASTY_LETTERS)
        config.write_text("".join(letters), encoding="utf-8")
        return _problem_of_reading(lambda: resolve(load(config)))

    return probe


def _values_of_config(draw: random.Random) -> str:
    """Exchange a value of a config."""
    experiment = small_run("fedntd")
    tables = {k: v for k, v in experiment.tree.items() if isinstance(v, dict) and v}
    table = draw.choice(sorted(tables))
    key = draw.choice(sorted(tables[table]))
    value = draw.choice(NASTY)
    return _problem_of_reading(
        lambda: resolve(experiment.with_values({f"{table}.{key}": value}, "scorecard"))
    )


def _journal(place: Path) -> Probe:
    """Damages the journal of a run."""
    run(small_run("fedntd"), place / "run")
    path = place / "run" / "journal.jsonl"
    journal = path.read_bytes()

    def probe(draw: random.Random) -> str:
        path.write_bytes(damaged(journal, draw))
        return _problem_of_reading(lambda: [run.rounds for run in find([place / "run"])])

    return probe


def _payload() -> Probe:
    """Damages a payload."""
    params = {"head.weight": torch.eye(3), "head.bias": torch.ones(3)}
    payload = encode(Payload(params=params, counts=torch.arange(3), gini=0.5))

    def probe(draw: random.Random) -> str:
        return _problem_of_reading(lambda: decode(damaged(payload, draw)))

    return probe


def _data_file(place: Path) -> Probe:
    """Damages a file of images or a table."""
    files = {"data.npz": _images(), "data.csv": _table()}

    def probe(draw: random.Random) -> str:
        name = draw.choice(sorted(files))
        (place / name).write_bytes(damaged(files[name], draw))
        return _problem_of_reading(lambda: load_dataset(str(place / name)))

    return probe


def _images() -> bytes:
    """A file of twelve images of three classes."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 255, (12, 8, 8), dtype=np.uint8)
    labels = np.arange(12) % 3
    out = io.BytesIO()
    np.savez(out, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return out.getvalue()


def _table() -> bytes:
    """A CSV file of twelve rows of three classes."""
    draw = np.random.default_rng(1)
    lines = ["height,weight,label"]
    for number in range(12):
        height, weight = draw.normal(size=2)
        lines.append(f"{height:.2f},{weight:.2f},{number % 3}")
    return "\n".join([*lines, ""]).encode()


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with one to three small damages: a flipped bit; deleted, inserted or exchanged
    bytes; or a lost end.
    """
    out = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        position = draw.randrange(len(out))
        match draw.randrange(5):
            case 0:
                out[position] ^= 1 << draw.randrange(8)
            case 1:
                del out[position : position + draw.randint(1, 8)]
            case 2:
                out[position:position] = draw.randbytes(draw.randint(1, 8))
            case 3:
                target = draw.randrange(len(out))
                out[position], out[target] = out[target], out[position]
            case _:
                del out[max(1, position) :]
    return bytes(out)


def _problem_of_reading(read: Callable[[], object]) -> str:
    """The problem if reading fails with anything but an error of fedstill in one line."""
    try:
        read()
    except FedstillError as error:
        return problem_unless("\n" not in str(error).strip(), "more than one line")
    except Exception as error:
        return f"not a named error: {on_one_line(error)}"
    return ""
