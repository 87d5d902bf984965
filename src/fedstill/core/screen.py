"""The screen: which replies are accepted, and why the others are refused."""

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

Kind = Literal["failed", "diverged", "unlike", "strange"]
Failures = Literal["stop", "tolerate"]
"""What an exception in a client's code does: end the run, or leave that client out of the stage."""
P = ParamSpec("P")

MAX_EXAMPLES = 10**7
"""The most examples that a client may claim, if the config says nothing else."""
MostExamples = Annotated[int, Interval(ge=1, le=10**9)]
MODELS = ("params", "shared")
"""The groups that hold a model's parameters, all or a part: they may not come back far larger than
they were sent.
"""
MAX_STRING = 1 << 16
MAX_NUMBER = 2**63


@dataclass(frozen=True)
class Rules:
    """When a stage counts: the share of its clients that must be accepted, what a reply may hold,
    who may fail.

    ``quorum``: the least share of a stage's clients, in (0, 1]. ``norm_limit``: a reply whose
    parameters' norm exceeds this many times that of what the client was sent (at least 1) is
    refused. ``max_examples``: so is one that claims more examples. ``failures``: "stop", a client
    that fails ends the run; "tolerate", it is refused.
    """

    quorum: PositiveShare = 0.5
    norm_limit: Positive = 10.0
    max_examples: MostExamples = MAX_EXAMPLES
    failures: Failures = "stop"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Refusal:
    """A reply that was left out, and why.

    ``kind``: "failed", the client said so; "diverged", its numbers, and nothing else, were at
    fault; "unlike", its groups are not those expected; "strange", it is not the reply to what was
    asked. ``content``: what it brought.
    """

    client: int
    reason: str
    kind: Kind = "strange"
    content: Payload = field(default=NOTHING, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", cut_reason(self.reason))

    @property
    def diverged(self) -> bool:
        """Whether its numbers, and nothing else, were at fault."""
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

    Refused are failures, replies of clients that were not asked, repeated replies, claims and
    reports that cannot be true, and payloads other than expected.

    ``expected``: gives the form of a client's payload. ``payloads``: what the clients were sent.
    ``refusal``: gives the reason why a reply cannot be true, or an empty string. A check that
    raises an error refuses the reply.
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
    untrue: Callable[[Reply], str]
    accepted: dict[int, Reply] = field(default_factory=dict)
    sent_norms: dict[int, float] = field(default_factory=dict)
    """The norms of the groups that were sent, by the object's id: most clients share them, and they
    live as long as the stage.
    """

    def problem(self, reply: Reply) -> Refusal | None:
        """The refusal of a reply by the first check that it fails; None if it passes all."""
        if reply.failure:
            return _refusal(reply, "failed", f"failed: {reply.failure}")
        reason = (
            _outcome(self._envelope, reply)
            or _outcome(_claim, reply, self.rules.max_examples)
            or _outcome(self.untrue, reply)
        )
        if reason:
            return _refusal(reply, "strange", reason)

        expected = self.expected(reply.client)
        reason = _outcome(_other_content, reply.content, expected)
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
        return of_other_stage(reply, self.stage)

    def _numbers(self, reply: Reply) -> str:
        """Which numbers are not finite, or too large."""
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
        """How a group of parameters is too large for what was sent."""
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
    """The reason that a check gives. An error in a check is a reason, too."""
    try:
        return check(*args, **kwargs)
    except Exception as error:
        return f"could not be checked: {on_one_line(error)}"


def of_other_stage(reply: Reply, stage: Stage) -> str:
    """Why a reply does not belong to this stage; empty if it does."""
    if reply.round == stage.round and reply.stage == stage.index:
        return ""
    return (
        f"replied for round {reply.round} stage {reply.stage}, not {stage.round} and {stage.index}"
    )


def _claim(reply: Reply, most: int) -> str:
    """Why a number of examples is not acceptable."""
    count = reply.examples
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return f"claims {count!r} examples"
    if count <= most:
        return ""
    claimed = "endless"
    if count < MAX_NUMBER:
        claimed = str(count)
    return f"claims {claimed} examples, over clients.max_examples = {most}"


def _lost_terms(metrics: Mapping[str, object]) -> str:
    """A remark on the terms of the objective whose loss was no number, as a client reports them."""
    losses = metrics.get("loss")
    if not isinstance(losses, Mapping):
        return ""
    lost = [f"{name!r:.60}" for name, loss in losses.items() if _is_lost(loss)]
    if not lost:
        return ""
    noun = "term" if len(lost) == 1 else "terms"
    return f" (so was the loss of its {noun} {', '.join(lost[:3])})"


def _is_lost(loss: object) -> bool:
    # JSON has no NaN: a loss that was sent over a network is None instead.
    return loss is None or (isinstance(loss, float) and not math.isfinite(loss))


# The form of a payload: its groups, and their names, shapes and types.


def _other_content(content: Payload, expected: Payload) -> str:
    if set(content) != set(expected):
        return f"groups differ: {_difference(content, expected)}"
    for name, group in expected.items():
        reason = other_group(name, content[name], group)
        if reason:
            return reason
    return ""


def other_group(name: str, got: Group, want: Group) -> str:
    """How a group differs from the expected one in names, shapes or types; empty if it does not."""
    if isinstance(want, Tensor):
        return _other_tensor(name, got, want)
    if isinstance(want, Mapping):
        return _other_tensors(name, got, want)
    if isinstance(want, str):
        if isinstance(got, str) and len(got) <= MAX_STRING:
            return ""
        return f"{name} is not a short string"
    return _other_number(name, got, want)


def _other_tensors(name: str, got: Group, want: Tensors) -> str:
    if not isinstance(got, Mapping):
        return f"{name} is a {type(got).__name__}, not named tensors"
    if set(got) != set(want):
        return f"{name} differs: {_difference(got, want)}"
    for key, tensor in want.items():
        reason = _other_tensor(f"{name}/{key}", got[key], tensor)
        if reason:
            return reason
    return ""


def _other_tensor(name: str, got: object, want: Tensor) -> str:
    if not isinstance(got, Tensor) or got.layout != torch.strided:
        return f"{name} is not a dense tensor"
    if got.shape != want.shape:
        return f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"{name} is {got.dtype}, not {want.dtype}"
    return ""


def _other_number(name: str, got: Group, want: float) -> str:
    is_whole_float = type(got) is int and type(want) is float
    if type(got) is not type(want) and not is_whole_float:
        return f"{name} is of type {type(got).__name__}, not {type(want).__name__}"
    if isinstance(got, int) and abs(got) > MAX_NUMBER:
        return f"{name} is a number beyond 2**63"
    return ""


def _difference(got: Collection[str], want: Collection[str]) -> str:
    missing = sorted(set(want) - set(got))
    unexpected = sorted(set(got) - set(want))
    return f"missing {missing[:3]}, not asked for {unexpected[:3]}"


def _tensors(name: str, group: Group) -> Tensors:
    """The tensors of a group, by the names that messages use; none for a number or a text."""
    if isinstance(group, Tensor):
        return {name: group}
    if isinstance(group, Mapping):
        return {f"{name}/{key}": tensor for key, tensor in group.items()}
    return {}
