"""Planted culprits: how often ``fedstill why`` names the client first that is known to harm a
class, compared with simpler rules.

``python -m benchmarks.culprits [--rounds 40] [--seeds 1,2,3] [--methods fedavg,fedntd,scaffold]
[--alphas 0.5,0.2]``: digits, twenty clients, ten a round, Dirichlet partitions. One client is
planted. In "all", the labels of all its examples of class 7 are changed; in "half", half of them.
In "helper", it is the only client with class 7, and should never be named. The benchmark counts the
rounds in which this client acts and the accuracy on the class falls by 10 points or more. Such a
round is harmful if the accuracy on the class would be 5 points higher without the client. The last
columns contain the share of the harmful rounds (for the helper, of all rounds) in which each rule
names the client first.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.options import integers, numbers, option_parser
from fedstill import Experiment, from_clients, load_dataset, run
from fedstill.core.extensions import StageResult
from fedstill.core.records import Tensors
from fedstill.core.trees import floats, norm, sub
from fedstill.data.dataset import Dataset
from fedstill.data.partition.dirichlet import dirichlet
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.measures.contributions import Contributions, StageGame, idle_replies
from fedstill.report import terminal

HARMED_CLASS = 7

LEAST_FALL = 0.10
"""The smallest fall of the class accuracy in a round that is counted."""

LEAST_HARM = 0.05
"""The smallest harm of a harmful round."""

CLIENTS = 20
SAMPLED = 10

KINDS = ("all", "half", "helper")
"""The kinds of a planted client."""

RULES = ("contribution", "leave-one-out", "own model's fall", "norm of the update")
"""The rules that name a client first."""

MEASURE = "benchmarks.culprits:FirstNamed"
"""The name of the measure in a config."""

HEAD = ["planted", "alpha", "method", "rounds", "fall [points]", "harmful", *RULES]


class FirstNamed(Measure):
    """The client that each rule names first, in rounds in which the accuracy on the class falls."""

    needs = frozenset({"test", "local_models"})

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """``first``: the client by rule. ``fall``: of the class accuracy. ``clients``: those that
        acted. ``harm``: by each of them, the class accuracy without it minus that with it.
        """
        accuracy_before = _accuracy(context, result.before.params)
        accuracy_after = _accuracy(context, result.after.params)
        fall = accuracy_before - accuracy_after
        if fall < LEAST_FALL:
            return None
        clients = [reply.client for reply in result.accepted]
        contributions = Contributions(classes=(HARMED_CLASS,)).look(result, context)
        assert contributions is not None
        models = [result.local_models[client] for client in clients]
        local_accuracies = [_accuracy(context, model) for model in models]
        update_norms = [norm(floats(sub(model, result.before.params))) for model in models]
        accuracies_without = _leave_one_out(result, context)
        first_positions = (
            np.argmin(contributions["values"][0]),
            np.argmax(accuracies_without),
            np.argmin(local_accuracies),
            np.argmax(update_norms),
        )
        first = {
            rule: clients[position] for rule, position in zip(RULES, first_positions, strict=True)
        }
        harm = [accuracy - accuracy_after for accuracy in accuracies_without]
        return {"first": first, "fall": fall, "clients": clients, "harm": harm}


def _leave_one_out(result: StageResult, context: EvaluationContext) -> list[float]:
    """The class accuracy of the aggregate if a client had been idle, for each client."""
    game = StageGame(
        actor=context.method,
        before=result.before,
        stage=result.stage,
        replies=result.accepted,
        world=context.world,
        idle_replies=idle_replies(context.method, result.accepted, result.payloads),
    )
    players = range(len(result.accepted))
    accuracies = []
    for idle in players:
        state = game.state([player for player in players if player != idle])
        accuracies.append(_accuracy(context, state.params))
    return accuracies


def _accuracy(context: EvaluationContext, parameters: Tensors) -> float:
    """The accuracy of a model on the class."""
    return float(context.accuracy_by_class(parameters, context.test)[HARMED_CLASS])


@dataclass(frozen=True)
class Planted:
    """A client that is known to harm the class or to help it, and the data set with it."""

    client: int
    dataset: Dataset


def planted(kind: str, alpha: float, seed: int) -> Planted:
    """Divide digits over clients, and plant the client with the most examples of the class."""
    digits = load_dataset("digits")
    labels = digits.train.labels.numpy()
    parts = [np.asarray(part) for part in dirichlet(labels, CLIENTS, alpha, seed)]
    class_counts = [np.count_nonzero(labels[part] == HARMED_CLASS) for part in parts]
    culprit = int(np.argmax(class_counts))
    draws = np.random.default_rng(seed)

    pairs = []
    for client, part in enumerate(parts):
        client_labels = labels[part].copy()
        if kind == "helper" and client != culprit:
            part = part[client_labels != HARMED_CLASS]
            client_labels = labels[part]
        if kind != "helper" and client == culprit:
            changed = np.flatnonzero(client_labels == HARMED_CLASS)
            if kind == "half":
                changed = draws.permutation(changed)[: len(changed) // 2]
            client_labels[changed] = _other_classes(draws, len(changed))
        values = digits.train.values[torch.as_tensor(part)]
        pairs.append((values, torch.as_tensor(client_labels)))
    test = (digits.test.values, digits.test.labels)
    return Planted(culprit, from_clients("digits", pairs, test=test, classes=digits.classes))


def _other_classes(draws: np.random.Generator, count: int) -> NDArray[Any]:
    """Random classes other than the harmed one."""
    return (HARMED_CLASS + 1 + draws.integers(0, 9, count)) % 10


@dataclass(frozen=True)
class Observation:
    """A round in which the planted client acted and the class accuracy fell.

    ``harm``: by the planted client. ``is_first``: by rule, whether the rule names it first.
    """

    fall: float
    harm: float
    is_first: Mapping[str, bool]


def observations(kind: str, alpha: float, method: str, seed: int, rounds: int) -> list[Observation]:
    """The counted rounds of one run."""
    plant = planted(kind, alpha, seed)
    experiment = Experiment(
        method=method,
        rounds=rounds,
        seed=seed,
        measure=(MEASURE,),
        measure_every=1,
        topology={"clients": CLIENTS, "sampled": SAMPLED},
        plan={"epochs": 5, "batch": 20, "lr": 0.02},
    )
    with tempfile.TemporaryDirectory() as folder:
        events = run(experiment, Path(folder) / "run", data=plant.dataset).measures
    observed = []
    for event in events:
        if plant.client not in event.get("clients", ()):
            continue
        harm = event["harm"][event["clients"].index(plant.client)]
        is_first = {rule: client == plant.client for rule, client in event["first"].items()}
        observed.append(Observation(event["fall"], harm, is_first))
    return observed


def row(kind: str, alpha: float, method: str, observed: Sequence[Observation]) -> list[str]:
    """A row of the table."""
    harmful = observed
    if kind != "helper":
        harmful = [observation for observation in observed if observation.harm >= LEAST_HARM]
    fall = 0.0
    if observed:
        fall = 100 * float(np.mean([observation.fall for observation in observed]))
    shares = ["–"] * len(RULES)
    if harmful:
        means = [np.mean([observation.is_first[rule] for observation in harmful]) for rule in RULES]
        shares = [f"{mean:.2f}" for mean in means]
    counts = [str(len(observed)), f"{fall:.0f}", str(len(harmful))]
    return [kind, f"{alpha:g}", method, *counts, *shares]


def main() -> None:
    """Run all settings, and print the table."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=integers, default="1,2,3")
    parser.add_argument("--methods", default="fedavg,fedntd,scaffold")
    parser.add_argument("--alphas", type=numbers, default="0.5,0.2")
    options = parser.parse_args()
    methods = options.methods.split(",")
    rows = []
    for kind, alpha, method in product(KINDS, options.alphas, methods):
        observed = []
        for seed in options.seeds:
            observed += observations(kind, alpha, method, seed, options.rounds)
        rows.append(row(kind, alpha, method, observed))
        print(*rows[-1], file=sys.stderr, flush=True)
    terminal.console().print(terminal.PlainTable(HEAD, rows))


if __name__ == "__main__":
    main()
