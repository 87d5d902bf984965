"""The temperatures of HiPer-FedKD's clients, with two scores for the classes that a client lacks:
``python -m benchmarks.temperatures FOLDER ...``.

For each run, with the label counts of its client split and the lowest temperature 0.01: the number
of absent classes of each client, and its linear temperature (Imp. 1 and 2) and its exponential one
(HiPer-FedKD). "skipped" is the score of the notebooks, "counted" that of the text, in which an
absent class adds 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.options import option_parser
from fedstill.core.label_counts import proportions
from fedstill.methods.hiper_fedkd import client_temperature, heterogeneity_score
from fedstill.report import terminal
from fedstill.running.runs import find


def temperatures(label_counts: Sequence[Sequence[int]], count_absent: bool) -> list[str]:
    """The linear and the exponential temperatures of all clients, as two cells."""
    shares = [proportions(torch.tensor(counts)) for counts in label_counts]
    mean_shares = torch.stack(shares).mean(0)
    scores = [heterogeneity_score(share, mean_shares, count_absent) for share in shares]
    linear = [client_temperature(score, "linear") for score in scores]
    exponential = [client_temperature(score, "exponential") for score in scores]
    return [_listed(linear), _listed(exponential)]


def _listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def main() -> None:
    """Print two rows for each run."""
    parser = option_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of runs")
    options = parser.parse_args()
    rows = []
    for run in find(options.folders):
        absent = " ".join(str(counts.count(0)) for counts in run.label_counts)
        for label, count_absent in (("skipped", False), ("counted", True)):
            cells = temperatures(run.label_counts, count_absent)
            rows.append([run.folder.parent.name, absent, label, *cells])
    head = ["clients' temperatures", "absent classes", "these are", "linear", "exponential"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
