"""Rows on attacks and privacy: what robust means leave of an attack, what configs may hold, whether epsilon is true."""

from __future__ import annotations

import itertools
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.audit.trials import Trials, small_run
from fedstill.errors import FedstillError, on_one_line
from fedstill.experiment.config.experiment import Experiment, load
from fedstill.experiment.config.settle import settle
from fedstill.experiment.running.runner import run
from fedstill.metrics.epsilon_audit import epsilon_at_least
from fedstill.records import Payload
from fedstill.wire.moments_accountant import training_epsilon
from fedstill.wire.privacy import Privacy, gaussian_epsilon

ATTACKS = ("sign_flip", "scaled", "label_flip")
MEANS = ("examples", "trimmed_mean", "median", "norm_clipping", "krum")
SHARES = (0.1, 0.2, 0.3)


def under_attack(trials: int) -> Trials:
    """Each trial: a run of FedAvg on the digits with hostile clients, under one mean; it says the accuracies.

    A trial passes if it runs to its end: no level is promised.
    """
    asked = list(itertools.product(ATTACKS, reversed(SHARES), MEANS))[:trials]
    says, passed = list[str](), 0
    for attack, share, mean in asked:
        with tempfile.TemporaryDirectory(prefix="fedstill-audit-") as place:
            result = run(_attacked(attack, share, mean), Path(place) / "run")
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


NASTY: tuple[Any, ...] = (-1, 0, 1e308, float("nan"), float("inf"), "", "x" * 10_000, [], [[]], {}, True, "\x00", 2**70)


def bad_configs(trials: int) -> Trials:
    """Each trial: a config with values or bytes changed at random; it is read, or refused in one line."""
    draw, problems = random.Random(2), dict[str, str]()
    text = settle(small_run("fedntd")).toml
    with tempfile.TemporaryDirectory(prefix="fedstill-audit-") as place:
        path = Path(place) / "config.toml"
        for trial in range(trials):
            if trial % 2:
                letters = list(text)
                for _ in range(draw.randint(1, 5)):
                    letters[draw.randrange(len(letters))] = chr(draw.choice((0, 10, 34, 61, 91, 93, 955, 0xFFFF)))
                path.write_text("".join(letters))
                problems[f"bytes {trial}"] = _read(lambda: settle(load(path)))
            else:
                problems[f"values {trial}"] = _read(lambda: settle(_mutated(draw)))
    return Trials.of(problems)


def _mutated(draw: random.Random) -> Experiment:
    asked: Experiment = small_run("fedntd")
    tables = {k: v for k, v in asked.tree.items() if isinstance(v, dict) and v}
    table = draw.choice(sorted(tables))
    return asked.with_values({f"{table}.{draw.choice(sorted(tables[table]))}": draw.choice(NASTY)}, "audit")


def _read(what: Any) -> str:
    try:
        what()
    except FedstillError as error:
        return "" if "\n" not in str(error).strip() else "more than one line"
    except Exception as error:
        return f"not a named error: {on_one_line(error)}"
    return ""


def epsilons(trials: int) -> Trials:
    """Each trial: a claim of epsilon against another way to it: exact Gaussian, bound, or the audit of a canary."""
    problems, draw = dict[str, str](), random.Random(3)
    for _ in range(trials):
        noise, steps = draw.uniform(1, 20), draw.randint(1, 50)
        exact = gaussian_epsilon(noise / math.sqrt(steps), 1e-5)
        bound = training_epsilon(noise, {1.0: steps}, 1e-5) or 0.0
        name = f"noise {noise:.2f}, {steps} steps"
        problems[name] = "" if exact <= bound * (1 + 1e-9) else f"{bound:.4f} is under the exact {exact:.4f}"
    for noise in (1.0, 2.0, 4.0):
        claim, seen = canary(noise)
        problems[f"canary, noise {noise:g}"] = "" if seen < claim else f"seen {seen:.2f}, claimed {claim:.2f}"
    return Trials.of(problems)


def canary(noise: float, rows: int = 5, each: int = 1000) -> tuple[float, float]:
    """What is claimed of logits with noise, and the least epsilon that the two worst inputs show."""
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
