"""A workload as a task for all contestants: the clients, initial weights, batch orders and learning
rates that fedstill draws, as tensors.
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
from fedstill.core.records import SERVER, Stage
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare

STORED = "stored.safetensors"
"""The file of the images as fedstill stores them."""

PLAN_KEYS = ("epochs", "batch", "momentum", "weight_decay")
"""The keys of the plan that a task needs."""


def resized(name: str, clients: int = 0, epochs: int = 0) -> Workload:
    """A workload with fewer clients a round, or another number of epochs, for a quick look; 0
    leaves a number as it is.
    """
    workload = WORKLOADS[name]
    if clients:
        workload = replace(workload, sampled=min(clients, workload.sampled))
    if epochs:
        workload = replace(workload, plan={**workload.plan, "epochs": epochs})
    return workload


def task_of(prepared: Prepared, rounds: int) -> Task:
    """The first rounds of a run of FedAvg or FedSeq.

    Its description has the layers if all of them are plain PyTorch.
    """
    world = prepared.world
    plan = world.plans["train"]
    indices = range(1, rounds + 1)
    schedule = [prepared.settings.schedule(index, world) for index in indices]
    cohorts = []
    orders = {}
    for stages in schedule:
        cohort: list[int] = []
        for stage in stages:
            cohort += stage.clients
            for client in stage.clients:
                orders[f"{stage.round}.{client}"] = _order(prepared, stage, client)
        cohorts.append(cohort)
    about = {
        "cohorts": cohorts,
        "chain": any(len(stages) > 1 for stages in schedule),
        "rates": [plan.lr_at(index) for index in indices],
        **{key: getattr(plan, key) for key in PLAN_KEYS},
        **_layers(contract.build(world.model(SERVER))),
    }
    return Task(
        about=about,
        examples=_examples(prepared),
        initial=dict(world.initial(SERVER)),
        orders=orders,
    )


def _examples(prepared: Prepared) -> dict[str, Tensor]:
    """The examples of all clients, one client after another, and the test set."""
    sites = prepared.sites
    # Workloads divide one training set among simulated clients, and have a common test set.
    assert sites.split is not None
    assert sites.common_test is not None
    sizes = torch.tensor([0, *sites.split.sizes])
    positions = torch.from_numpy(sites.split.positions)
    return {
        "images": sites.inputs.plain(sites.train.values[positions]),
        "labels": sites.train.labels[positions],
        "starts": sizes.cumsum(0),
        "test_images": sites.inputs.plain(sites.common_test.values),
        "test_labels": sites.common_test.labels,
    }


def _order(prepared: Prepared, stage: Stage, client: int) -> Tensor:
    """The order of a client's examples in each epoch of a stage (epochs, n)."""
    world = prepared.world
    seed = seed_for(world.seed, stage.round, stage.index, client, "order")
    draws = generator(seed)
    examples = len(prepared.sites.positions(client))
    epochs = world.plans["train"].epochs
    return torch.stack([torch.randperm(examples, generator=draws) for _ in range(epochs)])


def write_task(workload: Workload, rounds: int, folder: Path) -> Task:
    """Write a workload as a task, with the images as fedstill stores them."""
    dataset = workload.dataset()
    prepared = prepare(resolve(workload.experiment("fedavg")), dataset)
    task = task_of(prepared, rounds)
    about = {**task.about, "workload": workload.name, "sampled": workload.sampled}
    task = replace(task, about=about)
    task.save(folder)
    stored = {
        "images": dataset.train.values,
        "labels": dataset.train.labels,
        "test_images": dataset.test.values,
        "test_labels": dataset.test.labels,
    }
    save_file(stored, folder / STORED)
    return task


def workload_of(about: Mapping[str, Any]) -> Workload:
    """The workload of a task with this description."""
    return resized(about["workload"], about["sampled"], about["epochs"])


def stored_images(folder: Path, name: str) -> Dataset:
    """The images of a task as a data set with this name."""
    stored = load_file(folder / STORED)
    train = (stored["images"], stored["labels"])
    test = (stored["test_images"], stored["test_labels"])
    return from_tensors(name, train, test)


def _layers(network: nn.Module) -> dict[str, Any]:
    """The layers of a network's body and its head; empty if not all of them are known."""
    body = network.get_submodule("body")
    head = network.get_submodule("head")
    if not isinstance(body, nn.Sequential) or not isinstance(head, nn.Linear):
        return {}
    layers = [_layer(layer) for layer in body.children()]
    if not layers or None in layers:
        return {}
    return {"layers": layers, "head": [head.in_features, head.out_features]}


def _layer(layer: nn.Module) -> list[Any] | None:
    """The kind of a layer and its arguments; None for an unknown kind."""
    match layer:
        case nn.Conv2d():
            geometry = (layer.kernel_size, layer.stride, layer.padding)
            return ["Conv2d", layer.in_channels, layer.out_channels, *map(list, geometry)]
        case nn.MaxPool2d():
            return ["MaxPool2d", layer.kernel_size]
        case nn.Linear():
            return ["Linear", layer.in_features, layer.out_features]
        case nn.ReLU() | nn.Flatten():
            return [type(layer).__name__]
    return None
