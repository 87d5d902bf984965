"""The temperatures of HiPer-FedKD's clients, without the classes that a client lacks and with them.

``python -m benchmarks.temperatures FOLDER ...``: for each run, the lowest temperature 0.01, and the
client split's label counts, each client's number of absent classes and its temperature: linear
(Imp. 1 and 2) and exponential (HiPer-FedKD). "Skipped" is the notebooks' score, "counted" that of
the text, in which an absent class counts 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from fedstill.core.label_counts import proportions
from fedstill.methods.hiper_fedkd import client_temperature, heterogeneity_score
from fedstill.report import terminal
from fedstill.running.runs import find


def temperatures(label_counts: Sequence[Sequence[int]], count_absent: bool) -> list[str]:
    """The clients' linear and exponential temperatures, as two cells."""
    shares = [proportions(torch.tensor(counts)) for counts in label_counts]
    mean_shares = torch.stack(shares).mean(0)
    scores = [heterogeneity_score(share, mean_shares, count_absent) for share in shares]
    linear = [client_temperature(score, "linear") for score in scores]
    exponential = [client_temperature(score, "exponential") for score in scores]
    return [" ".join(f"{value:.3f}" for value in values) for values in (linear, exponential)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    rows = []
    for run in find(arguments.folders):
        absent = " ".join(str(counts.count(0)) for counts in run.label_counts)
        for label, count_absent in (("skipped", False), ("counted", True)):
            cells = temperatures(run.label_counts, count_absent)
            rows.append((f"{run.folder.parent.name}", absent, label, *cells))
    heads = ["clients' temperatures", "absent classes", "these are", "linear", "exponential"]
    terminal.console().print(terminal.PlainTable(heads, rows))
