"""The first round of HiPer-FedKD at alpha 1 with all 50,000 images: the authors' notebook, a plain
loop, and fedstill.

``python -m benchmarks.first_round [--seeds 1] [--draws 4]``. The plain loop has the seed of the
notebook, 42, for the weights and for the order of batches. It takes the client split and the
temperatures from fedstill. Its dropout masks are drawn on the CPU, those of the notebook on a card,
so the server is trained with several draws of dropout. Its last step, in which the notebook uses a
wrong batch, is repeated with twelve more draws for each. With one thread, the clients of the plain
loop take about four minutes, each draw two, and each seed of fedstill five.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.first_client import (
    BATCH,
    NORMALISATIONS,
    NOTEBOOK,
    RATE,
    TableClient,
    client_loss,
    local_training,
    simple_cnn,
)
from benchmarks.first_client import EPOCHS as LOCAL_EPOCHS
from benchmarks.options import option_parser
from fedstill.benchmark.recipes import load_recipe
from fedstill.report import terminal
from fedstill.running.journal import JOURNAL, read_journal
from fedstill.running.runner import run

SEED = 42
"""The seed of the notebook."""

CLIENTS = 4
SERVER_EPOCHS = 10

TEMPERATURE = 3.0
"""The temperature of distillation."""

LAST_STEP_DRAWS = 12
"""The number of further draws of dropout for the last step."""

EPSILON = 1e-6
"""Added to a standard deviation before a division by it."""

PIXELS = NORMALISATIONS[NOTEBOOK]


@dataclass(frozen=True, kw_only=True)
class Line:
    """The results of one program; accuracies in percent.

    ``held_out``: of the clients, on their held-out images. ``public``: of the clients, on the
    public images. ``losses``, ``server``: the last loss of each server, and its accuracy on the
    public images.
    """

    name: str
    held_out: Sequence[float]
    public: Sequence[float]
    losses: Sequence[float]
    server: Sequence[float]

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            self.name,
            " ".join(f"{share:.1f}" for share in self.held_out),
            " ".join(f"{share:.1f}" for share in self.public),
            " ".join(f"{loss:.3f}" for loss in self.losses),
            " ".join(f"{share:.1f}" for share in self.server),
        ]


NOTEBOOK_LINE = Line(
    name="the notebook",
    held_out=[44.70, 39.85, 54.77, 54.97],
    public=[33.62, 28.12, 32.18, 40.72],
    losses=[0.0637],
    server=[27.98],
)
"""The numbers that the notebook prints."""


@dataclass(frozen=True)
class Server:
    """A server after distillation; accuracies on the public images, in percent.

    ``loss``: the mean of a batch in the last epoch. ``before_last_step``: its accuracy before the
    last step. ``other_last_steps``: its accuracies after that step with other draws of dropout.
    """

    loss: float
    accuracy: float
    before_last_step: float
    other_last_steps: Sequence[float]


@dataclass
class Clients:
    """The clients after their local training; accuracies in percent."""

    held_out: list[float] = field(default_factory=list)
    public: list[float] = field(default_factory=list)
    public_logits: list[Tensor] = field(default_factory=list)

    def targets(self) -> Tensor:
        """The mean of the clients' standardised logits (N, C)."""
        return torch.stack([standardised(logits) for logits in self.public_logits]).mean(0)


@dataclass(frozen=True)
class PublicSet:
    """The inputs and labels of the public images."""

    inputs: Tensor
    labels: Tensor


# The plain loop.


def public_set() -> PublicSet:
    """The public images of the run."""
    public = local_training(NOTEBOOK, 1, TableClient()).prepared.sites.public
    assert public is not None
    return PublicSet(PIXELS.inputs(public.values), public.labels)


def train_clients(initial: nn.Module, public: PublicSet) -> Clients:
    """Train all clients from the initial model, with the seeds of the notebook."""
    clients = Clients()
    for client in range(CLIENTS):
        training = local_training(NOTEBOOK, 1, TableClient(client=client))
        examples = training.view.data
        held_out = training.view.validation
        assert held_out is not None
        network = copy.deepcopy(initial)
        dataset = TensorDataset(PIXELS.inputs(examples.values), examples.labels)
        train_client(network, dataset, training.temperature, SEED + client)
        held_out_logits = logits_of(network, PIXELS.inputs(held_out.values))
        public_logits = logits_of(network, public.inputs)
        clients.held_out.append(percent_correct(held_out_logits, held_out.labels))
        clients.public.append(percent_correct(public_logits, public.labels))
        clients.public_logits.append(public_logits)
    return clients


def train_client(network: nn.Module, dataset: TensorDataset, temperature: float, seed: int) -> None:
    """Train a client in place."""
    draws = torch.Generator().manual_seed(seed)
    batches = DataLoader(dataset, BATCH, shuffle=True, generator=draws)
    optimiser = torch.optim.SGD(network.parameters(), lr=RATE)
    network.train()
    for _ in range(LOCAL_EPOCHS):
        for inputs, labels in batches:
            optimiser.zero_grad()
            loss = client_loss(network(inputs), labels, temperature)
            loss.backward()
            optimiser.step()


def misplaced(targets: Tensor) -> Tensor:
    """The targets as the notebook pairs them with images: the incomplete last batch, of 8 images,
    gets the targets of images 624 to 631.
    """
    complete, remaining = divmod(len(targets), BATCH)
    return torch.cat([targets[:-remaining], targets[complete * remaining :][:remaining]])


