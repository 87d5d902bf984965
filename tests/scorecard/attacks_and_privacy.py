"""Rows on attacks and privacy: robust means under attack, whether epsilon is true, how far members
can be identified, and what clients send.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tools.fitting_runs import package_methods
from tools.sent import sent_groups

from fedstill.config.experiment import Experiment
from fedstill.core.errors import FedstillError, on_one_line
from fedstill.core.records import Payload
from fedstill.privacy.leakage import epsilon_at_least
from fedstill.privacy.noise import Privacy, gaussian_epsilon
from fedstill.privacy.private_training import training_epsilon
from fedstill.running.journal import read_journal
from fedstill.running.runner import run
from scorecard.trials import Trials, problem_unless, scratch, small_run

ATTACKS = ("sign_flip", "scaled", "label_flip")
MEANS = ("examples", "trimmed_mean", "median", "norm_clipping", "krum")
SHARES = (0.3, 0.2, 0.1)


def under_attack(trials: int) -> Trials:
    """Each trial: a run of FedAvg on the digits with hostile clients and one mean. The remarks are
    the accuracies.

    A trial passes if the run ends normally: no accuracy is promised.
    """
    attacks = list(itertools.product(ATTACKS, SHARES, MEANS))[:trials]
    remarks = []
    for attack, share, mean in attacks:
        with scratch() as place:
            result = run(_attacked(attack, share, mean), place / "run")
        percent = 100 * (result.accuracy or math.nan)
        remarks.append(f"{attack}, {share:.0%} hostile, {mean}: accuracy {percent:.1f} %")
    return Trials(len(attacks), len(remarks), tuple(remarks))


def _attacked(attack: str, share: float, mean: str) -> Experiment:
    return Experiment(
        method={"name": "fedavg", "aggregation": mean},
        rounds=10,
        topology={"clients": 10},
        partition={"kind": "dirichlet", "alpha": 0.5},
        clients={"attack": attack, "attackers": share},
        measure=(),
        seed=1,
    )


def epsilons(trials: int) -> Trials:
    """Each trial: an epsilon is compared with the exact value of Gaussian noise, or with a lower
    bound from the outputs of a canary.
    """
    problems = dict[str, str]()
    draw = random.Random(3)
    for _ in range(trials):
        noise = draw.uniform(1, 20)
        steps = draw.randint(1, 50)
        exact = gaussian_epsilon(noise / math.sqrt(steps), 1e-5)
        bound = training_epsilon(noise, {1.0: steps}, 1e-5) or 0.0
        problems[f"noise {noise:.2f}, {steps} steps"] = problem_unless(
            exact <= bound * (1 + 1e-9), f"{bound:.4f} is under the exact {exact:.4f}"
        )
    for noise in (1.0, 2.0, 4.0):
        claim, least = canary(noise)
        problems[f"canary, noise {noise:g}"] = problem_unless(
            least < claim, f"at least {least:.2f}, claimed {claim:.2f}"
        )
    return Trials.of(problems)


def canary(noise: float, rows: int = 5, draws: int = 1000) -> tuple[float, float]:
    """The claimed epsilon of logits with noise, and the least epsilon that is consistent with the
    outputs for the two inputs that differ most.
    """
    privacy = Privacy(clip=2.0, noise=noise * 2 * math.sqrt(rows), delta=1e-3)
    logits = torch.zeros(rows, 3)
    logits[:, 0] = 100.0
    scores_with = [_score(privacy, logits, seed) for seed in range(draws)]
    scores_without = [_score(privacy, -logits, seed) for seed in range(draws, 2 * draws)]
    least = epsilon_at_least(np.array(scores_with), np.array(scores_without), privacy.delta)
    return privacy.spent(rows) or 0.0, least


def _score(privacy: Privacy, logits: torch.Tensor, seed: int) -> float:
    """The sum of the first column of logits with noise."""
    protected = privacy.protect(Payload(logits=logits), seed).tensor("logits")
    return float(protected[:, 0].sum())


EXPOSED = [
    "fedavg",
    "fedavgm",
    "fedprox",
    "scaffold",
    "fednova",
    "feddyn",
    "moon",
    "fedntd",
    "kd",
    "fedadkd",
    "feddc",
    "fedlc",
    "fedrs",
    "fedsam",
    "fedsol",
    "fedgkd",
    "fedseq",
    "sfedkd",
    "dsfl",
    "hiper_fedkd",
]
"""Twenty methods whose clients send models or logits, which the membership attack reads."""

SEND_PUBLIC_LOGITS = ("dsfl", "hiper_fedkd")
"""Those of them that need public data."""

Attack = Mapping[str, Any]
"""The results of a membership attack."""


def members_told(trials: int) -> Trials:
    """Each trial: the replies of a run are attacked. The remarks are how often members are
    distinguished from other examples, 0.5 by chance.

    A trial passes if it is measured: no level is promised.
    """
    repetitions = math.ceil(trials / len(EXPOSED))
    runs = list(itertools.product(range(repetitions), EXPOSED))[:trials]
    attacks: dict[str, list[Attack]] = defaultdict(list)
    for seed, method in runs:
        with scratch() as place:
            run(_exposed(method, seed), place / "run")
            events = read_journal(place / "run" / "journal.jsonl")
        looks = [event for event in events if event["event"] == "measure" and "seen" in event]
        if looks:
            attacks[method].append(looks[-1]["seen"]["loss"])

    remarks = [_attack_remark(method, attacks[method]) for method in attacks]
    return Trials(len(runs), sum(map(len, attacks.values())), tuple(remarks))


def _attack_remark(method: str, attacks: Sequence[Attack]) -> str:
    auc = _span([attack["auc"] for attack in attacks])
    percent = _span([100 * attack["tpr_at_0.01"] for attack in attacks])
    return f"{method}: AUC {auc}; {percent} % of members found at 1 % false"


def _span(values: Sequence[float]) -> str:
    """The least and the largest value; one number if there is only one value."""
    least = f"{min(values):.2f}"
    if len(values) == 1:
        return least
    return f"{least} to {max(values):.2f}"


def _exposed(method: str, seed: int) -> Experiment:
    """Two rounds of ten epochs on a third of the digits: clients learn their examples by heart."""
    data = {"train_size": 600, "test_size": 359}
    if method in SEND_PUBLIC_LOGITS:
        data["public"] = 60
    plan = {"epochs": 10, "batch": 20, "lr": 0.05}
    return small_run(method, measure=("leakage",), measure_every=2, data=data, plan=plan, seed=seed)


def sent_by(trials: int) -> Trials:
    """Each trial: the clients of a method send what it declares and nothing else. The remarks are
    what they compute from labels.
    """
    problems = dict[str, str]()
    remarks = []
    for method in package_methods()[:trials]:
        try:
            from_labels = sent_groups(method).from_labels
        except (FedstillError, ValueError) as error:
            problems[method] = on_one_line(error)
            continue
        problems[method] = ""
        if from_labels != "nothing":
            remarks.append(f"{method}: {from_labels} made from labels".replace("`", ""))
    outcome = Trials.of(problems)
    return Trials(outcome.trials, outcome.passed, (*outcome.remarks, *remarks))
