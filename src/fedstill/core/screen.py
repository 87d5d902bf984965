"""The screen accepts or refuses each reply of a stage: its content, its claims, and its metrics
(``core.reports``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, ParamSpec

import torch
from annotated_types import Interval
from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import cut_reason, on_one_line
from fedstill.core.fields import Positive, PositiveShare, check_ranges
from fedstill.core.records import NOTHING, Group, Payload, Reply, Stage, Tensors
from fedstill.core.reports import wrong_report

P = ParamSpec("P")

MAX_EXAMPLES = 10**7
"""The most examples that a client may claim, by default."""

MostExamples = Annotated[int, Interval(ge=1, le=10**9)]

MODELS = ("params", "shared")
"""The groups that hold a model's parameters, or some of them. Their norm must not grow too much at
a client.
"""

MAX_STRING = 1 << 16  # characters in a string group
MAX_NUMBER = 2**63  # absolute value of an integer group


@dataclass(frozen=True)
class Rules:
    """The rules of the screen and the quorum.

    ``quorum``: the share of a stage's clients whose replies must be accepted, in (0, 1].
    ``norm_limit``: a reply is refused if its parameters' norm exceeds this many times the norm of
    the received parameters (at least 1). ``max_examples``: a reply that claims more examples is
    refused. ``failures``: with "stop", a failed client ends the run; with "tolerate", it is
    refused.
    """

    quorum: PositiveShare = 0.5
    norm_limit: Positive = 10.0
    max_examples: MostExamples = MAX_EXAMPLES
    failures: Failures = "stop"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Refusal:
    """A refused reply, with the reason.

    ``kind``: "failed" if the client reported a failure; "diverged" if only its numbers are invalid;
    "unlike" if its groups differ from the expected ones; "strange" for other reasons. ``content``:
    the reply's content.
    """

    client: int
    reason: str
    kind: Kind = "strange"
    content: Payload = field(default=NOTHING, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", cut_reason(self.reason))

    @property
    def diverged(self) -> bool:
        """Whether only the reply's numbers are invalid."""
        return self.kind == "diverged"


def screen(
    expected: Callable[[int], Payload],
    stage: Stage,
    payloads: Mapping[int, Payload],
    replies: Sequence[Reply],
    rules: Rules,
    *,
    refusal: Callable[[Reply], str] = lambda reply: "",
) -> tuple[list[Reply], list[Refusal]]:
    """The accepted replies, sorted by client id, and the refusals.

    The screen refuses failures, replies of clients without a payload, repeated replies, impossible
    claims and reports, and contents of an unexpected form.

    ``expected``: returns a payload of the form that a client's content must have. ``payloads``: the
    payloads that clients received. ``refusal``: returns the reason why a reply is impossible, or an
    empty string. If a check raises an exception, the reply is refused.
    """
    screening = _Screening(stage, payloads, rules, expected, refusal)
    refused: list[Refusal] = []
    for reply in replies:
        problem = screening.problem(reply)
        if problem is None:
            screening.accepted[reply.client] = reply
        else:
            refused.append(problem)
    accepted = [screening.accepted[client] for client in sorted(screening.accepted)]
    return accepted, refused


@dataclass
class _Screening:
    """The replies of one stage under examination."""

    stage: Stage
    payloads: Mapping[int, Payload]
    rules: Rules
    expected: Callable[[int], Payload]
    refusal: Callable[[Reply], str]
    accepted: dict[int, Reply] = field(default_factory=dict)
    sent_norms: dict[int, float] = field(default_factory=dict)
    """The norms of the groups that clients received, by the object's id. Most clients share these
    objects, which live as long as the stage.
    """

    def problem(self, reply: Reply) -> Refusal | None:
        """The refusal of a reply by the first check that it fails; None if it passes all."""
        if reply.failure:
            return _refusal(reply, "failed", f"failed: {reply.failure}")
        reason = (
            _outcome(self._envelope, reply)
            or _outcome(_claim, reply, self.rules.max_examples)
            or _outcome(self.refusal, reply)
        )
        if reason:
            return _refusal(reply, "strange", reason)

        expected = self.expected(reply.client)
        reason = _outcome(_content_difference, reply.content, expected)
        if reason:
            return _refusal(reply, "unlike", reason)

        reason = _outcome(self._numbers, reply)
        if reason:
            return _refusal(reply, "diverged", reason + _outcome(_lost_terms, reply.metrics))

        reason = _outcome(wrong_report, reply.metrics)
        if reason:
            return _refusal(reply, "strange", reason)
        return None

    def _envelope(self, reply: Reply) -> str:
        if type(reply.client) is not int or reply.client not in self.payloads:
            return "was not asked"
        if reply.client in self.accepted:
            return "replied twice"
        return stage_mismatch(reply, self.stage)

    def _numbers(self, reply: Reply) -> str:
        """The numbers that are not finite, or too large."""
        norms: dict[str, float] = {}
        for name, group in reply.content.items():
            if isinstance(group, float) and not math.isfinite(group):
                return f"{name} is {group}"
            tensors = _tensors(name, group)
            norms[name] = trees.norm(tensors)
            if math.isfinite(norms[name]):
                continue
            # A sum of squares may have overflowed though every number is finite.
            for label, tensor in tensors.items():
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    return f"{label} holds numbers that are not finite"

        payload = self.payloads[reply.client]
        for name in MODELS:
            if name in norms and name in payload:
                reason = self._growth(name, norms[name], payload)
                if reason:
                    return reason
        return ""

    def _growth(self, name: str, norm: float, payload: Payload) -> str:
        """Why the norm of a group of parameters is too large; empty if it is not."""
        key = id(payload[name])
        if key not in self.sent_norms:
            self.sent_norms[key] = max(1.0, trees.norm(payload.tensors(name)))
        sent_norm = self.sent_norms[key]
        limit = self.rules.norm_limit
        if norm <= limit * sent_norm:
            return ""
        owner = "parameters'"
        if name != "params":
            owner = f"{name} parameters'"
        return (
            f"its {owner} norm {norm:.3g} is over {limit:g} times the {sent_norm:.3g} it was sent"
        )


