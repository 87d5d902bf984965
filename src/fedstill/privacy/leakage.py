"""The measure ``leakage``: how well it can be told, from what clients send, which examples they
trained on; and a lower bound on a mechanism's epsilon, from its outputs with and without a canary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.extensions import StageResult
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, Examples, Payload, Stage, Tensors
from fedstill.core.registry import register
from fedstill.core.trees import same_bits
from fedstill.measures.base import Measure, Numbers, SaysLogits
from fedstill.measures.context import EvaluationContext
from fedstill.metrics.membership import LEAST_OUT, attack, confidences, likelihood_ratios
from fedstill.metrics.values import Values
from fedstill.privacy.noise import GROUP, Privacy

MOST = 2000
"""The most members that are tried in a stage, shared equally among its clients."""


@register("measure", "leakage")
class Leakage(Measure):
    """Membership inference: how well the server can recognise training examples from uploads and
    from the global model.

    Members are clients' training examples, 2,000 at most; the others are as many test examples of
    the same classes. So the classes that a client has give nothing away, which alone would name
    most members where labels are uneven: what is asked is which of two images of a class was
    trained on. Two attacks, with one threshold for all clients: the loss, and its likelihood ratio
    to what the other clients of the stage sent, if these are three or more. Formulas and sources
    are in ``metrics/membership.py``. In the journal: ``seen``, by what the server sees; ``raw``, by
    the same before ``[privacy]``, if that is on; ``global``, at the end of a round, by the loss
    under the server's model, on members of all clients.
    Source: the question is left open by HiPer-FedKD, section 5.1.
    Reading: where models are sent, the attack is on the model that was sent. Where logits on public
    images are sent, it is the worst case: a server that chooses the public images plants those that
    it asks about. So it is on what a client would send if they were public: its model's logits, as
    its method sends them (standardised, say), clipped and with noise as ``[privacy]`` says. Nothing
    is planted in the run. Logits on images that really are public give less away; ``global`` is the
    model that learned from those. Any method can be measured whose clients send models
    (``params``), or ``logits`` of a model that they remember as ``params`` if the method says by
    ``sent_logits(logits)`` what is sent of them. Others are refused by name: of prototypes or of
    logits that are made in an unknown way it cannot be told what planted images would have given.
    Reading: all numbers that are sent are read as logits, also DS-FL's probabilities: their order
    is nearly the same.
    Reading: it is on one upload. Who asks for the same again averages the noise; epsilon counts
    that.
    Reading: the other clients are a poor sample of models that did not see an example: their
    classes differ, and they started from a model that other rounds have shown it. Who trains models
    for the attack finds more. Intervals count examples as independent, though a test image may
    stand beside two clients' members.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "client_data", "uploads"})

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """The attacks on the stage's uploads, if there are any; at the end of a round on the global
        model, too.
        """
        models = dict(_models(seen, context))
        event: dict[str, Any] = {}
        if models:
            event |= _on_uploads(models, seen.stage, context)
        if seen.ends_round:
            event |= _on_global(seen, context)
        return event or None

    def examples(self, test: int, clients: int, own: int) -> int:
        """The candidates of all clients under each client's model, and once under the global
        one.
        """
        return 2 * min(own, test * clients, MOST) * (clients + 1)


@dataclass(frozen=True)
class _Candidates:
    """Members, then as many others, and to which client each belongs: (2n,) examples and ids.

    The i-th of the others is of the class of the i-th member and belongs to the same client.
    """

    examples: Examples
    owners: NDArray[np.int64]

    def attack(self, scores: Values) -> dict[str, Any]:
        """An attack by these scores (2n,), as numbers."""
        return attack(*np.split(scores, 2))


def _models(seen: StageResult, context: EvaluationContext) -> Iterator[tuple[int, Tensors]]:
    """The models that a stage's replies hold, or whose logits they hold, by client."""
    for reply in seen.accepted:
        if reply.client == SERVER:
            continue
        if "params" in reply.content:
            yield reply.client, reply.content.params
        elif (
            GROUP in reply.content
            and isinstance(context.method, SaysLogits)
            and context.remembered is not None
        ):
            yield reply.client, _behind_logits(context.remembered(reply.client), reply.client)


