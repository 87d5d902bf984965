"""A run that starts from another run's model: the same weights, the same bits after a resume, and
clear refusals.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
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
from fedstill.core.records import SERVER
from fedstill.running.compare import Outcome, Variant, _next, seeded, with_starts
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


def started_from(first: Path, **changes: Any) -> Experiment:
    """A run of FedNTD that starts from the model of a run, or from a file."""
    return toys.toy("fedntd", **{**SMALL, "partition": "iid", "start_from": str(first), **changes})


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the final model of a run."""
    return safetensors.torch.load((folder / "model.safetensors").read_bytes())


def test_it_starts_with_the_last_model_of_the_other_run(first: Path, tmp_path: Path) -> None:
    run(started_from(first), tmp_path / "second", data=toys.blobs())
    events = read_journal(tmp_path / "second" / "journal.jsonl")
    (initial,) = [event for event in events if event["event"] == "initial"]
    last = read_journal(first / "journal.jsonl")[-1]
    assert (last["event"], last["round"]) == ("round", 2)
    assert initial["accuracy"] == last["accuracy"]
    assert initial["class_accuracy"] == last["class_accuracy"]
    assert last["accuracy"] > 0.5, "it has learned, so that drawn weights would differ"

    world = prepare(resolve(started_from(first / "model.safetensors")), toys.blobs()).world
    trained = parameters_of(first)
    for client in (SERVER, 0, 3):
        assert all(torch.equal(world.initial(client)[name], trained[name]) for name in trained)


