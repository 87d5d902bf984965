"""The screen: which replies are accepted, and why the others are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, ParamSpec

import torch
from annotated_types import Interval
from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import cut_reason, on_one_line
from fedstill.core.fields import Positive, PositiveShare, check_ranges
from fedstill.core.records import NOTHING, Group, Payload, Reply, Stage
from fedstill.core.reports import wrong_report

# The screen: which replies may be folded, and why the others may not, from what was expected and
# what came.


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
    refusal: Callable[[Reply], str] = lambda reply: "",
) -> tuple[list[Reply], list[Refusal]]:
    """Replies sorted by client id, and refusals: of failures, clients that were not asked, repeats,
    claims and reports that cannot be, and payloads other than expected.

    ``refusal``: why a reply of this stage cannot be true, empty if it can. A check that raises
    refuses the reply.
    """
    accepted: dict[int, Reply] = {}
    sent: dict[int, float] = {}
    refused = []
    for reply in replies:
        kind: Kind = "failed" if reply.failure else "strange"
        why = (
            _outcome(_envelope, reply, stage, payloads, accepted)
            or _outcome(_claim, reply, rules.max_examples)
            or _outcome(refusal, reply)
        )
        if not why:
            kind, why = "unlike", _outcome(_content, reply.content, expected(reply.client))
        if not why:
            kind, why = (
                "diverged",
                _outcome(_wild, reply.content, payloads[reply.client], rules.norm_limit, sent),
            )
            why += _outcome(_lost, reply.metrics) if why else ""
        if not why:
            kind, why = "strange", _outcome(wrong_report, reply.metrics)
        if why:
            refused.append(Refusal(reply.client, why, kind, reply.content))
        else:
            accepted[reply.client] = reply
    return [accepted[c] for c in sorted(accepted)], refused


def _outcome(check: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> str:
    try:
        return check(*args, **kwargs)
    except Exception as error:
        return f"could not be checked: {on_one_line(error)}"


def _envelope(
    reply: Reply, stage: Stage, payloads: Mapping[int, Payload], seen: Mapping[int, Reply]
) -> str:
    if reply.failure:
        return f"failed: {reply.failure}"
    if type(reply.client) is not int or reply.client not in payloads:
        return "was not asked"
    if reply.client in seen:
        return "replied twice"
    return of_other_stage(reply, stage)


def of_other_stage(reply: Reply, stage: Stage) -> str:
    """Why a reply is not of this stage; empty if it is."""
    if (reply.round, reply.stage) == (stage.round, stage.index):
        return ""
    return (
        f"replied for round {reply.round} stage {reply.stage}, not {stage.round} and {stage.index}"
    )


def _claim(reply: Reply, most: int) -> str:
    count = reply.examples
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return f"claims {count!r} examples"
    if count > most:
        claimed = count if count < MAX_NUMBER else "endless"
        return f"claims {claimed} examples, over clients.max_examples = {most}"
    return ""


def _content(content: Payload, expected: Payload) -> str:
    if set(content) != set(expected):
        return f"groups differ: {_difference(content, expected)}"
    for name in expected:
        bad = other_group(name, content[name], expected[name])
        if bad:
            return bad
    return ""


def other_group(name: str, got: Group, want: Group) -> str:
    """In what a group is not as it must be: its names, shapes and types; empty if it is."""
    if isinstance(want, Tensor):
        return _tensor(name, got, want)
    if isinstance(want, Mapping):
        if not isinstance(got, Mapping):
            return f"{name} is a {type(got).__name__}, not named tensors"
        if set(got) != set(want):
            return f"{name} differs: {_difference(got, want)}"
        return next((bad for k in want if (bad := _tensor(f"{name}/{k}", got[k], want[k]))), "")
    if isinstance(want, str):
        return (
            ""
            if isinstance(got, str) and len(got) <= MAX_STRING
            else f"{name} is not a short string"
        )
    if type(got) is not type(want) and (type(got), type(want)) != (int, float):
        return f"{name} is of type {type(got).__name__}, not {type(want).__name__}"
    return (
        f"{name} is a number beyond 2**63" if isinstance(got, int) and abs(got) > MAX_NUMBER else ""
    )


def _difference(got: Collection[str], want: Collection[str]) -> str:
    return (
        f"missing {sorted(set(want) - set(got))[:3]}, not asked for "
        f"{sorted(set(got) - set(want))[:3]}"
    )


def _tensor(name: str, got: object, want: Tensor) -> str:
    if not isinstance(got, Tensor) or got.layout != torch.strided:
        return f"{name} is not a dense tensor"
    if got.shape != want.shape:
        return f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    return "" if got.dtype == want.dtype else f"{name} is {got.dtype}, not {want.dtype}"


def _wild(content: Payload, payload: Payload, limit: float, sent: dict[int, float]) -> str:
    """What is not finite or too large; ``sent``: the norms of parameters that were sent, by the
    object's id.
    """
    norms = dict[str, float]()
    for name, group in content.items():
        named = (
            group
            if isinstance(group, Mapping)
            else {"": group}
            if isinstance(group, Tensor)
            else {}
        )
        norms[name] = trees.norm(named)
        # looked at more closely: a sum of squares may have overflowed
        if not math.isfinite(norms[name]):
            for k, t in named.items():
                if t.is_floating_point() and not bool(torch.isfinite(t).all()):
                    return f"{name}{'/' if k else ''}{k} holds numbers that are not finite"
        if isinstance(group, float) and not abs(group) < float("inf"):
            return f"{name} is {group}"
    return next(
        (
            bad
            for n in MODELS
            if n in content and n in payload and (bad := _grown(n, norms[n], payload, limit, sent))
        ),
        "",
    )


def _lost(metrics: Mapping[str, object]) -> str:
    """The terms of the objective whose loss was no number, as a client reports them."""
    losses = metrics.get("loss")
    named = losses.items() if isinstance(losses, Mapping) else ()
    lost = [
        f"{name!r:.60}"
        for name, loss in named
        # over a network NaN becomes None
        if loss is None or (isinstance(loss, float) and not math.isfinite(loss))
    ]
    return (
        f" (so was the loss of its term{'s' * (len(lost) > 1)} {', '.join(lost[:3])})"
        if lost
        else ""
    )


def _grown(name: str, norm: float, payload: Payload, limit: float, sent: dict[int, float]) -> str:
    group = id(payload[name])  # which most clients share, and which lives as long as the stage
    if group not in sent:
        sent[group] = max(1.0, trees.norm(payload.tensors(name)))
    if norm > limit * sent[group]:
        what = "parameters'" if name == "params" else f"{name} parameters'"
        return (
            f"its {what} norm {norm:.3g} is over {limit:g} times the {sent[group]:.3g} it was sent"
        )
    return ""


# Whether what a client claims can be true, by what the server knows of its data.


@dataclass(frozen=True)
class Truth:
    """What a server knows of a client's data, by class (C,): its own, the common test set, the
    public set.

    None where it does not know, as of real sites. ``tasks``: how many the run has.
    """

    own: Sequence[int] | None = None
    test: Sequence[int] | None = None
    public: Sequence[int] | None = None
    tasks: int = 0


def untrue(examples: int, fields: Mapping[str, Any], truth: Truth) -> str:
    """Why a client's number of examples and its counts cannot be true; empty if they can."""
    own, test = truth.own, truth.test
    if own is not None and examples > sum(own):
        return f"claims {examples} examples, and has {sum(own)}"
    if own is not None and "label_counts" in fields and list(fields["label_counts"]) != list(own):
        return "its report 'label_counts' is not what it has"
    for row in (fields.get("correct_by_class", ()), *fields.get("correct_by_epoch", ())):
        if test is not None and (
            len(row) not in (0, len(test)) or any(r > n for r, n in zip(row, test, strict=False))
        ):
            return "its report has more right answers than there are test examples"
    if truth.tasks and len(fields.get("site_by_task", ())) not in (0, truth.tasks):
        return (
            f"its report 'site_by_task' has {len(fields['site_by_task'])} numbers for "
            f"{truth.tasks} tasks"
        )
    for name, there in (("private", own), ("public", truth.public)):
        table = fields.get(name)
        said = table.get("counts", ()) if isinstance(table, Mapping) else ()
        if there is not None and any(n > of for n, of in zip(said, there, strict=False)):
            return f"its report {name!r} counts more examples than there are"
    return ""
