"""The workloads: what is trained, on data made for it, and how much arithmetic a round of it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from fedstill import Experiment
from fedstill.core.records import SERVER
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.models import contract
from fedstill.running.preparation import Prepared

Labelled = tuple[torch.Tensor, torch.Tensor]
"""Images (N, C, H, W) uint8 and their labels (N,)."""

PAPER = {
    "epochs": 5,
    "batch": 50,
    "lr": 0.01,
    "lr_decay": 0.99,
    "momentum": 0.9,
    "weight_decay": 1e-5,
}


@dataclass(frozen=True)
class Workload:
    """A round that many people run: clients, images, network and plan; ``methods``: those it is
    measured with.

    The first of them is the one that the plain loop does too, without mirroring.
    """

    name: str
    about: str
    clients: int
    sampled: int
    images: int  # each client's
    shape: tuple[int, int, int]
    model: Mapping[str, Any]
    plan: Mapping[str, Any]
    methods: tuple[str, ...] = ("fedavg",)
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    topology: str = "parallel"
    augmented: bool = False  # whether it is measured with images mirrored at random, too

    def dataset(self) -> Dataset:
        """The images as a data set."""
        return from_tensors(self.name, *self.examples())

    def examples(self) -> tuple[Labelled, Labelled]:
        """Ten Gaussian classes as images: every client the same number, and 1,000 to test on."""
        draw = torch.Generator().manual_seed(0)
        centres = 40 * torch.randn(10, *self.shape, generator=draw)

        def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
            labels = torch.arange(n) % 10
            images = torch.empty(n, *self.shape, dtype=torch.uint8)
            for start in range(0, n, 5000):
                part = labels[start : start + 5000]
                noise = 45 * torch.randn(len(part), *self.shape, generator=draw)
                images[start : start + 5000] = (
                    (128 + centres[part] + noise).clamp(0, 255).to(torch.uint8)
                )
            return images, labels

        return some(self.clients * self.images), some(1000)

    def experiment(self, method: str, **changes: Any) -> Experiment:
        """One run of it."""
        return Experiment(**self.values(method, **changes))

    def values(self, method: str, **changes: Any) -> dict[str, Any]:
        """The fields of a run's Experiment."""
        values = {
            "rounds": 1000,
            "seed": 1,
            "measure": (),
            "method": {"name": method, **self.fields.get(method, {})},
            "model": dict(self.model),
            "partition": {"kind": "iid"},
            "topology": {"kind": self.topology, "clients": self.clients, "sampled": self.sampled},
            "plan": dict(self.plan),
        }
        return {**values, **changes}


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "W1",
            "FedNTD's setting: 10 of 100 clients, 500 images of 3 x 32 x 32 each, 5 epochs, the "
            "papers' network",
            100,
            10,
            500,
            (3, 32, 32),
            {"name": "cnn"},
            PAPER,
            ("fedavg", "fedntd", "fedadkd"),
            augmented=True,
        ),
        Workload(
            "W2",
            "a chain: 10 clients one after another, 500 images of 3 x 32 x 32 each, 5 epochs, the "
            "papers' network",
            10,
            10,
            500,
            (3, 32, 32),
            {"name": "cnn"},
            PAPER,
            ("fedseq", "sfedkd"),
            {"sfedkd": {"k": 5}},
            "sequential",
        ),
        Workload(
            "W3",
            "ResNet-18 with group normalisation: 10 clients, 500 images each, one epoch of batches "
            "of 32",
            10,
            10,
            500,
            (3, 32, 32),
            {"name": "resnet18", "norm": "group"},
            {**PAPER, "epochs": 1, "batch": 32},
        ),
        Workload(
            "W4",
            "many small clients: 100, 20 images of 1 x 8 x 8 each, one epoch of batches of 10, a "
            "tiny CNN",
            100,
            100,
            20,
            (1, 8, 8),
            {"name": "tiny_cnn"},
            {**PAPER, "epochs": 1, "batch": 10},
        ),
        Workload(
            "W4-MLP",
            "the same clients with one hidden layer of 100",
            100,
            100,
            20,
            (1, 8, 8),
            {"name": "mlp", "hidden": (100,)},
            {**PAPER, "epochs": 1, "batch": 10},
        ),
    )
}


def write_tensors(workload: Workload, folder: Path) -> Path:
    """The workload's images in a file, which is written once."""
    path = folder / f"{workload.name}.safetensors"
    if not path.exists():
        train, test = workload.examples()
        tensors = {
            "train_images": train[0],
            "train_labels": train[1],
            "test_images": test[0],
            "test_labels": test[1],
        }
        save_file(tensors, path)
    return path


def flops(workload: Workload, ready: Prepared) -> float:
    """Floating-point operations of a round's training steps without teachers, from one step of a
    full batch.
    """
    spec, batch = ready.world.model(SERVER), workload.plan["batch"]
    params = {
        k: v.clone().requires_grad_(v.is_floating_point())
        for k, v in contract.initial(spec, 0).items()
    }
    x = torch.zeros(batch, *workload.shape)
    counter = FlopCounterMode(display=False)
    with counter:
        contract.forward(contract.module(spec), params, x).sum().backward()
    images = workload.sampled * workload.images * workload.plan["epochs"]
    return counter.get_total_flops() / batch * images