def _behind_logits(client_state: Payload, client: int) -> Tensors:
    if "params" not in client_state:
        raise FedstillError(
            f"measure leakage: client {client} sent logits and remembers no model, a group 'params'"
        )
    return client_state.params


def _on_uploads(
    models: Mapping[int, Tensors], stage: Stage, context: EvaluationContext
) -> dict[str, Any]:
    """The attacks on models that were sent, or whose logits were, by client."""
    tried = _candidates(list(models), stage, context)
    if tried is None:
        return {}
    told = [
        _told(client, params, tried.examples, stage, context) for client, params in models.items()
    ]
    raw, seen = (
        np.stack([confidences(t, tried.examples.labels) for t in side])
        for side in zip(*told, strict=True)
    )
    with_members = list(dict.fromkeys(tried.owners.tolist()))
    own = _by_loss(seen, list(models), tried)
    before_protection = {}
    if _privacy_of(context).protects_logits:
        before_protection["raw"] = _attacks(raw, list(models), tried)
    return {
        "members": len(own) // 2,
        "clients": with_members,
        "client_auc": [tried.attack(own[tried.owners == c])["auc"] for c in with_members],
        "seen": _attacks(seen, list(models), tried),
        **before_protection,
    }


def _attacks(phi: Values, clients: Sequence[int], tried: _Candidates) -> dict[str, Any]:
    """Both attacks, from the confidences (clients, 2n) of all in all; one, if there are too few
    other clients.
    """
    out = {"loss": tried.attack(_by_loss(phi, clients, tried))}
    if len(clients) > LEAST_OUT:
        out["likelihood_ratio"] = tried.attack(_by_ratio(phi, clients, tried))
    return out


def _by_loss(phi: Values, clients: Sequence[int], tried: _Candidates) -> Values:
    """Of each candidate (2n,) the confidence of the client that it belongs to."""
    scores = np.zeros(len(tried.owners))
    for row, client in enumerate(clients):
        mine = tried.owners == client
        scores[mine] = phi[row, mine]
    return scores


def _by_ratio(phi: Values, clients: Sequence[int], tried: _Candidates) -> Values:
    """The same, compared with the other clients' confidences in it."""
    scores = np.zeros(len(tried.owners))
    for row, client in enumerate(clients):
        mine = tried.owners == client
        if mine.any():
            scores[mine] = likelihood_ratios(phi[row, mine], np.delete(phi, row, 0)[:, mine])
    return scores


