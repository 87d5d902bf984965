"""Rows on attacks and privacy: robust means under attack, whether epsilon is true, who was trained
on, what is sent.
"""

from __future__ import annotations

import itertools
import math
import random
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
from scorecard.trials import Trials, scratch, small_run

ATTACKS = ("sign_flip", "scaled", "label_flip")
MEANS = ("examples", "trimmed_mean", "median", "norm_clipping", "krum")
SHARES = (0.1, 0.2, 0.3)


def under_attack(trials: int) -> Trials:
    """Each trial: a run of FedAvg on the digits with hostile clients, under one mean; it says the
    accuracies.

    A trial passes if it runs to its end: no level is promised.
    """
    asked = list(itertools.product(ATTACKS, reversed(SHARES), MEANS))[:trials]
    says, passed = list[str](), 0
    for attack, share, mean in asked:
        with scratch() as place:
            result = run(_attacked(attack, share, mean), place / "run")
        accuracy, passed = result.accuracy or math.nan, passed + 1
        says.append(f"{attack}, {share:.0%} hostile, {mean}: accuracy {100 * accuracy:.1f} %")
    return Trials(len(asked), passed, tuple(says))


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
    """Each trial: a claim of epsilon against another way to it: exact Gaussian, bound, or the audit
    of a canary.
    """
    problems, draw = dict[str, str](), random.Random(3)
    for _ in range(trials):
        noise, steps = draw.uniform(1, 20), draw.randint(1, 50)
        exact = gaussian_epsilon(noise / math.sqrt(steps), 1e-5)
        bound = training_epsilon(noise, {1.0: steps}, 1e-5) or 0.0
        name = f"noise {noise:.2f}, {steps} steps"
        problems[name] = (
            "" if exact <= bound * (1 + 1e-9) else f"{bound:.4f} is under the exact {exact:.4f}"
        )
    for noise in (1.0, 2.0, 4.0):
        claim, seen = canary(noise)
        problems[f"canary, noise {noise:g}"] = (
            "" if seen < claim else f"seen {seen:.2f}, claimed {claim:.2f}"
        )
    return Trials.of(problems)


def canary(noise: float, rows: int = 5, each: int = 1000) -> tuple[float, float]:
    """What is claimed of logits with noise, and the least epsilon that the two worst inputs
    show.
    """
    privacy = Privacy(clip=2.0, noise=noise * 2 * math.sqrt(rows), delta=1e-3)
    far = torch.zeros(rows, 3)
    far[:, 0] = 100.0
    there, absent = (
        np.array([_score(privacy, sign * far, seed) for seed in range(begin, begin + each)])
        for sign, begin in ((1, 0), (-1, each))
    )
    return privacy.spent(rows) or 0.0, epsilon_at_least(there, absent, privacy.delta)


def _score(privacy: Privacy, logits: torch.Tensor, seed: int) -> float:
    return float(privacy.protect(Payload(logits=logits), seed).tensor("logits")[:, 0].sum())


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
"""Twenty methods whose clients send models or logits, of which the attack asks what they were
trained on.
"""


def members_told(trials: int) -> Trials:
    """Each trial: a run whose uploads are attacked; it says how often a member is told from
    another, 0.5 by chance.

    A trial passes if it is measured: no level is promised.
    """
    asked = list(itertools.product(range(-(-trials // len(EXPOSED))), EXPOSED))[:trials]
    told: dict[str, list[Mapping[str, Any]]] = {}
    for seed, method in asked:
        with scratch() as place:
            run(_exposed(method, seed), place / "run")
            events = read_journal(place / "run" / "journal.jsonl")
        seen = [e["seen"]["loss"] for e in events if e["event"] == "measure" and "seen" in e]
        told.setdefault(method, []).extend(seen[-1:])
    says = [
        f"{method}: AUC {_span(each, 'auc')}; {_span(each, 'tpr_at_0.01', 100)} % of members found "
        "at 1 % false"
        for method, each in told.items()
    ]
    return Trials(len(asked), sum(map(len, told.values())), tuple(says))


def _exposed(method: str, seed: int) -> Experiment:
    """Two rounds of ten epochs on a third of the digits: clients learn their examples by heart."""
    data = {
        "train_size": 600,
        "test_size": 359,
        "public": 60 if method in ("dsfl", "hiper_fedkd") else 0,
    }
    plan = {"epochs": 10, "batch": 20, "lr": 0.05}
    return small_run(method, measure=("leakage",), measure_every=2, data=data, plan=plan, seed=seed)


def _span(each: Sequence[Mapping[str, Any]], key: str, times: float = 1) -> str:
    values = [times * one[key] for one in each]
    return f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f} to {max(values):.2f}"


def sent_by(trials: int) -> Trials:
    """Each trial: a method; its clients send what it declares and nothing else, and it is said what
    this is.
    """
    problems, says = dict[str, str](), list[str]()
    for method in package_methods()[:trials]:
        try:
            from_labels = sent_groups(method).from_labels
        except (FedstillError, ValueError) as error:
            problems[method] = on_one_line(error)
            continue
        problems[method] = ""
        if from_labels != "nothing":
            says.append(f"{method}: {from_labels} made from labels".replace("`", ""))
    outcome = Trials.of(problems)
    return Trials(outcome.trials, outcome.passed, (*outcome.says, *says))
