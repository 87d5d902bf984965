"""The split of a run in a file of its own: what is in it, how damage is named, and that old
journals are read.
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split") / "run"
    run(TOY, folder, data=toys.blobs())
    return folder


def start_of(folder: Path) -> dict[str, Any]:
    return read_journal(folder / "journal.jsonl", limit=1)[0]


def begun(tmp_path: Path) -> Path:
    return stopped(TOY, tmp_path / "begun", 1)


def test_the_file_has_positions_labels_and_ends_and_the_journal_has_its_sha256(whole: Path) -> None:
    labels = toys.blobs().train.labels.numpy()
    parts = iid(labels, 5, resolve(TOY).seed)
    arrays = safetensors.numpy.load_file(whole / SPLIT)
    assert arrays["positions"].tolist() == np.concatenate([*parts]).tolist()
    assert arrays["ends"].tolist() == np.cumsum([len(part) for part in parts]).tolist()
    assert arrays["labels"].tolist() == labels[np.concatenate([*parts])].tolist()
    assert arrays["labels"].dtype == np.uint8, "five classes"
    start = start_of(whole)
    sha = digest((whole / SPLIT).read_bytes())
    assert start["split"] == {"file": SPLIT, "sha256": sha, "clients": 5, "examples": len(labels)}
    assert "label_counts" not in start
    counts = [np.bincount(labels[part], minlength=toys.CLASSES).tolist() for part in parts]
    assert Result.of(whole).label_counts().tolist() == counts == [*read_label_counts(whole, start)]


def test_a_resume_takes_the_split_of_the_file(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*_: Any) -> None:
        raise AssertionError("the split is drawn again")

    folder = begun(tmp_path)
    monkeypatch.setattr("fedstill.running.client_data.draw_split", drawn)
    resume(folder, toys.blobs())
    assert_same_bits(bits(folder), bits(whole))


def test_a_lost_file_is_written_again(whole: Path, tmp_path: Path) -> None:
    folder = begun(tmp_path)
    (folder / SPLIT).unlink()
    resume(folder, toys.blobs())
    assert_same_bits(bits(folder), bits(whole))


def test_a_lost_file_whose_split_cannot_be_drawn_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the data are others
    monkeypatch.setattr("fedstill.running.driver.check_same", lambda *_: None)
    folder, journal = begun(tmp_path), tmp_path / "begun/journal.jsonl"
    (folder / SPLIT).unlink()
    data = toys.blobs()
    other = replace(data, train=Examples(data.train.values, data.train.labels.flip(0)))
    before = journal.read_bytes()
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        resume(folder, other)
    assert journal.read_bytes() == before


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_is_named_by_resume_and_report(whole: Path, tmp_path: Path) -> None:
    folder = begun(tmp_path)
    flipped(folder / SPLIT)
    named = re.escape(str(folder / SPLIT))
    for use in (
        lambda: resume(folder, toys.blobs()),
        lambda: groups([folder]),
        lambda: read_split(folder, start_of(folder)),
    ):
        with pytest.raises(CorruptFile, match=named):
            use()


def test_a_lost_file_is_named_by_the_report(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / SPLIT).unlink()
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        groups([folder])
    (folder / "summary.json").unlink()
    resume(folder, toys.blobs())
    assert_same_bits(bits(folder), bits(whole))
    groups([folder])


def test_a_file_that_is_no_split_is_named(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / SPLIT).write_bytes(b"{}")
    start = {**start_of(folder), "split": {"sha256": digest(b"{}")}}
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        read_split(folder, start)


def test_other_data_than_it_began_with_are_refused(tmp_path: Path) -> None:
    data = toys.blobs()
    other = replace(data, train=Examples(data.train.values, data.train.labels.flip(0)))
    with pytest.raises(DataError, match="training data"):
        resume(begun(tmp_path), other)


def test_a_pack_has_the_split(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "runs/one")
    packed = packs.pack(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    (group,) = groups([packed])
    assert [*group.runs[0].label_counts] == Result.of(whole).label_counts().tolist()


def test_which_client_has_which_network_is_in_the_file(tmp_path: Path) -> None:
    mixed = toys.toy(
        "fedmd", **toys.suited("fedmd"), measure=(), clients={"models": ["mlp", "logistic"]}
    )
    folder = stopped(mixed, tmp_path / "run", 1)
    ready = prepare(resolve(mixed), toys.blobs())
    named = [ready.world.model(c).label for c in range(ready.world.clients)]
    start = start_of(folder)
    assert start["split"]["networks"] == list(dict.fromkeys(named))
    assert "models" not in start
    assert safetensors.numpy.load_file(folder / SPLIT)["networks"].tolist() == [
        c % 2 for c in range(len(named))
    ]
    assert read_run(folder).networks == named
    assert networks_of(None, {"models": named}) == named, "journals of before have the list"


def own(labels: np.ndarray, clients: int) -> list[list[int]]:
    """Lists, as a user writes them."""
    return [list(range(c, len(labels), clients)) for c in range(clients)]


def twice(labels: np.ndarray, clients: int) -> list[list[int]]:
    return [[c, 0] for c in range(clients)]


def floats(labels: np.ndarray, clients: int) -> list[np.ndarray]:
    return [np.array([float(c)]) for c in range(clients)]


def outside(labels: np.ndarray, clients: int) -> list[list[int]]:
    return [[c if c < 3 else len(labels)] for c in range(clients)]


def nothing(labels: np.ndarray, clients: int) -> list[list[int]]:
    return [[c] if c < 2 else [] for c in range(clients)]


def test_ones_own_function_may_give_lists(tmp_path: Path) -> None:
    ready = prepare(resolve(TOY.with_values({"partition": own}, "Python")), toys.blobs())
    assert [part.tolist() for part in ready.sites.split.tensors()] == own(
        toys.blobs().train.labels.numpy(), 5
    )


@pytest.mark.parametrize(
    ("split", "kind", "said"),
    [
        (twice, ConfigError, "client 0 twice"),
        (
            floats,
            ConfigError,
            "client 0 gets numbers of type float64, not an array of positions from 0 to",
        ),
        (outside, ConfigError, "client 3 gets example .*, not positions from 0 to"),
        (nothing, InfeasiblePartition, "client 2 gets no examples"),
    ],
)
def test_what_is_no_split_is_refused_by_the_clients_number(
    split: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        prepare(resolve(TOY.with_values({"partition": split}, "Python")), toys.blobs())


def many(clients: int) -> Dataset:
    return toys.blobs(size=2 * clients)


def test_of_many_clients_the_page_draws_the_first_and_counts_all(tmp_path: Path) -> None:
    clients = 60_000
    experiment = toys.toy(
        "fedavg",
        rounds=1,
        topology={"clients": clients, "sampled": 2},
        partition="iid",
        measure=(),
        plan={"epochs": 1},
    )
    run(experiment, tmp_path / "run", data=many(clients))
    assert (tmp_path / "run/journal.jsonl").stat().st_size < 3_000
    (group,) = groups([tmp_path / "run"])
    section = as_html(split_maps(Report([group])))
    assert len(section) < 100_000
    for words in (
        f"The map shows the first {FIRST}; the histograms count all 60,000",
        "A client has 2 examples, of 1 to 2 (mean 1.8) classes",
    ):
        assert words in section
    (drawn,) = splits([group])
    assert len(class_by_client(drawn).traces[0]["x"]) == FIRST
    counts = Result.of(tmp_path / "run").label_counts()
    values, clients_with = np.unique((counts > 0).sum(1), return_counts=True)
    (bars,) = clients_by(drawn.counts.classes_held, "classes").traces
    assert list(bars["x"]) == [str(v) for v in values]
    assert list(bars["y"]) == clients_with.tolist()


def test_a_map_of_many_classes_has_no_numbers() -> None:
    for classes, kind, text in (
        (10, EXAMPLES, "%{z}"),
        (100, EXAMPLES, ""),
        (100, IN_LOCAL, ""),
    ):
        names = [f"class {c}" for c in range(classes)]
        split = SimpleNamespace(drawn=[[3] * classes] * 5, classes=names, client_names=[])
        (trace,) = class_by_client(cast("Split", split), kind).traces
        assert trace["texttemplate"] == text


def test_many_sizes_are_counted_in_ranges() -> None:
    (bars,) = clients_by(np.arange(1000), "examples").traces
    assert sum(bars["y"]) == 1000
    assert len(bars["x"]) == len(bars["y"]) == BINS
    assert bars["x"][0] == "0–25"


HUGE = 2**33
"""A label or an end of this size would need a table of hundreds of gigabytes."""

HOSTILE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a huge label": lambda arrays: {"labels": np.where(arrays["labels"] == 4, HUGE, 0)},
    "a negative label": lambda arrays: {"labels": arrays["labels"].astype(np.int64) - 1},
    "an end that is huge": lambda arrays: {"ends": arrays["ends"].astype(np.int64) * HUGE},
    "ends that fall": lambda arrays: {"ends": arrays["ends"][::-1].copy()},
    "a label too many": lambda arrays: {"labels": np.append(arrays["labels"], arrays["labels"][0])},
    "fractions": lambda arrays: {"labels": arrays["labels"].astype(np.float32)},
    "a table": lambda arrays: {"positions": arrays["positions"][None]},
    "networks that nobody named": lambda arrays: {"networks": np.zeros_like(arrays["ends"])},
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_strangers_split_is_checked_before_anything_is_made_of_it(
    attack: str, whole: Path, tmp_path: Path
) -> None:
    arrays = safetensors.numpy.load_file(whole / SPLIT)
    path = tmp_path / SPLIT
    safetensors.numpy.save_file(arrays | HOSTILE[attack](arrays), path)
    start = start_of(whole)
    sealed = {**start, "split": {**start["split"], "sha256": digest(path.read_bytes())}}
    with pytest.raises(CorruptFile, match=r"split\.safetensors"):
        read_split(tmp_path, sealed)
