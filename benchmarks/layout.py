"""Which order of memory suits convolutions on a CUDA card: milliseconds a step:
``python -m benchmarks.layout``.

Steps as training takes them, replayed as one launch, so that the card is timed and not
the processor: forward, backward and SGD of the library's networks, images in either order of
memory, in each arithmetic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core.records import ModelSpec, Plan
from fedstill.engines.devices import make_deterministic, tf32_if_chosen
from fedstill.engines.hardware import Precision, at_precision
from fedstill.engines.optimiser import optimiser
from fedstill.models import contract
from fedstill.report import terminal

NETWORKS = (
    (ModelSpec("cnn", (3, 32, 32), 10), 50),
    (ModelSpec("simple_cnn", (3, 32, 32), 10), 64),
    (ModelSpec("qkt_cnn_pooled", (3, 32, 32), 10, (("norm", "batch"),)), 32),
    (ModelSpec("lenet5", (1, 28, 28), 10), 64),
    (ModelSpec("resnet18", (3, 32, 32), 10, (("norm", "group"),)), 32),
)
ORDERS = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}
KINDS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")


def step_of(
    spec: ModelSpec, batch: int, order: torch.memory_format, precision: Precision
) -> Callable[[], None]:
    """One training step on random images."""

    def laid(value: Tensor) -> Tensor:
        return value.cuda().contiguous(memory_format=order) if value.dim() == 4 else value.cuda()

    params, names = (
        {k: laid(v) for k, v in contract.initial(spec, 0).items()},
        contract.trainable_names(spec),
    )
    leaves = [v.requires_grad_() for k, v in params.items() if k in names]
    network, moves = contract.module(spec).train(), optimiser(Plan(momentum=0.9), leaves, 0.01)
    x, y = laid(torch.randn(batch, *spec.input_shape)), torch.randint(10, (batch,)).cuda()

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        cross_entropy(
            at_precision(contract.forward, precision, x.device)(network, params, x), y
        ).backward()
        moves.step()

    return step


def milliseconds(step: Callable[[], None], replays: int) -> float:
    """A replay of the step, the mean of many."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / replays


def main() -> None:
    """Print one row a network."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--replays", type=int, default=60)
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.layout: torch sees no CUDA device here, and this times one")
    make_deterministic("cuda")
    rows = []
    for spec, batch in NETWORKS:
        row = [f"{spec.label}, {batch}"]
        for kind in KINDS:
            with tf32_if_chosen(kind, torch.device("cuda")):
                row += [
                    f"{milliseconds(step_of(spec, batch, o, kind), given.replays):.3f}"
                    for o in ORDERS.values()
                ]
        rows.append(row)
    screen = terminal.console()
    screen.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds a step")
    screen.print(
        terminal.PlainTable(
            ["network, batch", *(f"{kind}, {order}" for kind in KINDS for order in ORDERS)], rows
        )
    )


if __name__ == "__main__":
    main()
