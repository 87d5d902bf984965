"""How well QKT's noise filter tells peers that know a class from those that do not, from the
journals of finished runs.

``python -m benchmarks.probes FOLDER ... [--thresholds 0.01,0.1]``: folders of runs. For every
client that asked, every class asked for and every peer: the peer's mean softmax on noise, and
whether it has examples of the class. Printed is the share of peers that pass a threshold: of those
with the class, and of those without.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedstill.report import terminal
from fedstill.running.runs import Run, find


def probed(run: Run) -> Iterator[tuple[bool, float]]:
    """Whether a peer has a class asked for, and its mean softmax for it on noise."""
    probes = {e["client"]: e["probe"] for e in run.clients if "probe" in e}
    for client, query in {e["client"]: e["query"] for e in run.clients if e.get("query")}.items():
        for peer in probes.keys() - {client}:
            yield from (
                (bool(run.label_counts[peer][asked]), probes[peer][asked]) for asked in query
            )


def passing(values: Sequence[float], threshold: float) -> str:
    """The share that reaches the threshold, in percent."""
    return f"{100 * float((np.array(values) >= threshold).mean()):.0f}" if values else "–"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--thresholds", default="0.01,0.02,0.05,0.1,0.2")
    given = parser.parse_args()
    thresholds = [float(t) for t in given.thresholds.split(",")]
    lines = []
    for folder in given.folders:
        pairs = [pair for run in find([folder]) for pair in probed(run)]
        for who, has in (("have the class", True), ("lack it", False)):
            values = [value for knows, value in pairs if knows == has]
            shares = [passing(values, threshold) for threshold in thresholds]
            lines.append([str(folder).removeprefix("results/"), who, str(len(values)), *shares])
    head = ("peers that pass [%]", "", "pairs", *map(str, thresholds))
    terminal.console().print(terminal.PlainTable(head, lines, words=2))
