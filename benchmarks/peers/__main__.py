"""Compare fedstill with other libraries:
``python -m benchmarks.peers [--workloads W1,W4] [--pairs 3] [--rounds 3]``.

Each contestant has an environment of its own. All get the same tensors, network, initial weights,
clients, batch orders and learning rates, in float32. Their runs alternate, so that other programs
on the machine disturb all of them alike.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import platformdirs

from benchmarks.options import names_among, option_parser
from benchmarks.peers import processes, tasks
from benchmarks.peers.common import Task, cores
from benchmarks.peers.entry import Entry, accuracy, distance
from benchmarks.peers.environments import CONTESTANTS, Installer, NotInstalled
from benchmarks.turns import ratios, spread
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.report import terminal

MAX_DISTANCE = 0.05
"""The largest distance between two models of the same training, relative to the distance that
training moved the weights.
"""

MAX_ACCURACY_DIFFERENCE = 0.02
"""The largest difference between the accuracies of two models of the same training."""

HEAD = [
    "",
    "seconds a round",
    "times fedstill's",
    "start-up, s",
    "peak memory",
    "accuracy",
    "distance",
]


def installed(options: argparse.Namespace) -> list[Entry]:
    """The contestants, each with its interpreter, or with the reason why it has none."""
    installer = Installer(
        cache=options.cache,
        fresh=options.fresh,
        uv_arguments=options.pip_args.split(),
        seconds=60 * options.minutes,
    )
    entries = []
    for contestant in CONTESTANTS:
        if contestant.key not in options.only:
            continue
        _log(f"{contestant.name}: its environment")
        try:
            entries.append(Entry(contestant, installer.python(contestant)))
        except NotInstalled as error:
            entries.append(Entry(contestant, Path(), f"not installed: {error}"))
    return entries


def measure(name: str, entries: Sequence[Entry], options: argparse.Namespace) -> bool:
    """Run a workload with all contestants in turn, and print its table.

    Returns whether all contestants performed the same training.
    """
    workload = tasks.resized(name, options.clients, options.epochs)
    with tempfile.TemporaryDirectory(prefix="task-") as folder:
        # The first round of a run is the warm-up.
        task = tasks.write_task(workload, options.rounds + 1, Path(folder))
        for turn in range(options.pairs):
            _run_turn(turn, entries, Path(folder), options)
    _print_heading(workload, is_smaller=bool(options.clients or options.epochs))
    return show(task, entries)


def _run_turn(
    turn: int, entries: Sequence[Entry], task_folder: Path, options: argparse.Namespace
) -> None:
    """Run every contestant once; odd turns have the reverse order."""
    order = list(entries)
    if turn % 2:
        order.reverse()
    for entry in order:
        if entry.failure:
            continue
        _log(f"turn {turn + 1} of {options.pairs}: {entry.contestant.name}")
        entry.run(task_folder, 60 * options.minutes)


def _print_heading(workload: Workload, is_smaller: bool) -> None:
    screen = terminal.console()
    screen.print(f"\n{workload.name}: {workload.about}")
    if is_smaller:
        screen.print(
            f"SMALLER than that: {workload.sampled} clients a round, {workload.plan['epochs']} "
            "epoch(s)"
        )


def show(task: Task, entries: Sequence[Entry]) -> bool:
    """Print the table of a workload, and the setup of each contestant.

    Returns whether all contestants performed the same training.
    """
    screen = terminal.console()
    # A file should get complete lines.
    screen.width = max(screen.width, 120)
    complete = [entry for entry in entries if not entry.failure]
    fedstill = next((entry for entry in complete if entry.is_fedstill), None)
    rows = [cells(task, entry, fedstill) for entry in complete]
    screen.print(terminal.PlainTable(HEAD, rows))
    for entry in entries:
        screen.print(f"{entry.contestant.name}: {_setup(entry)}", markup=False, soft_wrap=True)

    if fedstill is None:
        screen.print("fedstill did not run, so nothing is compared")
        return False
    different = [
        entry.contestant.name for entry in complete if not is_same_training(task, entry, fedstill)
    ]
    if different:
        screen.print(f"NOT THE SAME TRAINING: {', '.join(different)}")
        return False
    screen.print(
        f"all contestants that ran have the same model: distances up to {MAX_DISTANCE:g}, "
        f"accuracies within {100 * MAX_ACCURACY_DIFFERENCE:g} points"
    )
    return True


def cells(task: Task, entry: Entry, fedstill: Entry | None) -> list[str]:
    """The row of a contestant."""
    ratio = ""
    model_distance = ""
    if fedstill is not None:
        ratio = spread(ratios(entry.medians, fedstill.medians))
        model_distance = f"{distance(task, entry.final, fedstill.final):.0e}"
    peak = ""
    # Without /proc, the memory is unknown.
    if max(entry.peaks):
        peak = f"{max(entry.peaks) / 1e6:,.0f} MB"
    return [
        entry.contestant.name,
        spread(list(chain.from_iterable(entry.runs))),
        ratio,
        f"{statistics.median(entry.starts):.1f}",
        peak,
        f"{100 * accuracy(task, entry.final):.1f} %",
        model_distance,
    ]


def is_same_training(task: Task, entry: Entry, fedstill: Entry) -> bool:
    """Whether a contestant's model is close enough to fedstill's."""
    if distance(task, entry.final, fedstill.final) > MAX_DISTANCE:
        return False
    difference = accuracy(task, entry.final) - accuracy(task, fedstill.final)
    return abs(difference) <= MAX_ACCURACY_DIFFERENCE


def _setup(entry: Entry) -> str:
    """How a contestant was run, or why it was not."""
    if entry.failure:
        return entry.failure
    result = entry.result
    return f"{result['setup']}; torch {result['torch']}, Python {result['python']}"


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def options_of_command() -> argparse.Namespace:
    """Read the options of the command line."""
    keys = [contestant.key for contestant in CONTESTANTS]
    cache = platformdirs.user_cache_path("fedstill") / "peers"
    parser = option_parser(__doc__)
    parser.add_argument(
        "--workloads",
        type=names_among(WORKLOADS),
        default="W1,W4",
        help="the workloads, e.g. W1,W4-MLP (default: W1,W4)",
    )
    parser.add_argument(
        "--only",
        type=names_among(keys),
        default=keys,
        help=f"some of the contestants: {','.join(keys)}",
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each contestant, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run after the warm-up")
    parser.add_argument(
        "--clients", type=int, default=0, help="fewer clients a round, for a quick look"
    )
    parser.add_argument(
        "--epochs", type=int, default=0, help="another number of epochs, for a quick look"
    )
    parser.add_argument(
        "--minutes", type=float, default=20, help="the time limit of an installation or a run"
    )
    parser.add_argument(
        "--cache", type=Path, default=cache, help="the folder that keeps the environments"
    )
    parser.add_argument("--fresh", action="store_true", help="create the environments again")
    parser.add_argument("--pip-args", default="", help="for uv, e.g. an index of torch's builds")
    return parser.parse_args()


def main() -> None:
    """Install the contestants, run them in turn, and print a table for each workload.

    The status is 1 if they did not perform the same training.
    """
    options = options_of_command()
    # sys.exit unwinds the stack, so that running contestants are ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processes.adopt()
    contestants = installed(options)
    terminal.console().print(
        f"{cores()} cores; {options.pairs} runs of each in turn, {options.rounds} rounds a run "
        "after one to warm up; median (min–max)"
    )
    is_same = []
    for name in options.workloads:
        entries = [Entry(entry.contestant, entry.python, entry.failure) for entry in contestants]
        is_same.append(measure(name, entries, options))
    sys.exit(int(not all(is_same)))


if __name__ == "__main__":
    main()
