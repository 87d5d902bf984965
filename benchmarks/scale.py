"""Seconds and bytes against clients, clients a round, model size and teachers: one thing varied at
a time.

"start-up" is all that a run does outside of its rounds: the split, the check of the settings, the
first journal line. With ``million`` the data grow with the clients, up to a million; 1,000 of them
act in a round.

``python -m benchmarks.scale [--only clients ...]`` prints a table; ``--json FILE`` keeps the rows,
``--plot FILE`` draws them (``pip install 'fedstill[docs]'``). Every row is a run in a process of
its own, on synthetic images; memory is the most that process held (resident set), start-up
included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Case:
    """One run: ``images`` in all, so that the data are as large whatever the number of clients
    is.
    """

    clients: int = 1000
    sampled: int = 20
    width: int = 64
    teachers: int = 0
    method: str = "fedavg"
    engine: str = "pooled"
    rounds: int = 5
    images: int = 20_000


AXES: Mapping[str, tuple[Case, ...]] = {
    "clients": tuple(Case(clients=n, method="moon") for n in (100, 1000, 10_000)),
    "million": tuple(
        Case(clients=n, sampled=1000, images=2 * n) for n in (10_000, 100_000, 1_000_000)
    ),
    "sampled": tuple(Case(sampled=n) for n in (10, 50, 100, 200)),
    "stacked": tuple(Case(sampled=n, engine="vectorised") for n in (10, 50, 100, 200)),
    "width": tuple(Case(width=n) for n in (64, 256, 1024, 2048)),
    "teachers": tuple(Case(method="aver", teachers=n) for n in (0, 1, 5, 10)),
}
"""What is varied, by name; the rest of a case stays as it is."""

PICTURE = {
    ("clients",): "clients, 20 a round, 20,000 images in all (MOON)",
    ("sampled", "stacked"): "clients a round",
    ("width",): "width of the model's two hidden layers",
    ("teachers",): "teachers a client (AVER)",
}
"""The columns of the picture: what is drawn together, and what its axis says."""


def run_case(case: Case) -> dict[str, float]:
    """Train a case: seconds to the first round, seconds a round, bytes of memory, of disk, of
    journal and split.
    """
    import torch

    from fedstill import Experiment, run
    from fedstill.data.sources import from_tensors
    from fedstill.running.journal import read_journal
    from fedstill.running.split_file import SPLIT

    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(case.images) % 10
    images = torch.randint(256, (case.images, 1, 8, 8), generator=draw, dtype=torch.uint8)
    data = from_tensors("noise", (images, labels), (images[:500], labels[:500]))
    topology = {"clients": case.clients, "sampled": case.sampled}
    method: dict[str, object] = {"name": case.method}
    if case.method == "aver":
        method |= {"k": case.teachers, "teacher_choice": "random"}
        topology["kind"] = "parallel"  # type: ignore[assignment]
    experiment = Experiment(
        method=method,
        engine=case.engine,
        rounds=case.rounds,
        measure=(),
        threads=1,
        partition="iid",
        topology=topology,
        model={"name": "mlp", "hidden": (case.width, case.width)},
        plan={"epochs": 1, "batch": 20, "lr": 0.001},
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run(experiment, Path(folder) / "run", data=data)
        took = time.perf_counter() - began
        events = [
            e for e in read_journal(Path(folder) / "run/journal.jsonl") if e["event"] == "round"
        ]
        sizes = {p: p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()}
        journal, split = (sizes[Path(folder) / "run" / name] for name in ("journal.jsonl", SPLIT))
    seconds = [e["seconds"] for e in events]
    return {
        "start": took - sum(seconds),
        "round": statistics.median(seconds),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "disk": float(sum(sizes.values())),
        "journal": float(journal),
        "split": float(split),
    }


def rows(names: list[str], rounds: int) -> Iterator[tuple[str, Case, dict[str, float]]]:
    """Each case of some axes with what was measured."""
    context = multiprocessing.get_context("spawn")
    for name in names:
        for case in AXES[name]:
            one = replace(case, rounds=rounds)
            with context.Pool(1) as pool:
                yield name, one, pool.apply(run_case, (one,))


def plot(kept: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Seconds a round and memory over each thing that was varied; what was stacked stands beside
    what was not.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fedstill"  # the same file for the same rows
    from matplotlib import pyplot

    groups = [g for g in PICTURE if any(row["varied"] in g for row in kept)]
    figure, axes = pyplot.subplots(2, len(groups), figsize=(3.4 * len(groups), 5.2), squeeze=False)
    for column, group in enumerate(groups):
        for name in group:
            chosen = [row for row in kept if row["varied"] == name]
            key, label = ("sampled", "stacked") if name == "stacked" else (name, "pooled")
            for row, what in enumerate(("round", "memory")):
                values = [r[what] / (1e6 if what == "memory" else 1) for r in chosen]
                axes[row, column].plot([r[key] for r in chosen], values, "o-", label=label)
        for row, says in enumerate(("seconds a round", "memory, MB")):
            ticks = sorted({r[key] for r in kept if r["varied"] in group})
            axes[row, column].set(
                xlabel=PICTURE[group],
                ylabel=says,
                xscale="log" if ticks[0] > 0 else "linear",
                ylim=(0, 1.1 * axes[row, column].get_ylim()[1]),
            )
            axes[row, column].grid(alpha=0.3)
            axes[row, column].set_xticks(ticks)
            axes[row, column].set_xticklabels([f"{t:,}" for t in ticks])
            axes[row, column].minorticks_off()
        if len(group) > 1:
            axes[0, column].legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Measure, and print one row a run."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", choices=list(AXES), default=list(AXES))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path)
    options.add_argument("--plot", type=Path)
    given = options.parse_args()
    table = Table(title=f"{given.rounds} rounds each; everything but the varied thing as in Case")
    for head in (
        "varied",
        "run",
        "start-up, s",
        "round, s",
        "memory, MB",
        "disk, MB",
        "journal, MB",
        "split, MB",
    ):
        table.add_column(head, justify="left" if head in ("varied", "run") else "right")
    kept = []
    for name, case, got in rows(given.only, given.rounds):
        said = (
            f"{case.clients:,} clients, {case.sampled:,} a round, width {case.width}, "
            f"{case.teachers} teachers"
        )
        bytes_ = [f"{got[k] / 1e6:.1f}" for k in ("memory", "disk", "journal", "split")]
        table.add_row(
            name, f"{case.method}, {said}", f"{got['start']:.2f}", f"{got['round']:.3f}", *bytes_
        )
        kept.append({"varied": name, **asdict(case), **got})
    Console(width=160).print(table)
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if given.plot:
        plot(kept, given.plot)


if __name__ == "__main__":
    main()