def test_it_resumes_to_the_same_bits_and_from_the_same_model_only(
    first: Path, tmp_path: Path
) -> None:
    start = Path(shutil.copytree(first, tmp_path / "start"))
    run(started_from(start), tmp_path / "whole", data=toys.blobs())
    folder = stopped(started_from(start), tmp_path / "stopped", 1)

    changed = {name: parameter + 1 for name, parameter in parameters_of(first).items()}
    changed_model = safetensors.torch.save(changed)
    (start / "model.safetensors").write_bytes(changed_model)
    with pytest.raises(CorruptFile, match="SHA-256"):
        resume(folder, data=toys.blobs())

    summary = json.loads((first / "summary.json").read_bytes())
    summary["model_sha256"] = digest(changed_model)
    (start / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(CorruptFile, match="another model"):
        resume(folder, data=toys.blobs())

    shutil.copytree(first, start, dirs_exist_ok=True)
    resume(folder, data=toys.blobs())
    assert_same_bits(bits(folder), bits(tmp_path / "whole"))


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
def test_a_model_that_is_absent_or_does_not_fit_is_refused(
    changes: dict[str, Any], words: str, first: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run(started_from(first, **changes), tmp_path / "run", data=toys.blobs())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptFile, match=r"m\.safetensors"):
        prepare(resolve(started_from(tmp_path / "m.safetensors")), toys.blobs())


def test_seeds_that_start_from_their_own_seed_are_one_group(first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, first.parent / "seed8")
    for seed in (7, 8):
        start = first.parent / f"seed{seed}"
        run(started_from(start, seed=seed), tmp_path / "visits" / f"seed{seed}", data=toys.blobs())

    (group,) = groups([tmp_path / "visits"])

    assert group.settings["start_from"] == first.parent.as_posix()
    assert group.seeds == [7, 8]


def test_runs_that_start_from_folders_of_one_name_are_two_groups(
    first: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / first.parent.name / first.name
    shutil.copytree(first, other)
    for number, start in enumerate((first, other)):
        run(started_from(start), tmp_path / "visits" / str(number), data=toys.blobs())

    assert len(groups([tmp_path / "visits"])) == 2


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path: Path) -> None:
    def variant(name: str) -> Variant:
        return seeded(name, Experiment(), 1, tmp_path / name)

    start = variant("start")
    visits = [replace(variant("a"), after=start), replace(variant("b"), after=start)]
    runs = with_starts([*visits, variant("c")])
    assert [run.label for run in runs] == ["start", "a", "b", "c"]

    outcomes = [Outcome(run, 1) for run in runs]
    outcomes[0].state = "running"
    tasks = outcomes[1:]
    ready = _next(tasks, outcomes)
    assert ready is not None
    assert ready.variant.label == "c"
    assert _next(tasks[:2], outcomes) is None

    outcomes[0].state = "failed"  # then the error of the visit names the missing model
    assert _next(tasks[:2], outcomes) is tasks[0]


StateDict = dict[str, torch.Tensor]


def bare(parameters: StateDict) -> object:
    """The state dict itself."""
    return parameters


def nested(parameters: StateDict) -> object:
    """The state dict in a checkpoint of a training loop."""
    return {"epoch": 3, "state_dict": parameters, "optimizer": {"state": {}}}


def data_parallel(parameters: StateDict) -> object:
    """The state dict as ``DataParallel`` names its entries."""
    entries = {f"module.{name}": torch.nn.Parameter(value) for name, value in parameters.items()}
    return {"model_state_dict": entries}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("shape", [bare, nested, data_parallel])
def test_a_state_dict_of_torch_is_the_same_model(
    shape: Callable[[StateDict], object], legacy: bool, first: Path, tmp_path: Path
) -> None:
    stored = parameters_of(first)
    torch.save(shape(stored), tmp_path / "net.pth", _use_new_zipfile_serialization=not legacy)
    start = initial_parameters(started_from(tmp_path / "net.pth"))
    names_in_order = ["body.1.weight", "body.1.bias", "head.weight", "head.bias"]

    assert list(start) == names_in_order
    for name, parameter in stored.items():
        assert torch.equal(start[name], parameter)
        assert not start[name].requires_grad


def initial_parameters(experiment: Experiment) -> Mapping[str, torch.Tensor]:
    """The parameters with which the server of a run begins."""
    return prepare(resolve(experiment), toys.blobs()).world.initial(SERVER)


class RunsCode:
    """A pickle of it creates a file when it is opened."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("was_run"),)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.nn.Linear(2, 2), ConfigError, "could execute code.*state_dict"),
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
        prepare(resolve(started_from(tmp_path / "net.pt")), toys.blobs())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "was_run").exists()


def compressed(path: Path) -> None:
    """Rewrite a file of torch.save so that a small file unpacks to a large one."""
    with zipfile.ZipFile(path) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


ZEROS = torch.zeros(1 << 16)

LARGE_WHEN_LOADED: dict[str, StateDict] = {
    "one number": {"body.1.weight": torch.zeros(1).expand(1 << 40)},
    "shared": {f"{number}": ZEROS for number in range(5000)},
    "compressed": {"body.1.weight": ZEROS},
}
"""State dicts whose files are small."""


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("attack", LARGE_WHEN_LOADED)
def test_a_small_file_of_torch_with_a_large_model_is_refused(
    attack: str, legacy: bool, tmp_path: Path
) -> None:
    if attack == "compressed" and legacy:
        pytest.skip("the older format does not compress")
    state_dict = LARGE_WHEN_LOADED[attack]
    torch.save(state_dict, tmp_path / "net.pt", _use_new_zipfile_serialization=not legacy)
    if attack == "compressed":
        compressed(tmp_path / "net.pt")

    with pytest.raises(CorruptFile, match=r"net\.pt"):
        prepare(resolve(started_from(tmp_path / "net.pt")), toys.blobs())


@pytest.mark.parametrize("length", [0, 10, 900], ids=str)
def test_a_damaged_file_of_torch_is_named(length: int, first: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.save(parameters_of(first), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptFile, match=r"net\.pt") as caught:
        prepare(resolve(started_from(path)), toys.blobs())
    assert "\n" not in str(caught.value)


def test_entries_that_fit_come_from_the_file_and_the_others_are_drawn_and_named(
    first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = parameters_of(first)
    other_entries = {"head.weight": torch.zeros(7, 8), "more": torch.zeros(1)}
    torch.save({**stored, **other_entries}, tmp_path / "net.pt")
    experiment = started_from(tmp_path / "net.pt", start_from_partial=True)
    run(experiment, tmp_path / "run", data=toys.blobs())

    start = read_journal(tmp_path / "run" / "journal.jsonl")[0]
    assert start["start_from_new"] == ["head.weight"]
    assert start["start_from_left_out"] == ["head.weight", "more"]
    message = "3 of 4 entries come from the file; new: head.weight; left out: head.weight, more"
    assert message in caplog.text

    drawn = initial_parameters(replace(experiment, start_from="", start_from_partial=False))
    expected = {**stored, "head.weight": drawn["head.weight"]}
    partly_stored = initial_parameters(experiment)
    assert list(partly_stored) == list(drawn)
    for name, parameter in partly_stored.items():
        assert torch.equal(parameter, expected[name])

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
        prepare(resolve(started_from(tmp_path / "net.pt", start_from_partial=True)), toys.blobs())
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
