"""Replies that are stored for other runs: clients train once, results have the same bits, and a
damaged file is replaced.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError
from fedstill.core.files import cache_folder
from fedstill.core.method import ClientWork
from fedstill.core.records import Examples, Payload, Reply, Stage, View
from fedstill.core.registry import register
from fedstill.data.inputs import Inputs
from fedstill.engines import serial
from fedstill.engines.clients import TrainingSetup
from fedstill.engines.loop import Trained
from fedstill.engines.passes import ModelPasses
from fedstill.engines.reply_cache import (
    LOCK_DIGITS,
    CachedReply,
    ReplyInputs,
    StoredReplies,
    key_of,
)
from fedstill.models import contract
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import reuse_bytes
from fedstill.running.runner import run

pytestmark = pytest.mark.usefixtures("with_threads")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of replies in a new cache."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "replies"


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The stage and the client of each training."""
    trained: list[tuple[str, int]] = []
    loop = serial.train

    def counted(work: Any, start: Any, view: View, setup: TrainingSetup) -> Trained:
        trained.append((setup.stage.name, view.client))
        return loop(work, start, view, setup)

    monkeypatch.setattr(serial, "train", counted)
    return trained


def experiment(method: object, reuse: bool = True, **changes: object) -> Experiment:
    """One round among peers, who raise queries."""
    values = {
        "rounds": 1,
        "topology": {"clients": 6},
        "query": {"draw": "single", "fewer_than": 5},
        "reuse": reuse,
        "plan": {"epochs": 1, "batch": 20},
    }
    return toys.toy(method, **{**values, **changes})


def events_of(folder: Path) -> list[object]:
    """The journal of a run without times."""
    return without_times(read_journal(folder / "journal.jsonl"))


def fitted(trained: list[tuple[str, int]]) -> list[int]:
    """The clients that were trained alone."""
    return sorted(client for stage, client in trained if stage == "fit")


ALL_CLIENTS = [0, 1, 2, 3, 4, 5]


def test_a_second_method_trains_nobody_alone_again_and_has_the_same_bits(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path
) -> None:
    run(experiment("local_only"), tmp_path / "local", toys.blobs())
    assert fitted(fits) == ALL_CLIENTS

    fits.clear()
    run(experiment("qkt"), tmp_path / "reused", toys.blobs())
    assert fitted(fits) == []
    assert ("refine", 1) in fits

    run(experiment("qkt", reuse=False), tmp_path / "anew", toys.blobs())
    assert fitted(fits) == ALL_CLIENTS
    assert events_of(tmp_path / "reused") == events_of(tmp_path / "anew")

    journal = read_journal(tmp_path / "reused" / "journal.jsonl")
    fit_events = [event for event in journal if event.get("name") == "fit"]
    assert fit_events
    for event in fit_events:
        assert event["seconds_training"] == 0
        assert event["seconds_reused"] > 0


def test_a_method_of_many_rounds_takes_the_same_models_to_compare_with(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path
) -> None:
    run(experiment("local_only"), tmp_path / "local", toys.blobs())
    fits.clear()
    fine_tuned = experiment(
        "ft_fedavg",
        rounds=2,
        topology={"clients": 6, "first": "fit"},
    )
    run(fine_tuned, tmp_path / "ft", toys.blobs())
    assert fitted(fits) == []
    last = read_journal(tmp_path / "ft" / "journal.jsonl")[-1]
    assert last["query_gain"] is not None


SHORT_SEARCH = {"name": "pfnm", "gamma": (1.0,), "variance": (1.0,), "prior_variance": (1.0,)}


@pytest.mark.parametrize("method", ["fedavg_once", SHORT_SEARCH], ids=["fedavg_once", "pfnm"])
def test_the_states_of_clients_are_reused_with_their_replies(
    cache: Path, tmp_path: Path, method: object
) -> None:
    """In each task, a client continues from its own model of the previous one."""
    changes = {"topology": {"clients": 6}, "stream": {"kind": "classes", "tasks": 3}}
    run(toys.toy(method, **changes), tmp_path / "anew", toys.blobs())
    for name in ("first", "second"):
        run(toys.toy(method, reuse=True, **changes), tmp_path / name, toys.blobs())
        model = (tmp_path / name / "model.safetensors").read_bytes()
        assert model == (tmp_path / "anew" / "model.safetensors").read_bytes()
        assert events_of(tmp_path / name) == events_of(tmp_path / "anew")


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 8},
        {"plan": {"epochs": 3, "batch": 10}},
        {"model": {"name": "mlp", "hidden": (9,)}},
        {"partition": {"kind": "dirichlet", "alpha": 1.0, "min_size": 4, "seed": 3}},
        {"data": {"test_size": 60}},
        {"threads": (3, 1)},
    ],
    ids=str,
)
def test_what_a_reply_depends_on_makes_another_key(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path, changes: dict[str, object]
) -> None:
    run(experiment("local_only"), tmp_path / "one", toys.blobs())
    fits.clear()
    run(experiment("local_only", **changes), tmp_path / "two", toys.blobs())
    assert fitted(fits) == ALL_CLIENTS


