"""A workload as a task for all: the very clients, starts, orders and rates that fedstill draws,
written as tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.peers.common import Task
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare


def resized(name: str, clients: int = 0, epochs: int = 0) -> Workload:
    """A workload, or, for a quick look, one with fewer clients a round or other epochs; 0 leaves
    what it has.
    """
    full = WORKLOADS[name]
    plan = {**full.plan, **({"epochs": epochs} if epochs else {})}
    return replace(full, sampled=min(clients, full.sampled) if clients else full.sampled, plan=plan)


def task_of(ready: Prepared, rounds: int) -> Task:
    """The first rounds of a run of FedAvg or FedSeq; ``layers`` are there if the model is a row of
    plain ones.
    """
    world, sites, plan = ready.world, ready.sites, ready.world.plans["train"]
    schedule = [ready.settings.schedule(r, world) for r in range(1, rounds + 1)]
    sizes = torch.tensor([0, *sites.split.sizes])
    by_client = torch.from_numpy(sites.split.positions)
    examples = {
        "images": sites.inputs.plain(sites.train.values[by_client]),
        "labels": sites.train.labels[by_client],
        "starts": sizes.cumsum(0),
        "test_images": sites.inputs.plain(sites.common_test.values),
        "test_labels": sites.common_test.labels,
    }
    orders = {
        f"{stage.round}.{c}": _orders(
            len(sites.positions(c)),
            plan.epochs,
            seed_for(world.seed, stage.round, stage.index, c, "order"),
        )
        for stages in schedule
        for stage in stages
        for c in stage.clients
    }
    about = {
        "cohorts": [[c for stage in stages for c in stage.clients] for stages in schedule],
        "chain": any(len(stages) > 1 for stages in schedule),
        "rates": [plan.lr_at(r) for r in range(1, rounds + 1)],
        **{key: getattr(plan, key) for key in ("epochs", "batch", "momentum", "weight_decay")},
        **_layers(contract.build(world.model(SERVER))),
    }
    return Task(about, examples, dict(world.initial(SERVER)), orders)


def write(workload: Workload, rounds: int, folder: Path) -> Task:
    """Make a workload's data, and write the task and, for fedstill itself, the images as they are
    stored.
    """
    dataset = workload.dataset()
    ready = prepare(resolve(workload.experiment("fedavg")), dataset)
    task = task_of(ready, rounds)
    task = replace(
        task, about={**task.about, "workload": workload.name, "sampled": workload.sampled}
    )
    task.save(folder)
    kept = {"images": dataset.train.values, "labels": dataset.train.labels}
    test = {"test_images": dataset.test.values, "test_labels": dataset.test.labels}
    save_file({**kept, **test}, folder / "stored.safetensors")
    return task


def read(folder: Path, about: Mapping[str, Any]) -> tuple[Workload, Dataset]:
    """The workload and the data of a task that was written."""
    stored = load_file(folder / "stored.safetensors")
    train, test = ((stored[f"{p}images"], stored[f"{p}labels"]) for p in ("", "test_"))
    workload = resized(about["workload"], about["sampled"], about["epochs"])
    return workload, from_tensors(workload.name, train, test)


def _orders(n: int, epochs: int, seed: int) -> Tensor:
    draw = generator(seed)
    return torch.stack([torch.randperm(n, generator=draw) for _ in range(epochs)])


def _layers(network: nn.Module) -> dict[str, Any]:
    body, head = network.get_submodule("body"), network.get_submodule("head")
    described = (
        [_described(layer) for layer in body.children()] if isinstance(body, nn.Sequential) else []
    )
    if not described or None in described or not isinstance(head, nn.Linear):
        return {}
    return {"layers": described, "head": [head.in_features, head.out_features]}


def _described(layer: nn.Module) -> list[Any] | None:
    """A layer's kind and what it is built with, where peers can build it."""
    if isinstance(layer, nn.Conv2d):
        return [
            "Conv2d",
            layer.in_channels,
            layer.out_channels,
            *map(list, (layer.kernel_size, layer.stride, layer.padding)),
        ]
    if isinstance(layer, nn.MaxPool2d):
        return ["MaxPool2d", layer.kernel_size]
    if isinstance(layer, nn.Linear):
        return ["Linear", layer.in_features, layer.out_features]
    return [type(layer).__name__] if isinstance(layer, (nn.ReLU, nn.Flatten)) else None
