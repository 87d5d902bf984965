"""Attacks on privacy: the measure ``leakage``, which infers clients' training examples from their
uploads, and a lower bound on a mechanism's epsilon from its outputs with and without a canary.
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
from fedstill.measures.base import EvaluationContext, Measure, Numbers, SendsLogits
from fedstill.metrics.accuracy import Values
from fedstill.metrics.membership import LEAST_OUT, attack, confidences, likelihood_ratios
from fedstill.privacy.noise import GROUP, Privacy

# ---- membership inference ------------------------------------------------------------------------

MOST = 2000
"""The largest number of members per stage, shared equally among its clients."""


@register("measure", "leakage")
class Leakage(Measure):
    """Membership inference: how well the server can recognise training examples from uploads and
    from the global model.

    The members are up to 2,000 training examples of clients. Each member is paired with a
    non-member: an example of the same class from the test set. An attack must therefore distinguish
    two examples of a class; knowing a client's classes does not help. There are two attacks, each
    with one threshold for all clients. The first one uses the loss. The second one needs at least
    three other clients: it uses the likelihood ratio between the client's upload and the uploads
    of the other clients. ``metrics/membership.py`` has formulas and sources.

    In the journal, ``seen`` holds the attacks on what the server receives, and ``raw`` the attacks
    on the same content before ``[privacy]`` is applied. ``global`` is the attack that uses the loss
    of the server's model at the end of a round, on members of all clients.

    Source: HiPer-FedKD, section 5.1, leaves the question open.
    Reading: if clients send models, the attacks use these models. If clients send logits on public
    images, the attacks assume the worst case: the server chooses the public images and adds the
    examples in question to them. The attacks therefore use the logits that the client would send on
    these examples, in the form in which its method sends them (for example standardised), clipped
    and with noise as in ``[privacy]``. The run itself is not changed. Logits on genuinely public
    images reveal less; ``global`` is the model that was trained with those. The measure supports
    methods whose clients send models (``params``), and methods whose clients send ``logits`` of a
    model that they keep as ``params``, if the method defines ``sent_logits(logits)``. Other methods
    are rejected; for prototypes, for example, the effect of added images is unknown.
    Reading: all numeric uploads are treated as logits. This includes the probabilities of DS-FL,
    which have nearly the same order.
    Reading: the attacks use a single upload. A server that asks several times can average out the
    noise; epsilon accounts for that.
    Reading: the other clients are a poor sample of models that were not trained on an example.
    Their classes differ, and they started from a model that may have been trained on the example
    in earlier rounds. An attacker who trains reference models finds more members. Intervals treat
    examples as independent, although a test example may be paired with members of two clients.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "client_data", "uploads"})

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The attacks on the stage's uploads, if there are any, and on the global model at the end
        of a round.
        """
        models = dict(_uploaded_models(result, context))
        fields: dict[str, Any] = {}
        if models:
            fields |= _attacks_on_uploads(models, result.stage, context)
        if result.ends_round:
            fields |= _attack_on_global_model(result, context)
        return fields or None

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """The number of evaluated examples: all candidates, for each client's model and the global
        one.
        """
        return 2 * min(client_examples, test * clients, MOST) * (clients + 1)


@dataclass(frozen=True)
class _Candidates:
    """The candidates of an attack (2n,): n members, then n non-members.

    The i-th non-member has the same class and is assigned to the same client as the i-th member.

    owners: the client of each example (2n,).
    """

    examples: Examples
    owners: NDArray[np.int64]

    def attack(self, scores: Values) -> dict[str, Any]:
        """The results of an attack with these scores (2n,), which should be higher for members."""
        member_scores, other_scores = np.split(scores, 2)
        return attack(member_scores, other_scores)


def _uploaded_models(
    result: StageResult, context: EvaluationContext
) -> Iterator[tuple[int, Tensors]]:
    """Pairs of a client that sent a model or its logits, and this model."""
    for reply in result.accepted:
        if reply.client == SERVER:
            continue
        if "params" in reply.content:
            yield reply.client, reply.content.params
            continue
        has_logits = GROUP in reply.content and isinstance(context.method, SendsLogits)
        if has_logits and context.remembered is not None:
            client_state = context.remembered(reply.client)
            yield reply.client, _model_of_logits(client_state, reply.client)


def _model_of_logits(client_state: Payload, client: int) -> Tensors:
    if "params" not in client_state:
        raise FedstillError(
            f"measure leakage: client {client} sent logits and remembers no model, a group 'params'"
        )
    return client_state.params


def _attacks_on_uploads(
    models: Mapping[int, Tensors], stage: Stage, context: EvaluationContext
) -> dict[str, Any]:
    """The attacks on the models or logits that clients sent."""
    clients = list(models)
    candidates = _candidates(clients, stage, context)
    if candidates is None:
        return {}
    labels = candidates.examples.labels
    raw_rows = []
    seen_rows = []
    for client, params in models.items():
        upload = _upload(client, params, candidates.examples, stage, context)
        raw_rows.append(confidences(upload.raw, labels))
        seen_rows.append(confidences(upload.seen, labels))
    seen = np.stack(seen_rows)

    owners = list(dict.fromkeys(candidates.owners.tolist()))
    scores = _scores_by_loss(seen, clients, candidates)
    client_attacks = [candidates.attack(scores[candidates.owners == owner]) for owner in owners]
    fields = {
        "members": len(scores) // 2,
        "clients": owners,
        "client_auc": [client_attack["auc"] for client_attack in client_attacks],
        "seen": _attacks(seen, clients, candidates),
    }
    if _privacy_of(context).protects_logits:
        fields["raw"] = _attacks(np.stack(raw_rows), clients, candidates)
    return fields


def _attacks(phi: Values, clients: Sequence[int], candidates: _Candidates) -> dict[str, Any]:
    """Both attacks, or only the attack that uses the loss if there are too few other clients.

    phi: the confidence of each client's upload on each candidate (clients, 2n).
    """
    attacks = {"loss": candidates.attack(_scores_by_loss(phi, clients, candidates))}
    if len(clients) > LEAST_OUT:
        scores = _scores_by_ratio(phi, clients, candidates)
        attacks["likelihood_ratio"] = candidates.attack(scores)
    return attacks


def _scores_by_loss(phi: Values, clients: Sequence[int], candidates: _Candidates) -> Values:
    """The confidence of the client's own upload on each of its candidates (2n,)."""
    scores = np.zeros(len(candidates.owners))
    for row, client in enumerate(clients):
        is_owned = candidates.owners == client
        scores[is_owned] = phi[row, is_owned]
    return scores


