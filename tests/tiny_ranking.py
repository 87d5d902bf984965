"""A suite that runs in seconds and replaces a suite of the package: small data, two rounds, FedAvg
and FedNTD.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fedstill.benchmark import suites
from fedstill.benchmark.suites import Choice
from fedstill.running import runner
from fedstill.running.compare import Outcome, Variant

NAME = "digits-space"

TINY = """
paper = "The ranking, tiny"
version = 1
against = "FedAvg"
bounds = { floor = "FedAvg", ceiling = ["joint"] }
choosing = { column = "uneven", rounds = 1 }

[common]
rounds = 2
threads = 1
engine = "serial"
measure = []
reuse = false
data = { name = "digits", train_size = 120, test_size = 60 }
topology = { kind = "parallel", clients = 4, sampled = 2 }
model = { name = "mlp", hidden = [8] }
plan = { epochs = 1, batch = 20, optimiser = "sgd", lr = 0.05, momentum = 0.9, validation = 0.0 }

[columns]
"uneven" = { partition = { kind = "dirichlet", alpha = 1.0 } }
"even" = { partition = { kind = "iid" } }

[rows]
"FedAvg" = { method = "fedavg" }
"FedNTD" = { method = { name = "fedntd", beta = 1.0 } }
"joint" = { method = "fedavg", topology = { clients = 1, sampled = 1 }, partition = { kind = "iid" } }

[tries]
"FedAvg" = [{}, { "plan.lr" = 0.1 }]
"FedNTD" = [{}, { beta = 3.0 }]
"""  # noqa: E501

SCORES = {
    "FedAvg": Choice(((0.5, 0.6, 0.4), (0.7, 0.6, 0.5)), (10, 10)),
    "FedNTD": Choice(((0.5, 0.5, 0.5), (0.4, 0.4, 0.4)), (10, 10)),
}
"""Scores by which FedAvg's second try and FedNTD's first are chosen."""


def install(patch: pytest.MonkeyPatch) -> suites.Suite:
    """Replace digits-space by the tiny suite, with the scores of its tries."""
    recipe_text = suites.recipe_text

    def recipe_or_tiny(name: str) -> str:
        if name == f"rank/{NAME}":
            return TINY
        return recipe_text(name)

    patch.setattr(suites, "recipe_text", recipe_or_tiny)
    patch.setattr(suites, "shipped_choices", lambda *_: dict(SCORES))
    return suites.load_suite(NAME)


def do(runs: Sequence[Variant]) -> list[Outcome]:
    """Carry out runs in this process, except those that are finished."""
    outcomes = []
    for variant in runs:
        if not (variant.folder / "summary.json").is_file():
            runner.run(variant.experiment, variant.folder)
        rounds = variant.settings.rounds
        outcomes.append(Outcome(variant, rounds, rounds, state="finished"))
    return outcomes