def _on_global(seen: StageResult, context: EvaluationContext) -> dict[str, Any]:
    """The loss under the server's model, if there is one and it was trained."""
    params = seen.after.params
    if not params or same_bits(params, context.world.initial(SERVER)):
        return {}
    tried = _candidates(range(context.world.clients), seen.stage, context)
    if tried is None:
        return {}
    logits = context.passes().logits(params, tried.examples, seen.after.model)
    scores = confidences(logits, tried.examples.labels)
    return {"global": {"members": len(scores) // 2, "loss": tried.attack(scores)}}


def _told(
    client: int, params: Tensors, images: Examples, stage: Stage, context: EvaluationContext
) -> tuple[Tensor, Tensor]:
    """What a client's upload says of images (n, C): before ``[privacy]``, and as the server sees
    it.
    """
    logits = context.passes().logits(params, images, context.world.model(client)).cpu()
    sent = logits
    if isinstance(context.method, SaysLogits):
        sent = context.method.sent_logits(logits)
    seed = seed_for(context.world.seed, stage.round, stage.index, client, "leakage noise")
    return sent, _privacy_of(context).protect(Payload({GROUP: sent}), seed).tensor(GROUP)


def _privacy_of(context: EvaluationContext) -> Privacy:
    """The run's table ``[privacy]``."""
    table = context.tables["privacy"]
    assert isinstance(table, Privacy)
    return table


def _candidates(
    clients: Sequence[int], stage: Stage, context: EvaluationContext
) -> _Candidates | None:
    """The same in every round; None if there are none: no client has an example of a class that has
    test examples.
    """
    labels = context.test.labels.cpu()
    order = torch.randperm(len(labels), generator=context.draw("leakage others"))
    # of each class, those taken last at the end
    left = [order[labels[order] == c] for c in range(context.world.classes)]
    inside = []
    outside = []
    owners = []
    for client in clients:
        own = _trained_on(client, stage, context)
        mixed = torch.randperm(len(own), generator=context.draw(f"leakage {client}"))[
            : -(-MOST // len(clients))
        ]
        classes = own.labels.cpu()[mixed]
        for c, there in enumerate(left):
            mine = mixed[classes == c][: len(there)]
            inside.append(own.take(mine))
            outside.append(context.test.take(there[: len(mine)]))
            owners += [client] * len(mine)
            left[c] = there.roll(-len(mine))
    if not owners:
        return None
    examples = (
        torch.cat(side)
        for side in zip(*((e.values, e.labels) for e in (*inside, *outside)), strict=True)
    )
    return _Candidates(Examples(*examples), np.array([*owners, *owners], dtype=np.int64))


def _trained_on(client: int, stage: Stage, context: EvaluationContext) -> Examples:
    """A client's examples but those that any stage holds out; of two shares held out, one holds the
    other.
    """
    plans = context.world.plans
    most = max(plans, key=lambda name: plans[name].validation, default=stage.name)
    return context.sites.view(client, replace(stage, name=most)).data


Array = np.ndarray[Any, np.dtype[np.float64]]


def epsilon_at_least(canary: Array, clean: Array, delta: float, confidence: float = 0.95) -> float:
    """An epsilon that the true one is above with this confidence; 0 where the outputs tell nothing.

    canary, clean: (n,) a score of each output of the mechanism on data with and without the canary,
    at least 8 of each. A threshold, and which side of it counts, is chosen by the first half of the
    scores; the second half says how often it tells. With the bounds of Clopper and Pearson on both
    rates, ``epsilon >= log((TPR - delta) / FPR)``.

    Source: Jagielski et al. (2020), "Auditing Differentially Private Machine Learning", section 3;
    Nasr et al. (2021).

    >>> epsilon_at_least(np.zeros(100), np.zeros(100), 1e-5)
    0.0
    >>> round(epsilon_at_least(np.ones(1000), np.zeros(1000), 1e-5), 2)
    4.91
    """
    first_canary, second_canary = np.split(canary, [len(canary) // 2])
    first_clean, second_clean = np.split(clean, [len(clean) // 2])
    best_bound = -math.inf
    best_threshold = 0.0
    best_sign = 1
    for sign in (1, -1):
        for threshold in np.unique(np.concatenate([sign * first_canary, sign * first_clean])):
            positives = _Positives.above(threshold, sign * first_canary, sign * first_clean)
            bound = positives.epsilon_bound(delta, confidence)
            if bound > best_bound:
                best_bound = bound
                best_threshold = float(threshold)
                best_sign = sign

    positives = _Positives.above(
        best_threshold, best_sign * second_canary, best_sign * second_clean
    )
    return max(0.0, positives.epsilon_bound(delta, confidence))


@dataclass(frozen=True, kw_only=True)
class _Positives:
    """How many scores are on the positive side of a threshold, with and without the canary."""

    true: int
    canaries: int
    false: int
    cleans: int

    @classmethod
    def above(cls, threshold: float, canary: Array, clean: Array) -> _Positives:
        """The counts of scores of at least a threshold."""
        return cls(
            true=int((canary >= threshold).sum()),
            canaries=len(canary),
            false=int((clean >= threshold).sum()),
            cleans=len(clean),
        )

    def epsilon_bound(self, delta: float, confidence: float) -> float:
        """The bound of the threshold. Each of the two rates may err with half of the probability
        that the confidence leaves.
        """
        from scipy.stats import beta  # here, as every list of measures imports this module

        tail = (1 - confidence) / 2
        true_rate = 0.0
        if self.true:
            true_rate = float(beta.ppf(tail, self.true, self.canaries - self.true + 1))
        false_rate = 1.0
        if self.false < self.cleans:
            false_rate = float(beta.ppf(1 - tail, self.false + 1, self.cleans - self.false))
        if true_rate <= delta:
            return -math.inf
        return math.log((true_rate - delta) / false_rate)
