"""What normalises pixels, in HiPer-FedKD's first client: five local epochs at alpha 1, by fedstill
and by a plain loop.

``python -m benchmarks.first_client [--seeds 1]``: the mean loss of the fifth epoch, and the
accuracy on the fifth of the client's data that is held out, in percent. Pixels are normalised by .5
and .5, as in the notebooks, or by the mean and spread of CIFAR-10. The notebook that made the
paper's numbers prints 1.397 and 44.7. Of the library the plain loop has the split and the client's
temperature. One thread. ``--row``, ``--alpha`` and ``--client`` name another client of the paper's
Table 1, ``--low`` another lowest temperature: "Imp. 1", 0.1 and 3 is a client that learns nothing
at 0.01.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedstill.benchmark.recipes import load_recipe
from fedstill.core.records import Stage, State, View
from fedstill.core.rounds import run_round
from fedstill.report import terminal
from fedstill.running.extensions import run_context
from fedstill.running.preparation import Prepared, prepare

PIXELS = {
    ".5, .5": ([0.5] * 3, [0.5] * 3),
    "CIFAR-10's": ([0.49139968, 0.48215827, 0.44653124], [0.24703233, 0.24348505, 0.26158768]),
}
FLOOR = 1e-8


@dataclass(frozen=True)
class Which:
    """A client of the paper's Table 1; ``low``: the lowest temperature that a client may have, the
    recipe's if None.
    """

    row: str = "HiPer-FedKD"
    alpha: str = "1.0"
    client: int = 0
    low: float | None = None


def first_client(pixels: str, seed: int, which: Which) -> tuple[Prepared, Stage, View, float]:
    """The run of a seed, its first stage for one client alone, what that client sees, and its
    temperature.
    """
    mean, std = PIXELS[pixels]
    changes = {"data.mean": mean, "data.std": std, "reuse": False}
    changes |= {} if which.low is None else {"method.low": which.low}
    cell = (which.row, f"alpha {which.alpha}")
    (run,) = load_recipe("hiper/table1").variants([cell], [seed], changes, Path("unused"))
    ready, client = prepare(run.settings), which.client
    stage = Stage(1, 0, "local", (client,))
    payload = ready.settings.method.payload_for_client(counted(ready), client, stage, ready.world)
    assert payload is not None
    return ready, stage, ready.sites.view(client, stage), float(payload.number("temperature"))


def counted(ready: Prepared) -> State:
    """The state before round 1, with every client's label counts."""
    start = ready.settings.method.initial_state(ready.world)
    first = ready.settings.schedule(0, ready.world)
    return run_round(replace(start, round=0), first, run_context(ready, ready.engine()))


def ours(pixels: str, seed: int, which: Which) -> tuple[float, float, int]:
    """Loss, held-out accuracy, and how many classes are right at all, by fedstill."""
    ready, stage, view, _ = first_client(pixels, seed, which)
    client = which.client
    down = {
        client: ready.settings.method.payload_for_client(counted(ready), client, stage, ready.world)
    }
    (reply,) = ready.engine().run(ready.settings.method.work(stage), stage, down, seed)
    counts, right = (reply.metrics["private"][k] for k in ("counts", "after"))
    assert sum(counts) == len(view.validation or ())
    return reply.metrics["loss"]["ce"], sum(right) / sum(counts), sum(map(bool, right))


def plainly(pixels: str, seed: int, which: Which) -> tuple[float, float, int]:
    """The same by a plain loop."""
    _, _, view, temperature = first_client(pixels, seed, which)
    assert view.validation is not None
    x, held = (normal(e.values, *PIXELS[pixels]) for e in (view.data, view.validation))
    torch.manual_seed(seed)
    net = simple_cnn()
    steps, losses = torch.optim.SGD(net.parameters(), lr=0.01), list[float]()
    for _ in range(5):
        losses = []
        for index in torch.randperm(len(x)).split(64):
            steps.zero_grad()
            known = (net(x[index]) / temperature).softmax(1)[
                torch.arange(len(index)), view.data.labels[index]
            ]
            loss = -(known + FLOOR).log().mean()
            loss.backward()
            steps.step()
            losses += [loss.item()] * len(index)
    with torch.no_grad():
        right = net.eval()(held).argmax(1) == view.validation.labels
    known = len(view.validation.labels[right].unique())
    return sum(losses) / len(losses), float(right.double().mean()), known


def simple_cnn() -> nn.Sequential:
    """The notebook's network, its layers made in the notebook's order."""
    blocks = [
        layer
        for i, o in ((3, 32), (32, 64), (64, 128))
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(
        *blocks, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Dropout(0.25), nn.Linear(512, 10)
    )


def normal(images: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Images as inputs."""
    return (images.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--row", default="HiPer-FedKD")
    parser.add_argument("--alpha", choices=("1.0", "0.5", "0.1"), default="1.0")
    parser.add_argument("--client", type=int, choices=range(4), default=0)
    parser.add_argument(
        "--low", type=float, help="the lowest temperature; the text has 0.05, the notebook 0.01"
    )
    parser.add_argument("--pixels", action="append", choices=list(PIXELS))
    given = parser.parse_args()
    which = Which(given.row, given.alpha, given.client, given.low)
    torch.set_num_threads(1)
    table = []
    for name in given.pixels or PIXELS:
        for who, run in (("fedstill", ours), ("a plain loop", plainly)):
            found = [run(name, seed, which) for seed in range(1, given.seeds + 1)]
            losses, accuracies, known = zip(*found, strict=True)
            said = (
                ", ".join(f"{v:.3f}" for v in losses),
                ", ".join(f"{100 * v:.1f}" for v in accuracies),
            )
            table.append((name, who, *said, ", ".join(map(str, known))))
    terminal.console().print(
        terminal.PlainTable(["pixels", "", "loss", "held out [%]", "classes it gets right"], table)
    )
