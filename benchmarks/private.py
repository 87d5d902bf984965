"""The cost of private training: the seconds of a local epoch without privacy, with fedstill's
DP-SGD, and with Opacus.

``python -m benchmarks.private [--models mlp,cnn] [--images 500] [--batch 50] [--turns 3]``. One
client trains by SGD with momentum in one thread. In private training, gradients are clipped at 1,
the noise has the same scale, and each example is drawn into a batch at random. The contestants take
turns, one epoch each; ratios are computed turn by turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.options import names_among, option_parser
from benchmarks.turns import ratios, seconds_in_turns, spread
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.engines.hardware import keep_freed_memory
from fedstill.models import contract
from fedstill.report import terminal
from fedstill.running.preparation import Prepared, prepare

MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": (256,)},
    "cnn": {"name": "cnn"},
}

CLIP = 1.0
NOISE = 1.0


def workload_of(model: str, images: int, batch: int) -> Workload:
    """One client of workload W1 with another network, for one epoch."""
    full = WORKLOADS["W1"]
    plan = {**full.plan, "epochs": 1, "batch": batch}
    return replace(full, clients=1, sampled=1, images=images, model=MODELS[model], plan=plan)


def opacus_epoch(workload: Workload, prepared: Prepared) -> Callable[[], None]:
    """A function that trains an epoch with Opacus, with the same network and images."""
    from opacus import PrivacyEngine

    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    network = contract.module(prepared.world.model(SERVER), "opacus").train()
    optimiser = torch.optim.SGD(
        network.parameters(),
        workload.plan["lr"],
        workload.plan["momentum"],
        weight_decay=workload.plan["weight_decay"],
    )
    train = prepared.sites.train
    dataset = TensorDataset(prepared.sites.inputs.plain(train.values), train.labels)
    network, optimiser, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=optimiser,
        data_loader=DataLoader(dataset, workload.plan["batch"]),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
    )

    def epoch() -> None:
        torch.set_num_threads(1)
        for images, labels in loader:
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimiser.step()

    return epoch


def measure(model: str, images: int, batch: int, turns: int) -> list[Sequence[str]]:
    """The rows of a network: seconds of an epoch, and their ratio to fedstill's private epoch."""
    workload = workload_of(model, images, batch)
    dataset = workload.dataset()

    def loop(**changes: Any) -> FedstillLoop:
        experiment = workload.experiment("fedavg", threads=1, **changes)
        return FedstillLoop(prepare(resolve(experiment), dataset))

    plain = loop()
    private = loop(privacy={"gradient_clip": CLIP, "gradient_noise": NOISE})
    contestants = {
        "without privacy": plain.run_round,
        "fedstill": private.run_round,
        "Opacus": opacus_epoch(workload, plain.prepared),
    }
    seconds = seconds_in_turns(contestants, turns)
    return [
        (f"{model}, {name}", spread(epochs), spread(ratios(epochs, seconds["fedstill"])))
        for name, epochs in seconds.items()
    ]


def main() -> None:
    """Measure the networks, and print one table."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--models",
        type=names_among(MODELS),
        default=list(MODELS),
        help="the networks (default: mlp,cnn)",
    )
    parser.add_argument("--images", type=int, default=500, help="images of the client")
    parser.add_argument("--batch", type=int, default=50, help="the mean size of a batch")
    parser.add_argument("--turns", type=int, default=3, help="epochs of each after the warm-up")
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    for model in options.models:
        rows += measure(model, options.images, options.batch, options.turns)
    head = ["private training", "seconds an epoch", "times fedstill's"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
