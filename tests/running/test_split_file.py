"""The split of a run has a file of its own: its contents, errors for damaged files, and journals of
earlier versions.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, CorruptFile, DataError, InfeasiblePartition
from fedstill.core.files import digest
from fedstill.core.records import Examples
from fedstill.data.dataset import Dataset
from fedstill.data.partition import iid
from fedstill.report.data_split import (
    BINS,
    EXAMPLES,
    FIRST,
    IN_LOCAL,
    MapKind,
    Split,
    class_by_client,
    clients_by,
    split_maps,
    splits,
)
from fedstill.report.page import Report
from fedstill.running import packs
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.runs import groups, read_run
from fedstill.running.split_file import SPLIT, networks_of, read_label_counts, read_split
from pages import as_html
from run_bits import assert_same_bits, bits, stopped

TOY = toys.toy(
    "fedavg", rounds=2, topology={"clients": 5, "sampled": 2}, partition="iid", measure=()
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split") / "run"
    run(TOY, folder, data=toys.blobs())
    return folder


def start_of(folder: Path) -> dict[str, Any]:
    """The first event of the journal of a run."""
    return read_journal(folder / "journal.jsonl", limit=1)[0]


def begun(tmp_path: Path) -> Path:
    """The directory of a run that was stopped after one stage."""
    return stopped(TOY, tmp_path / "begun", 1)


def test_the_file_has_positions_labels_and_ends_and_the_journal_has_its_sha256(
    finished: Path,
) -> None:
    labels = toys.blobs().train.labels.numpy()
    parts = iid(labels, 5, resolve(TOY).seed)
    positions = np.concatenate([*parts])
    arrays = safetensors.numpy.load_file(finished / SPLIT)
    assert arrays["positions"].tolist() == positions.tolist()
    assert arrays["ends"].tolist() == np.cumsum([len(part) for part in parts]).tolist()
    assert arrays["labels"].tolist() == labels[positions].tolist()
    assert arrays["labels"].dtype == np.uint8, "five classes"

    start = start_of(finished)
    sha256 = digest((finished / SPLIT).read_bytes())
    split = {"file": SPLIT, "sha256": sha256, "clients": 5, "examples": len(labels)}
    assert start["split"] == split
    assert "label_counts" not in start

    counts = [np.bincount(labels[part], minlength=toys.CLASSES).tolist() for part in parts]
    assert Result.of(finished).label_counts().tolist() == counts
    assert [*read_label_counts(finished, start)] == counts


def test_a_resume_takes_the_split_of_the_file(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*_: Any) -> None:
        raise AssertionError("the split is drawn again")

    folder = begun(tmp_path)
    monkeypatch.setattr("fedstill.running.client_data.draw_split", drawn)
    resume(folder, toys.blobs())

    assert_same_bits(bits(folder), bits(finished))


def test_a_lost_file_is_written_again(finished: Path, tmp_path: Path) -> None:
    folder = begun(tmp_path)
    (folder / SPLIT).unlink()
    resume(folder, toys.blobs())
    assert_same_bits(bits(folder), bits(finished))


def test_a_lost_file_whose_split_cannot_be_drawn_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this check, the run is resumed on other data.
    monkeypatch.setattr("fedstill.running.driver.check_same", lambda *_: None)
    folder = begun(tmp_path)
    (folder / SPLIT).unlink()
    journal = (folder / "journal.jsonl").read_bytes()

    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        resume(folder, blobs_with_reversed_labels())
    assert (folder / "journal.jsonl").read_bytes() == journal


def blobs_with_reversed_labels() -> Dataset:
    """The toy images, with the labels of others."""
    data = toys.blobs()
    return replace(data, train=Examples(data.train.values, data.train.labels.flip(0)))


def test_resume_and_report_name_a_split_with_a_changed_byte(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    content = bytearray((folder / SPLIT).read_bytes())
    content[-1] ^= 1
    (folder / SPLIT).write_bytes(content)

    path = re.escape(str(folder / SPLIT))
    with pytest.raises(CorruptFile, match=path):
        resume(folder, toys.blobs())
    with pytest.raises(CorruptFile, match=path):
        groups([folder])
    with pytest.raises(CorruptFile, match=path):
        read_split(folder, start_of(folder))


def test_the_report_names_a_lost_file_and_a_resume_writes_it_again(
    finished: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / SPLIT).unlink()
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        groups([folder])

    (folder / "summary.json").unlink()
    resume(folder, toys.blobs())
    assert_same_bits(bits(folder), bits(finished))
    groups([folder])


def test_a_file_that_is_no_split_is_named(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / SPLIT).write_bytes(b"{}")
    start = {**start_of(folder), "split": {"sha256": digest(b"{}")}}
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        read_split(folder, start)


def test_a_run_is_not_resumed_on_other_labels(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training data"):
        resume(begun(tmp_path), blobs_with_reversed_labels())


def test_a_pack_has_the_split(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "runs/one")
    packed = packs.pack(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    (group,) = groups([packed])
    assert [*group.runs[0].label_counts] == Result.of(finished).label_counts().tolist()


def test_the_networks_of_clients_are_in_the_file(tmp_path: Path) -> None:
    mixed = toys.toy(
        "fedmd", **toys.suited("fedmd"), measure=(), clients={"models": ["mlp", "logistic"]}
    )
    folder = stopped(mixed, tmp_path / "run", 1)
    ready = prepare(resolve(mixed), toys.blobs())
    networks = [ready.world.model(client).label for client in range(ready.world.clients)]
    start = start_of(folder)

    assert start["split"]["networks"] == list(dict.fromkeys(networks))
    assert "models" not in start

    numbers = safetensors.numpy.load_file(folder / SPLIT)["networks"].tolist()
    assert numbers == [client % 2 for client in range(len(networks))]
    assert read_run(folder).networks == networks

    of_an_earlier_version = {"models": networks}
    assert networks_of(None, of_an_earlier_version) == networks


def in_turn(labels: np.ndarray, clients: int) -> list[list[int]]:
    """Examples are dealt out in turn, in lists, as a user writes them."""
    return [list(range(client, len(labels), clients)) for client in range(clients)]


def first_example_again(labels: np.ndarray, clients: int) -> list[list[int]]:
    """Every client has an example of its own, and the first one."""
    return [[client, 0] for client in range(clients)]


def floats(labels: np.ndarray, clients: int) -> list[np.ndarray]:
    """Positions that are no integers."""
    return [np.array([float(client)]) for client in range(clients)]


def client_3_outside(labels: np.ndarray, clients: int) -> list[list[int]]:
    """Client 3 has a position behind the last example."""
    return [[0], [1], [2], [len(labels)], [4]]


def client_2_empty(labels: np.ndarray, clients: int) -> list[list[int]]:
    """Client 2 has no example."""
    return [[0], [1], [], [3], [4]]


def test_a_users_partition_may_return_lists(tmp_path: Path) -> None:
    ready = prepare(resolve(TOY.with_values({"partition": in_turn}, "Python")), toys.blobs())
    parts = [part.tolist() for part in ready.sites.split.tensors()]
    assert parts == in_turn(toys.blobs().train.labels.numpy(), 5)


@pytest.mark.parametrize(
    ("split", "kind", "message"),
    [
        (first_example_again, ConfigError, "client 0 twice"),
        (
            floats,
            ConfigError,
            "client 0 gets numbers of type float64, not an array of positions from 0 to",
        ),
        (client_3_outside, ConfigError, "client 3 gets example .*, not positions from 0 to"),
        (client_2_empty, InfeasiblePartition, "client 2 gets no examples"),
    ],
)
def test_the_error_for_a_faulty_partition_names_the_client(
    split: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        prepare(resolve(TOY.with_values({"partition": split}, "Python")), toys.blobs())


def test_of_many_clients_the_page_draws_the_first_and_counts_all(tmp_path: Path) -> None:
    topology = {"clients": 60_000, "sampled": 2}
    experiment = replace(TOY, rounds=1, topology=topology, plan={"epochs": 1})
    run(experiment, tmp_path / "run", data=toys.blobs(size=2 * 60_000))
    assert (tmp_path / "run/journal.jsonl").stat().st_size < 3_000

    (group,) = groups([tmp_path / "run"])
    section = as_html(split_maps(Report([group])))
    assert len(section) < 100_000
    assert f"The map shows the first {FIRST}; the histograms count all 60,000" in section
    assert "A client has 2 examples, of 1 to 2 (mean 1.8) classes" in section

    (drawn,) = splits([group])
    assert len(class_by_client(drawn).traces[0]["x"]) == FIRST
    label_counts = Result.of(tmp_path / "run").label_counts()
    class_counts = (label_counts > 0).sum(1)
    values, clients_by_value = np.unique(class_counts, return_counts=True)
    (bars,) = clients_by(drawn.counts.classes_held, "classes").traces
    assert list(bars["x"]) == [str(value) for value in values]
    assert list(bars["y"]) == clients_by_value.tolist()


def test_a_map_of_many_classes_has_no_numbers() -> None:
    def cell_text(classes: int, kind: MapKind) -> str:
        names = [f"class {index}" for index in range(classes)]
        split = SimpleNamespace(drawn=[[3] * classes] * 5, classes=names, client_names=[])
        (trace,) = class_by_client(cast("Split", split), kind).traces
        return str(trace["texttemplate"])

    assert cell_text(10, EXAMPLES) == "%{z}"
    assert cell_text(100, EXAMPLES) == ""
    assert cell_text(100, IN_LOCAL) == ""


def test_many_sizes_are_counted_in_ranges() -> None:
    (bars,) = clients_by(np.arange(1000), "examples").traces
    assert sum(bars["y"]) == 1000
    assert len(bars["x"]) == len(bars["y"]) == BINS
    assert bars["x"][0] == "0–25"


HUGE = 2**33
"""A label or an end of this size would need a table of hundreds of gigabytes."""


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("labels", lambda labels: np.where(labels == 4, HUGE, 0)),
        ("labels", lambda labels: labels.astype(np.int64) - 1),
        ("ends", lambda ends: ends.astype(np.int64) * HUGE),
        ("ends", lambda ends: ends[::-1].copy()),
        ("labels", lambda labels: np.append(labels, labels[0])),
        ("labels", lambda labels: labels.astype(np.float32)),
        ("positions", lambda positions: positions[None]),
    ],
    ids=[
        "a huge label",
        "a negative label",
        "an end that is huge",
        "ends that fall",
        "a label too many",
        "fractions",
        "a table",
    ],
)
def test_a_strangers_split_is_checked_before_it_is_used(
    name: str, changed: Callable[[np.ndarray], np.ndarray], finished: Path, tmp_path: Path
) -> None:
    arrays = safetensors.numpy.load_file(finished / SPLIT)
    arrays[name] = changed(arrays[name])
    assert_refused(arrays, finished, tmp_path)


def test_a_strangers_split_may_not_have_networks_that_the_journal_does_not_name(
    finished: Path, tmp_path: Path
) -> None:
    arrays = safetensors.numpy.load_file(finished / SPLIT)
    arrays["networks"] = np.zeros_like(arrays["ends"])
    assert_refused(arrays, finished, tmp_path)


def assert_refused(arrays: dict[str, np.ndarray], finished: Path, folder: Path) -> None:
    """Assert that a split of these arrays is refused, even if the journal has its SHA-256."""
    path = folder / SPLIT
    safetensors.numpy.save_file(arrays, path)
    start = start_of(finished)
    start["split"]["sha256"] = digest(path.read_bytes())
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        read_split(folder, start)
