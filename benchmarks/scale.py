"""Seconds and bytes as a function of the number of clients, clients a round, model size and
teachers: ``python -m benchmarks.scale [--only clients ...]``.

"start-up" is the time of a run outside its rounds: the split, the check of the settings, and the
first line of the journal. With ``million``, the data grow with the clients, up to a million, of
which 1,000 act in a round. ``--json FILE`` writes the rows, ``--plot FILE`` draws them
(``pip install 'fedstill[docs]'``). Each row is a run in a process of its own, on synthetic images.
Memory is the peak of this process (resident set), start-up included.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.memory import peak_memory
from benchmarks.options import option_parser
from benchmarks.turns import seconds_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedstill import Experiment
    from fedstill.config.tables import Engine
    from fedstill.data.dataset import Dataset


@dataclass(frozen=True)
class Case:
    """One run. ``images``: of all clients together, so that the data do not grow with their
    number.
    """

    clients: int = 1000
    sampled: int = 20
    width: int = 64
    teachers: int = 0
    method: str = "fedavg"
    engine: Engine = "pooled"
    rounds: int = 5
    images: int = 20_000

    @property
    def label(self) -> str:
        """The description in the table."""
        return (
            f"{self.method}, {self.clients:,} clients, {self.sampled:,} a round, "
            f"width {self.width}, {self.teachers} teachers"
        )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a run: seconds of its start and of a round, and bytes of memory, of all files, of
    its journal and of its client split.
    """

    start: float
    round: float
    memory: float
    disk: float
    journal: float
    split: float

    def cells(self) -> list[str]:
        """The numbers in the table."""
        megabytes = [
            f"{size / 1e6:.1f}" for size in (self.memory, self.disk, self.journal, self.split)
        ]
        return [f"{self.start:.2f}", f"{self.round:.3f}", *megabytes]


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
"""The cases by the name of what varies among them."""


@dataclass(frozen=True)
class Panel:
    """A column of the figure.

    ``curves``: the field on the x axis of each curve, by the curve's name in ``AXES``. ``title``:
    of the x axis.
    """

    curves: Mapping[str, str]
    title: str


PANELS = (
    Panel({"clients": "clients"}, "clients, 20 a round, 20,000 images in all (MOON)"),
    Panel({"sampled": "sampled", "stacked": "sampled"}, "clients a round"),
    Panel({"width": "width"}, "width of the model's two hidden layers"),
    Panel({"teachers": "teachers"}, "teachers a client (AVER)"),
)

LABELS = {"sampled": "pooled", "stacked": "stacked"}
"""The names of curves in a legend."""

HEAD = (
    "varied",
    "run",
    "start-up, s",
    "round, s",
    "memory, MB",
    "disk, MB",
    "journal, MB",
    "split, MB",
)

Row = Mapping[str, Any]
"""A case and its cost as they are written to JSON: the name in ``AXES`` under "varied", and all
fields of both.
"""

# fedstill and torch are imported in the processes that run cases, whose memory is measured.


def noise_images(count: int) -> Dataset:
    """Images of noise, 500 of which are also the test set."""
    import torch

    from fedstill.data.sources import from_tensors

    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    images = torch.randint(256, (count, 1, 8, 8), generator=draws, dtype=torch.uint8)
    return from_tensors("noise", (images, labels), (images[:500], labels[:500]))


def experiment_of(case: Case) -> Experiment:
    """The experiment of a case."""
    from fedstill import Experiment

    topology: dict[str, Any] = {"clients": case.clients, "sampled": case.sampled}
    method: dict[str, Any] = {"name": case.method}
    if case.method == "aver":
        method |= {"k": case.teachers, "teacher_choice": "random"}
        topology["kind"] = "parallel"
    return Experiment(
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


def cost_of(case: Case) -> Cost:
    """Train a case in this process, and return its cost."""
    from fedstill import run
    from fedstill.running.journal import JOURNAL, read_journal
    from fedstill.running.split_file import SPLIT

    dataset = noise_images(case.images)
    experiment = experiment_of(case)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        seconds = seconds_of(lambda: run(experiment, folder, data=dataset))
        events = read_journal(folder / JOURNAL)
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        disk = sum(path.stat().st_size for path in files)
        journal = (folder / JOURNAL).stat().st_size
        split = (folder / SPLIT).stat().st_size
    rounds = [event["seconds"] for event in events if event["event"] == "round"]
    return Cost(
        start=seconds - sum(rounds),
        round=statistics.median(rounds),
        memory=float(peak_memory()),
        disk=float(disk),
        journal=float(journal),
        split=float(split),
    )


def measure(case: Case) -> Cost:
    """The cost of a case in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(cost_of, (case,))


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draw seconds a round and memory as a function of what varies."""
    import matplotlib

    matplotlib.use("svg")
    # The same rows give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "fedstill"
    from matplotlib import pyplot

    names = {row["varied"] for row in rows}
    panels = [panel for panel in PANELS if names & panel.curves.keys()]
    size = (3.4 * len(panels), 5.2)
    figure, axes = pyplot.subplots(2, len(panels), figsize=size, squeeze=False)
    for column, panel in enumerate(panels):
        draw_panel(axes[0, column], panel, rows, Quantity("round", "seconds a round"))
        draw_panel(axes[1, column], panel, rows, Quantity("memory", "memory, MB", unit=1e6))
        if len(panel.curves) > 1:
            axes[0, column].legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


@dataclass(frozen=True)
class Quantity:
    """A quantity on the y axis: its key in a row, its title, and its unit."""

    key: str
    title: str
    unit: float = 1


def draw_panel(axes: Axes, panel: Panel, rows: Sequence[Row], quantity: Quantity) -> None:
    """Draw the curves of one quantity."""
    ticks = set()
    for name, field in panel.curves.items():
        curve = [row for row in rows if row["varied"] == name]
        positions = [row[field] for row in curve]
        values = [row[quantity.key] / quantity.unit for row in curve]
        axes.plot(positions, values, "o-", label=LABELS.get(name))
        ticks.update(positions)
    scale = "linear"
    if min(ticks) > 0:
        scale = "log"
    axes.set(xlabel=panel.title, ylabel=quantity.title, xscale=scale)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    axes.set_xticks(sorted(ticks))
    axes.set_xticklabels([f"{tick:,}" for tick in sorted(ticks)])
    axes.minorticks_off()


def main() -> None:
    """Measure the cases, and print a row for each."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=list(AXES), default=list(AXES), help="what varies"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the rows here")
    options = parser.parse_args()

    table = Table(
        title=f"{options.rounds} rounds each; all other settings are the defaults of Case"
    )
    for heading in HEAD[:2]:
        table.add_column(heading)
    for heading in HEAD[2:]:
        table.add_column(heading, justify="right")
    rows = []
    for name in options.only:
        for default_case in AXES[name]:
            case = replace(default_case, rounds=options.rounds)
            cost = measure(case)
            table.add_row(name, case.label, *cost.cells())
            rows.append({"varied": name, **asdict(case), **asdict(cost)})
    Console(width=160).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
