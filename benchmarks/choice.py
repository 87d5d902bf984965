"""The quality of SFedKD's greedy choice of teachers, compared with the best and with a random
choice: ``python -m benchmarks.choice [--rounds 200]``.

The client splits are those of SFedKD's settings over 100 clients, of which 10 are drawn in each
round. The distance is the KL divergence from the mean label shares of the chosen teachers to the
uniform distribution, in nats, averaged over rounds. "optimal" is the best of all choices, "random"
the mean of all choices, and "as good" the share of rounds in which the greedy choice is as good as
the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import option_parser
from fedstill.core.keys import numpy_generator
from fedstill.core.label_counts import distance, proportions
from fedstill.data.partition import extended_dirichlet
from fedstill.methods.sfedkd import TIE, complementary
from fedstill.report import terminal

CLIENTS = 100
CANDIDATES = 10
NUMBERS_OF_TEACHERS = (3, 4, 5, 6)

CIFAR10 = [5000] * 10
CIFAR100 = [500] * 100
HAM10000 = [327, 514, 1099, 115, 1113, 6705, 142]


@dataclass(frozen=True)
class Split:
    """An extended Dirichlet partition.

    ``class_sizes``: the examples of each class. ``min_size``: of the smallest client.
    """

    class_sizes: Sequence[int]
    classes_per_client: int
    alpha: float
    min_size: int = 10

    def label_shares(self) -> Tensor:
        """The label shares of each client (clients, C)."""
        labels = np.repeat(np.arange(len(self.class_sizes)), self.class_sizes)
        parts = extended_dirichlet(
            labels,
            CLIENTS,
            self.classes_per_client,
            self.alpha,
            seed=1,
            min_size=self.min_size,
        )
        counts = [np.bincount(labels[part], minlength=len(self.class_sizes)) for part in parts]
        return proportions(np.stack(counts))


SPLITS = {
    "CIFAR-10 (2, .5)": Split(CIFAR10, 2, 0.5),
    "CIFAR-10 (2, 1)": Split(CIFAR10, 2, 1.0),
    "CIFAR-10 (2, 10)": Split(CIFAR10, 2, 10.0),
    "CIFAR-10 (2, 100)": Split(CIFAR10, 2, 100.0),
    "CIFAR-100 (20, 1)": Split(CIFAR100, 20, 1.0),
    "HAM10000 (2, 1)": Split(HAM10000, 2, 1.0, min_size=1),
}


@dataclass(frozen=True)
class Choices:
    """The distances to uniform of one round's choices: of the greedy one, and of the best and the
    mean of all.
    """

    greedy: float
    best: float
    mean: float

    @staticmethod
    def among(candidates: Tensor, k: int) -> Choices:
        """Choose k of the candidates, whose label shares are (M, C)."""
        uniform = torch.full_like(candidates[0], 1 / candidates.shape[1])
        choices = torch.tensor(list(combinations(range(len(candidates)), k)))
        distances = distance(candidates[choices].mean(1), uniform, "kl", smoothing=0.0)
        greedy_shares = candidates[complementary(candidates, k)].mean(0)
        greedy = distance(greedy_shares, uniform, "kl", smoothing=0.0)
        return Choices(float(greedy), float(distances.min()), float(distances.mean()))

    @property
    def is_optimal(self) -> bool:
        """Whether the greedy choice is as good as the best one."""
        return self.greedy <= self.best + TIE


def cells(label_shares: Tensor, k: int, rounds: int) -> list[str]:
    """The cells of a row: means over rounds, and how often the greedy choice is optimal."""
    draws = numpy_generator(k)
    choices = []
    for _ in range(rounds):
        drawn = torch.from_numpy(draws.permutation(len(label_shares))[:CANDIDATES])
        choices.append(Choices.among(label_shares[drawn], k))
    optimal_share = fmean(choice.is_optimal for choice in choices)
    return [
        f"{fmean(choice.greedy for choice in choices):.3f}",
        f"{fmean(choice.best for choice in choices):.3f}",
        f"{fmean(choice.mean for choice in choices):.3f}",
        f"{100 * optimal_share:.0f} %",
    ]


def main() -> None:
    """Print a row for each split and number of teachers."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for name, split in SPLITS.items():
        label_shares = split.label_shares()
        rows += [
            [name, str(k), *cells(label_shares, k, options.rounds)] for k in NUMBERS_OF_TEACHERS
        ]
    head = ["split", "K", "greedy", "optimal", "random", "as good"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
