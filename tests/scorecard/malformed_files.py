"""The row on malformed files: configs, journals, payloads and data, changed at random, are one line
or are read.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.config.experiment import Experiment, load
from fedstill.config.resolve import resolve
from fedstill.core.codec import decode, encode
from fedstill.core.errors import FedstillError, on_one_line
from fedstill.core.records import Payload
from fedstill.data.sources.load import load_dataset
from fedstill.running.runner import run
from fedstill.running.runs import find
from scorecard.trials import Trials, scratch, small_run

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

Probe = Callable[[random.Random], str]


def malformed(trials: int) -> Trials:
    """Each trial: a config, a journal, a payload or a data file, changed at random; five of eight
    are configs.
    """
    draw, problems = random.Random(2), dict[str, str]()
    with scratch() as place:
        kinds = _kinds(place)
        for trial in range(trials):
            name, probe = kinds[trial % len(kinds)]
            problems[f"{name}, {trial}"] = probe(draw)
    return Trials.of(problems)


def _kinds(place: Path) -> list[tuple[str, Probe]]:
    """What is changed in turn."""
    text = resolve(small_run("fedntd")).toml
    config = place / "config.toml"

    def letters(draw: random.Random) -> str:
        changed = list(text)
        for _ in range(draw.randint(1, 5)):
            changed[draw.randrange(len(changed))] = chr(
                draw.choice((0, 10, 34, 61, 91, 93, 955, 0xFFFF))
            )
        config.write_text("".join(changed), encoding="utf-8")
        return _read(lambda: resolve(load(config)))

    def values(draw: random.Random) -> str:
        return _read(lambda: resolve(_mutated(draw)))

    others = [
        ("a journal", _journal(place)),
        ("a payload", _payload()),
        ("a data file", _data_file(place)),
    ]
    return [("a config", letters), ("a config", values)] * 2 + [("a config", letters), *others]


def _journal(place: Path) -> Probe:
    run(small_run("fedntd"), place / "run")
    path = place / "run" / "journal.jsonl"
    whole = path.read_bytes()

    def probe(draw: random.Random) -> str:
        path.write_bytes(damaged(whole, draw))
        return _read(lambda: [one.rounds for one in find([place / "run"])])

    return probe


def _payload() -> Probe:
    params = {"head.weight": torch.eye(3), "head.bias": torch.ones(3)}
    whole = encode(Payload(params=params, counts=torch.arange(3), gini=0.5))

    def probe(draw: random.Random) -> str:
        return _read(lambda: decode(damaged(whole, draw)))

    return probe


def _data_file(place: Path) -> Probe:
    draw = np.random.default_rng(0)
    out = io.BytesIO()
    images, labels = draw.integers(0, 255, (12, 8, 8), dtype=np.uint8), np.arange(12) % 3
    np.savez(out, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    table = "".join(
        f"{a:.2f},{b:.2f},{c}\n" for a, b, c in zip(*draw.normal(size=(2, 12)), labels, strict=True)
    )
    files = {"data.npz": out.getvalue(), "data.csv": ("height,weight,label\n" + table).encode()}

    def probe(draw: random.Random) -> str:
        name = draw.choice(sorted(files))
        (place / name).write_bytes(damaged(files[name], draw))
        return _read(lambda: load_dataset(str(place / name)))

    return probe


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes with one to three small damages: a bit turned, bytes cut out, put in or exchanged, or
    the end cut off.
    """
    out = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(out))
        match draw.randrange(5):
            case 0:
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                del out[at : at + draw.randint(1, 8)]
            case 2:
                out[at:at] = draw.randbytes(draw.randint(1, 8))
            case 3:
                other = draw.randrange(len(out))
                out[at], out[other] = out[other], out[at]
            case _:
                del out[max(1, at) :]
    return bytes(out)


def _mutated(draw: random.Random) -> Experiment:
    asked: Experiment = small_run("fedntd")
    tables = {k: v for k, v in asked.tree.items() if isinstance(v, dict) and v}
    table = draw.choice(sorted(tables))
    return asked.with_values(
        {f"{table}.{draw.choice(sorted(tables[table]))}": draw.choice(NASTY)}, "scorecard"
    )


def _read(what: Any) -> str:
    try:
        what()
    except FedstillError as error:
        return "" if "\n" not in str(error).strip() else "more than one line"
    except Exception as error:
        return f"not a named error: {on_one_line(error)}"
    return ""
