"""The row on secure sums: uploads look uniform and sums are exact; sums of too few clients, and
unsuitable methods, are refused.
"""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor

from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Permit
from fedstill.core.errors import IncompatibleMethod, TooFewReplies
from fedstill.privacy.compatibility import RULES
from fedstill.privacy.masking import BITS, RANGE, FixedPoint
from fedstill.privacy.protocol import Masks, Sum, Summand, unmasked
from fedstill.running.compatibility import PlannedRun
from fedstill.running.preparation import Prepared, prepare
from scorecard.trials import Trials, problem_unless, small_run

CLIENTS = 10
THRESHOLD = 6
"""The number of clients that a sum needs."""
DROPOUT_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6)
"""Shares of the clients that drop out in the trials, in turn."""
STEPS = ("shares", "vectors", "answers")
"""The messages of the protocol, before one of which clients drop out."""
ENTRIES = 20_000
UNLIKELY = 1e-9
"""An upload is not uniform if a chi-square test has a p-value below this: by chance, one of 100,000
trials.
"""


def secret_sums(trials: int) -> Trials:
    """Each trial: a sum of the changes of ten clients, of which some drop out at a random step; or
    a method that must be refused.
    """
    problems = dict[str, str]()
    draw = random.Random(4)
    for trial in range(trials):
        share = DROPOUT_SHARES[trial % len(DROPOUT_SHARES)]
        step = draw.choice(STEPS)
        name = f"sum {trial}, {share:.0%} gone before their {step}"
        problems[name] = _problem_of_sum(trial, share, step)
    ready = prepare(resolve(small_run("fedavg", rounds=1)))
    for name in registry.names("method"):
        if Permit.LINEAR_AGGREGATE not in registry.lookup("method", name).build().permits:
            problems[f"method {name}"] = _problem_of_refusal(name, ready)
    return Trials.of(problems)


def _problem_of_sum(trial: int, share: float, step: str) -> str:
    """The problem of one sum; empty if there is none."""
    clients = range(CLIENTS)
    dropouts = range(round(share * CLIENTS))
    draw = torch.Generator().manual_seed(trial)
    changes: list[dict[str, Tensor]] = []
    for _ in clients:
        entries = torch.randn(ENTRIES, generator=draw, dtype=torch.float64)
        changes.append({"a": 0.1 * entries})
    weights = [1 + (trial * 7 + client * 13) % 500 for client in clients]
    fixed = FixedPoint(RANGE, BITS, CLIENTS)
    vectors = {client: fixed.encoded(changes[client], weights[client]) for client in clients}

    is_possible = CLIENTS - len(dropouts) >= THRESHOLD
    try:
        outcome = _carry_out(f"sum {trial}", vectors, dropouts, step)
    except TooFewReplies:
        return problem_unless(not is_possible, "it ended though enough clients were left")
    if not is_possible:
        return "too few clients were left, and it did not end"
    for client, upload in outcome.uploads.items():
        if least_p_value(upload) < UNLIKELY:
            return f"the upload of client {client} is not uniform"

    mean, _ = fixed.decoded(outcome.total, changes[0])
    weighted_sum = torch.zeros(ENTRIES, dtype=torch.float64)
    for client in outcome.uploads:
        weighted_sum += weights[client] * changes[client]["a"]
    expected = weighted_sum / sum(weights[client] for client in outcome.uploads)
    error = float((mean["a"] - expected).abs().max())
    return problem_unless(
        error <= fixed.error * (1 + 1e-6), f"the mean is off by {error:.3g}, over {fixed.error:.3g}"
    )


@dataclass(frozen=True)
class _Outcome:
    """A sum, and the masked vectors that clients uploaded for it."""

    total: Masks
    uploads: dict[int, Masks]


def _carry_out(
    name: str, vectors: dict[int, Masks], dropouts: Container[int], step: str
) -> _Outcome:
    """Carry out the protocol with clients that drop out before a step. Raises TooFewReplies."""
    secret_sum = Sum(name, tuple(vectors), THRESHOLD)
    summands = {client: Summand(secret_sum, client) for client in secret_sum.clients}
    keys = {client: summand.public for client, summand in summands.items()}
    remaining = [client for client in vectors if client not in dropouts]

    sharing = list(vectors)
    if step == "shares":
        sharing = remaining
    shares = {client: summands[client].shares(keys) for client in sharing}

    uploading = sharing
    if step == "vectors":
        uploading = remaining
    uploads = {}
    for client in uploading:
        received = {sender: shares[sender][client] for sender in sharing}
        uploads[client] = summands[client].masked(vectors[client], received)

    answering = uploading
    if step == "answers":
        answering = remaining
    revealed = {client: summands[client].revealed(uploading) for client in answering}
    return _Outcome(unmasked(secret_sum, keys, shares, uploads, revealed), uploads)


def least_p_value(numbers: Masks) -> float:
    """The least p-value of the chi-square tests that the bytes of 64-bit numbers are uniform, at
    each of their eight places.
    """
    places = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    counts = [np.bincount(places[:, place], minlength=256) for place in range(8)]
    return min(float(chisquare(count).pvalue) for count in counts)


def _problem_of_refusal(name: str, ready: Prepared) -> str:
    """The problem if a method is not refused in one line; ``ready`` is a run with the same data."""
    settings = resolve(small_run(name, rounds=1, privacy={"secure_sum": True}))
    planned = PlannedRun(settings, ready.world, ready.sites)
    try:
        for rule in RULES:
            rule.check(planned)
    except IncompatibleMethod as error:
        return problem_unless("\n" not in str(error), "more than one line")
    return "it was not refused"
