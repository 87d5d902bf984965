"""What private training costs: seconds a local epoch without it, by fedstill's DP-SGD, and by
Opacus's.

``python -m benchmarks.private [--models mlp,cnn] [--images 500] [--batch 50] [--turns 3]``. One
client, SGD with momentum, gradients clipped at 1 with as much noise, batches drawn example by
example, one thread. The contestants take turns, one epoch each, after one to warm up. Ratios are of
the same turn.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.ours import Ours
from benchmarks.speed import spread
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.engines.hardware import keep_freed_memory
from fedstill.models import contract
from fedstill.report import terminal
from fedstill.running.preparation import prepare

MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": (256,)},
    "cnn": {"name": "cnn"},
}
CLIP = NOISE = 1.0


def workload(model: str, images: int, batch: int) -> Workload:
    """One client of workload W1 with another network, one epoch."""
    full = WORKLOADS["W1"]
    plan = {**full.plan, "epochs": 1, "batch": batch}
    return replace(full, clients=1, sampled=1, images=images, model=MODELS[model], plan=plan)


def opacus_epoch(made: Workload, ours: Ours) -> Callable[[], None]:
    """An epoch by Opacus, of the same network on the same images."""
    from opacus import PrivacyEngine

    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    ready = ours.ready
    network = contract.module(ready.world.model(SERVER), "opacus").train()
    sgd = torch.optim.SGD(
        network.parameters(),
        made.plan["lr"],
        made.plan["momentum"],
        weight_decay=made.plan["weight_decay"],
    )
    train = ready.sites.train
    loader = DataLoader(
        TensorDataset(ready.sites.inputs.plain(train.values), train.labels), made.plan["batch"]
    )
    network, sgd, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=sgd,
        data_loader=loader,
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
    )

    def epoch() -> None:
        torch.set_num_threads(1)
        for x, y in loader:
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            sgd.step()

    return epoch


def measure(model: str, images: int, batch: int, turns: int) -> list[tuple[str, ...]]:
    """Rows of a network: who, seconds an epoch, times fedstill's private epoch."""
    made = workload(model, images, batch)
    data, private = made.dataset(), {"gradient_clip": CLIP, "gradient_noise": NOISE}
    how = {"without privacy": {}, "fedstill": {"privacy": private}}
    ours = {
        n: Ours(prepare(resolve(made.experiment("fedavg", threads=1, **changes)), data))
        for n, changes in how.items()
    }
    epochs = {
        **{n: one.run_round for n, one in ours.items()},
        "Opacus": opacus_epoch(made, ours["without privacy"]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for turn in range(turns + 1):
        for name, epoch in epochs.items():
            began = time.perf_counter()
            epoch()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    ratios = {
        n: [a / b for a, b in zip(own, seconds["fedstill"], strict=True)]
        for n, own in seconds.items()
    }
    return [(f"{model}, {n}", spread(seconds[n]), spread(ratios[n])) for n in epochs]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="mlp,cnn", help=f"which, of {', '.join(MODELS)}")
    for option, default in (("images", 500), ("batch", 50), ("turns", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    asked = parser.parse_args()
    keep_freed_memory()
    rows = [
        row
        for m in asked.models.split(",")
        for row in measure(m, asked.images, asked.batch, asked.turns)
    ]
    heads = ["private training", "seconds an epoch", "times fedstill's"]
    terminal.console().print(terminal.PlainTable(heads, rows))