def _refusal(reply: Reply, kind: Kind, reason: str) -> Refusal:
    return Refusal(reply.client, reason, kind, reply.content)


def _outcome(check: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> str:
    """The reason that a check returns. An exception in a check is a reason, too."""
    try:
        return check(*args, **kwargs)
    except Exception as error:
        return f"could not be checked: {on_one_line(error)}"


def stage_mismatch(reply: Reply, stage: Stage) -> str:
    """Why a reply does not belong to a stage; empty if it does."""
    if reply.round == stage.round and reply.stage == stage.index:
        return ""
    return (
        f"replied for round {reply.round} stage {reply.stage}, not {stage.round} and {stage.index}"
    )


def _claim(reply: Reply, most: int) -> str:
    """Why a number of training or test examples is invalid; empty if both are valid."""
    counts = (reply.examples, reply.metrics.get("site_test_examples", 0))
    return next(filter(None, (_wrong_count(count, most) for count in counts)), "")


def _wrong_count(count: object, most: int) -> str:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return f"claims {count!r} examples"
    if count <= most:
        return ""
    claimed = "endless"
    if count < MAX_NUMBER:
        claimed = str(count)
    return f"claims {claimed} examples, over clients.max_examples = {most}"


def _lost_terms(metrics: Mapping[str, object]) -> str:
    """A remark on the terms of the objective whose reported loss was not a number."""
    losses = metrics.get("loss")
    if not isinstance(losses, Mapping):
        return ""
    lost = [f"{name!r:.60}" for name, loss in losses.items() if _is_lost(loss)]
    if not lost:
        return ""
    noun = "terms"
    if len(lost) == 1:
        noun = "term"
    return f" (so was the loss of its {noun} {', '.join(lost[:3])})"


def _is_lost(loss: object) -> bool:
    # JSON has no NaN: a loss that was sent over a network is None instead.
    return loss is None or (isinstance(loss, float) and not math.isfinite(loss))


# ---- the form of a payload -----------------------------------------------------------------------


def _content_difference(content: Payload, expected: Payload) -> str:
    if set(content) != set(expected):
        return f"groups differ: {_name_difference(content, expected)}"
    for name, group in expected.items():
        reason = group_difference(name, content[name], group)
        if reason:
            return reason
    return ""


def group_difference(name: str, received: Group, expected: Group) -> str:
    """How a group differs from the expected one in names, shapes or types; empty if it does not."""
    if isinstance(expected, Tensor):
        return _tensor_difference(name, received, expected)
    if isinstance(expected, Mapping):
        return _tensors_difference(name, received, expected)
    if isinstance(expected, str):
        if isinstance(received, str) and len(received) <= MAX_STRING:
            return ""
        return f"{name} is not a short string"
    return _number_difference(name, received, expected)


def _tensors_difference(name: str, received: Group, expected: Tensors) -> str:
    if not isinstance(received, Mapping):
        return f"{name} is a {type(received).__name__}, not named tensors"
    if set(received) != set(expected):
        return f"{name} differs: {_name_difference(received, expected)}"
    for key, tensor in expected.items():
        reason = _tensor_difference(f"{name}/{key}", received[key], tensor)
        if reason:
            return reason
    return ""


def _tensor_difference(name: str, received: object, expected: Tensor) -> str:
    if not isinstance(received, Tensor) or received.layout != torch.strided:
        return f"{name} is not a dense tensor"
    if received.shape != expected.shape:
        return f"{name} has shape {tuple(received.shape)}, not {tuple(expected.shape)}"
    if received.dtype != expected.dtype:
        return f"{name} is {received.dtype}, not {expected.dtype}"
    return ""


def _number_difference(name: str, received: Group, expected: float) -> str:
    is_whole_float = type(received) is int and type(expected) is float
    if type(received) is not type(expected) and not is_whole_float:
        return f"{name} is of type {type(received).__name__}, not {type(expected).__name__}"
    if isinstance(received, int) and abs(received) > MAX_NUMBER:
        return f"{name} is a number beyond 2**63"
    return ""


def _name_difference(received: Collection[str], expected: Collection[str]) -> str:
    missing = sorted(set(expected) - set(received))
    unexpected = sorted(set(received) - set(expected))
    return f"missing {missing[:3]}, not asked for {unexpected[:3]}"


def _tensors(name: str, group: Group) -> Tensors:
    """The tensors of a group, by the names that messages use; none for a number or a text."""
    if isinstance(group, Tensor):
        return {name: group}
    if isinstance(group, Mapping):
        return {f"{name}/{key}": tensor for key, tensor in group.items()}
    return {}


Kind = Literal["failed", "diverged", "unlike", "strange"]
Failures = Literal["stop", "tolerate"]
"""The effect of an exception in a client's code: it ends the run, or the client is refused."""
