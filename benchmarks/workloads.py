"""The workloads: their synthetic data, their training, and the number of operations in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedstill import Experiment
from fedstill.core.records import SERVER
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.models import contract
from fedstill.running.preparation import Prepared

PAPER = {
    "epochs": 5,
    "batch": 50,
    "lr": 0.01,
    "lr_decay": 0.99,
    "momentum": 0.9,
    "weight_decay": 1e-5,
}
"""The plan of FedNTD and of the papers that follow it."""

CLASSES = 10

TEST_IMAGES = 1000

IMAGES_AT_A_TIME = 5000
"""The number of images that are drawn together, which limits the memory."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A round that is typical of the literature: clients, images, network and plan.

    ``images``: of each client. ``shape``: of an image. ``methods``: those it is measured with; the
    plain loop performs the first of them. ``fields``: of methods, by name. ``augmented``: whether
    it is also measured with images that are mirrored at random.
    """

    name: str
    about: str
    clients: int
    sampled: int
    images: int
    shape: tuple[int, int, int]
    model: Mapping[str, Any]
    plan: Mapping[str, Any]
    methods: tuple[str, ...] = ("fedavg",)
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    topology: str = "parallel"
    augmented: bool = False

    def dataset(self) -> Dataset:
        """The images as a data set."""
        tensors = self.tensors()
        train = (tensors["train_images"], tensors["train_labels"])
        test = (tensors["test_images"], tensors["test_labels"])
        return from_tensors(self.name, train, test)

    def tensors(self) -> dict[str, Tensor]:
        """Images (N, C, H, W) uint8 of ten Gaussian classes and their labels (N,), for training and
        for testing.
        """
        draws = torch.Generator().manual_seed(0)
        centres = 40 * torch.randn(CLASSES, *self.shape, generator=draws)

        def drawn(labels: Tensor) -> Tensor:
            images = torch.empty(len(labels), *self.shape, dtype=torch.uint8)
            for start in range(0, len(labels), IMAGES_AT_A_TIME):
                part = slice(start, start + IMAGES_AT_A_TIME)
                part_centres = centres[labels[part]]
                noise = 45 * torch.randn(*part_centres.shape, generator=draws)
                values = 128 + part_centres + noise
                images[part] = values.clamp(0, 255).to(torch.uint8)
            return images

        train_labels = torch.arange(self.clients * self.images) % CLASSES
        test_labels = torch.arange(TEST_IMAGES) % CLASSES
        return {
            "train_images": drawn(train_labels),
            "train_labels": train_labels,
            "test_images": drawn(test_labels),
            "test_labels": test_labels,
        }

    def experiment(self, method: str, **changes: Any) -> Experiment:
        """A run of the workload."""
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


W1 = Workload(
    name="W1",
    about=(
        "FedNTD's setting: 10 of 100 clients, 500 images of 3 x 32 x 32 each, 5 epochs, the "
        "papers' network"
    ),
    clients=100,
    sampled=10,
    images=500,
    shape=(3, 32, 32),
    model={"name": "cnn"},
    plan=PAPER,
    methods=("fedavg", "fedntd", "fedadkd"),
    augmented=True,
)

W2 = Workload(
    name="W2",
    about=(
        "a chain: 10 clients one after another, 500 images of 3 x 32 x 32 each, 5 epochs, the "
        "papers' network"
    ),
    clients=10,
    sampled=10,
    images=500,
    shape=(3, 32, 32),
    model={"name": "cnn"},
    plan=PAPER,
    methods=("fedseq", "sfedkd"),
    fields={"sfedkd": {"k": 5}},
    topology="sequential",
)

W3 = Workload(
    name="W3",
    about=(
        "ResNet-18 with group normalisation: 10 clients, 500 images each, one epoch of batches "
        "of 32"
    ),
    clients=10,
    sampled=10,
    images=500,
    shape=(3, 32, 32),
    model={"name": "resnet18", "norm": "group"},
    plan={**PAPER, "epochs": 1, "batch": 32},
)

W4 = Workload(
    name="W4",
    about=(
        "many small clients: 100, 20 images of 1 x 8 x 8 each, one epoch of batches of 10, a "
        "tiny CNN"
    ),
    clients=100,
    sampled=100,
    images=20,
    shape=(1, 8, 8),
    model={"name": "tiny_cnn"},
    plan={**PAPER, "epochs": 1, "batch": 10},
)

W4_MLP = Workload(
    name="W4-MLP",
    about="the same clients with one hidden layer of 100",
    clients=100,
    sampled=100,
    images=20,
    shape=(1, 8, 8),
    model={"name": "mlp", "hidden": (100,)},
    plan={**PAPER, "epochs": 1, "batch": 10},
)

WORKLOADS = {workload.name: workload for workload in (W1, W2, W3, W4, W4_MLP)}


def write_tensors(workload: Workload, folder: Path) -> Path:
    """Write the images of a workload to a file, unless it exists already."""
    path = folder / f"{workload.name}.safetensors"
    if not path.exists():
        save_file(workload.tensors(), path)
    return path


def flops(workload: Workload, prepared: Prepared) -> float:
    """The floating-point operations of a round's training steps without teachers, computed from one
    step of a complete batch.
    """
    spec = prepared.world.model(SERVER)
    parameters = {}
    for name, value in contract.initial(spec, 0).items():
        parameters[name] = value.clone().requires_grad_(value.is_floating_point())
    batch = workload.plan["batch"]
    images = torch.zeros(batch, *workload.shape)
    counter = FlopCounterMode(display=False)
    with counter:
        logits = contract.forward(contract.module(spec), parameters, images)
        logits.sum().backward()
    trained_images = workload.sampled * workload.images * workload.plan["epochs"]
    flops_per_image = counter.get_total_flops() / batch
    return float(flops_per_image * trained_images)
