"""The table of docs/privacy.md on what the clients of each method send in addition to models.

``tools.docs_check`` compares it with the page. A row of the scorecard looks at the same replies.

A client works through the stages of a small run twice without training, with different labels. A
group of tensors that differs between the two runs is made from labels, and not by training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedstill import from_tensors
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need, Permit
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import SERVER, Group, Payload
from fedstill.core.rounds import run_round
from fedstill.data.dataset import Dataset
from fedstill.running.extensions import run_context
from fedstill.running.preparation import prepare
from tools.fitting_runs import fitting_run, package_methods

CLASSES = 7
WIDTH = 11
PUBLIC_EXAMPLES = 13
TRAINING_EXAMPLES = 210

SYMBOLS = {
    CLASSES: "C",
    WIDTH: "D",
    WIDTH + 1: "D + 1",
    PUBLIC_EXAMPLES: "P",
    WIDTH + CLASSES: "D + C",
    16: "d",
    1251: "M + 1",
}
"""The symbol of each size that a tensor may have in these runs; all sizes differ."""

MODELS = ("params", "shared")
"""The groups of a reply that are models."""

NETWORK = {"name": "mlp", "hidden": [WIDTH]}

TWO_TASKS = {"kind": "domains", "tasks": 2, "transform": "rotate90", "share": "all"}
"""A stream for methods that act at the end of a task. Both tasks have all examples, whatever the
labels are.
"""

HEAD = "| method | in addition to models | made from labels | models as a secure sum |"


@dataclass(frozen=True)
class SentGroups:
    """What the clients of a method send in addition to models, as the cells of the table."""

    groups: str
    from_labels: str
    """Those groups that are made from labels."""


def sent_table() -> str:
    """The table in Markdown; methods that send the same share a row."""
    methods = defaultdict[str, list[str]](list)
    for method in package_methods():
        reply = sent_groups(method)
        secure_sum = "no"
        if Permit.LINEAR_AGGREGATE in registry.lookup("method", method).build().permits:
            secure_sum = "yes"
        cells = f"{reply.groups} | {reply.from_labels} | {secure_sum}"
        methods[cells].append(f"`{method}`")
    rows = []
    for cells, names in methods.items():
        rows.append(f"| {', '.join(names)} | {cells} |")
    return "\n".join([HEAD, "|---|---|---|---|", *rows, ""])


def sent_groups(method: str) -> SentGroups:
    """What the clients of a method send in addition to models."""
    payloads = first_payloads(method, noise_images(merge_classes=False))
    payloads_of_other_labels = first_payloads(method, noise_images(merge_classes=True))
    # Dictionaries keep the order of the groups and drop repetitions.
    groups = dict[str, None]()
    from_labels = dict[str, None]()
    for stage, payload in payloads.items():
        for name, group in payload.items():
            if name in MODELS:
                continue
            groups[f"`{name}`{shape_of(group)}"] = None
            if not are_equal(group, payloads_of_other_labels[stage][name]):
                from_labels[f"`{name}`"] = None
    return SentGroups(", ".join(groups) or "nothing", ", ".join(from_labels) or "nothing")


def noise_images(merge_classes: bool) -> Dataset:
    """Noise with seven equally frequent classes. ``merge_classes`` gives examples of the first
    three classes the label of the first.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (280, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.arange(280) % CLASSES
    if merge_classes:
        labels = torch.where(labels < 3, 0, labels)
    train = (images[:TRAINING_EXAMPLES], labels[:TRAINING_EXAMPLES])
    test = (images[TRAINING_EXAMPLES:], labels[TRAINING_EXAMPLES:])
    return from_tensors("noise", train, test, classes=list("abcdefg"))


@dataclass
class FirstPayloads(NoRecorder):
    """Records the payload of the first client of each stage."""

    by_stage: dict[str, Payload] = field(default_factory=dict)

    def stage(self, result: StageResult) -> None:
        """Record the payload of the first accepted reply."""
        if result.refused:
            raise ValueError(f"{result.stage}: {result.refused[0].reason}")
        if not result.accepted:
            return
        reply = result.accepted[0]
        if reply.client != SERVER:
            self.by_stage.setdefault(result.stage.name, reply.content)


def first_payloads(method: str, data: Dataset) -> dict[str, Payload]:
    """The payload of one client in each stage of a run without training."""
    prepared = prepare(resolve(run_without_training(method)), data)
    engine = replace(prepared.engine(), reply_cache=None, stops_on_failure=True)
    recorder = FirstPayloads()
    context = run_context(prepared, engine, recorder)
    state = replace(context.method.initial_state(prepared.world), round=0)
    for round_index in range(prepared.settings.rounds + 1):
        stages = context.schedule(round_index, prepared.world)
        state = run_round(state, stages, context)
    return recorder.by_stage


def run_without_training(method: str) -> Experiment:
    """A run of a method in which no client trains."""
    built = registry.lookup("method", method).build()
    settings: dict[str, Any] = {
        "rounds": 2,
        "data": {"public": PUBLIC_EXAMPLES},
        "plan": {"epochs": 0, "steps": 0},
        "clients": {"norm_limit": 1e9},
    }
    if built.topology == "peer_to_peer":
        settings["rounds"] = 1
    if not built.requires() & (Need.ETF | Need.SLIM | Need.PAIR):
        settings["model"] = NETWORK
    if "task_end" in built.schedule:
        settings["stream"] = TWO_TASKS
    return fitting_run(method, **settings)


def shape_of(group: Group) -> str:
    """The shape of a tensor in symbols; empty for a number."""
    if isinstance(group, Mapping):
        if len(group) > 1:
            return ", in the shape of the sent parameters"
        return shape_of(*group.values())
    if not isinstance(group, Tensor):
        return ""
    sizes = [SYMBOLS.get(size, str(size)) for size in group.shape]
    return f" ({', '.join(sizes)})"


def are_equal(first: Group, second: Group) -> bool:
    """Whether two groups hold the same numbers."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return all(torch.equal(first[name], second[name]) for name in first)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first == second