def _scores_by_ratio(phi: Values, clients: Sequence[int], candidates: _Candidates) -> Values:
    """The same confidences, relative to those of the other clients' uploads."""
    scores = np.zeros(len(candidates.owners))
    for row, client in enumerate(clients):
        is_owned = candidates.owners == client
        if is_owned.any():
            other_clients = np.delete(phi, row, 0)
            scores[is_owned] = likelihood_ratios(phi[row, is_owned], other_clients[:, is_owned])
    return scores


def _attack_on_global_model(result: StageResult, context: EvaluationContext) -> dict[str, Any]:
    """The attack that uses the loss of the server's model; empty without a trained model."""
    params = result.after.params
    if not params or same_bits(params, context.world.initial(SERVER)):
        return {}
    candidates = _candidates(range(context.world.clients), result.stage, context)
    if candidates is None:
        return {}
    logits = context.passes().logits(params, candidates.examples, result.after.model)
    scores = confidences(logits, candidates.examples.labels)
    return {"global": {"members": len(scores) // 2, "loss": candidates.attack(scores)}}


@dataclass(frozen=True)
class _Upload:
    """The logits that a client would send on some examples (n, C), before and after ``[privacy]``
    is applied.
    """

    raw: Tensor
    seen: Tensor


def _upload(
    client: int, params: Tensors, examples: Examples, stage: Stage, context: EvaluationContext
) -> _Upload:
    logits = context.passes().logits(params, examples, context.world.model(client)).cpu()
    raw = logits
    if isinstance(context.method, SendsLogits):
        raw = context.method.sent_logits(logits)
    seed = seed_for(context.world.seed, stage.round, stage.index, client, "leakage noise")
    protected = _privacy_of(context).protect(Payload({GROUP: raw}), seed)
    return _Upload(raw, protected.tensor(GROUP))


def _privacy_of(context: EvaluationContext) -> Privacy:
    """The table ``[privacy]`` of the run."""
    table = context.tables["privacy"]
    assert isinstance(table, Privacy)
    return table


def _candidates(
    clients: Sequence[int], stage: Stage, context: EvaluationContext
) -> _Candidates | None:
    """The candidates of an attack, the same in every round.

    None if no client has an example of a class that has test examples.
    """
    labels = context.test.labels.cpu()
    order = torch.randperm(len(labels), generator=context.draw("leakage others"))
    # Used test examples of a class move to the end, so that all are used equally often.
    queues = [order[labels[order] == label] for label in range(context.world.classes)]
    members = []
    others = []
    owners = []
    most_of_client = -(-MOST // len(clients))
    for client in clients:
        trained = _trained_on(client, stage, context)
        draw = context.draw(f"leakage {client}")
        drawn = torch.randperm(len(trained), generator=draw)[:most_of_client]
        drawn_labels = trained.labels.cpu()[drawn]
        for label, queue in enumerate(queues):
            chosen = drawn[drawn_labels == label][: len(queue)]
            members.append(trained.take(chosen))
            others.append(context.test.take(queue[: len(chosen)]))
            owners += [client] * len(chosen)
            queues[label] = queue.roll(-len(chosen))
    if not owners:
        return None
    parts = [*members, *others]
    examples = Examples(
        torch.cat([part.values for part in parts]), torch.cat([part.labels for part in parts])
    )
    return _Candidates(examples, np.array([*owners, *owners], dtype=np.int64))


def _trained_on(client: int, stage: Stage, context: EvaluationContext) -> Examples:
    """A client's examples without those that any stage holds out.

    The held-out sets of stages are nested, so the largest one counts.
    """
    plans = context.world.plans
    largest = max(plans, key=lambda name: plans[name].validation, default=stage.name)
    return context.sites.view(client, replace(stage, name=largest)).data


# ---- a lower bound on epsilon --------------------------------------------------------------------


Array = np.ndarray[Any, np.dtype[np.float64]]


def epsilon_at_least(canary: Array, clean: Array, delta: float, confidence: float = 0.95) -> float:
    """A lower bound on the epsilon of a mechanism at a confidence level; 0 if the outputs reveal
    nothing.

    The first half of the scores selects a threshold and its positive side; the second half
    estimates the rates of true and false positives. With Clopper-Pearson bounds on both rates,
    ``epsilon >= log((TPR - delta) / FPR)``.

    canary, clean: (n,) scores of the mechanism's outputs on data with and without the canary, at
    least 8 of each.

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
    """The numbers of scores on the positive side of a threshold, with and without the canary."""

    true: int
    canaries: int
    false: int
    cleans: int

    @classmethod
    def above(cls, threshold: float, canary: Array, clean: Array) -> _Positives:
        """Count the scores that reach a threshold."""
        return cls(
            true=int((canary >= threshold).sum()),
            canaries=len(canary),
            false=int((clean >= threshold).sum()),
            cleans=len(clean),
        )

    def epsilon_bound(self, delta: float, confidence: float) -> float:
        """The lower bound on epsilon. The error probability ``1 - confidence`` is shared equally
        between the two rates.
        """
        from scipy.stats import beta  # here because every list of measures imports this module

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
