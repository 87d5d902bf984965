"""How well QKT's noise filter separates peers that know a class from those that do not, from the
journals of finished runs: ``python -m benchmarks.probes FOLDER ... [--thresholds 0.01,0.1]``.

For each client with a query, each queried class and each peer, a journal contains the peer's mean
softmax on noise. The benchmark prints the share of peers that pass a threshold: of those that have
examples of the class, and of those that have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import numbers, option_parser
from fedstill.report import terminal
from fedstill.running.runs import Run, find

GROUPS = {True: "have the class", False: "lack it"}
"""The names of peers with and without examples of the class."""


@dataclass(frozen=True)
class Probe:
    """A peer's mean softmax for a queried class, and whether it has examples of the class."""

    has_class: bool
    softmax: float


def probes_of(run: Run) -> Iterator[Probe]:
    """The probes of a run."""
    softmax = {event["client"]: event["probe"] for event in run.clients if "probe" in event}
    queries = {event["client"]: event["query"] for event in run.clients if event.get("query")}
    for client, query in queries.items():
        for peer in softmax.keys() - {client}:
            for label in query:
                has_class = run.label_counts[peer][label] > 0
                yield Probe(has_class, softmax[peer][label])


def passing(probes: Sequence[Probe], threshold: float) -> str:
    """The share of the probes that reach a threshold, in percent."""
    if not probes:
        return "–"
    passed = sum(probe.softmax >= threshold for probe in probes)
    return f"{100 * passed / len(probes):.0f}"


def rows(folder: Path, thresholds: Sequence[float]) -> Iterator[Sequence[str]]:
    """The two rows of a folder."""
    probes: list[Probe] = []
    for run in find([folder]):
        probes += probes_of(run)
    for has_class, label in GROUPS.items():
        group = [probe for probe in probes if probe.has_class == has_class]
        shares = [passing(group, threshold) for threshold in thresholds]
        yield str(folder).removeprefix("results/"), label, str(len(group)), *shares


def main() -> None:
    """Print two rows for each folder."""
    parser = option_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--thresholds", type=numbers, default="0.01,0.02,0.05,0.1,0.2")
    options = parser.parse_args()
    cells: list[Sequence[str]] = []
    for folder in options.folders:
        cells += rows(folder, options.thresholds)
    head = ["peers that pass [%]", "", "pairs", *map(str, options.thresholds)]
    terminal.console().print(terminal.PlainTable(head, cells, words=2))


if __name__ == "__main__":
    main()
