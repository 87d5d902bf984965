"""A left-over example of an epoch joins the batch before it where the network cannot be trained on
one alone.
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
from newcomer import mine, refusals

SIZES = [41, 40, 61]
"""In batches of 20, the first and the last client have an example left over."""


class Normed(nn.Module):
    """Batch normalisation of features: torch refuses a single example in training mode."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, num_classes)

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
        self.norm, self.head = nn.BatchNorm2d(1), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(1))


def sized(sizes: list[int]) -> Any:
    def parts(labels: Any, clients: int) -> list[list[int]]:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)][
            :clients
        ]

    return parts


def experiment(model: Any = Normed, sizes: list[int] = SIZES, **changes: Any) -> Experiment:
    usual = {
        "topology": {"clients": 3},
        "plan": {"epochs": 2, "batch": 20, "lr": 0.1},
        "measure": (),
    }
    return toys.toy(**{"model": model, "partition": sized(sizes), "rounds": 2, **usual, **changes})


def steps(folder: Path) -> list[int]:
    """The steps of each client in round 1."""
    events = journals.read_journal(folder / "journal.jsonl")
    clients = [e for e in events if e["event"] == "client" and e["round"] == 1]
    return [e["steps"] for e in sorted(clients, key=lambda e: e["client"])]


def trained(folder: Path, what: Experiment) -> tuple[dict[str, Tensor], list[int]]:
    """The final model of a run, and each client's steps in round 1."""
    result = run(what, folder, toys.blobs())
    return result.model, steps(folder)


@pytest.mark.parametrize("engine", ["pooled", "flower"])
def test_it_joins_in_every_engine_alike(engine: str, tmp_path: Path) -> None:
    serial, taken = trained(tmp_path / "serial", experiment(engine="serial"))
    assert taken == [4, 4, 6], "two epochs of 20 + 21, of 20 + 20, and of 20 + 20 + 21"
    found, also = trained(tmp_path / engine, experiment(engine=engine))
    assert also == taken
    for name, value in serial.items():
        assert torch.equal(found[name], value), name


def test_it_joins_beside_clients_that_are_stacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = []

    def spied(work: Any, starts: Any, views: Any, setup: Any) -> Any:
        stacks.append([view.client for view in views])
        return train_stack(work, starts, views, setup)

    monkeypatch.setattr("fedstill.engines.vectorised.train_stack", spied)
    four = {"model": Paired, "sizes": [*SIZES, 45], "topology": {"clients": 4}}
    serial, taken = trained(tmp_path / "serial", experiment(**four, engine="serial"))
    assert taken == [4, 4, 6, 6]
    found, also = trained(tmp_path / "stacked", experiment(**four, engine="vectorised"))
    assert stacks == [[3, 1], [3, 1]], "in both rounds the clients that have no example left over"
    assert also == taken
    for name, value in serial.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


OTHERS: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "one image is enough": (NormedImages, {}, [6, 4, 8]),
    "no statistics": ("mlp", {}, [6, 4, 8]),
    "frozen statistics": (
        Normed,
        {"plan": {"epochs": 2, "batch": 20, "norm": "frozen"}},
        [6, 4, 8],
    ),
    "steps that end before": (Normed, {"plan": {"steps": 2, "batch": 20}}, [2, 2, 2]),
    "held out examples": (
        Normed,
        {"plan": {"epochs": 1, "batch": 20, "validation": 0.1}},
        [2, 2, 3],
    ),
}


@pytest.mark.parametrize("why", OTHERS)
def test_what_works_keeps_its_batches(why: str, tmp_path: Path) -> None:
    model, changes, expected = OTHERS[why]
    run(experiment(model, **changes), tmp_path / "run", toys.blobs())
    assert steps(tmp_path / "run") == expected


def test_steps_count_through_joined_epochs(tmp_path: Path) -> None:
    run(experiment(plan={"steps": 5, "batch": 20}), tmp_path / "run", toys.blobs())
    assert steps(tmp_path / "run") == [5, 5, 5]


def test_a_single_example_is_an_error_at_the_start() -> None:
    single = experiment(sizes=[40, 1, 40])
    with pytest.raises(ConfigError, match=r"client 1 .*plan\.norm"):
        prepare(resolve(single), toys.blobs())
    prepare(
        resolve(experiment(sizes=[40, 1, 40], plan={"epochs": 1, "norm": "frozen"})), toys.blobs()
    )
    prepare(resolve(experiment("mlp", sizes=[40, 1, 40])), toys.blobs())


def test_a_batch_of_one_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"plan\.batch"):
        prepare(resolve(experiment(plan={"epochs": 1, "batch": 1})), toys.blobs())


def test_only_clients_that_are_drawn_count() -> None:
    found = set[str]()
    for seed in range(8):
        one_of_three = {"clients": 3, "sampled": 1}
        try:
            prepare(
                resolve(experiment(sizes=[1, 40, 1], seed=seed, rounds=1, topology=one_of_three)),
                toys.blobs(),
            )
        except ConfigError as error:
            found.update(
                client for client in ("client 0", "client 1", "client 2") if client in str(error)
            )
        else:
            found.add("none")
    assert found == {"none", "client 0", "client 2"}


def test_clients_that_may_fail_are_left_out(tmp_path: Path) -> None:
    tolerant = {"clients": {"quorum": 0.3, **toys.TOLERANT}}
    run(experiment(sizes=[40, 1, 40], **tolerant), tmp_path / "run", toys.blobs())
    assert {event["client"] for event in refusals(tmp_path / "run")} == {1}


def test_a_method_that_adds_examples_may_train_on_more_than_one(tmp_path: Path) -> None:
    client = """
    def begin(self, payload, client_state, view, world):
        return TrainingStart(params=payload.params, examples=view.data + view.data)
    """
    single = {
        "topology": {"clients": 3},
        "partition": sized([40, 1, 40]),
        "model": Normed,
        "plan": {"epochs": 1},
    }
    added = mine(tmp_path, client, **single)[0]
    run(added, tmp_path / "run", toys.blobs())
    client = """
    def begin(self, payload, client_state, view, world):
        return TrainingStart(params=payload.params)
    """
    (tmp_path / "other").mkdir()
    own_alone = mine(tmp_path / "other", client, **single)[0]
    with pytest.raises(ClientFailed, match="client 1"):
        run(own_alone, tmp_path / "failed", toys.blobs())
