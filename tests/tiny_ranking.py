"""A suite that runs in seconds, in the place of one that ships: small data, two rounds, FedAvg and
FedNTD.
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
"""What was chosen: FedAvg's second try, FedNTD's first."""


def install(patch: pytest.MonkeyPatch) -> suites.Suite:
    """Put the tiny suite in the place of digits-space, with what was chosen for its rows."""
    whole = suites.recipe_text
    patch.setattr(
        suites, "recipe_text", lambda name: TINY if name == f"rank/{NAME}" else whole(name)
    )
    patch.setattr(suites, "shipped_choices", lambda *_: dict(SCORES))
    return suites.load_suite(NAME)


def do(runs: Sequence[Variant]) -> list[Outcome]:
    """Carry runs out in this process, leaving alone those that are finished."""
    outcomes = []
    for one in runs:
        if not (one.folder / "summary.json").is_file():
            runner.run(one.experiment, one.folder)
        outcomes.append(Outcome(one, one.settings.rounds, one.settings.rounds, state="finished"))
    return outcomes
