"""How well each strategy of ``fedstill unlearn`` forgets a client, compared with an exact result:
``python -m benchmarks.forgotten``.

The benchmark prints the tables of all studies from the certificates of their packs,
results/unlearning-NAME. ``--study NAME`` prints those of one study. ``--train FOLDER`` first trains
its runs in a folder: two scenarios with five seeds each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.options import option_parser
from fedstill import Experiment, from_clients, load_dataset, run
from fedstill.core.errors import Diverged
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset
from fedstill.report import terminal
from fedstill.running.packs import readable
from fedstill.unlearning.certificate import CERTIFICATE, read_certificate
from fedstill.unlearning.report import COLUMNS, verification_table
from fedstill.unlearning.request import STRATEGIES, UnlearningRequest, strategy_named
from fedstill.unlearning.unlearn import unlearn
from fedstill.unlearning.verification import Backdoor

RESULTS = Path("results")
CLIENTS = 5
SEEDS = (1, 2, 3, 4, 5)

SHOWN = [
    replace(column, digits=0)
    for column in COLUMNS
    if column.scale == 100 and column.path[-1] not in ("remaining", "sites", "auc")
]
"""The columns of the tables: all shares except these."""

COMMON_SETTINGS: Mapping[str, Any] = {
    "threads": 1,
    "measure": (),
    "keep_updates": True,
    "keep_checkpoints_every": 1,
}
"""The settings of all studies: one thread, and all files that strategies need."""


@dataclass(frozen=True)
class Scenario:
    """A client that leaves.

    ``client``: its number. ``only_class``: a class of which it is the only owner. ``backdoor``: a
    trigger that is planted into a third of its images.
    """

    name: str
    client: int = 0
    only_class: int | None = None
    backdoor: Backdoor | None = None


@dataclass(frozen=True)
class Sizes:
    """The numbers of training and test examples."""

    train: int
    test: int


@dataclass(frozen=True)
class Study:
    """A data set, its scenarios, and how models are trained.

    ``settings``: keys of the config in addition to ``COMMON_SETTINGS``; ``data.name`` names the
    data. With a partition, clients are those of the partition. Without one, examples are assigned
    to clients at random, as far as the scenario allows. ``sizes``: of random subsets; None for all
    examples.
    """

    settings: Mapping[str, Any]
    scenarios: Sequence[Scenario]
    sizes: Sizes | None = None

    def experiment(self, seed: int) -> Experiment:
        """The original run, with client 0 in it."""
        return Experiment(**COMMON_SETTINGS, **self.settings, seed=seed)

    def dataset(self, scenario: Scenario, seed: int) -> Dataset | None:
        """The examples of each client, or None if the config names all of them."""
        if "partition" in self.settings:
            return None
        dataset = load_dataset(self.settings["data"]["name"])
        draws = np.random.default_rng(seed)
        train = dataset.train
        test = dataset.test
        if self.sizes is not None:
            train = _drawn(train, self.sizes.train, draws)
            test = _drawn(test, self.sizes.test, draws)
        owners = draws.integers(0, CLIENTS, len(train))
        if scenario.only_class is not None:
            owners[train.labels.numpy() == scenario.only_class] = scenario.client
        dataset = replace(dataset, train=train, test=test)
        if scenario.backdoor is not None:
            of_client = np.flatnonzero(owners == scenario.client)
            dataset = scenario.backdoor.planted(dataset, of_client[::3])
        pairs = []
        for client in range(CLIENTS):
            part = dataset.train.take(torch.as_tensor(np.flatnonzero(owners == client)))
            pairs.append((part.values, part.labels))
        return from_clients(
            dataset.name, pairs, test=(test.values, test.labels), classes=dataset.classes
        )


def _drawn(examples: Examples, size: int, draws: np.random.Generator) -> Examples:
    """A random subset of examples."""
    return examples.take(torch.as_tensor(draws.permutation(len(examples))[:size]))


BACKDOOR = Backdoor(target=0, size=2)
ONE_OF_MANY = Scenario("one-of-many", backdoor=BACKDOOR)

STUDIES: Mapping[str, Study] = {
    "digits": Study(
        settings={
            "data": {"name": "digits", "public": 100},
            "rounds": 8,
            "model": "mlp",
            "plan": {"epochs": 3, "batch": 20, "lr": 0.1},
        },
        scenarios=(Scenario("only-owner", only_class=7), ONE_OF_MANY),
    ),
    "heart": Study(
        settings={
            "data": {"name": "heart_disease", "public": 50},
            "partition": {"kind": "column", "column": "hospital"},
            "topology": {"clients": 4},
            "rounds": 30,
            "model": "logistic",
            "plan": {"epochs": 5, "batch": 16, "lr": 0.01, "momentum": 0.9},
        },
        scenarios=(Scenario("switzerland", client=3), Scenario("hungary", client=1)),
    ),
    "blood": Study(
        settings={
            "data": {"name": "pbc_blood28", "public": 100},
            "rounds": 8,
            "model": "cnn",
            "plan": {"epochs": 2, "batch": 20, "lr": 0.02},
        },
        scenarios=(Scenario("only-owner", only_class=7), ONE_OF_MANY),
        sizes=Sizes(train=1500, test=1000),
    ),
    "cifar10": Study(
        settings={
            "data": {"name": "cifar10", "public": 100},
            "rounds": 10,
            "model": "cnn",
            "plan": {"epochs": 2, "batch": 20, "lr": 0.02},
        },
        scenarios=(Scenario("only-owner", only_class=7), ONE_OF_MANY),
        sizes=Sizes(train=2000, test=1000),
    ),
}


def train(study: Study, scenario: Scenario, seed: int, folder: Path) -> None:
    """Train the original run of a scenario, and unlearn its client by every strategy."""
    data = study.dataset(scenario, seed)
    run(study.experiment(seed), folder / "original", data)
    for name in STRATEGIES:
        exact = None
        if name != "retraining":
            exact = folder / "retraining"
        try:
            unlearn(
                folder / "original",
                UnlearningRequest(clients=(scenario.client,)),
                strategy_named(name, {}),
                folder / name,
                exact=exact,
                backdoor=scenario.backdoor,
                data=data,
            )
        except Diverged as error:
            print(f"{folder / name}: {error}")
    remove_models(folder)


def remove_models(folder: Path) -> None:
    """Delete the models and updates of runs, which take gigabytes and which packs leave out."""
    for path in folder.rglob("*.safetensors"):
        if path.name != "split.safetensors":
            path.unlink()


def certificates_of(strategy: str, folder: Path) -> list[Mapping[str, Any]]:
    """The certificates of a strategy in a scenario, of all seeds on which it did not diverge."""
    folders = [folder / f"seed{seed}" / strategy for seed in SEEDS]
    return [read_certificate(path) for path in folders if (path / CERTIFICATE).is_file()]


def print_tables(study: Study, folder: Path) -> None:
    """A table for each scenario: the mean over seeds, with its 95 % interval, of each model."""
    screen = terminal.console()
    for scenario in study.scenarios:
        rows: dict[str, Sequence[str]] = {}
        for name in STRATEGIES:
            if name == "retraining":
                continue
            certificates = certificates_of(name, readable(folder) / scenario.name)
            table = dict(verification_table(certificates, SHOWN).rows)
            if len(certificates) < len(SEEDS):
                table[f"{name} ({len(certificates)} of {len(SEEDS)} seeds)"] = table.pop(name)
            # "exact" and "original" are the same in all tables, and the exact model comes first.
            rows.setdefault("exact", table["exact"])
            for model, texts in table.items():
                rows.setdefault(model, texts)
        cells = [[model, *texts] for model, texts in rows.items()]
        titles = [column.title for column in SHOWN]
        screen.print(terminal.PlainTable([scenario.name, *titles], cells))


def main() -> None:
    """Print the tables; with ``--train``, after the runs."""
    parser = option_parser(__doc__)
    parser.add_argument("--study", choices=STUDIES, help="one study (default: all)")
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="train its runs there first")
    options = parser.parse_args()
    names = list(STUDIES)
    if options.study:
        names = [options.study]
    for name in names:
        study = STUDIES[name]
        folder = RESULTS / f"unlearning-{name}"
        if options.train is not None:
            folder = options.train / f"unlearning-{name}"
            for seed in SEEDS:
                for scenario in study.scenarios:
                    train(study, scenario, seed, folder / scenario.name / f"seed{seed}")
        if len(names) > 1:
            terminal.console().print(name)
        print_tables(study, folder)


if __name__ == "__main__":
    main()
