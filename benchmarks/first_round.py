"""HiPer-FedKD's first round at alpha 1, all 50,000 images: the authors' notebook, a plain loop, and
fedstill.

``python -m benchmarks.first_round [--seeds 1] [--draws 4]``. The plain loop has the notebook's
seed, 42, for weights and for the order of batches; of the library it has the split and the clients'
temperatures. Its dropout is the CPU's, the notebook's a card's: the server is taught with several
draws of it, and its last step, which is the one that the notebook misplaces, with twelve more of
each. About four minutes for the plain loop's clients, two for each draw, and five for each seed of
fedstill; one thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.first_client import FLOOR, PIXELS, Which, first_client, normal, simple_cnn
from fedstill.benchmark.recipes import load_recipe
from fedstill.report import terminal
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

NOTEBOOK = [44.70, 39.85, 54.77, 54.97, 33.62, 28.12, 32.18, 40.72], [0.0637], [27.98]
"""It prints: clients on their held-out images, on the public ones, the server's last loss, its
accuracy there.
"""

SEED, PIXELS_OF_IT = 42, ".5, .5"
CLIENTS, LOCAL_EPOCHS, SERVER_EPOCHS, BATCH, RATE, HOT = 4, 5, 10, 64, 0.01, 3.0
LAST_DRAWS = 12


@dataclass(frozen=True)
class Taught:
    """A server after its lessons: their last loss, its accuracy, what that was before the last
    step, and what it is after the last step with other draws of dropout; in %.
    """

    loss: float
    right: float
    before: float
    after: Sequence[float]


def plainly(draws: int) -> tuple[list[float], list[list[Taught]]]:
    """The round by a plain loop with the notebook's seeds: what the clients do, and servers taught
    with some draws of dropout, each batch by its own logits, then as the notebook has it.

    There the last batch of each pass, 8 images, is taught the logits of images 624 to 631.
    """
    torch.manual_seed(SEED)
    server = simple_cnn()
    private, public, logits = [], [], []
    for client in range(CLIENTS):
        ready, _, view, temperature = first_client(PIXELS_OF_IT, 1, Which(client=client))
        known = ready.sites.public
        assert view.validation is not None
        assert known is not None
        net = copy.deepcopy(server)
        _train_alone(net, _inputs(view.data.values), view.data.labels, temperature, SEED + client)
        private.append(
            _right(_logits(net, _inputs(view.validation.values)), view.validation.labels)
        )
        logits.append(_logits(net, _inputs(known.values)))
        public.append(_right(logits[-1], known.labels))
    images, mean = _inputs(known.values), torch.stack([_standard(z) for z in logits]).mean(0)
    full, last = divmod(len(mean), BATCH)
    misplaced = torch.cat([mean[:-last], mean[full * last :][:last]])
    lesson = partial(_taught, server, images, known.labels)
    return [*private, *public], [
        [lesson(target, draw) for draw in range(draws)] for target in (mean, misplaced)
    ]


def ours(seed: int) -> tuple[list[float], list[float], list[float]]:
    """The round by fedstill, from its journal."""
    with tempfile.TemporaryDirectory() as folder:
        (one,) = load_recipe("hiper/table1").variants(
            [("HiPer-FedKD", "alpha 1.0")], [seed], {"rounds": 1, "threads": 1}, Path(folder)
        )
        run(one.experiment, one.folder)
        events = read_journal(one.folder / "journal.jsonl")
    last = next(e for e in events if e["event"] == "round" and e["round"] == 1)
    loss = next(e["loss"]["distil"] for e in events if e.get("name") == "teach_server")
    each = [last[key] for key in ("private_before_by_client", "public_before_by_client")]
    shares = [100 * own[str(client)] for own in each for client in range(CLIENTS)]
    return shares, [loss], [100 * last["server_public_accuracy"]]


def _inputs(images: Tensor) -> Tensor:
    return normal(images, *PIXELS[PIXELS_OF_IT])


def _train_alone(net: nn.Module, x: Tensor, y: Tensor, temperature: float, seed: int) -> None:
    batches = DataLoader(
        TensorDataset(x, y), BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )
    steps = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    for _ in range(LOCAL_EPOCHS):
        for images, labels in batches:
            steps.zero_grad()
            known = (net(images) / temperature).softmax(1)[torch.arange(len(labels)), labels]
            (-(known + FLOOR).log().mean()).backward()
            steps.step()


def _taught(server: nn.Module, x: Tensor, labels: Tensor, target: Tensor, draw: int) -> Taught:
    """Distil into the server; the loss is the mean of a batch in the last epoch."""
    torch.manual_seed(draw)
    net = copy.deepcopy(server)
    steps, losses = torch.optim.SGD(net.parameters(), lr=RATE), list[float]()
    net.train()
    batches = list(zip(x.split(BATCH), target.split(BATCH), strict=True))
    for epoch in range(SERVER_EPOCHS):
        losses = [
            _step(net, steps, *batch)
            for batch in batches[: -1 if epoch + 1 == SERVER_EPOCHS else None]
        ]
    before = copy.deepcopy(net)
    losses.append(_step(net, steps, *batches[-1]))
    after = []
    for other in range(LAST_DRAWS):
        torch.manual_seed(1000 + other)
        again = copy.deepcopy(before).train()
        _step(again, torch.optim.SGD(again.parameters(), lr=RATE), *batches[-1])
        after.append(_right(_logits(again, x), labels))
    right = [_right(_logits(each, x), labels) for each in (net, before)]
    return Taught(sum(losses) / len(losses), right[0], right[1], after)


def _step(net: nn.Module, steps: torch.optim.Optimizer, images: Tensor, wanted: Tensor) -> float:
    steps.zero_grad()
    said = (_standard(net(images)) / HOT).log_softmax(1)
    loss = kl_div(said, (wanted / HOT).softmax(1), reduction="batchmean") * HOT**2
    loss.backward()
    steps.step()
    return loss.item()


def _standard(logits: Tensor) -> Tensor:
    return (logits - logits.mean(-1, keepdim=True)) / (logits.std(-1, keepdim=True) + 1e-6)


def _logits(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([net.eval()(some) for some in x.split(250)])


def _right(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).double().mean())


def _line(
    who: str, clients: Sequence[float], losses: Sequence[float], right: Sequence[float]
) -> list[str]:
    held, public = (" ".join(f"{v:.1f}" for v in clients[a : a + CLIENTS]) for a in (0, CLIENTS))
    return [
        who,
        held,
        public,
        " ".join(f"{v:.3f}" for v in losses),
        " ".join(f"{v:.1f}" for v in right),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draws", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    clients, (right, as_written) = plainly(given.draws)
    table = [_line("the notebook", *NOTEBOOK)]
    for who, servers in (
        ("a plain loop, its last batch misplaced", as_written),
        ("a plain loop", right),
    ):
        table.append(
            _line(who, clients, [one.loss for one in servers], [one.right for one in servers])
        )
    table += [_line(f"fedstill, seed {seed}", *ours(seed)) for seed in range(1, given.seeds + 1)]
    head = [
        "",
        "clients, held out [%]",
        "clients, public [%]",
        "server's loss",
        "server, public [%]",
    ]
    terminal.console().print(terminal.PlainTable(head, table))
    for who, servers in (("misplaced", as_written), ("its own", right)):
        after = [share for one in servers for share in one.after]
        spread = (
            f"{statistics.mean(after):.1f} ± {statistics.stdev(after):.1f}, {min(after):.1f} to "
            f"{max(after):.1f}"
        )
        print(
            f"the last step alone, logits {who}: from "
            f"{' '.join(f'{one.before:.1f}' for one in servers)} % to {spread} "
            f"% over {len(after)} draws of its dropout"
        )
