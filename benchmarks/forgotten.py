"""How well each strategy of ``fedstill unlearn`` forgets a client, beside an exact result.

``python -m benchmarks.forgotten [FOLDER]`` prints the tables from the certificates in a folder or
its pack, by default results/unlearning-digits. ``--train`` trains the runs first: digits, five
clients, five seeds. In *only owner*, client 0 alone has class 7. In *one of many*, all clients have
similar data, and a third of those of client 0 have a planted trigger.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedstill import Experiment, from_clients, load_dataset, run
from fedstill.data.dataset import Dataset
from fedstill.report import terminal
from fedstill.running.directory import readable
from fedstill.unlearning.certificate import read_certificate
from fedstill.unlearning.report import COLUMNS, verification_table
from fedstill.unlearning.request import STRATEGIES, UnlearningRequest, strategy_named
from fedstill.unlearning.unlearn import unlearn
from fedstill.unlearning.verification import Backdoor

FOLDER = Path("results/unlearning-digits")
CLIENTS = 5
SEEDS = (1, 2, 3, 4, 5)
OWNED = 7
"""The class of which client 0 is the only owner."""
BACKDOOR = Backdoor(target=0, size=2)
SCENARIOS: Mapping[str, Backdoor | None] = {"only-owner": None, "one-of-many": BACKDOOR}
"""The backdoor of each scenario."""

SHOWN = [
    replace(column, digits=0)
    for column in COLUMNS
    if column.scale == 100 and column.path[-1] not in ("remaining", "sites", "auc")
]
"""The columns of the tables: all shares except these."""

SETTINGS = {
    "rounds": 8,
    "threads": 1,
    "measure": (),
    "keep_updates": True,
    "keep_checkpoints_every": 1,
    "model": {"name": "mlp"},
    "plan": {"epochs": 3, "batch": 20, "lr": 0.1},
}


def digits_of_clients(scenario: str, seed: int) -> Dataset:
    """The digits of all clients, dealt out at random except for what the scenario says."""
    digits = load_dataset("digits")
    backdoor = SCENARIOS[scenario]
    owners = np.random.default_rng(seed).integers(0, CLIENTS, len(digits.train))
    if backdoor is None:
        owners[digits.train.labels.numpy() == OWNED] = 0
    else:
        digits = backdoor.planted(digits, np.flatnonzero(owners == 0)[::3])
    pairs = []
    for client in range(CLIENTS):
        part = digits.train.take(torch.as_tensor(np.flatnonzero(owners == client)))
        pairs.append((part.values, part.labels))
    test = (digits.test.values, digits.test.labels)
    return from_clients("digits", pairs, test=test, classes=digits.classes)


def train(folder: Path, scenario: str, seed: int) -> None:
    """Train the original run of a scenario, and unlearn its client 0 by every strategy."""
    data = digits_of_clients(scenario, seed)
    place = folder / scenario / f"seed{seed}"
    experiment = Experiment(**SETTINGS, seed=seed, data={"public": 100})
    run(experiment, place / "original", data)
    for name in STRATEGIES:
        exact = None
        if name != "retraining":
            exact = place / "retraining"
        unlearn(
            place / "original",
            UnlearningRequest(clients=(0,)),
            strategy_named(name, {}),
            place / name,
            exact=exact,
            backdoor=SCENARIOS[scenario],
            data=data,
        )


def print_tables(folder: Path) -> None:
    """A table for each scenario: the mean over seeds, with its 95 % interval, of each model."""
    screen = terminal.console()
    for scenario in SCENARIOS:
        rows: dict[str, Sequence[str]] = {}
        for name in STRATEGIES:
            if name != "retraining":
                place = readable(folder) / scenario
                certificates = [read_certificate(place / f"seed{seed}" / name) for seed in SEEDS]
                table = verification_table(certificates, SHOWN)
                rows |= {"exact": table.rows["exact"], **rows, **table.rows}
        cells = [[model, *texts] for model, texts in rows.items()]
        screen.print(terminal.table([scenario, *(column.title for column in SHOWN)], cells))


def main() -> None:
    """Print the tables; with ``--train``, after the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--train", action="store_true", help="train the runs first")
    options = parser.parse_args()
    if options.train:
        for scenario in SCENARIOS:
            for seed in SEEDS:
                train(options.folder, scenario, seed)
    print_tables(options.folder)


if __name__ == "__main__":
    main()
