"""fedstill beside its peers in one run:
``python -m benchmarks.peers [--workloads W1,W4] [--pairs 3] [--rounds 3]``.

Every contestant has an environment of its own, and gets the same tensors, network, first weights,
clients of each round, batch orders and learning rates, in float32. Runs alternate: whatever else
the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from benchmarks.peers import environments, hand_out, processes
from benchmarks.peers.common import Task, cores
from benchmarks.peers.entry import Entry, accuracy, distance
from benchmarks.peers.environments import CONTESTANTS, NotInstalled
from benchmarks.speed import spread
from fedstill.report import terminal

NEAR, CLOSE = 0.05, 0.02
"""The same training: weights within this share of how far training moved them, accuracy within this
much.
"""


def installed(asked: argparse.Namespace) -> list[Entry]:
    """The contestants, each with its environment or the reason why it has none."""
    entries = []
    for one in CONTESTANTS:
        if asked.only and one.module.removeprefix("run_") not in asked.only.split(","):
            continue
        _say(f"{one.name}: its environment")
        try:
            more, seconds = asked.pip_args.split(), 60 * asked.minutes
            entries.append(
                Entry(one, environments.make(one, asked.cache, asked.fresh, more, seconds))
            )
        except NotInstalled as error:
            entries.append(Entry(one, Path(), f"not installed: {error}"))
    return entries


def measure(name: str, entries: Sequence[Entry], asked: argparse.Namespace) -> bool:
    """Run a workload with every contestant in turn and print its table; whether all of them
    agree.
    """
    workload = hand_out.resized(name, asked.clients, asked.epochs)
    with tempfile.TemporaryDirectory(prefix="task-") as made:
        folder = Path(made)
        task = hand_out.write(workload, asked.rounds + 1, folder)
        for turn in range(asked.pairs):
            for entry in entries[:: 1 if turn % 2 == 0 else -1]:
                if not entry.failure:
                    _say(f"{name}, {turn + 1} of {asked.pairs}: {entry.contestant.name}")
                    entry.run(folder, 60 * asked.minutes)
        screen = terminal.console()
        screen.print(f"\n{name}: {workload.about}")
        if asked.clients or asked.epochs:
            screen.print(
                f"SMALLER than that: {workload.sampled} clients a round, {workload.plan['epochs']} "
                "epoch(s)"
            )
        return show(task, entries)


def show(task: Task, entries: Sequence[Entry]) -> bool:
    """Print the table of a workload, and how each contestant was run; whether all of them agree."""
    screen, rows, apart = terminal.console(), [], []
    screen.width = max(screen.width, 120)  # also where the output goes to a file
    ran = [e for e in entries if not e.failure]
    ours = next((e for e in ran if e.ours), None)
    reference = accuracy(task, ours.final) if ours else 0.0
    for one in ran:
        ratios, far, right = [], 0.0, accuracy(task, one.final)
        if ours:
            ratios = [
                statistics.median(a) / statistics.median(b)
                for a, b in zip(one.runs, ours.runs, strict=True)
            ]
            far = distance(task, one.final, ours.final)
        if far > NEAR or abs(right - reference) > CLOSE:
            apart.append(one.contestant.name)
        rows.append(
            (
                one.contestant.name,
                spread([s for run in one.runs for s in run]),
                spread(ratios) if ratios else "",
                f"{statistics.median(one.starts):.1f}",
                f"{max(one.peaks) / 1e6:,.0f} MB" if max(one.peaks) else "",
                f"{100 * right:.1f} %",
                f"{far:.0e}" if ours else "",
            )
        )
    heads = [
        "",
        "seconds a round",
        "times fedstill's",
        "start-up, s",
        "peak memory",
        "accuracy",
        "distance",
    ]
    screen.print(terminal.PlainTable(heads, rows))
    for one in entries:
        how = (
            one.failure
            or f"{one.said['how']}; torch {one.said['torch']}, Python {one.said['python']}"
        )
        screen.print(f"{one.contestant.name}: {how}", markup=False, soft_wrap=True)
    if apart or not ours:
        screen.print(
            f"NOT THE SAME TRAINING: {', '.join(apart)}"
            if ours
            else "fedstill did not run: nothing is compared"
        )
        return False
    screen.print(
        f"all that ran end with the same model: within {NEAR:g} of the way trained, "
        f"{100 * CLOSE:g} points"
    )
    return True


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    """Install, run in turn, print a table a workload; status 1 if what was trained is not the
    same.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="W1,W4", help="which, e.g. W1,W4,W4-MLP")
    parser.add_argument(
        "--only", default="", help="some contestants: fedstill,plain,flower,pfl,fluke,blazefl"
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each, in turn")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of a run, after one to warm up"
    )
    parser.add_argument(
        "--clients", type=int, default=0, help="fewer clients a round, for a quick look"
    )
    parser.add_argument("--epochs", type=int, default=0, help="other epochs, for a quick look")
    parser.add_argument(
        "--minutes",
        type=float,
        default=20,
        help="the longest that an installation or a run may take",
    )
    parser.add_argument(
        "--cache", type=Path, default=platformdirs.user_cache_path("fedstill") / "peers"
    )
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    parser.add_argument("--pip-args", default="", help="for uv, e.g. an index of torch's builds")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    processes.adopt()
    entries = installed(asked)
    terminal.console().print(
        f"{cores()} cores; {asked.pairs} runs of each in turn, {asked.rounds} rounds a run after "
        "one to warm up; "
        "median (min–max)"
    )
    agree = [
        measure(name, [Entry(e.contestant, e.python, e.failure) for e in entries], asked)
        for name in asked.workloads.split(",")
    ]
    sys.exit(0 if all(agree) else 1)


if __name__ == "__main__":
    main()
