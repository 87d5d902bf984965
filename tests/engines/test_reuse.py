"""Replies kept for other runs: trained once, the same bits, and a damaged file is noticed and made
anew.
"""

from __future__ import annotations

import errno
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
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "replies"


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which stages and clients are trained."""
    trained: list[tuple[str, int]] = []
    loop = serial.train

    def counted(work: Any, start: Any, view: View, setup: TrainingSetup) -> Trained:
        trained.append((setup.stage.name, view.client))
        return loop(work, start, view, setup)

    monkeypatch.setattr(serial, "train", counted)
    return trained


def experiment(method: object, reuse: bool = True, **changes: object) -> Experiment:
    given = {
        "rounds": 1,
        "topology": {"clients": 6},
        "query": {"draw": "single", "fewer_than": 5},
        "reuse": reuse,
    }
    return toys.toy(method, **{**given, "plan": {"epochs": 2, "batch": 10}, **changes})


def bits(folder: Path) -> list[object]:
    return without_times(read_journal(folder / "journal.jsonl"))


def fitted(trained: list[tuple[str, int]]) -> list[int]:
    return sorted(c for name, c in trained if name == "fit")


def test_a_second_method_trains_nobody_alone_again_and_has_the_same_bits(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path
) -> None:
    run(experiment("local_only"), tmp_path / "local", toys.blobs())
    assert fitted(fits) == [0, 1, 2, 3, 4, 5]
    fits.clear()
    run(experiment("qkt"), tmp_path / "reused", toys.blobs())
    assert fitted(fits) == []
    assert ("refine", 1) in fits
    run(experiment("qkt", reuse=False), tmp_path / "anew", toys.blobs())
    assert fitted(fits) == [0, 1, 2, 3, 4, 5]
    assert bits(tmp_path / "reused") == bits(tmp_path / "anew")
    events = [
        e for e in read_journal(tmp_path / "reused" / "journal.jsonl") if e.get("name") == "fit"
    ]
    assert all(e["seconds_training"] == 0 and e["seconds_reused"] > 0 for e in events)


def test_a_method_of_many_rounds_takes_the_same_models_to_compare_with(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path
) -> None:
    run(experiment("local_only"), tmp_path / "local", toys.blobs())
    fits.clear()
    plan = {"train": {"epochs": 1}, "epochs": 2, "batch": 10}
    method = {"name": "ft_fedavg"}
    changes = {"rounds": 2, "topology": {"clients": 6, "first": "fit"}, "plan": plan}
    run(experiment(method, **changes), tmp_path / "ft", toys.blobs())
    assert fitted(fits) == []
    last = read_journal(tmp_path / "ft" / "journal.jsonl")[-1]
    assert last["query_gain"] is not None


@pytest.mark.parametrize("method", ["fedavg_once", "pfnm"])
def test_the_states_of_clients_are_reused_with_their_replies(
    cache: Path, tmp_path: Path, method: str
) -> None:
    """In each task, a client continues from its own model of the previous one."""
    changes = {"topology": {"clients": 6}, "stream": {"kind": "classes", "tasks": 3}}
    run(toys.toy(method, **changes), tmp_path / "anew", toys.blobs())
    for name in ("first", "second"):
        run(toys.toy(method, reuse=True, **changes), tmp_path / name, toys.blobs())
        model = (tmp_path / name / "model.safetensors").read_bytes()
        assert model == (tmp_path / "anew" / "model.safetensors").read_bytes()
        assert bits(tmp_path / name) == bits(tmp_path / "anew")


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
    assert fitted(fits) == [0, 1, 2, 3, 4, 5]


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
    """A work with a tensor, of which ``repr`` shows the first and the last numbers."""

    weights: torch.Tensor


def test_own_tests_and_tensors_of_the_work_are_part_of_what_a_reply_depends_on() -> None:
    spec, draw = contract.spec_for("logistic", (4,), 3, {}), torch.Generator().manual_seed(1)
    own, test, other = (
        Examples(torch.randn(6, 4, generator=draw), torch.arange(6) % 3) for _ in range(3)
    )
    plain = View(
        0, spec, own, torch.tensor([2, 2, 2]), None, None, None, ModelPasses(spec, Inputs())
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
    keys = {
        key_of(replace(inputs, view=view))
        for view in (
            plain,
            replace(plain, test=test),
            replace(plain, test=other),
            replace(plain, test=test),
        )
    }
    assert len(keys) == 3
    large = torch.zeros(2000)
    changed = large.clone()
    changed[1000] = 1.0
    assert repr(large) == repr(changed)
    works = [Weighted(large), Weighted(changed), Weighted(large.clone())]
    assert len({key_of(replace(inputs, work=work)) for work in works}) == 2


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
    whole = files[0].read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    files[0].write_bytes(
        {"cut": whole[:-9], "flipped": flipped, "empty": b"", "other": b"x" * 200}[damage]
    )
    fits.clear()
    with caplog.at_level(logging.WARNING, logger="fedstill.reuse"):
        run(experiment("local_only"), tmp_path / "two", toys.blobs())
    assert len(fitted(fits)) == 1
    assert "damaged" in caplog.text
    assert bits(tmp_path / "one") == bits(tmp_path / "two")
    assert sorted(cache.glob("*.reply")) == files


def test_a_client_that_failed_is_not_kept_and_those_that_finished_are(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = serial.train

    def killed(work: Any, start: Any, view: View, setup: TrainingSetup) -> Trained:
        if view.client == 3:
            raise KeyboardInterrupt
        return counted(work, start, view, setup)

    one_by_one = replace(experiment("local_only"), engine="serial")
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
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["query_average_accuracy"] > 0
    assert "replies are not stored" in caplog.text


def test_those_not_used_for_longest_make_room(
    cache: Path, fits: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(experiment("local_only"), tmp_path / "one", toys.blobs())
    files = sorted(cache.glob("*.reply"))
    assert {p.name for p in (cache / "locks").iterdir()} == {p.stem[:LOCK_DIGITS] for p in files}, (
        "no lock for each"
    )
    for age, path in enumerate(files):
        os.utime(path, (1e9 - age, 1e9 - age))
    used = files[-1]  # the oldest, until it serves again
    size = max(p.stat().st_size for p in files)
    monkeypatch.setenv("FEDSTILL_REUSE_GB", str(3.5 * size / 1e9))
    kept = StoredReplies(cache, frozenset({"fit"}), reuse_bytes())
    assert kept.entry(used.stem, pytest.fail).reply.client >= 0
    made = CachedReply(Reply(9, Payload(params={"w": torch.zeros(1)}), 1))
    assert kept.entry("another", lambda: made) is made
    left = {p.stem for p in cache.glob("*.reply")}
    assert left == {"another", used.stem, files[0].stem, files[1].stem}
    assert sum(p.stat().st_size for p in cache.glob("*.reply")) <= 3.5 * size
    monkeypatch.setenv("FEDSTILL_REUSE_GB", "0")
    run(experiment("local_only", seed=8), tmp_path / "none", toys.blobs())
    assert not list(cache.glob("*.reply"))


def test_where_no_lock_can_be_written_what_is_kept_serves_and_one_line_warns(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = StoredReplies(cache, frozenset({"fit"}), reuse_bytes())
    made = CachedReply(Reply(0, Payload(params={"w": torch.zeros(1)}), 1))
    kept.entry("before", lambda: made)

    def refused(lock: FileLock, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", refused)
    assert kept.entry("before", pytest.fail).reply.client == 0
    assert kept.entry("another", lambda: made) is made
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"replies are not stored in {cache} for other runs: Read-only file system"]


def test_a_cache_folder_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="FEDSTILL_CACHE"):
        cache_folder()


@pytest.mark.parametrize("said", ["much", "-1", "nan", "inf"])
def test_a_bound_that_is_none_is_one_clear_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("FEDSTILL_REUSE_GB", said)
    with pytest.raises(ConfigError, match=f"FEDSTILL_REUSE_GB = '{said}'"):
        reuse_bytes()
