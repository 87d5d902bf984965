"""The row on secure sums: are uploads uniform to look at, sums exact, too few clients and other
methods refused?
"""

from __future__ import annotations

import random
from collections.abc import Sequence

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
from scorecard.trials import Trials, small_run

GONE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6)
"""Shares of the clients that drop out in the trials, in turn."""
ENTRIES = 20_000
UNLIKELY = 1e-9
"""Below which a chi-square test says that an upload is not uniform; one of 100,000 trials would say
so by chance.
"""


def secret_sums(trials: int) -> Trials:
    """Each trial: a sum of ten clients' changes, of which some drop out at a step drawn; or a
    method to be refused.
    """
    draw, problems = random.Random(4), dict[str, str]()
    for trial in range(trials):
        share = GONE[trial % len(GONE)]
        step = draw.choice(("shares", "vectors", "answers"))
        problems[f"sum {trial}, {share:.0%} gone before their {step}"] = _summed(trial, share, step)
    ready = prepare(resolve(small_run("fedavg", rounds=1)))
    for name in registry.names("method"):
        if Permit.LINEAR_AGGREGATE not in registry.lookup("method", name).build().permits:
            problems[f"method {name}"] = _refused(name, ready)
    return Trials.of(problems)


def _summed(trial: int, share: float, step: str) -> str:
    """What was wrong with one sum; empty if nothing was."""
    of, draw = Sum(f"sum {trial}", tuple(range(10)), 6), torch.Generator().manual_seed(trial)
    gone = of.clients[: round(share * 10)]
    changes = {
        c: {"a": 0.1 * torch.randn(ENTRIES, generator=draw, dtype=torch.float64)}
        for c in of.clients
    }
    weights = {c: 1 + (trial * 7 + c * 13) % 500 for c in of.clients}
    fixed = FixedPoint(RANGE, BITS, len(of.clients))
    try:
        total, uploads, left = _carried(
            of, {c: fixed.encoded(changes[c], weights[c]) for c in of.clients}, gone, step
        )
    except TooFewReplies:
        return "" if share > 0.4 else "it ended though enough clients were left"
    if share > 0.4:
        return "too few clients were left, and it did not end"
    if bad := [c for c, upload in uploads.items() if least_p_value(upload) < UNLIKELY]:
        return f"the upload of client {bad[0]} is not uniform"
    mean, _ = fixed.decoded(total, changes[0])
    plain: Tensor = torch.stack([weights[c] * changes[c]["a"] for c in left]).sum(0) / sum(
        weights[c] for c in left
    )
    off = float((mean["a"] - plain).abs().max())
    return (
        ""
        if off <= fixed.error * (1 + 1e-6)
        else f"the mean is off by {off:.3g}, over {fixed.error:.3g}"
    )


def _carried(
    of: Sum, vectors: dict[int, Masks], gone: Sequence[int], step: str
) -> tuple[Masks, dict[int, Masks], list[int]]:
    """The sum, the masked vectors that came, and whose they are."""
    clients = {c: Summand(of, c) for c in of.clients}
    keys = {c: one.public for c, one in clients.items()}
    shares = {
        c: one.shares(keys) for c, one in clients.items() if step != "shares" or c not in gone
    }
    left = [c for c in shares if step != "vectors" or c not in gone]
    masked = {c: clients[c].masked(vectors[c], {o: shares[o][c] for o in shares}) for c in left}
    revealed = {c: clients[c].revealed(left) for c in left if step != "answers" or c not in gone}
    return unmasked(of, keys, shares, masked, revealed), masked, left


def least_p_value(numbers: Masks) -> float:
    """Of the chi-square test that the bytes of 64-bit numbers are uniform, at each of their
    eight places: the least.
    """
    places = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    return min(float(chisquare(np.bincount(places[:, i], minlength=256)).pvalue) for i in range(8))


def _refused(name: str, ready: Prepared) -> str:
    """What was wrong with the refusal of a method; ``ready``: a run that is like it otherwise."""
    settings = resolve(small_run(name, rounds=1, privacy={"secure_sum": True}))
    planned = PlannedRun(settings, ready.world, ready.sites)
    try:
        for rule in RULES:
            rule.check(planned)
    except IncompatibleMethod as error:
        return "" if "\n" not in str(error) else "more than one line"
    return "it was not refused"
