"""Planted culprits: how often ``fedstill why`` names first who is known to harm a class, and what
simpler guesses say.

``python -m benchmarks.culprits [--rounds 40] [--seeds 1,2,3] [--methods fedavg,fedntd,scaffold]
[--alphas 0.5,0.2]``: digits, twenty clients, ten a round, Dirichlet. One client is planted: its
labels of class 7 are changed, in all of its data ("all") or in half ("half"); or it holds class 7
and nobody else does ("helper", who must never be named). Counted are the rounds in which it acts
and the class falls by 10 points or more, and of these the ones in which it does harm: had it idled,
the class would be 5 points higher. Of these (for the helper, of all), the share in which each rule
names it first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.guesses import OF, Planted
from fedstill import Experiment, from_clients, load_dataset, run
from fedstill.data.dataset import Dataset
from fedstill.data.partition.dirichlet import dirichlet
from fedstill.report import terminal

CLIENTS, HARM = 20, 0.05
RULES = ("contribution", "leave-one-out", "own model's fall", "norm of the update")


def planted(kind: str, alpha: float, seed: int) -> Dataset:
    """Digits dealt out, with one client's data changed; ``Planted.client`` is who."""
    digits = load_dataset("digits")
    labels = digits.train.labels.numpy()
    parts = [np.asarray(p) for p in dirichlet(labels, CLIENTS, alpha, seed)]
    holds = [int((labels[p] == OF).sum()) for p in parts]
    Planted.client = int(np.argmax(holds))
    draw = np.random.default_rng(seed)
    pairs = []
    for client, part in enumerate(parts):
        values, own = digits.train.values[torch.as_tensor(part)], labels[part].copy()
        mine = np.flatnonzero(own == OF)
        if client == Planted.client and kind in ("all", "half"):
            changed = mine if kind == "all" else draw.permutation(mine)[: len(mine) // 2]
            own[changed] = (OF + 1 + draw.integers(0, 9, len(changed))) % 10
        keep = (
            own != OF
            if kind == "helper" and client != Planted.client
            else np.ones(len(own), dtype=bool)
        )
        kept = torch.as_tensor(np.flatnonzero(keep))
        pairs.append((values[kept], torch.as_tensor(own)[kept]))
    return from_clients(
        "digits", pairs, test=(digits.test.values, digits.test.labels), classes=digits.classes
    )


def counted(
    kind: str, alpha: float, method: str, seed: int, rounds: int
) -> list[Mapping[str, Any]]:
    """What the measure saw in one run."""
    data = planted(kind, alpha, seed)
    asked = Experiment(
        method=method,
        rounds=rounds,
        seed=seed,
        measure=("benchmarks.guesses:Guesses",),
        measure_every=1,
        topology={"clients": CLIENTS, "sampled": 10},
        plan={"epochs": 5, "batch": 20, "lr": 0.02},
    )
    with tempfile.TemporaryDirectory() as place:
        return [e for e in run(asked, Path(place) / "run", data=data).measures if "first" in e]


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--methods", default="fedavg,fedntd,scaffold")
    parser.add_argument("--alphas", default="0.5,0.2")
    said = parser.parse_args()
    seeds, rows = list(map(int, said.seeds.split(","))), []
    for kind in ("all", "half", "helper"):
        for alpha in map(float, said.alphas.split(",")):
            for method in said.methods.split(","):
                looks = [
                    e for seed in seeds for e in counted(kind, alpha, method, seed, said.rounds)
                ]
                harmful = [e for e in looks if kind == "helper" or e["harm"] >= HARM]
                fall = 100 * float(np.mean([e["fall"] for e in looks])) if looks else 0.0
                hits = [[e["first"][rule] == e["planted"] for e in harmful] for rule in RULES]
                cells = [f"{np.mean(hit):.2f}" if hit else "–" for hit in hits]
                rows.append(
                    (
                        kind,
                        f"{alpha:g}",
                        method,
                        str(len(looks)),
                        f"{fall:.0f}",
                        str(len(harmful)),
                        *cells,
                    )
                )
                print(*rows[-1], flush=True)
    terminal.console().print(
        terminal.PlainTable(
            ["planted", "alpha", "method", "rounds", "fall [points]", "harmful", *RULES], rows
        )
    )


if __name__ == "__main__":
    main()
