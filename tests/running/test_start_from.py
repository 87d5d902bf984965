"""A run that starts from another run's model: the same weights, the same bits after a resume, and
clear refusals.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest
from fedstill.running.compare import Outcome, _next, seeded, with_starts
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups
from run_bits import assert_same_bits, bits, stopped

SMALL: dict[str, Any] = {"model": {"name": "mlp", "hidden": (8,)}, "rounds": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "trained long" / "seed7"
    run(toys.toy(**SMALL), folder, data=toys.blobs())
    return folder


def going_on(first: Path, **changes: Any) -> Experiment:
    return toys.toy("fedntd", **{**SMALL, "partition": "iid", "start_from": str(first), **changes})


def test_it_starts_with_the_other_runs_last_model(first: Path, tmp_path: Path) -> None:
    run(going_on(first), tmp_path / "second", data=toys.blobs())
    events = read_journal(tmp_path / "second" / "journal.jsonl")
    (initial,) = [e for e in events if e["event"] == "initial"]
    (last,) = [
        e
        for e in read_journal(first / "journal.jsonl")
        if e["event"] == "round" and e["round"] == 2
    ]
    assert (initial["accuracy"], initial["class_accuracy"]) == (
        last["accuracy"],
        last["class_accuracy"],
    )
    assert last["accuracy"] > 0.5, "it has learned, so that drawn weights would differ"
    named = prepare(resolve(going_on(first / "model.safetensors")), toys.blobs()).world
    trained = safetensors.torch.load((first / "model.safetensors").read_bytes())
    assert all(torch.equal(named.initial(c)[k], trained[k]) for c in (-1, 0, 3) for k in trained)


def test_it_resumes_to_the_same_bits_and_from_the_same_model_only(
    first: Path, tmp_path: Path
) -> None:
    run(going_on(first), tmp_path / "whole", data=toys.blobs())
    other = stopped(going_on(first), tmp_path / "stopped", 1)
    kept = [
        (path, path.read_bytes()) for path in (first / "model.safetensors", first / "summary.json")
    ]
    again = safetensors.torch.save(
        {k: v + 1 for k, v in safetensors.torch.load(kept[0][1]).items()}
    )
    (first / "model.safetensors").write_bytes(again)
    with pytest.raises(CorruptFile, match="SHA-256"):
        resume(other, data=toys.blobs())
    (first / "summary.json").write_text(
        json.dumps(json.loads(kept[1][1]) | {"model_sha256": digest(again)})
    )
    with pytest.raises(CorruptFile, match="another model"):
        resume(other, data=toys.blobs())
    for path, was in kept:
        path.write_bytes(was)
    resume(other, data=toys.blobs())
    assert_same_bits(bits(other), bits(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"start_from": "nowhere"},
            r"start_from = '.*nowhere': there is no model; name the directory of a finished run",
        ),
        (
            {"model": {"name": "mlp", "hidden": (9,)}},
            r"its 'body\.1\.bias' is \(8,\) float32, not \(9,\) float32; set \[model\]",
        ),
    ],
)
def test_what_it_cannot_start_from_is_refused(
    changes: dict[str, Any], words: str, first: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run(going_on(first, **changes), tmp_path / "run", data=toys.blobs())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptFile, match=r"m\.safetensors"):
        prepare(resolve(going_on(tmp_path / "m.safetensors")), toys.blobs())


def test_seeds_that_start_from_their_own_seed_are_one_group(first: Path, tmp_path: Path) -> None:
    for seed in (7, 8):
        start = first if seed == 7 else tmp_path / "trained long" / "seed8"
        if seed == 8:
            run(toys.toy(**SMALL, seed=8), start, data=toys.blobs())
        run(going_on(start, seed=seed), tmp_path / "visits" / f"seed{seed}", data=toys.blobs())
    (group,) = groups([tmp_path / "visits"])
    assert group.settings["start_from"] == "trained long"
    assert group.seeds == [7, 8]


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path: Path) -> None:
    start = seeded("start", Experiment(), 1, tmp_path / "start")
    visits = [replace(seeded(name, Experiment(), 1, tmp_path / name), after=start) for name in "ab"]
    every = with_starts([*visits, seeded("c", Experiment(), 1, tmp_path / "c")])
    assert [v.label for v in every] == ["start", "a", "b", "c"]
    outcomes = [Outcome(v, 1) for v in every]
    outcomes[0].state = "running"
    tasks = outcomes[1:]
    ready = _next(tasks, outcomes)
    assert ready is not None
    assert ready.variant.label == "c"
    assert _next(tasks[:2], outcomes) is None
    outcomes[0].state = "failed"  # then it is the visit itself that says what is missing
    assert _next(tasks[:2], outcomes) is tasks[0]


def saved(first: Path, path: Path, shape: Callable[[dict[str, torch.Tensor]], Any] = dict) -> Path:
    """A file of torch.save with the first run's model, in some shape."""
    torch.save(shape(safetensors.torch.load((first / "model.safetensors").read_bytes())), path)
    return path


@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "shape",
    [
        dict,
        lambda own: {"epoch": 3, "state_dict": own, "optimizer": {"state": {}}},
        lambda own: {
            "model_state_dict": {f"module.{k}": torch.nn.Parameter(v) for k, v in own.items()}
        },
    ],
    ids=["bare", "nested", "data_parallel"],
)
def test_a_state_dict_of_torch_is_the_same_model(
    shape: Any, old: bool, first: Path, tmp_path: Path
) -> None:
    stored = safetensors.torch.load((first / "model.safetensors").read_bytes())
    torch.save(shape(stored), tmp_path / "net.pth", _use_new_zipfile_serialization=not old)
    start = prepare(resolve(going_on(tmp_path / "net.pth")), toys.blobs()).world.initial(-1)
    assert list(start) == ["body.1.weight", "body.1.bias", "head.weight", "head.bias"], (
        "the network's order"
    )
    assert all(torch.equal(start[k], v) and not start[k].requires_grad for k, v in stored.items())


