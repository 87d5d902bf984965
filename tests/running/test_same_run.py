"""The identity of a run: what its journal records, and how the present data and code differ."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.method import Method
from fedstill.core.registry import register
from fedstill.running.runs import settings_but_seed
from fedstill.running.same_run import RunIdentity, check_same, code_digests, comparable_start
from newcomer import mine

START = {
    "event": "start",
    "classes": ["a", "b"],
    "test_counts": [3, 4],
    "inputs": {"mean": [0.5], "std": [0.25]},
    "examples_sha256": {"train": "1", "test": "2"},
    "torch": "9.0",
    "sources": {"/home/me/mine.py": "abc"},
    "seconds_since_1970": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, []),
        ({"inputs": {"mean": [0.5 * (1 + 1e-7)], "std": [0.25]}}, []),
        ({"inputs": {"mean": [0.5 * (1 + 1e-3)], "std": [0.25]}}, ["inputs"]),
        ({"inputs": {"mean": [0.5]}}, ["inputs"]),
        ({"classes": ["b", "a"], "test_counts": [4, 3]}, ["classes", "test_counts"]),
        ({"torch": "8.0"}, []),
    ],
)
def test_data_are_the_same_up_to_rounding(changes: dict[str, object], changed: list[str]) -> None:
    assert RunIdentity.noted_in(START).changed_data({**START, **changes}) == changed


def test_only_recorded_properties_are_compared() -> None:
    identity = RunIdentity.noted_in({"event": "start", "classes": ["a"]})
    assert identity.changed_data(START) == ["classes"]
    assert not identity.has_other_examples({"train": "3"})
    assert RunIdentity.noted_in(START).has_other_examples({"train": "1", "test": "3"})
    assert not RunIdentity.noted_in(START).has_other_examples({"train": "1"})


def test_files_of_code_are_compared_by_digest_and_modules_only_if_they_were_recorded(
    tmp_path: Path,
) -> None:
    experiment, _ = mine(tmp_path)
    file = tmp_path / "mine.py"
    module = tmp_path / "beside.py"
    module.write_text("VALUE = 1\n")
    file.write_text(f"import beside\n{file.read_text()}")
    settings = resolve(experiment)
    noted = code_digests(settings)
    assert noted.keys() == {str(file), str(module)}
    assert not RunIdentity.noted_in({"sources": noted}).changed_code(settings)

    module.write_text("VALUE = 2\n")
    assert RunIdentity.noted_in({"sources": noted}).changed_code(settings) == [str(module)]
    without_module = {str(file): noted[str(file)]}
    assert not RunIdentity.noted_in({"sources": without_module}).changed_code(settings)
    assert RunIdentity.noted_in({"sources": {}}).changed_code(settings) == [str(file)]
    with pytest.raises(CorruptFile, match=str(module)):
        check_same(settings, {"sources": noted}, {})


def test_the_start_of_a_run_is_the_same_on_two_machines() -> None:
    start_elsewhere = {**START, "torch": "8.0", "sources": {}, "seconds_since_1970": 2.0}
    assert comparable_start(START) == comparable_start(start_elsewhere)
    assert comparable_start({**START, "test_counts": [4, 3]}) != comparable_start(START)


def test_runs_of_several_seeds_share_the_run_that_they_start_from() -> None:
    for seed in (1, 2):
        settings = {"seed": seed, "start_from": f"runs/base/seed{seed}/model.safetensors"}
        common_settings = settings_but_seed(settings, START)
        assert common_settings == {"start_from": "runs/base", "sources.mine.py": "abc"}


def test_settings_without_files_of_code_have_no_digests() -> None:
    assert code_digests(resolve(toys.toy("fedavg"))) == {}


def test_the_file_of_a_stream_has_a_digest(tmp_path: Path) -> None:
    file = tmp_path / "seasons.py"
    file.write_text("def seasons(labels, tasks, classes): ...\n")
    stream = {"kind": f"{file}:seasons", "tasks": 3}
    assert str(file) in code_digests(resolve(toys.toy(stream=stream)))


def test_the_module_of_an_import_path_is_compared_if_it_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "nets_by_path.py"
    file.write_text("from torch import nn\ndef net(classes):\n    return nn.Linear(4, classes)\n")
    settings = resolve(toys.toy(model="nets_by_path:net"))
    noted = code_digests(settings)
    assert noted.keys() == {str(file)}
    assert code_digests(resolve(toys.toy(model="torch.nn:Identity"))) == {}

    file.write_text(file.read_text() + "VALUE = 2\n")
    assert RunIdentity.noted_in({"sources": noted}).changed_code(settings) == [str(file)]
    assert not RunIdentity.noted_in({"sources": {}}).changed_code(settings)


def test_the_code_of_a_class_that_a_script_registers_has_a_digest() -> None:
    @register("method", "registered_here")
    class First(Method):
        def requires(self) -> Need:
            return super().requires()

    settings = resolve(toys.toy("registered_here"))
    noted = code_digests(settings)
    assert noted.keys() == {"registered_here"}

    @register("method", "registered_here")
    class Second(Method):
        def requires(self) -> Need:
            return super().requires() | Need.SAME_SHAPES

    identity = RunIdentity.noted_in({"sources": noted})
    assert identity.changed_code(settings) == ["registered_here"]
    with pytest.raises(ConfigError, match="cannot import registered_here"):
        fedstill.compare(toys.toy("registered_here"))
