"""The fastest memory layout for convolutions on a CUDA card, in milliseconds a step:
``python -m benchmarks.layout``.

A step of training (forward pass, backward pass and SGD) of the library's networks is recorded and
replayed, so that the card is measured and not the processor. Images are in either layout, in each
precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.options import option_parser
from fedstill.core.records import ModelSpec, Plan
from fedstill.engines.devices import make_deterministic, tf32_if_chosen
from fedstill.engines.hardware import Precision, at_precision
from fedstill.engines.optimiser import optimiser
from fedstill.models import contract
from fedstill.report import terminal

BATCH_SIZES = {
    ModelSpec("cnn", (3, 32, 32), 10): 50,
    ModelSpec("simple_cnn", (3, 32, 32), 10): 64,
    ModelSpec("qkt_cnn_pooled", (3, 32, 32), 10, (("norm", "batch"),)): 32,
    ModelSpec("lenet5", (1, 28, 28), 10): 64,
    ModelSpec("resnet18", (3, 32, 32), 10, (("norm", "group"),)): 32,
}
"""The networks, with the size of a batch."""

LAYOUTS = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")

WARM_UP_STEPS = 2


def training_step(
    spec: ModelSpec, layout: torch.memory_format, precision: Precision
) -> Callable[[], None]:
    """A function that trains one step on random images."""

    def on_card(value: Tensor) -> Tensor:
        """A value on the card; images and kernels get the layout."""
        if value.dim() == 4:
            return value.cuda().contiguous(memory_format=layout)
        return value.cuda()

    parameters = {name: on_card(value) for name, value in contract.initial(spec, 0).items()}
    leaves = [parameters[name].requires_grad_() for name in contract.trainable_names(spec)]
    network = contract.module(spec).train()
    sgd = optimiser(Plan(momentum=0.9), leaves, 0.01)
    batch_size = BATCH_SIZES[spec]
    images = on_card(torch.randn(batch_size, *spec.input_shape))
    labels = torch.randint(10, (batch_size,)).cuda()
    forward = at_precision(contract.forward, precision, images.device)

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss = cross_entropy(forward(network, parameters, images), labels)
        loss.backward()
        sgd.step()

    return step


def milliseconds(step: Callable[[], None], replays: int) -> float:
    """The mean milliseconds of a replayed step."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(WARM_UP_STEPS):
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


def row(spec: ModelSpec, replays: int) -> list[str]:
    """The row of a network: all layouts in each precision."""
    cells = [f"{spec.label}, {BATCH_SIZES[spec]}"]
    for precision in PRECISIONS:
        with tf32_if_chosen(precision, torch.device("cuda")):
            for layout in LAYOUTS.values():
                step = training_step(spec, layout, precision)
                cells.append(f"{milliseconds(step, replays):.3f}")
    return cells


def main() -> None:
    """Print a row for each network."""
    parser = option_parser(__doc__)
    parser.add_argument("--replays", type=int, default=60, help="replays of each step")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here, and this benchmark measures one")
    make_deterministic("cuda")
    head = ["network, batch"]
    for precision in PRECISIONS:
        head += [f"{precision}, {layout}" for layout in LAYOUTS]
    rows = [row(spec, options.replays) for spec in BATCH_SIZES]
    screen = terminal.console()
    screen.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds a step")
    screen.print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