class RunsCode:
    """What a pickle can do when it is opened."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("was_run"),)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            torch.nn.Linear(2, 2),
            ConfigError,
            "could execute code.*state_dict",
        ),
        (RunsCode(), ConfigError, "could execute code"),
        ({"a": 1.0}, ConfigError, "is not a state dict .*: its 'a' is not a tensor"),
        ({0: torch.zeros(1)}, ConfigError, "its 0 is not a tensor"),
        ([torch.zeros(1)], ConfigError, "it contains a list; write torch.save"),
        ({}, ConfigError, "it contains a dict"),
        (
            {"body.1.weight": torch.zeros(8, 16)},
            ConfigError,
            "its 'body.1.bias' is missing, not .8,. float32",
        ),
        (
            {"body.1.bias": torch.zeros(8).to_sparse()},
            ConfigError,
            "'body.1.bias' is .8,. float32, not dense",
        ),
        (
            {"body.1.bias": torch.zeros(8, device="meta")},
            ConfigError,
            "'body.1.bias' is .8,. float32, not dense",
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_file_of_torch_that_is_no_model_is_refused(
    value: Any, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(value, tmp_path / "net.pt")
    with pytest.raises(error, match=words) as caught:
        prepare(resolve(going_on(tmp_path / "net.pt")), toys.blobs())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "was_run").exists()


def compressed(path: Path) -> None:
    """Rewrite a file of torch.save so that a small file unpacks to a large one."""
    with zipfile.ZipFile(path) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("attack", ["one number", "shared", "compressed"])
def test_a_small_file_of_torch_makes_no_large_model(attack: str, old: bool, tmp_path: Path) -> None:
    shared = torch.zeros(1 << 16)
    tensors = {
        "one number": {"body.1.weight": torch.zeros(1).expand(1 << 40)},
        "shared": {f"{number}": shared for number in range(5000)},
        "compressed": {"body.1.weight": torch.zeros(1 << 16)},
    }[attack]
    torch.save(tensors, tmp_path / "net.pt", _use_new_zipfile_serialization=not old)
    if attack == "compressed":
        if old:
            pytest.skip("the older format does not compress")
        compressed(tmp_path / "net.pt")
    with pytest.raises(CorruptFile, match=r"net\.pt"):
        prepare(resolve(going_on(tmp_path / "net.pt")), toys.blobs())


@pytest.mark.parametrize("kept", [0, 10, 900], ids=str)
def test_a_damaged_file_of_torch_is_named(kept: int, first: Path, tmp_path: Path) -> None:
    path = saved(first, tmp_path / "net.pt")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptFile, match=r"net\.pt") as caught:
        prepare(resolve(going_on(path)), toys.blobs())
    assert "\n" not in str(caught.value)


def test_what_fits_is_taken_and_the_rest_is_drawn_and_named(
    first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"head.weight": torch.zeros(7, 8), "more": torch.zeros(1)}
    path = saved(first, tmp_path / "net.pt", lambda own: {**own, **other})
    experiment = going_on(path, start_from_partial=True)
    run(experiment, tmp_path / "run", data=toys.blobs())
    (start,) = [
        e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "start"
    ]
    assert (start["start_from_new"], start["start_from_left_out"]) == (
        ["head.weight"],
        ["head.weight", "more"],
    )
    assert (
        "3 of 4 entries come from the file; new: head.weight; left out: head.weight, more"
        in caplog.text
    )
    stored = safetensors.torch.load((first / "model.safetensors").read_bytes())
    drawn = prepare(
        resolve(replace(experiment, start_from="", start_from_partial=False)), toys.blobs()
    ).world.initial(0)
    ours = prepare(resolve(experiment), toys.blobs()).world.initial(0)
    assert list(ours) == list(drawn)
    assert all(torch.equal(ours[k], (drawn if k == "head.weight" else stored)[k]) for k in ours)
    halfway = stopped(experiment, tmp_path / "stopped", 1)
    resume(halfway, toys.blobs())
    assert_same_bits(bits(halfway), bits(tmp_path / "run"))


def test_a_start_in_parts_without_any_part_is_refused(tmp_path: Path) -> None:
    torch.save({"head.bias": torch.zeros(6), "more": torch.zeros(5)}, tmp_path / "net.pt")
    words = (
        r"no entry matches mlp.*; the file has head\.bias, more, the network body\.1\.weight, "
        r"body\.1\.bias, head"
    )
    with pytest.raises(ConfigError, match=words):
        prepare(resolve(going_on(tmp_path / "net.pt", start_from_partial=True)), toys.blobs())
    with pytest.raises(ConfigError, match="start_from_partial"):
        resolve(toys.toy(start_from_partial=True))


@pytest.mark.parametrize("method", ["fedavg", "feddbe"])
def test_a_file_without_any_entry_of_the_network_is_refused(method: str, tmp_path: Path) -> None:
    """Also if the method adds entries to the network, which no file needs to have."""
    safetensors.torch.save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    experiment = toys.toy(
        method, **SMALL, start_from=str(tmp_path / "x.safetensors"), start_from_partial=True
    )
    with pytest.raises(ConfigError, match="no entry matches"):
        prepare(resolve(experiment), toys.blobs())
