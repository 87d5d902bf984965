"""The effect of the normalisation of pixels on HiPer-FedKD's first client: five local epochs at
alpha 1, by fedstill and by a plain loop.

``python -m benchmarks.first_client [--seeds 1]`` prints the mean loss of the fifth epoch and the
accuracy on the held-out fifth of the client's data, in percent. Pixels are normalised by .5 and .5,
as in the notebooks, or by the mean and standard deviation of CIFAR-10. The notebook that produced
the paper's numbers prints 1.397 and 44.7. The plain loop takes the client split and the client's
temperature from fedstill. Both use one thread. ``--row``, ``--alpha`` and ``--client`` choose
another client of the paper's Table 1, and ``--low`` another lowest temperature. For example, client
3 of row "Imp. 1" at alpha 0.1 learns nothing at 0.01.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.options import option_parser
from fedstill.benchmark.recipes import load_recipe
from fedstill.core.records import Payload, Stage, State, View
from fedstill.core.rounds import run_round
from fedstill.report import terminal
from fedstill.running.extensions import run_context
from fedstill.running.preparation import Prepared, prepare

EPOCHS = 5
BATCH = 64
RATE = 0.01

FLOOR = 1e-8
"""Added to a probability before its logarithm is taken."""


@dataclass(frozen=True)
class Normalisation:
    """The mean and standard deviation by which each channel is normalised."""

    mean: list[float]
    std: list[float]

    def inputs(self, images: Tensor) -> Tensor:
        """The inputs (N, 3, H, W) of images."""
        mean = torch.tensor(self.mean).view(3, 1, 1)
        std = torch.tensor(self.std).view(3, 1, 1)
        return (images.float() / 255 - mean) / std


NOTEBOOK = ".5, .5"
"""The name of the notebooks' normalisation."""

NORMALISATIONS = {
    NOTEBOOK: Normalisation([0.5] * 3, [0.5] * 3),
    "CIFAR-10's": Normalisation(
        [0.49139968, 0.48215827, 0.44653124], [0.24703233, 0.24348505, 0.26158768]
    ),
}


@dataclass(frozen=True)
class TableClient:
    """A client of the paper's Table 1.

    ``low``: the lowest temperature of a client; None for that of the recipe.
    """

    row: str = "HiPer-FedKD"
    alpha: str = "1.0"
    client: int = 0
    low: float | None = None


@dataclass(frozen=True)
class LocalTraining:
    """The first stage of a run for one client only: the client's view of its data, and its
    payload.
    """

    prepared: Prepared
    stage: Stage
    view: View
    payload: Payload

    @property
    def temperature(self) -> float:
        """The client's temperature."""
        return float(self.payload.number("temperature"))


@dataclass(frozen=True)
class Outcome:
    """The mean loss of the last epoch, the accuracy on the held-out images, and the number of
    classes with a correct prediction.
    """

    loss: float
    accuracy: float
    known_classes: int


def local_training(name: str, seed: int, chosen: TableClient) -> LocalTraining:
    """Prepare the local training of a client. ``name``: of the normalisation."""
    pixels = NORMALISATIONS[name]
    changes: dict[str, Any] = {"data.mean": pixels.mean, "data.std": pixels.std, "reuse": False}
    if chosen.low is not None:
        changes["method.low"] = chosen.low
    cell = (chosen.row, f"alpha {chosen.alpha}")
    (run,) = load_recipe("hiper/table1").variants([cell], [seed], changes, Path("unused"))
    prepared = prepare(run.settings)
    stage = Stage(1, 0, "local", (chosen.client,))
    payload = prepared.settings.method.payload_for_client(
        state_before_training(prepared), chosen.client, stage, prepared.world
    )
    assert payload is not None
    return LocalTraining(prepared, stage, prepared.sites.view(chosen.client, stage), payload)


def state_before_training(prepared: Prepared) -> State:
    """The state before round 1, with the label counts of all clients."""
    initial = prepared.settings.method.initial_state(prepared.world)
    census = prepared.settings.schedule(0, prepared.world)
    context = run_context(prepared, prepared.engine())
    return run_round(replace(initial, round=0), census, context)


