"""What clients send beside models, of every method: from what its code expects and does.

A client works through the stages of a small run twice, untrained: with its labels, and with others.
What differs is made from labels, and not by training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedstill import from_tensors
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import SERVER, Group, Payload
from fedstill.core.rounds import run_round
from fedstill.data.dataset import Dataset
from fedstill.running.extensions import run_context
from fedstill.running.preparation import Prepared, prepare
from tools.fitting_runs import fitting_run

CLASSES, WIDTH, PUBLIC, CLIENTS = 7, 11, 13, 4
LETTERS = {
    CLASSES: "C",
    WIDTH: "D",
    WIDTH + 1: "D + 1",
    PUBLIC: "P",
    WIDTH + CLASSES: "D + C",
    16: "d",
    1251: "M + 1",
}
MODELS = ("params", "shared")
NETWORK = {"name": "mlp", "hidden": [WIDTH]}
TWO_TASKS = {"kind": "domains", "tasks": 2, "transform": "rotate90", "share": "all"}
"""For methods that do something at a task's end; both tasks have all examples, whatever their
labels are.
"""


def pictures(flip: bool) -> Dataset:
    """Noise with seven classes, as many of each; or the first three classes called by the name of
    the first.
    """
    draw = torch.Generator().manual_seed(0)
    pixels, labels = (
        torch.randint(256, (280, 1, 4, 4), generator=draw, dtype=torch.uint8),
        torch.arange(280) % CLASSES,
    )
    told = torch.where(labels < 3, 0, labels) if flip else labels
    return from_tensors(
        "noise", (pixels[:210], told[:210]), (pixels[210:], labels[210:]), classes=list("abcdefg")
    )


@dataclass
class Collected(NoRecorder):
    """What each stage's clients sent: by stage, the first client's payload."""

    sent: dict[str, Payload] = field(default_factory=dict)

    def stage(self, result: StageResult) -> None:
        """Keep the first reply of a client."""
        if result.refused:
            raise ValueError(f"{result.stage}: {result.refused[0].reason}")
        for reply in result.accepted[:1]:
            if reply.client != SERVER:
                self.sent.setdefault(result.stage.name, reply.content)


def collected(method: str, flip: bool) -> dict[str, Payload]:
    """What a client sends in each stage of a run in which nobody trains."""
    built = registry.lookup("method", method).build()
    own: Mapping[str, object] = {"model": NETWORK}
    if built.requires() & (Need.ETF | Need.SLIM | Need.PAIR):
        own = {}
    rounds = 1 if built.topology == "peer_to_peer" else 2
    plan = {"epochs": 0, "steps": 0}
    own = {**own, **({"stream": TWO_TASKS} if "task_end" in built.schedule else {})}
    run = fitting_run(
        method,
        rounds=rounds,
        data={"public": PUBLIC},
        plan=plan,
        clients={"norm_limit": 1e9},
        **own,
    )
    ready = prepare(resolve(run), pictures(flip))
    return dict(_through(ready))


def _through(ready: Prepared) -> Iterator[tuple[str, Payload]]:
    recorder = Collected()
    engine = replace(ready.engine(), reply_cache=None, stops_on_failure=True)
    context = run_context(ready, engine, recorder)
    state = replace(context.method.initial_state(ready.world), round=0)
    for round in range(ready.settings.rounds + 1):
        stages = context.schedule(round, ready.world)
        state = run_round(state, stages, context)
    yield from recorder.sent.items()


def cells(method: str) -> tuple[str, str]:
    """What a method's clients send beside a model, and which of it is made from labels."""
    true, false = (collected(method, flip) for flip in (False, True))
    beside, told = dict[str, None](), dict[str, None]()
    for stage, up in true.items():
        for name, group in up.items():
            if name not in MODELS:
                beside[f"`{name}`{shape_of(group)}"] = None
                if not same(group, false[stage][name]):
                    told[f"`{name}`"] = None
    return ", ".join(beside) or "nothing", ", ".join(told) or "nothing"


def shape_of(group: Group) -> str:
    """The shape of a tensor; that of a model for named ones; nothing for a number."""
    if isinstance(group, Mapping):
        if len(group) > 1:
            return ", in the shape of the sent parameters"
        return shape_of(*group.values())
    if not isinstance(group, Tensor):
        return ""
    return f" ({', '.join(LETTERS.get(size, str(size)) for size in group.shape)})"


def same(one: Group, other: Group) -> bool:
    """Whether two groups hold the same numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(torch.equal(one[k], other[k]) for k in one)
    return (
        torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one == other
    )
