"""The measure ``contributions``: what a round did to each class, by local training and averaging,
and by client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, instance_norm
from torch.overrides import TorchFunctionMode

from fedstill.core.extensions import StageActor, StageResult, of_some_clients
from fedstill.core.keys import generator, seed_for
from fedstill.core.method import Method
from fedstill.core.records import (
    SERVER,
    Examples,
    ModelSpec,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    World,
)
from fedstill.core.registry import register
from fedstill.core.trees import floats, norm, sub
from fedstill.data.inputs import Inputs
from fedstill.data.views import SiteViews
from fedstill.engines.client_measures import AtClient
from fedstill.engines.passes import correct_by_class, shards
from fedstill.measures.base import Measure, Numbers, are_counts, rounded_lists
from fedstill.measures.context import EvaluationContext
from fedstill.methods.fit import fitted_models, student_models
from fedstill.metrics.shapley import (
    MOST_EXACT,
    Divided,
    along_path,
    by_local_training_and_averaging,
    exact,
    moved_classes,
    soft_accuracy,
    two_ends,
)
from fedstill.models import contract
from fedstill.models.contract import Predictor

# Networks run so that running means and variances have gradients, as weights do.


class ThroughNorms(TorchFunctionMode):
    """Within it, normalisation by running statistics is a formula with gradients to them; all else
    is torch's own.

    torch's own kernels refuse to be derived by the statistics. The formula is theirs; only rounding
    differs.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """A function of torch's, or what stands in its place."""
        return _OWN.get(func, func)(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _by_statistics(input, running_mean, running_var, weight, bias, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats or running_mean is None or running_var is None:
        return instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    return _by_statistics(input, running_mean, running_var, weight, bias, eps)


def _by_statistics(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias by channel: x is (B, channels, …), all else
    (channels,).
    """
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


_OWN: dict[Any, Callable[..., Tensor]] = {batch_norm: _batch_norm, instance_norm: _instance_norm}


# A round's stage as a game: what the state would be, had only some of its clients acted.


Game = Literal["idle", "absent"]
"""Whether clients that are no part of a coalition change nothing (idle), or do not reply at all
(absent).
"""

AFFINE = 1e-4
"""How far, relative to the whole change, the sum of the clients' own changes may be off for a fold
to be affine.
"""


@dataclass(frozen=True, eq=False)
class StageGame:
    """The players are the clients whose replies were accepted; the fold is the method's own.

    idle: a client outside a coalition replies as if it had changed nothing; its number of examples
    counts. absent: it does not reply. ``before``: the state in which the replies were aggregated.
    """

    actor: StageActor
    before: State
    stage: Stage
    replies: Sequence[Reply]
    payloads: Mapping[int, Payload]
    world: World
    game: Game = "idle"

    @property
    def players(self) -> tuple[int, ...]:
        """The clients, in the order of their replies."""
        return tuple(r.client for r in self.replies)

    @cached_property
    def _idle(self) -> list[Reply] | None:
        if not isinstance(self.actor, Method):
            return None
        idle = []
        for reply in self.replies:
            content = self.actor.idle_reply(reply, self.payloads[reply.client])
            if content is None:
                return None
            idle.append(replace(reply, content=content))
        return idle

    def can_idle(self) -> bool:
        """Whether it is known what clients that change nothing would have sent."""
        return self._idle is not None

    def state(self, coalition: Sequence[int]) -> State:
        """The state after the fold, had only the players in these positions acted."""
        acting = set(coalition)
        if self.game == "absent":
            replies = [r for i, r in enumerate(self.replies) if i in acting]
            return self._fold(replies) if replies else self.before
        assert self._idle is not None
        pairs = zip(self.replies, self._idle, strict=True)
        return self._fold([r if i in acting else still for i, (r, still) in enumerate(pairs)])

    def _fold(self, replies: Sequence[Reply]) -> State:
        return self.actor.aggregate(self.before, replies, self.stage, self.world)

    def _moved(self, start: Tensors, coalition: Sequence[int]) -> Tensors | None:
        """How far a coalition moves the parameters from a start; None where it makes another
        network of them.
        """
        end = floats(self.state(coalition).params)
        same = start.keys() == end.keys() and all(v.shape == end[k].shape for k, v in start.items())
        return sub(end, start) if same else None

    @cached_property
    def changes(self) -> Sequence[Tensors] | None:
        """How far each player moves the parameters when it acts alone; None where the fold is not
        their sum.

        It is none either where a fold makes another network, whose entries cannot be subtracted.
        """
        if self.game != "idle" or not self.can_idle():
            return None
        start, players = floats(self.state(()).params), range(len(self.replies))
        whole = self._moved(start, players)
        alone = [
            own
            for k in players
            if whole is not None and (own := self._moved(start, (k,))) is not None
        ]
        if whole is None or len(alone) < len(players):
            return None
        rest = {name: value - sum(own[name] for own in alone) for name, value in whole.items()}
        return alone if norm(rest) <= AFFINE * max(norm(whole), 1e-12) else None


@dataclass(frozen=True, eq=False)
class Judged:
    """Test examples by class, and what a model is worth on them: soft accuracy at a temperature.

    ``examples``: {class: its examples}, of the classes that are asked about.
    """

    examples: Mapping[int, Examples]
    inputs: Inputs
    temperature: float

    def worth(self, predict: Callable[[Tensor], Tensor], classes: Sequence[int]) -> Tensor:
        """Soft accuracy (c,) float64 of these classes, without gradients."""
        with torch.no_grad():
            return torch.stack(
                [self._of(predict, self.examples[c]).double().cpu() for c in classes]
            )

    def _of(self, predict: Callable[[Tensor], Tensor], own: Examples) -> Tensor:
        logits = torch.cat([predict(x) for x in shards(own.values, self.inputs)])
        return soft_accuracy(logits, own.labels.to(logits.device), self.temperature).mean()

    def gradient(
        self, predict: Callable[[Tensor], Tensor], of: int, leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """How soft accuracy of a class moves with each leaf; shard by shard, so that memory stays
        small.
        """
        own, total = self.examples[of], [torch.zeros_like(leaf) for leaf in leaves]
        at = 0
        for x in shards(own.values, self.inputs):
            labels = own.labels[at : at + len(x)].to(x.device)
            at += len(x)
            part = soft_accuracy(predict(x), labels, self.temperature).sum() / len(own)
            given = torch.autograd.grad(part, list(leaves), allow_unused=True)
            total = [t if g is None else t + g for t, g in zip(total, given, strict=True)]
        return total


@dataclass(frozen=True, eq=False)
class ModelLine:
    """Soft accuracy along the line from a start to start + the sum of the players' changes
    (``shapley.Line``).

    Running means and variances of normalisation lie on the line as weights do; whole numbers stay.
    """

    spec: ModelSpec
    start: Tensors
    changes: Sequence[Tensors]
    judged: Judged

    @cached_property
    def _whole(self) -> Tensors:
        return {name: sum(own[name] for own in self.changes) for name in self.changes[0]}  # type: ignore[misc]

    def _at(self, s: float) -> dict[str, Tensor]:
        there = next(iter(self.judged.examples.values())).values.device
        moved = {
            k: v + s * self._whole[k] if k in self._whole else v for k, v in self.start.items()
        }
        return {k: v.to(there) for k, v in moved.items()}

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        """Soft accuracy (c,) at a place of the line."""
        network, there = contract.module(self.spec, "frozen").eval(), self._at(s)
        return self.judged.worth(lambda x: contract.forward(network, there, x), classes)

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        """Its gradient there along each player's change: (m, c)."""
        network, there = contract.module(self.spec, "frozen").eval(), self._at(s)
        leaves = {k: there[k].detach().requires_grad_() for k in self._whole}
        params = {**there, **leaves}

        def predict(x: Tensor) -> Tensor:
            with ThroughNorms():
                return contract.forward(network, params, x)

        rows = []
        for c in classes:
            grads = self.judged.gradient(predict, c, list(leaves.values()))
            gradient = {name: g.cpu() for name, g in zip(leaves, grads, strict=True)}
            rows.append([_inner_product(gradient, change) for change in self.changes])
        return torch.tensor(rows, dtype=torch.float64).T


def _inner_product(gradient: Tensors, change: Tensors) -> float:
    """The inner product over the entries of a gradient, summed in float64."""
    return sum(float((g * change[name]).sum(dtype=torch.float64)) for name, g in gradient.items())


def global_model(method: Method, state: State, world: World) -> Callable[[Tensor], Tensor] | None:
    """The server's answer for everybody; None where there are answers of single clients only."""
    named = method.predictors(state, world)
    return next((predict for name, predict in named.items() if not of_some_clients(name)), None)


def is_plain(predict: Callable[[Tensor], Tensor] | None, state: State) -> bool:
    """Whether an answer is the network with the state's parameters, and nothing else."""
    return isinstance(predict, Predictor) and predict.params is state.params


EACH = 100
"""Test examples of a class that are looked at, at most."""

LEAST, MOST = 0.05, 10
"""From which change of a class's accuracy on it is asked who contributed, and for how many classes
at most.
"""

TEMPERATURE = 0.25
"""At which soft accuracy follows accuracy best."""

DIGITS = 6


@register("measure", "contributions")
class Contributions(Measure):
    """Who made the model forget: each class's change in a round by local training, by averaging,
    and by client.

    Of clients side by side: what the classes gained by local training and by averaging, which add
    up to the change; for classes that moved by 5 points or more, each client's contribution to it,
    an Aumann–Shapley value of the method's own fold (``metrics/shapley.py``), in soft accuracy at
    temperature 0.25, and what the server does with nobody (``nobody``: momentum, training of its
    own), which together make up the change. In a chain: the change by link. Where clients keep
    models of their own: the clients' mean change by stage. On at most 100 test examples of a class.
    A contribution is a share of one round's change: no guilt, no forecast, not what leaving the
    client out would do.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "no_client_predictors"})
    gives: ClassVar[tuple[str, ...]] = ("correct_before", "correct_after")

    def __init__(
        self, game: Game | None = None, exactly: bool = False, classes: Sequence[int] = ()
    ) -> None:
        """game: What clients that are left out do; unset: idle where it is known what such clients
        send, else absent.
        exactly: Ask all coalitions.
        classes: Ask about these, however much they moved.
        """
        self.game, self.exactly, self.classes = game, exactly, tuple(classes)

    def at_client(self, seen: AtClient) -> Numbers | None:
        """Right answers by class (C,) before and after the client's work, where its reply holds no
        model.
        """
        if seen.test is None or seen.is_server or "params" in seen.sent:
            return None
        some = at_most(seen.test, EACH, seen.classes)
        return {
            "correct_before": seen.correct_by_class(seen.start, some),
            "correct_after": seen.correct_by_class(seen.end, some),
        }

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be whole numbers, one a class."""
        return are_counts(report, self.gives, classes)

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """Whose model it is, its accuracies before and after the stage, the parts of the change,
        and contributions.
        """
        if not seen.accepted:
            return None
        data = at_most(context.test, EACH, context.world.classes)
        ends = [
            global_model(context.method, state, context.world)
            for state in (seen.before, seen.after)
        ]
        if ends[0] is None or ends[1] is None or not _is_moved(seen):
            return _of_own_models(seen, context, data)
        before, after = (accuracies_of(predict, data, context) for predict in ends)
        clients = [r.client for r in seen.accepted]
        told: dict[str, Any] = {
            "model": "global",
            "clients": clients,
            "before": _listed(before),
            "after": _listed(after),
        }
        if seen.stage.sequential or seen.accepted[0].client == SERVER:
            return {**told, "parts": {_name(seen): _listed(after - before)}}
        if seen.local_models and is_plain(ends[1], seen.after):
            local = torch.stack(
                [_by_class(context, client, p, data) for client, p in seen.local_models.items()]
            )
            weights = _weights(seen)
            parts = by_local_training_and_averaging(before, local, after, weights)
            told["parts"] = {
                "local training": _listed(parts.training),
                "averaging": _listed(parts.averaging),
            }
        else:
            told["parts"] = {seen.stage.name: _listed(after - before)}
        return {
            **told,
            **_shares_of_data(seen, context),
            **self._contributed(seen, context, data, before, after),
        }

    def _contributed(
        self,
        seen: StageResult,
        context: EvaluationContext,
        data: Examples,
        before: Tensor,
        after: Tensor,
    ) -> dict[str, Any]:
        there = set(data.labels.tolist())
        classes = [c for c in self.classes if c in there]
        classes = classes or moved_classes(before.tolist(), after.tolist(), LEAST, MOST)
        game = StageGame(
            context.schedule.actor(seen.stage),
            seen.before,
            seen.stage,
            seen.accepted,
            seen.payloads,
            context.world,
        )
        chosen: Game = self.game or ("idle" if game.can_idle() else "absent")
        game = replace(game, game=chosen)
        by_class = {c: data.take((data.labels == c).nonzero().flatten()) for c in classes}
        judged = Judged(by_class, context.inputs, TEMPERATURE)
        if not classes:
            return {"game": chosen, "classes": []}
        rule, divided = self._divided(game, judged, context, classes)
        start = _worth(judged, seen.before, context, classes)
        return {
            "game": chosen,
            "rule": rule,
            "temperature": TEMPERATURE,
            "classes": classes,
            "values": rounded_lists(divided.values.T, DIGITS),
            "gap": rounded_lists(divided.gap, DIGITS),
            "nobody": rounded_lists(
                _worth(judged, game.state(()), context, classes) - start, DIGITS
            ),
        }

    def _divided(
        self, game: StageGame, judged: Judged, context: EvaluationContext, classes: Sequence[int]
    ) -> tuple[str, Divided]:
        players = len(game.players)

        def value(coalition: tuple[int, ...]) -> Tensor:
            return _worth(judged, game.state(coalition), context, classes)

        if self.exactly and players <= MOST_EXACT:
            return "exact", exact(value, players)
        start = game.state(())
        plain = is_plain(global_model(context.method, start, context.world), start)
        if plain and game.changes is not None and players:
            line = ModelLine(start.model or context.spec, start.params, game.changes, judged)
            return "path", along_path(line, players, classes)
        return "two ends", two_ends(value, players)

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test examples once a local model, and with gradients at three places of the path."""
        return min(test, EACH * MOST) * (clients + 2 + 3 * 3)


def at_most(test: Examples, each: int, classes: int) -> Examples:
    """At most ``each`` test examples of each class, drawn by key: the same in every round and run,
    in order.
    """
    draw = generator(seed_for(0, 0, 0, SERVER, "contributions"))
    mixed = torch.randperm(len(test), generator=draw)
    labels = test.labels.cpu()[mixed]
    kept = [mixed[(labels == c).nonzero().flatten()[:each]] for c in range(classes)]
    return test.take(torch.cat(kept).sort().values)


def accuracies_of(predict: Any, data: Examples, context: EvaluationContext) -> Tensor:
    """Class accuracies (C,) float64 of an answer; NaN for a class without test examples."""
    right = correct_by_class(predict, data, context.inputs, context.world.classes).double().cpu()
    return right / torch.bincount(data.labels.cpu(), minlength=context.world.classes)


def _worth(
    judged: Judged, state: State, context: EvaluationContext, classes: Sequence[int]
) -> Tensor:
    predict = global_model(context.method, state, context.world)
    assert predict is not None
    return judged.worth(predict, classes)


def _by_class(context: EvaluationContext, client: int, params: Tensors, data: Examples) -> Tensor:
    return accuracies_of(context.predictor(params, client), data, context)


def _weights(seen: StageResult) -> Tensor:
    """Shares of examples (m,) of the clients with local models."""
    sizes = torch.tensor(
        [float(r.examples) for r in seen.accepted if r.client in seen.local_models],
        dtype=torch.float64,
    )
    return sizes / sizes.sum() if sizes.sum() > 0 else torch.full_like(sizes, 1 / len(sizes))


def _is_moved(seen: StageResult) -> bool:
    """Whether the stage's aggregation made another global model."""
    before = seen.before.params
    after = seen.after.params
    if not before:
        return False
    if before.keys() != after.keys():
        return True
    return any(
        before[name] is not after[name] and not torch.equal(before[name], after[name])
        for name in before
    )


def _name(seen: StageResult) -> str:
    client = seen.accepted[0].client
    return f"{seen.stage.name} at the server" if client == SERVER else f"client {client}"


def _of_own_models(seen: StageResult, context: EvaluationContext, data: Examples) -> Numbers | None:
    """The clients' mean change by class in a stage, where each keeps a model of its own."""
    totals = torch.bincount(data.labels.cpu(), minlength=context.world.classes)
    ends = {
        r.client: both
        for r in seen.accepted
        if (both := _both_ends(r, seen, context, data, totals))
    }
    if not ends:
        return None
    before, after = (torch.stack([both[i] for both in ends.values()]).mean(0) for i in range(2))
    parts = {seen.stage.name: _listed(after - before)}
    return {
        "model": "own",
        "clients": list(ends),
        "before": _listed(before),
        "after": _listed(after),
        "parts": parts,
    }


def _both_ends(
    reply: Reply, seen: StageResult, context: EvaluationContext, data: Examples, totals: Tensor
) -> tuple[Tensor, ...]:
    """Class accuracies (C,) of a client's own model before and after the stage; none where nobody
    knows it.
    """
    if "correct_before" in reply.metrics:
        return tuple(
            torch.tensor(reply.metrics[k], dtype=torch.float64) / totals
            for k in Contributions.gives
        )
    if reply.client == SERVER or "params" not in reply.content:
        return ()
    own = student_models(seen.before).get(reply.client) or fitted_models(seen.before).get(
        reply.client
    )
    ends = (own or context.world.initial(reply.client), reply.content.params)
    return tuple(_by_class(context, reply.client, params, data) for params in ends)


def _shares_of_data(seen: StageResult, context: EvaluationContext) -> dict[str, Any]:
    """Each class's share of the acting clients' data in the round over its share of all clients',
    where these are here.

    Of a run with tasks also which task each of them is in, from 1, and what it has of each class in
    it, (m, C).
    """
    sites = context.sites
    if not isinstance(sites, SiteViews) or not len(every := sites.all_counts(seen.stage.round)):
        return {}
    stream, clients = context.world.stream, [r.client for r in seen.accepted]
    had = every[clients]
    acted, overall = had.sum(0).double(), every.sum(0).double()
    ratio = (acted / acted.sum().clamp(min=1)) / (overall / overall.sum().clamp(min=1))
    tasks = {"tasks": [stream.task(seen.stage.round, c) + 1 for c in clients], "had": had.tolist()}
    return {"drawn": _listed(ratio), **(tasks if stream.tasks > 1 else {})}


def _listed(values: Tensor) -> list[float | None]:
    return [
        None if v != v or v in (float("inf"), float("-inf")) else round(v, DIGITS)
        for v in values.tolist()
    ]
