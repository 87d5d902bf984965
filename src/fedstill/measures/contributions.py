"""The measure ``contributions``: the causes of a round's changes in class accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, instance_norm
from torch.overrides import TorchFunctionMode

from fedstill.core.errors import ConfigError
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
from fedstill.measures.base import EvaluationContext, Measure, Numbers, rounded_lists, wrong_counts
from fedstill.methods.fit import fitted_models, student_models
from fedstill.metrics.shapley import (
    MOST_EXACT,
    ContributionTable,
    along_path,
    by_local_training_and_averaging,
    exact,
    moved_classes,
    soft_accuracy,
    two_ends,
)
from fedstill.models import contract
from fedstill.models.predictors import Predictor

# Forward passes in which running means and variances have gradients, like weights.


class ThroughNorms(TorchFunctionMode):
    """A context in which normalisation by running statistics is differentiable with respect to the
    statistics.

    torch's kernels do not support this derivative. The formula is the same; only rounding differs.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or its replacement."""
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _batch_norm(  # noqa: PLR0917 - torch calls it by the signature of its own function
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
    return _by_statistics(input, running_mean, running_var, weight=weight, bias=bias, eps=eps)


def _instance_norm(  # noqa: PLR0917 - torch calls it by the signature of its own function
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
    return _by_statistics(input, running_mean, running_var, weight=weight, bias=bias, eps=eps)


def _by_statistics(
    x: Tensor, mean: Tensor, var: Tensor, *, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias for each channel. x is (B, channels, …), and the
    other tensors are (channels,).
    """
    shape = (1, -1, *[1] * (x.dim() - 2))
    normalised = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    if weight is not None:
        normalised = normalised * weight.view(shape)
    if bias is not None:
        normalised = normalised + bias.view(shape)
    return normalised


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    batch_norm: _batch_norm,
    instance_norm: _instance_norm,
}


# A stage as a game: the server's state if only some of its clients had acted.


Game = Literal["idle", "absent"]
"""The behaviour of clients outside a coalition: "idle", they reply without a change; "absent", they
do not reply.
"""

AFFINE = 1e-4
"""The tolerance for an affine aggregation: the error of the sum of the clients' separate changes,
relative to the whole change.
"""


def idle_replies(
    actor: StageActor, replies: Sequence[Reply], payloads: Mapping[int, Payload]
) -> list[Reply] | None:
    """The replies of the same clients if they had changed nothing; None if the method does not
    define them.
    """
    if not isinstance(actor, Method):
        return None
    idle = []
    for reply in replies:
        content = actor.idle_reply(reply, payloads[reply.client])
        if content is None:
            return None
        idle.append(replace(reply, content=content))
    return idle


@dataclass(frozen=True, eq=False)
class StageGame:
    """A game whose players are the clients with accepted replies. The method aggregates the replies
    of a coalition.

    With "idle", a client outside the coalition replies as if it had changed nothing, and its number
    of examples counts. With "absent", it does not reply. ``before``: the server's state before
    aggregation. ``idle_replies``: the replies of idle clients, in the order of ``replies``; None
    for the game "absent".
    """

    actor: StageActor
    before: State
    stage: Stage
    replies: Sequence[Reply]
    world: World
    idle_replies: Sequence[Reply] | None = None

    @property
    def game(self) -> Game:
        """The behaviour of clients outside a coalition."""
        if self.idle_replies is None:
            return "absent"
        return "idle"

    @property
    def players(self) -> tuple[int, ...]:
        """The clients, in the order of their replies."""
        return tuple(r.client for r in self.replies)

    def state(self, coalition: Sequence[int]) -> State:
        """The state after aggregation if only the players at these positions had acted."""
        acting = set(coalition)
        if self.idle_replies is None:
            replies = [reply for i, reply in enumerate(self.replies) if i in acting]
            if not replies:
                return self.before
            return self._aggregated(replies)
        replies = list(self.idle_replies)
        for i in acting:
            replies[i] = self.replies[i]
        return self._aggregated(replies)

    def _aggregated(self, replies: Sequence[Reply]) -> State:
        return self.actor.aggregate(self.before, replies, self.stage, self.world)

    def _change(self, start: Tensors, coalition: Sequence[int]) -> Tensors | None:
        """The change of the parameters by a coalition; None if aggregation changes the network."""
        end = floats(self.state(coalition).params)
        if start.keys() != end.keys():
            return None
        if any(value.shape != end[name].shape for name, value in start.items()):
            return None
        return sub(end, start)

    @cached_property
    def changes(self) -> Sequence[Tensors] | None:
        """The change of the parameters by each player alone; None if their sum is not the whole
        change, or if aggregation changes the network.
        """
        if self.game != "idle":
            return None
        start = floats(self.state(()).params)
        players = range(len(self.replies))
        total = self._change(start, players)
        if total is None:
            return None
        changes = []
        for k in players:
            change = self._change(start, (k,))
            if change is None:
                return None
            changes.append(change)

        error = {
            name: value - sum(change[name] for change in changes) for name, value in total.items()
        }
        if norm(error) > AFFINE * max(norm(total), 1e-12):
            return None
        return changes


@dataclass(frozen=True, eq=False)
class SoftAccuracy:
    """The soft accuracy of models on test examples, at a temperature.

    ``examples``: the test examples of each class whose change is divided.
    """

    examples: Mapping[int, Examples]
    inputs: Inputs
    temperature: float

    def values(self, predict: Callable[[Tensor], Tensor], classes: Sequence[int]) -> Tensor:
        """The soft accuracies (c,) float64 of some classes, without gradients."""
        with torch.no_grad():
            values = [self._of(predict, self.examples[c]).double().cpu() for c in classes]
            return torch.stack(values)

    def _of(self, predict: Callable[[Tensor], Tensor], examples: Examples) -> Tensor:
        logits = torch.cat([predict(x) for x in shards(examples.values, self.inputs)])
        return soft_accuracy(logits, examples.labels.to(logits.device), self.temperature).mean()

    def gradient(
        self, predict: Callable[[Tensor], Tensor], label: int, leaves: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradient of the soft accuracy of a class, accumulated over shards to save memory."""
        examples = self.examples[label]
        total = [torch.zeros_like(leaf) for leaf in leaves]
        start = 0
        for x in shards(examples.values, self.inputs):
            labels = examples.labels[start : start + len(x)].to(x.device)
            start += len(x)
            part = soft_accuracy(predict(x), labels, self.temperature).sum() / len(examples)
            grads = torch.autograd.grad(part, list(leaves), allow_unused=True)
            for i, grad in enumerate(grads):
                if grad is not None:
                    total[i] = total[i] + grad
        return total


@dataclass(frozen=True, eq=False)
class ModelLine:
    """The soft accuracy along the line from start to start + the sum of the players' changes
    (a ``shapley.Line``).

    Running means and variances change along the line like weights; integers do not change.
    """

    spec: ModelSpec
    start: Tensors
    changes: Sequence[Tensors]
    soft_accuracy: SoftAccuracy

    @cached_property
    def _total_change(self) -> Tensors:
        names = self.changes[0]
        return {name: sum(change[name] for change in self.changes) for name in names}  # type: ignore[misc]

    def _params_at(self, s: float) -> dict[str, Tensor]:
        device = next(iter(self.soft_accuracy.examples.values())).values.device
        params = dict(self.start)
        for name, change in self._total_change.items():
            params[name] = params[name] + s * change
        return {name: value.to(device) for name, value in params.items()}

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        """The soft accuracies (c,) at a point of the line."""
        network = contract.module(self.spec, "frozen").eval()
        params = self._params_at(s)
        return self.soft_accuracy.values(lambda x: contract.forward(network, params, x), classes)

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        """The derivatives (m, c) at a point, in the direction of each player's change."""
        network = contract.module(self.spec, "frozen").eval()
        params = self._params_at(s)
        leaves = {name: params[name].detach().requires_grad_() for name in self._total_change}
        params |= leaves

        def predict(x: Tensor) -> Tensor:
            with ThroughNorms():
                return contract.forward(network, params, x)

        rows = []
        for c in classes:
            grads = self.soft_accuracy.gradient(predict, c, list(leaves.values()))
            gradient = {name: g.cpu() for name, g in zip(leaves, grads, strict=True)}
            rows.append([_inner_product(gradient, change) for change in self.changes])
        return torch.tensor(rows, dtype=torch.float64).T


def _inner_product(gradient: Tensors, change: Tensors) -> float:
    """The inner product of a gradient and a change, summed in float64."""
    return sum(float((g * change[name]).sum(dtype=torch.float64)) for name, g in gradient.items())


def global_model(method: Method, state: State, world: World) -> Callable[[Tensor], Tensor] | None:
    """The server's predictor for all clients; None if all its predictors are for some clients."""
    for name, predict in method.predictors(state, world).items():
        if not of_some_clients(name):
            return predict
    return None


def is_plain(predict: Callable[[Tensor], Tensor] | None, state: State) -> bool:
    """Whether a predictor is simply the network with the parameters of a state."""
    return isinstance(predict, Predictor) and predict.params is state.params


MOST_EXAMPLES = 100
"""The maximum number of test examples of a class."""

LEAST_CHANGE = 0.05
"""The smallest change of a class accuracy that is divided among the clients."""

MOST_CLASSES = 10
"""The maximum number of classes whose change is divided."""

TEMPERATURE = 0.25
"""The temperature at which soft accuracy is closest to accuracy."""

DIGITS = 6


@register("measure", "contributions")
class Contributions(Measure):
    """Causes of forgetting: the change of each class accuracy in a round, divided into local
    training, averaging, and the clients' contributions.

    In a parallel stage, the changes by local training and by averaging sum to the whole change. For
    classes that changed by at least 5 points, each client has a contribution: its Aumann–Shapley
    value in the method's aggregation (``metrics/shapley.py``), in soft accuracy at temperature
    0.25. The contributions and the server's own change (``nobody``: momentum, training at the
    server) sum to the whole change. In a chain, the measure records the change by each client. If
    clients have personal models, it records their mean change by stage. It uses at most 100 test
    examples of each class. A contribution is a share of one round's change. It does not predict the
    effect of excluding the client.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "no_client_predictors"})
    gives: ClassVar[tuple[str, ...]] = ("correct_before", "correct_after")

    def __init__(
        self, game: Game | None = None, exactly: bool = False, classes: Sequence[int] = ()
    ) -> None:
        """game: The behaviour of clients outside a coalition; by default "idle" if the method
        defines the reply of an idle client, otherwise "absent".
        exactly: Whether to evaluate all coalitions.
        classes: The classes whose changes are divided, even if they are small.
        """
        self.game = game
        self.exactly = exactly
        self.classes = tuple(classes)

    def at_client(self, visit: AtClient) -> Numbers | None:
        """Correct predictions by class (C,) before and after the client's work; None if its reply
        contains the model.
        """
        if visit.test is None or visit.is_server or "params" in visit.sent:
            return None
        examples = at_most(visit.test, MOST_EXAMPLES, visit.classes)
        return {
            "correct_before": visit.correct_by_class(visit.start, examples),
            "correct_after": visit.correct_by_class(visit.end, examples),
        }

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Counts must be lists with an integer for each class, and complete. A class has at most
        ``MOST_EXAMPLES`` test examples.
        """
        names = [name for name in self.gives if name in report]
        if names not in ([], list(self.gives)):
            return f"it has {', '.join(names)} without the other counts"
        problem = wrong_counts(report, self.gives, classes)
        if problem:
            return problem
        for name in names:
            if max(report[name]) > MOST_EXAMPLES:
                return f"{name} is above {MOST_EXAMPLES} for a class"
        return ""

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        """The model ("global" or "own"), its class accuracies before and after the stage, the parts
        of the change, and the clients' contributions.
        """
        if not result.accepted:
            return None
        data = at_most(context.test, MOST_EXAMPLES, context.world.classes)
        received = global_model(context.method, result.before, context.world)
        aggregated = global_model(context.method, result.after, context.world)
        if received is None or aggregated is None or not _is_moved(result):
            return _of_personal_models(result, context, data)

        initial = accuracies_of(received, data, context)
        final = accuracies_of(aggregated, data, context)
        numbers: dict[str, Any] = {
            "model": "global",
            "clients": [reply.client for reply in result.accepted],
            "before": _listed(initial),
            "after": _listed(final),
        }
        if result.stage.sequential or result.accepted[0].client == SERVER:
            return {**numbers, "parts": {_name(result): _listed(final - initial)}}

        numbers["parts"] = {result.stage.name: _listed(final - initial)}
        if result.local_models and is_plain(aggregated, result.after):
            numbers["parts"] = _training_and_averaging(result, context, data, initial, final)
        classes = self._divided_classes(data, initial, final)
        return {
            **numbers,
            **_shares_of_data(result, context),
            **self._contributions(result, context, data, classes),
        }

    def _divided_classes(self, data: Examples, initial: Tensor, final: Tensor) -> list[int]:
        """The classes whose changes are divided: those of the settings that have test examples or,
        without any, those with large changes.
        """
        present = set(data.labels.tolist())
        classes = [c for c in self.classes if c in present]
        if classes:
            return classes
        return moved_classes(initial.tolist(), final.tolist(), LEAST_CHANGE, MOST_CLASSES)

    def _contributions(
        self, result: StageResult, context: EvaluationContext, data: Examples, classes: list[int]
    ) -> dict[str, Any]:
        """The journal's fields about the clients' contributions to the changes of some classes."""
        actor = context.schedule.actor(result.stage)
        game = StageGame(
            actor=actor,
            before=result.before,
            stage=result.stage,
            replies=result.accepted,
            world=context.world,
            idle_replies=self._idle_replies(actor, result),
        )
        if not classes:
            return {"game": game.game, "classes": []}

        by_class = {c: data.take((data.labels == c).nonzero().flatten()) for c in classes}
        accuracy = SoftAccuracy(by_class, context.inputs, TEMPERATURE)
        rule, contributions = self._contribution_table(game, accuracy, context, classes)
        start = _soft_accuracies(accuracy, result.before, context, classes)
        without_clients = _soft_accuracies(accuracy, game.state(()), context, classes)
        return {
            "game": game.game,
            "rule": rule,
            "temperature": TEMPERATURE,
            "classes": classes,
            "values": rounded_lists(contributions.values.T, DIGITS),
            "gap": rounded_lists(contributions.gap, DIGITS),
            "nobody": rounded_lists(without_clients - start, DIGITS),
        }

    def _idle_replies(self, actor: StageActor, result: StageResult) -> list[Reply] | None:
        """The replies of idle clients; None for the game "absent"."""
        if self.game == "absent":
            return None
        idle = idle_replies(actor, result.accepted, result.payloads)
        if idle is None and self.game == "idle":
            raise ConfigError(
                "game = 'idle' needs a method that defines the reply of an idle client; remove game"
            )
        return idle

    def _contribution_table(
        self,
        game: StageGame,
        accuracy: SoftAccuracy,
        context: EvaluationContext,
        classes: Sequence[int],
    ) -> tuple[str, ContributionTable]:
        """The name of the rule, and the clients' contributions."""
        players = len(game.players)

        def value(coalition: tuple[int, ...]) -> Tensor:
            return _soft_accuracies(accuracy, game.state(coalition), context, classes)

        if self.exactly and players <= MOST_EXACT:
            return "exact", exact(value, players)
        start = game.state(())
        plain = is_plain(global_model(context.method, start, context.world), start)
        if plain and game.changes is not None and players:
            line = ModelLine(start.model or context.spec, start.params, game.changes, accuracy)
            return "path", along_path(line, players, classes)
        return "two ends", two_ends(value, players)

    def examples(self, test: int, clients: int, client_examples: int) -> int:
        """A pass of each local model, and gradients at three points of the path."""
        return min(test, MOST_EXAMPLES * MOST_CLASSES) * (clients + 2 + 3 * 3)


def at_most(test: Examples, most: int, classes: int) -> Examples:
    """At most ``most`` test examples of each class in their original order. They are drawn by key,
    and are the same in every round and run.
    """
    draw = generator(seed_for(0, 0, 0, SERVER, "contributions"))
    shuffled = torch.randperm(len(test), generator=draw)
    labels = test.labels.cpu()[shuffled]
    chosen = [shuffled[(labels == c).nonzero().flatten()[:most]] for c in range(classes)]
    return test.take(torch.cat(chosen).sort().values)


def accuracies_of(predict: Any, data: Examples, context: EvaluationContext) -> Tensor:
    """The class accuracies (C,) float64 of a predictor; NaN for a class without test examples."""
    classes = context.world.classes
    correct = correct_by_class(predict, data, context.inputs, classes).double().cpu()
    return correct / torch.bincount(data.labels.cpu(), minlength=classes)


def _soft_accuracies(
    accuracy: SoftAccuracy, state: State, context: EvaluationContext, classes: Sequence[int]
) -> Tensor:
    predict = global_model(context.method, state, context.world)
    assert predict is not None
    return accuracy.values(predict, classes)


def _by_class(context: EvaluationContext, client: int, params: Tensors, data: Examples) -> Tensor:
    return accuracies_of(context.predictor(params, client), data, context)


def _training_and_averaging(
    result: StageResult, context: EvaluationContext, data: Examples, initial: Tensor, final: Tensor
) -> dict[str, list[float | None]]:
    """The change of each class accuracy by local training and by averaging.

    initial, final: class accuracies (C,) of the global model before and after the stage.
    """
    local = [
        _by_class(context, client, params, data) for client, params in result.local_models.items()
    ]
    parts = by_local_training_and_averaging(initial, torch.stack(local), final, _weights(result))
    return {"local training": _listed(parts.training), "averaging": _listed(parts.averaging)}


def _weights(result: StageResult) -> Tensor:
    """The shares (m,) of examples of the clients with local models."""
    local_models = result.local_models
    sizes = torch.tensor(
        [float(reply.examples) for reply in result.accepted if reply.client in local_models],
        dtype=torch.float64,
    )
    if not sizes.sum() > 0:
        return torch.full_like(sizes, 1 / len(sizes))
    return sizes / sizes.sum()


def _is_moved(result: StageResult) -> bool:
    """Whether the stage changed the global model."""
    old = result.before.params
    new = result.after.params
    if not old:
        return False
    if old.keys() != new.keys():
        return True
    return any(old[name] is not new[name] and not torch.equal(old[name], new[name]) for name in old)


def _name(result: StageResult) -> str:
    client = result.accepted[0].client
    if client == SERVER:
        return f"{result.stage.name} at the server"
    return f"client {client}"


def _of_personal_models(
    result: StageResult, context: EvaluationContext, data: Examples
) -> Numbers | None:
    """The mean change of personal models by class in a stage; None if there are none."""
    changes = {}
    for reply in result.accepted:
        change = _personal_change(reply, result, context, data)
        if change is not None:
            changes[reply.client] = change
    if not changes:
        return None
    initial = torch.stack([change.initial for change in changes.values()]).mean(0)
    final = torch.stack([change.final for change in changes.values()]).mean(0)
    return {
        "model": "own",
        "clients": list(changes),
        "before": _listed(initial),
        "after": _listed(final),
        "parts": {result.stage.name: _listed(final - initial)},
    }


@dataclass(frozen=True)
class _PersonalChange:
    """The class accuracies (C,) of a personal model before and after a stage."""

    initial: Tensor
    final: Tensor


def _personal_change(
    reply: Reply, result: StageResult, context: EvaluationContext, data: Examples
) -> _PersonalChange | None:
    """The change of a client's model in a stage; None if neither the client nor the server can
    measure it.
    """
    client = reply.client
    if "correct_before" in reply.metrics:
        totals = torch.bincount(data.labels.cpu(), minlength=context.world.classes)
        correct_before = torch.tensor(reply.metrics["correct_before"], dtype=torch.float64)
        correct_after = torch.tensor(reply.metrics["correct_after"], dtype=torch.float64)
        return _PersonalChange(correct_before / totals, correct_after / totals)
    if client == SERVER or "params" not in reply.content:
        return None
    state = result.before
    start = student_models(state).get(client) or fitted_models(state).get(client)
    return _PersonalChange(
        initial=_by_class(context, client, start or context.world.initial(client), data),
        final=_by_class(context, client, reply.content.params, data),
    )


def _shares_of_data(result: StageResult, context: EvaluationContext) -> dict[str, Any]:
    """``drawn``: for each class, its share in the data of the stage's clients divided by its share
    in the data of all clients. Only in a simulation.

    With several tasks also ``tasks``, the task of each client, counted from 1, and ``had``, the
    clients' label counts (m, C) in the task.
    """
    sites = context.sites
    if not isinstance(sites, SiteViews):
        return {}
    all_counts = sites.all_counts(result.stage.round)
    if not len(all_counts):
        return {}

    clients = [reply.client for reply in result.accepted]
    counts = all_counts[clients]  # (m, C)
    acting = counts.sum(0).double()
    overall = all_counts.sum(0).double()
    ratio = (acting / acting.sum().clamp(min=1)) / (overall / overall.sum().clamp(min=1))
    fields: dict[str, Any] = {"drawn": _listed(ratio)}
    stream = context.world.stream
    if stream.tasks > 1:
        fields["tasks"] = [stream.task(result.stage.round, c) + 1 for c in clients]
        fields["had"] = counts.tolist()
    return fields


def _listed(values: Tensor) -> list[float | None]:
    """Rounded numbers for a journal, with None instead of numbers that are not finite."""
    rounded: list[float | None] = []
    for value in values.tolist():
        if math.isfinite(value):
            rounded.append(round(value, DIGITS))
        else:
            rounded.append(None)
    return rounded
