"""If a network cannot be trained on a single example, the left-over example of an epoch joins the
last full batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ClientFailed, ConfigError
from fedstill.engines.vectorised import train_stack
from fedstill.running import journal as journals
from fedstill.running.preparation import prepare
from fedstill.running.runner import run
from journals import refusals
from newcomer import mine

SIZES = [41, 40, 61]
"""In batches of 20, the first and the last client have an example left over."""


class Normed(nn.Module):
    """Batch normalisation of features: torch refuses a single example in training mode."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


class Paired(nn.Module):
    """A network that can be stacked, and that takes no single example in training mode either."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) < 2:
            raise ValueError("one example")
        return self.head(x.flatten(1))


class NormedImages(nn.Module):
    """A mean over the places of an image: one image is enough."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(1))


def partition_of_sizes(sizes: list[int]) -> Any:
    """A partition in which clients have these numbers of examples."""

    def parts(labels: Any, clients: int) -> list[list[int]]:
        positions = torch.arange(sum(sizes)).split(sizes)
        return [part.tolist() for part in positions[:clients]]

    return parts


def experiment(model: Any = Normed, sizes: list[int] = SIZES, **changes: Any) -> Experiment:
    """Two rounds of three clients, each of two epochs in batches of 20."""
    values = {
        "model": model,
        "partition": partition_of_sizes(sizes),
        "rounds": 2,
        "topology": {"clients": 3},
        "plan": {"epochs": 2, "batch": 20, "lr": 0.1},
        "measure": (),
    }
    return toys.toy(**{**values, **changes})


def steps(folder: Path) -> list[int]:
    """The steps of each client in round 1."""
    steps_by_client = {}
    for event in journals.read_journal(folder / "journal.jsonl"):
        if event["event"] == "client" and event["round"] == 1:
            steps_by_client[event["client"]] = event["steps"]
    return [steps_by_client[client] for client in sorted(steps_by_client)]


@pytest.mark.parametrize("engine", ["pooled", "flower"])
def test_it_joins_in_every_engine(engine: str, tmp_path: Path) -> None:
    serial = run(experiment(engine="serial"), tmp_path / "serial", toys.blobs())
    result = run(experiment(engine=engine), tmp_path / engine, toys.blobs())

    two_epochs = [4, 4, 6]
    assert steps(tmp_path / "serial") == two_epochs, "of 20 + 21, of 20 + 20, and of 20 + 20 + 21"
    assert steps(tmp_path / engine) == two_epochs
    for name, parameter in serial.model.items():
        assert torch.equal(result.model[name], parameter), name


def test_it_joins_beside_clients_that_are_stacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = []

    def spied(work: Any, starts: Any, views: Any, setup: Any) -> Any:
        stacks.append([view.client for view in views])
        return train_stack(work, starts, views, setup)

    monkeypatch.setattr("fedstill.engines.vectorised.train_stack", spied)
    four = {"model": Paired, "sizes": [*SIZES, 45], "topology": {"clients": 4}}
    serial = run(experiment(**four, engine="serial"), tmp_path / "serial", toys.blobs())
    stacked = run(experiment(**four, engine="vectorised"), tmp_path / "stacked", toys.blobs())

    assert stacks == [[3, 1], [3, 1]], "in both rounds the clients that have no example left over"
    assert steps(tmp_path / "serial") == [4, 4, 6, 6]
    assert steps(tmp_path / "stacked") == [4, 4, 6, 6]
    for name, parameter in serial.model.items():
        torch.testing.assert_close(stacked.model[name], parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "plan", "step_counts"),
    [
        (NormedImages, {"epochs": 2}, [6, 4, 8]),
        ("mlp", {"epochs": 2}, [6, 4, 8]),
        (Normed, {"epochs": 2, "norm": "frozen"}, [6, 4, 8]),
        (Normed, {"steps": 2}, [2, 2, 2]),
        (Normed, {"epochs": 1, "validation": 0.1}, [2, 2, 3]),
    ],
    ids=[
        "one image is enough",
        "no statistics",
        "frozen statistics",
        "steps that end earlier",
        "held-out examples",
    ],
)
def test_batches_are_unchanged_if_no_example_is_alone_or_one_is_enough(
    model: Any, plan: dict[str, Any], step_counts: list[int], tmp_path: Path
) -> None:
    run(experiment(model, plan={**plan, "batch": 20}), tmp_path / "run", toys.blobs())
    assert steps(tmp_path / "run") == step_counts


def test_steps_count_through_joined_epochs(tmp_path: Path) -> None:
    run(experiment(plan={"steps": 5, "batch": 20}), tmp_path / "run", toys.blobs())
    assert steps(tmp_path / "run") == [5, 5, 5]


def test_a_single_example_is_an_error_at_the_start() -> None:
    """It is no error if statistics are frozen, or if the network has none."""
    sizes = [40, 1, 40]
    with pytest.raises(ConfigError, match=r"client 1 .*plan\.norm"):
        prepare(resolve(experiment(sizes=sizes)), toys.blobs())

    frozen = experiment(sizes=sizes, plan={"epochs": 1, "norm": "frozen"})
    prepare(resolve(frozen), toys.blobs())
    prepare(resolve(experiment("mlp", sizes=sizes)), toys.blobs())


def test_a_batch_of_one_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"plan\.batch"):
        prepare(resolve(experiment(plan={"epochs": 1, "batch": 1})), toys.blobs())


def test_only_sampled_clients_must_have_enough_examples() -> None:
    """Clients 0 and 2 have a single example each, and a seed samples one client of three."""
    messages = []
    for seed in range(8):
        one_of_three = {"clients": 3, "sampled": 1}
        sampled = experiment(sizes=[1, 40, 1], seed=seed, rounds=1, topology=one_of_three)
        try:
            prepare(resolve(sampled), toys.blobs())
            messages.append("no error")
        except ConfigError as error:
            messages.append(str(error))

    for words in ("no error", "client 0", "client 2"):
        assert any(words in message for message in messages)
    assert not any("client 1" in message for message in messages)


def test_clients_that_may_fail_are_left_out(tmp_path: Path) -> None:
    tolerant = {"clients": {"quorum": 0.3, **toys.TOLERANT}}
    run(experiment(sizes=[40, 1, 40], **tolerant), tmp_path / "run", toys.blobs())
    assert {event["client"] for event in refusals(tmp_path / "run")} == {1}


def test_a_method_that_adds_examples_may_train_on_more_than_one(tmp_path: Path) -> None:
    begin = """
    def begin(self, payload, client_state, view, world):
        return TrainingStart(params=payload.params{examples})
    """
    single = {
        "topology": {"clients": 3},
        "partition": partition_of_sizes([40, 1, 40]),
        "model": Normed,
        "plan": {"epochs": 1},
    }
    twice = begin.format(examples=", examples=view.data + view.data")
    with_more_examples, _ = mine(tmp_path, twice, **single)
    run(with_more_examples, tmp_path / "run", toys.blobs())

    (tmp_path / "other").mkdir()
    unchanged, _ = mine(tmp_path / "other", begin.format(examples=""), **single)
    with pytest.raises(ClientFailed, match="client 1"):
        run(unchanged, tmp_path / "failed", toys.blobs())
