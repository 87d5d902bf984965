"""How good the greedy choice of teachers is: beside the best of all choices, and beside one at
random.

``python -m benchmarks.choice [--rounds 200]``: splits of SFedKD's settings over 100 clients, of
whom 10 are drawn a round. The distance is KL from the chosen teachers' mean label shares to
uniform, in nats, mean over rounds. "Optimal" is found by trying all choices; "as good" is the share
of rounds in which greedy's distance is the optimal one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from fedstill.core.keys import numpy_generator
from fedstill.core.label_counts import distance, proportions
from fedstill.data.partition import extended_dirichlet
from fedstill.methods.sfedkd import TIE, complementary
from fedstill.report import terminal

CIFAR10, HAM10000 = [5000] * 10, [327, 514, 1099, 115, 1113, 6705, 142]
SPLITS = {
    "CIFAR-10 (2, .5)": (CIFAR10, 2, 0.5, 10),
    "CIFAR-10 (2, 1)": (CIFAR10, 2, 1.0, 10),
    "CIFAR-10 (2, 10)": (CIFAR10, 2, 10.0, 10),
    "CIFAR-10 (2, 100)": (CIFAR10, 2, 100.0, 10),
    "CIFAR-100 (20, 1)": ([500] * 100, 20, 1.0, 10),
    "HAM10000 (2, 1)": (HAM10000, 2, 1.0, 1),
}
"""Examples of each class, classes a client, alpha, smallest client."""


def distances(shares: Tensor, k: int) -> tuple[float, Tensor]:
    """Of one round's candidates (M, C): greedy's distance to uniform, and that of every choice of
    k.
    """
    every = torch.tensor(list(combinations(range(len(shares)), k)))
    uniform = torch.full_like(shares[0], 1 / shares.shape[1])
    far = distance(shares[every].mean(1), uniform, "kl", smoothing=0.0)
    greedy = distance(shares[complementary(shares, k)].mean(0), uniform, "kl", smoothing=0.0)
    return float(greedy), far


def row(shares: Tensor, k: int, rounds: int) -> Sequence[str]:
    """Means over rounds: greedy, optimal, random, and how often greedy is optimal."""
    draw, found = numpy_generator(k), []
    for _ in range(rounds):
        drawn = torch.from_numpy(draw.permutation(len(shares))[:10])
        greedy, far = distances(shares[drawn], k)
        found.append(
            (greedy, float(far.min()), float(far.mean()), greedy <= float(far.min()) + TIE)
        )
    greedy, best, random, equal = np.mean(found, axis=0)
    return f"{greedy:.3f}", f"{best:.3f}", f"{random:.3f}", f"{100 * equal:.0f} %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    table = []
    for name, (sizes, classes_per_client, alpha, least) in SPLITS.items():
        labels = np.repeat(np.arange(len(sizes)), sizes)
        parts = extended_dirichlet(labels, 100, classes_per_client, alpha, seed=1, min_size=least)
        shares = proportions(
            np.stack([np.bincount(labels[p], minlength=len(sizes)) for p in parts])
        )
        table += [(name, f"{k}", *row(shares, k, given.rounds)) for k in (3, 4, 5, 6)]
    heads = ["split", "K", "greedy", "optimal", "random", "as good"]
    terminal.console().print(terminal.PlainTable(heads, table))