def distil(initial: nn.Module, public: PublicSet, targets: Tensor, draw: int) -> Server:
    """Train a server on the targets (N, C), with one draw of dropout."""
    torch.manual_seed(draw)
    network = copy.deepcopy(initial)
    optimiser = torch.optim.SGD(network.parameters(), lr=RATE)
    network.train()
    batches = list(zip(public.inputs.split(BATCH), targets.split(BATCH), strict=True))
    for _ in range(SERVER_EPOCHS - 1):
        for batch in batches:
            distillation_step(network, optimiser, *batch)
    losses = [distillation_step(network, optimiser, *batch) for batch in batches[:-1]]
    before_last_step = copy.deepcopy(network)
    losses.append(distillation_step(network, optimiser, *batches[-1]))

    other_last_steps = []
    for other_draw in range(LAST_STEP_DRAWS):
        torch.manual_seed(1000 + other_draw)
        repeated = copy.deepcopy(before_last_step).train()
        repeated_optimiser = torch.optim.SGD(repeated.parameters(), lr=RATE)
        distillation_step(repeated, repeated_optimiser, *batches[-1])
        other_last_steps.append(public_accuracy(repeated, public))
    return Server(
        loss=statistics.fmean(losses),
        accuracy=public_accuracy(network, public),
        before_last_step=public_accuracy(before_last_step, public),
        other_last_steps=other_last_steps,
    )


def distillation_step(
    network: nn.Module, optimiser: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> float:
    """Take a step on a batch, and return its loss."""
    optimiser.zero_grad()
    log_probabilities = (standardised(network(inputs)) / TEMPERATURE).log_softmax(1)
    target_probabilities = (targets / TEMPERATURE).softmax(1)
    divergence = kl_div(log_probabilities, target_probabilities, reduction="batchmean")
    loss = divergence * TEMPERATURE**2
    loss.backward()
    optimiser.step()
    return loss.item()


def standardised(logits: Tensor) -> Tensor:
    """Logits (B, C) with mean 0 and standard deviation 1."""
    centred = logits - logits.mean(-1, keepdim=True)
    return centred / (logits.std(-1, keepdim=True) + EPSILON)


def logits_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """The logits (N, C) of a network, which is then in evaluation mode."""
    network.eval()
    with torch.no_grad():
        return torch.cat([network(part) for part in inputs.split(250)])


def percent_correct(logits: Tensor, labels: Tensor) -> float:
    """The accuracy of logits (N, C), in percent."""
    return 100 * float((logits.argmax(1) == labels).double().mean())


def public_accuracy(network: nn.Module, public: PublicSet) -> float:
    """The accuracy on the public images, in percent."""
    return percent_correct(logits_of(network, public.inputs), public.labels)


# fedstill.


def fedstill_line(seed: int) -> Line:
    """The round with fedstill, from its journal."""
    with tempfile.TemporaryDirectory() as folder:
        (cell,) = load_recipe("hiper/table1").variants(
            [("HiPer-FedKD", "alpha 1.0")], [seed], {"rounds": 1, "threads": 1}, Path(folder)
        )
        run(cell.experiment, cell.folder)
        events = read_journal(cell.folder / JOURNAL)
    first_round = next(
        event for event in events if event["event"] == "round" and event["round"] == 1
    )
    distillation = next(event for event in events if event.get("name") == "teach_server")
    return Line(
        name=f"fedstill, seed {seed}",
        held_out=_percent_by_client(first_round["private_before_by_client"]),
        public=_percent_by_client(first_round["public_before_by_client"]),
        losses=[distillation["loss"]["distil"]],
        server=[100 * first_round["server_public_accuracy"]],
    )


def _percent_by_client(shares: dict[str, float]) -> list[float]:
    return [100 * shares[str(client)] for client in range(CLIENTS)]


# The output.


def plain_line(name: str, clients: Clients, servers: Sequence[Server]) -> Line:
    """The line of the plain loop with some servers."""
    return Line(
        name=name,
        held_out=clients.held_out,
        public=clients.public,
        losses=[server.loss for server in servers],
        server=[server.accuracy for server in servers],
    )


def print_last_step(label: str, servers: Sequence[Server]) -> None:
    """Print the effect of the last step alone."""
    shares: list[float] = []
    for server in servers:
        shares += server.other_last_steps
    initial = " ".join(f"{server.before_last_step:.1f}" for server in servers)
    print(
        f"the last step alone, logits {label}: from {initial} % to "
        f"{statistics.mean(shares):.1f} ± {statistics.stdev(shares):.1f}, {min(shares):.1f} to "
        f"{max(shares):.1f} % over {len(shares)} draws of its dropout"
    )


def main() -> None:
    """Run the plain loop and fedstill, and print the table."""
    parser = option_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds of fedstill")
    parser.add_argument("--draws", type=int, default=4, help="the number of draws of dropout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    initial = simple_cnn()
    public = public_set()
    clients = train_clients(initial, public)
    targets = clients.targets()
    draws = range(options.draws)
    servers = [distil(initial, public, targets, draw) for draw in draws]
    notebook_targets = misplaced(targets)
    notebook_servers = [distil(initial, public, notebook_targets, draw) for draw in draws]

    lines = [
        NOTEBOOK_LINE,
        plain_line("a plain loop, its last batch misplaced", clients, notebook_servers),
        plain_line("a plain loop", clients, servers),
    ]
    lines += [fedstill_line(seed) for seed in range(1, options.seeds + 1)]
    head = [
        "",
        "clients, held out [%]",
        "clients, public [%]",
        "server's loss",
        "server, public [%]",
    ]
    rows = [line.cells() for line in lines]
    terminal.console().print(terminal.PlainTable(head, rows))
    print_last_step("misplaced", notebook_servers)
    print_last_step("its own", servers)


if __name__ == "__main__":
    main()