def train_with_fedstill(name: str, seed: int, chosen: TableClient) -> Outcome:
    """Train a client with fedstill."""
    training = local_training(name, seed, chosen)
    prepared = training.prepared
    (reply,) = prepared.engine().run(
        prepared.settings.method.work(training.stage),
        training.stage,
        {chosen.client: training.payload},
        seed,
    )
    counts = reply.metrics["private"]["counts"]
    correct = reply.metrics["private"]["after"]
    assert sum(counts) == len(training.view.validation or ())
    return Outcome(
        loss=reply.metrics["loss"]["ce"],
        accuracy=sum(correct) / sum(counts),
        known_classes=sum(map(bool, correct)),
    )


def train_plainly(name: str, seed: int, chosen: TableClient) -> Outcome:
    """Train a client with a plain loop."""
    training = local_training(name, seed, chosen)
    examples = training.view.data
    held_out = training.view.validation
    assert held_out is not None
    inputs = NORMALISATIONS[name].inputs(examples.values)
    torch.manual_seed(seed)
    network = simple_cnn()
    optimiser = torch.optim.SGD(network.parameters(), lr=RATE)
    total_loss = 0.0
    for _ in range(EPOCHS):
        total_loss = 0.0
        for positions in torch.randperm(len(inputs)).split(BATCH):
            optimiser.zero_grad()
            logits = network(inputs[positions])
            loss = client_loss(logits, examples.labels[positions], training.temperature)
            loss.backward()
            optimiser.step()
            total_loss += loss.item() * len(positions)

    with torch.no_grad():
        logits = network.eval()(NORMALISATIONS[name].inputs(held_out.values))
    is_correct = logits.argmax(1) == held_out.labels
    return Outcome(
        loss=total_loss / len(inputs),
        accuracy=float(is_correct.double().mean()),
        known_classes=len(held_out.labels[is_correct].unique()),
    )


def client_loss(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The notebook's loss of a batch: the cross-entropy at a temperature, with a floor."""
    probabilities = (logits / temperature).softmax(1)
    label_probabilities = probabilities[torch.arange(len(labels)), labels]
    return -(label_probabilities + FLOOR).log().mean()


def simple_cnn() -> nn.Sequential:
    """The notebook's network. Its layers are created in the notebook's order."""
    layers: list[nn.Module] = []
    for channels, features in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Dropout(0.25), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


TRAININGS = {"fedstill": train_with_fedstill, "a plain loop": train_plainly}
"""Both trainings, by their name in the table."""


def cells(outcomes: Sequence[Outcome]) -> list[str]:
    """The results of all seeds."""
    return [
        _listed(f"{outcome.loss:.3f}" for outcome in outcomes),
        _listed(f"{100 * outcome.accuracy:.1f}" for outcome in outcomes),
        _listed(str(outcome.known_classes) for outcome in outcomes),
    ]


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def main() -> None:
    """Print a row for each normalisation and training."""
    names = list(NORMALISATIONS)
    parser = option_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds")
    parser.add_argument("--row", default="HiPer-FedKD", help="of the paper's Table 1")
    parser.add_argument("--alpha", choices=("1.0", "0.5", "0.1"), default="1.0")
    parser.add_argument("--client", type=int, choices=range(4), default=0)
    parser.add_argument(
        "--low", type=float, help="the lowest temperature: 0.05 in the text, 0.01 in the notebook"
    )
    parser.add_argument(
        "--pixels", action="append", choices=names, help="a normalisation (default: both)"
    )
    options = parser.parse_args()
    chosen = TableClient(options.row, options.alpha, options.client, options.low)
    torch.set_num_threads(1)
    rows = []
    for name in options.pixels or names:
        for label, train in TRAININGS.items():
            outcomes = [train(name, seed, chosen) for seed in range(1, options.seeds + 1)]
            rows.append([name, label, *cells(outcomes)])
    head = ["pixels", "", "loss", "held out [%]", "classes it gets right"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