def test_labels_of_the_public_set_count_where_clients_are_measured(
    cache: Path, tmp_path: Path
) -> None:
    """Clients do not see them, but measures do."""
    for labels in (False, True):
        data = {"name": "blobs", "public": 40, "public_labels": labels}
        values = experiment("local_only", measure=("private_public",), data=data)
        result = run(values, tmp_path / str(labels), toys.blobs())
        assert ("public_accuracy" in result.history[-1]) == labels


@dataclass(frozen=True)
class Weighted(ClientWork):
    """A work with a value, whose ``repr`` may be incomplete."""

    weights: object


class Plain(ClientWork):
    """The same without fields."""

    def __init__(self, weights: object) -> None:
        self.weights = weights


def test_own_tests_and_tensors_of_the_work_are_part_of_what_a_reply_depends_on() -> None:
    spec = contract.spec_for("logistic", (4,), 3, {})
    draw = torch.Generator().manual_seed(1)

    def examples() -> Examples:
        return Examples(torch.randn(6, 4, generator=draw), torch.arange(6) % 3)

    plain = View(
        client=0,
        model=spec,
        data=examples(),
        counts=torch.tensor([2, 2, 2]),
        public=None,
        validation=None,
        test=None,
        passes=ModelPasses(spec, Inputs()),
    )
    inputs = ReplyInputs(
        work=ClientWork(),
        stage=Stage(1, 0, "fit", (0,)),
        view=plain,
        plan=None,
        seed=1,
        payload=Payload(),
        client_state=Payload(),
        measured=(),
        further=(),
    )

    def key_with_test(test: Examples | None) -> str:
        return key_of(replace(inputs, view=replace(plain, test=test)))

    test = examples()
    assert key_with_test(test) == key_with_test(test)
    assert len({key_with_test(None), key_with_test(test), key_with_test(examples())}) == 3

    large = torch.zeros(2000)
    changed = large.clone()
    changed[1000] = 1.0
    assert repr(large) == repr(changed)
    copy = large.clone()
    for work in (Weighted, Plain):
        for form in (
            lambda value: value,
            lambda value: {"w": value},
            lambda value: ("w", [value]),
            lambda value: Payload(w=value),
        ):
            works = [work(form(value)) for value in (large, changed, copy)]
            assert len({key_of(replace(inputs, work=work)) for work in works}) == 2


NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.{activation}())
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.body(x))
"""


@pytest.mark.parametrize(
    "model",
    [
        {"name": "low_rank", "of": "nets.py:Net"},
        {"name": "etf", "of": "low_rank", "arguments": {"of": "nets.py:Net"}},
        {"name": "pair", "own": "mlp", "shared": "nets.py:Net"},
    ],
    ids=["wrapped", "wrapped_twice", "pair"],
)
def test_a_network_within_another_one_is_part_of_what_a_reply_depends_on(
    model: dict[str, object],
    cache: Path,
    fits: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for activation in ("ReLU", "Tanh"):
        Path("nets.py").write_text(NETWORK.format(activation=activation))
        fits.clear()
        run(experiment("local_only", model=model), tmp_path / activation, toys.blobs())
        assert fitted(fits) == ALL_CLIENTS


def test_replies_of_networks_that_their_file_does_not_identify_are_not_stored(
    cache: Path,
    fits: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notebook imports a module, which changes before it is imported again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "nets_of_notebook.py"
    file.write_text(NETWORK.format(activation="ReLU"))
    module = importlib.import_module("nets_of_notebook")
    file.write_text(NETWORK.format(activation="Tanh") + "# longer\n")
    for name in ("old", "new"):
        fits.clear()
        run(experiment("local_only", model=module.Net), tmp_path / name, toys.blobs())
        assert fitted(fits) == ALL_CLIENTS
        importlib.reload(module)


def test_replies_of_registered_networks_are_not_stored(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path
) -> None:
    """A notebook registers a network again after a change."""
    for activation in ("ReLU", "Tanh"):
        cell: dict[str, Any] = {"__name__": "__main__"}
        exec(NETWORK.format(activation=activation), cell)
        register("model", "typed_net")(cell["Net"])
        fits.clear()
        run(experiment("local_only", model="typed_net"), tmp_path / activation, toys.blobs())
        assert fitted(fits) == ALL_CLIENTS


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_file_is_noticed_and_made_anew(
    cache: Path,
    fits: list[tuple[str, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    run(experiment("local_only"), tmp_path / "one", toys.blobs())
    files = sorted(cache.glob("*.reply"))
    assert len(files) == 6
    intact = files[0].read_bytes()
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    contents = {"cut": intact[:-9], "flipped": flipped, "empty": b"", "other": b"x" * 200}
    files[0].write_bytes(contents[damage])

    fits.clear()
    with caplog.at_level(logging.WARNING, logger="fedstill.reuse"):
        run(experiment("local_only"), tmp_path / "two", toys.blobs())

    assert len(fitted(fits)) == 1
    assert "damaged" in caplog.text
    assert events_of(tmp_path / "one") == events_of(tmp_path / "two")
    assert sorted(cache.glob("*.reply")) == files


def test_a_client_that_failed_is_not_kept_and_those_that_finished_are(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = serial.train

    def killed(work: Any, start: Any, view: View, setup: TrainingSetup) -> Trained:
        if view.client == 3:
            raise KeyboardInterrupt
        return counted(work, start, view, setup)

    one_by_one = experiment("local_only", engine="serial")
    monkeypatch.setattr(serial, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        run(one_by_one, tmp_path / "killed", toys.blobs())
    monkeypatch.setattr(serial, "train", counted)
    fits.clear()
    run(one_by_one, tmp_path / "again", toys.blobs())
    assert fitted(fits) == [3, 4, 5]


def test_a_folder_that_cannot_be_written_costs_time_and_nothing_else(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where a folder should be")
    run(experiment("local_only"), tmp_path / "run", toys.blobs())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["query_average_accuracy"] > 0
    assert "replies are not stored" in caplog.text


def test_those_not_used_for_longest_make_room(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(experiment("local_only"), tmp_path / "one", toys.blobs())
    files = sorted(cache.glob("*.reply"))
    locks = {path.name for path in (cache / "locks").iterdir()}
    assert locks == {path.stem[:LOCK_DIGITS] for path in files}, "replies share locks"
    for age, path in enumerate(files):
        os.utime(path, (1e9 - age, 1e9 - age))
    oldest = files[-1]
    bound = 3.5 * max(path.stat().st_size for path in files)

    monkeypatch.setenv("FEDSTILL_REUSE_GB", str(bound / 1e9))
    replies = StoredReplies(cache, frozenset({"fit"}), reuse_bytes())
    assert replies.entry(oldest.stem, pytest.fail).reply.client >= 0, "it is used, so it is new"
    new_reply = CachedReply(Reply(9, Payload(params={"w": torch.zeros(1)}), 1))
    assert replies.entry("another", lambda: new_reply) is new_reply

    remaining = list(cache.glob("*.reply"))
    names = {path.stem for path in remaining}
    assert names == {"another", oldest.stem, files[0].stem, files[1].stem}
    assert sum(path.stat().st_size for path in remaining) <= bound

    monkeypatch.setenv("FEDSTILL_REUSE_GB", "0")
    run(experiment("local_only", seed=8), tmp_path / "none", toys.blobs())
    assert not list(cache.glob("*.reply"))


def test_where_no_lock_can_be_written_what_is_kept_serves_and_one_line_warns(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replies = StoredReplies(cache, frozenset({"fit"}), reuse_bytes())
    new_reply = CachedReply(Reply(0, Payload(params={"w": torch.zeros(1)}), 1))
    replies.entry("before", lambda: new_reply)

    def refused(lock: FileLock, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", refused)
    assert replies.entry("before", pytest.fail).reply.client == 0
    assert replies.entry("another", lambda: new_reply) is new_reply
    (record,) = caplog.records
    warning = f"replies are not stored in {cache} for other runs: Read-only file system"
    assert record.getMessage() == warning


def test_a_cache_folder_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDSTILL_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "cache"


def test_a_cache_folder_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="FEDSTILL_CACHE"):
        cache_folder()


@pytest.mark.parametrize("bound", ["much", "-1", "nan", "inf"])
def test_a_bound_that_is_none_is_one_clear_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setenv("FEDSTILL_REUSE_GB", bound)
    with pytest.raises(ConfigError, match=f"FEDSTILL_REUSE_GB = '{bound}'"):
        reuse_bytes()
