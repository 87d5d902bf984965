"""The certificate of an unlearning: its content, and a check that finds one changed byte."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest
from fedstill.core.records import SERVER, Tensors
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.unlearning.certificate import (
    CERTIFICATE,
    CERTIFICATE_SHA256,
    check_certificate,
    file_bytes,
    read_certificate,
)
from fedstill.unlearning.report import verification_table
from fedstill.unlearning.request import UnlearningRequest, strategy_named
from fedstill.unlearning.strategy import OriginalRun
from fedstill.unlearning.unlearn import unlearn
from journals import journal_events

CLIENT = 3
REQUEST = UnlearningRequest(clients=(CLIENT,))
RETRAINING = strategy_named("retraining", {})
FINE_TUNING = strategy_named("fine_tuning", {"repair_rounds": 1})
FILES = {"config": "config.toml", "journal": "journal.jsonl", "model": "model.safetensors"}
"""The files of a run whose SHA-256 is in a certificate, by their keys."""


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a retraining of it (``exact``), and a fine-tuning that is compared with
    the retraining (``tuned``).
    """
    folder = tmp_path_factory.mktemp("certified")
    experiment = toys.toy("fedavg", rounds=2, keep_checkpoints_every=1)
    original = folder / "run"
    run(experiment, original, toys.blobs())
    exact = folder / "exact"
    unlearn(original, REQUEST, RETRAINING, exact, data=toys.blobs())
    unlearn(original, REQUEST, FINE_TUNING, folder / "tuned", exact=exact, data=toys.blobs())
    return folder


@pytest.fixture
def copied(certified: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change. The copy's certificates still name the original
    run by its path.
    """
    folder = tmp_path / "copy"
    shutil.copytree(certified, folder)
    return folder


def content_of(folder: Path) -> dict[str, Any]:
    """The content of a certificate, unchecked."""
    content: dict[str, Any] = json.loads((folder / CERTIFICATE).read_text(encoding="utf-8"))
    return content


def write_signed(folder: Path, content: dict[str, Any]) -> None:
    """Write a certificate with a SHA-256 that fits its content."""
    unsigned = {key: value for key, value in content.items() if key != CERTIFICATE_SHA256}
    sha256 = digest(json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode())
    (folder / CERTIFICATE).write_bytes(file_bytes({**unsigned, CERTIFICATE_SHA256: sha256}))


def replace_entry(folder: Path, path: tuple[str, ...], value: object) -> None:
    """Change an entry of a certificate, and adapt the SHA-256 of the certificate."""
    content = content_of(folder)
    table = content
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    write_signed(folder, content)


def test_it_names_the_request_the_strategy_and_all_files(certified: Path) -> None:
    content = content_of(certified / "tuned")

    assert content["request"] == {"clients": [CLIENT], "classes": [], "examples": []}
    options = {"repair_rounds": 1}
    assert content["strategy"] == {"name": "fine_tuning", "exact": False, "options": options}
    assert content["rounds"] == {"first": 3, "last": 3}
    for key, name in FILES.items():
        assert content["original"][key] == digest((certified / "run" / name).read_bytes())
        assert content["unlearned"][key] == digest((certified / "tuned" / name).read_bytes())
    assert check_certificate(certified / "tuned").original_checked


def as_vector(model: Tensors) -> Tensor:
    """All parameters of a model, by the names of its entries."""
    return torch.cat([model[name].flatten().double() for name in sorted(model)])


def test_its_measurements_are_those_of_the_models(certified: Path) -> None:
    measurements = content_of(certified / "tuned")["measurements"]
    original = OriginalRun.of(certified / "run", toys.blobs())
    sites = original.prepared.sites
    forgotten = sites.train.take(sites.positions(CLIENT))
    passes = sites.passes(original.prepared.world.model(SERVER))
    results = {
        "original": Result.of(certified / "run"),
        "unlearned": Result.of(certified / "tuned"),
        "exact": Result.of(certified / "exact"),
    }

    for name, result in results.items():
        is_correct = passes.logits(result.model, forgotten).argmax(1) == forgotten.labels
        accuracy = measurements["accuracy"][name]
        assert accuracy["forgotten"] == float(is_correct.double().mean())
        assert accuracy["test"] == pytest.approx(result.accuracy)

    exact = as_vector(results["exact"].model)
    for name in ("original", "unlearned"):
        difference = as_vector(results[name].model) - exact
        expected = float(difference.norm() / exact.norm())
        weights = measurements["distance_to_exact"][name]["weights"]
        assert weights == pytest.approx(expected)


def retrained(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """The measurements of a retraining (``second``) that is compared with an equal one
    (``exact``).
    """
    original = folder / "run"
    run(experiment, original, toys.blobs())
    exact = folder / "exact"
    unlearn(original, REQUEST, RETRAINING, exact, data=toys.blobs())
    second = unlearn(
        original, REQUEST, RETRAINING, folder / "second", exact=exact, data=toys.blobs()
    )
    return dict(second.certificate["measurements"])


@pytest.mark.parametrize("method", ["analytic", "pfnm"])
def test_the_model_of_the_method_is_measured(method: str, tmp_path: Path) -> None:
    """It has another network than the clients train."""
    measurements = retrained(toys.toy(method, **toys.suited(method)), tmp_path)
    folders = {"original": "run", "unlearned": "second", "exact": "exact"}
    for name, folder in folders.items():
        accuracy = Result.of(tmp_path / folder).accuracy
        assert measurements["accuracy"][name]["test"] == pytest.approx(accuracy)
    assert measurements["distance_to_exact"]["unlearned"]["predictions"] == 0


@pytest.mark.parametrize(
    "method", ["fedrep", pytest.param("qkt", marks=pytest.mark.uses("querying"))]
)
def test_clients_with_models_of_their_own_are_measured_by_the_journals(
    method: str, tmp_path: Path
) -> None:
    measurements = retrained(toys.toy(method, **toys.suited(method)), tmp_path)
    assert measurements["accuracy"] == {"original": {}, "unlearned": {}, "exact": {}}
    assert measurements["cost"]["relative_to_exact"]["bytes"] == 1
    assert call(["unlearn", str(tmp_path / "second"), "--check"]) == 0


def test_a_run_without_checkpoints_is_measured_by_the_journals(tmp_path: Path) -> None:
    """Retraining needs no checkpoints, which may have been deleted after the run."""
    original = tmp_path / "run"
    run(toys.toy("fedavg", rounds=2), original, toys.blobs())
    shutil.rmtree(original / "checkpoints")
    new = unlearn(original, REQUEST, RETRAINING, tmp_path / "new", data=toys.blobs())
    accuracies = new.certificate["measurements"]["accuracy"]
    assert accuracies["original"] == {"test": Result.of(original).accuracy}
    assert accuracies["unlearned"] == {"test": new.result.accuracy}


def test_a_round_in_which_the_client_leaves_is_not_certified_to_be_without_its_data(
    tmp_path: Path,
) -> None:
    experiment = toys.toy("fedavg", rounds=2, keep_updates=True, topology={"clients": 6})
    run(experiment, tmp_path / "run", toys.blobs())
    ascent = strategy_named("gradient_ascent", {"repair_rounds": 2})
    new = unlearn(tmp_path / "run", REQUEST, ascent, tmp_path / "new", data=toys.blobs())

    events = journal_events(tmp_path / "new", event="client", client=CLIENT)
    last_round_of_client = max(event["round"] for event in events)
    assert last_round_of_client == 3
    assert new.certificate["rounds"]["first"] == 4


def test_an_exact_result_is_of_the_same_request_and_run(certified: Path, tmp_path: Path) -> None:
    """It is checked before anything is trained."""
    original = certified / "run"
    other_client = UnlearningRequest(clients=(CLIENT + 1,))
    unlearn(original, other_client, RETRAINING, tmp_path / "other", data=toys.blobs())
    other_seed = toys.toy("fedavg", rounds=2, keep_checkpoints_every=1, seed=8)
    run(other_seed, tmp_path / "seed", toys.blobs())
    unlearn(tmp_path / "seed", REQUEST, RETRAINING, tmp_path / "seed exact", data=toys.blobs())

    reasons = {
        original: "has forgotten nothing",
        tmp_path / "other": f"has forgotten client {CLIENT + 1}",
        certified / "tuned": "fine_tuning, which is not exact",
        tmp_path / "seed exact": "another value of seed",
    }
    new = tmp_path / "new"
    for exact, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            unlearn(original, REQUEST, FINE_TUNING, new, exact=exact, data=toys.blobs())
    assert not new.exists()


def test_an_intact_certificate_keeps_its_measurements(copied: Path) -> None:
    """A damaged one is written anew."""
    original = copied / "run"
    tuned = copied / "tuned"
    unlearn(original, REQUEST, FINE_TUNING, tuned, exact=copied / "exact", data=toys.blobs())
    certificate = (tuned / CERTIFICATE).read_bytes()

    without_exact = unlearn(original, REQUEST, FINE_TUNING, tuned, data=toys.blobs())
    assert "distance_to_exact" in without_exact.certificate["measurements"]
    assert (tuned / CERTIFICATE).read_bytes() == certificate

    (tuned / CERTIFICATE).write_bytes(certificate[:-9])
    unlearn(original, REQUEST, FINE_TUNING, tuned, data=toys.blobs())
    assert check_certificate(tuned).original_checked


def test_retraining_has_distance_zero_to_itself(certified: Path, tmp_path: Path) -> None:
    second = unlearn(
        certified / "run",
        REQUEST,
        RETRAINING,
        tmp_path / "again",
        exact=certified / "exact",
        data=toys.blobs(),
    )
    distances = second.certificate["measurements"]["distance_to_exact"]["unlearned"]
    assert distances["weights"] == 0
    assert distances["predictions"] == 0
    assert distances["probabilities"] == 0


@pytest.mark.parametrize("name", [*FILES.values(), CERTIFICATE])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_one_changed_byte_is_found(name: str, place: float, copied: Path) -> None:
    path = copied / "tuned" / name
    data = bytearray(path.read_bytes())
    position = int(place * len(data))
    # A letter or digit stays one, so that a text file can still be parsed.
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=name.partition(".")[0]):
        check_certificate(copied / "tuned")


@pytest.mark.parametrize("byte", b" \n\t0a", ids=["space", "line", "tab", "digit", "letter"])
def test_no_byte_of_a_certificate_can_be_replaced(byte: int, copied: Path) -> None:
    """Not even a space by a line break, which leaves all entries as they are."""
    path = copied / "tuned" / CERTIFICATE
    data = path.read_bytes()
    positions = [position for position, original in enumerate(data) if original != byte]
    for position in positions:
        changed = bytearray(data)
        changed[position] = byte
        path.write_bytes(changed)
        with pytest.raises(CorruptFile, match=CERTIFICATE):
            read_certificate(copied / "tuned")


def test_a_changed_byte_of_the_original_run_is_found(copied: Path) -> None:
    original = copied / "run"
    content = content_of(copied / "exact")
    content["original"]["folder"] = str(original)
    write_signed(copied / "exact", content)
    assert check_certificate(copied / "exact").original_checked

    path = original / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="model"):
        check_certificate(copied / "exact")


def test_without_the_original_run_only_the_new_one_is_checked(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_entry(copied / "tuned", ("original", "folder"), str(copied / "gone"))
    assert not check_certificate(copied / "tuned").original_checked
    assert call(["unlearn", str(copied / "tuned"), "--check"]) == 0
    assert "gone" in capsys.readouterr().err


def test_a_forgotten_client_that_acts_is_found(copied: Path) -> None:
    """Even if the SHA-256 of the changed journal has been adapted."""
    folder = copied / "exact"
    original_journal = (copied / "run" / "journal.jsonl").read_bytes()
    event_of_client = next(
        line
        for line in original_journal.splitlines(keepends=True)
        if json.loads(line).get("client") == CLIENT
    )
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["event"] for line in lines]
    lines.insert(kinds.index("client"), event_of_client)
    journal.write_bytes(b"".join(lines))
    replace_entry(folder, ("unlearned", "journal"), digest(journal.read_bytes()))

    with pytest.raises(CorruptFile, match=f"client {CLIENT}"):
        check_certificate(folder)


def test_a_directory_without_a_certificate_is_refused(certified: Path) -> None:
    with pytest.raises(CorruptFile, match=CERTIFICATE):
        check_certificate(certified / "run")


def test_the_command_checks(
    certified: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["unlearn", str(certified / "tuned"), "--check"]) == 0
    assert "fine_tuning" in capsys.readouterr().out
    path = copied / "tuned" / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b" ")
    assert call(["unlearn", str(copied / "tuned"), "--check"]) != 0
    assert str(path) in capsys.readouterr().err


def test_a_run_without_new_training_has_no_range_of_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = {"clients": 6, "sampled": 1}
    experiment = toys.toy("fedavg", rounds=2, topology=topology, keep_checkpoints_every=1)
    run(experiment, tmp_path / "run", toys.blobs())
    sampled = {event["client"] for event in journal_events(tmp_path / "run", event="client")}
    never_sampled = min(set(range(6)) - sampled)
    request = UnlearningRequest(clients=(never_sampled,))
    unlearn(tmp_path / "run", request, RETRAINING, tmp_path / "idle", data=toys.blobs())

    assert call(["unlearn", str(tmp_path / "idle"), "--check"]) == 0
    assert not re.search(r"rounds \d+ to \d+", capsys.readouterr().out)


ENTRIES = [
    ("request",),
    ("request", "clients"),
    ("strategy",),
    ("strategy", "name"),
    ("rounds",),
    ("rounds", "first"),
    ("original",),
    ("unlearned", "model"),
    ("measurements",),
]


@pytest.mark.parametrize("path", ENTRIES, ids=".".join)
@pytest.mark.parametrize(
    "value", [None, 10**400, [[]], float("nan")], ids=["null", "large", "list", "nan"]
)
def test_a_strangers_certificate_is_refused_in_one_line(
    path: tuple[str, ...], value: object, copied: Path
) -> None:
    replace_entry(copied / "exact", path, value)
    with pytest.raises(CorruptFile, match=path[0]):
        check_certificate(copied / "exact")


INVALID_MEASUREMENTS: dict[str, object] = {
    "text": "text",
    "too large": 10**400,
    "list": [1],
    "nan": float("nan"),
    "inf": float("inf"),
}


@pytest.mark.parametrize("name", INVALID_MEASUREMENTS)
def test_a_strangers_measurements_are_left_out(name: str, copied: Path) -> None:
    value = INVALID_MEASUREMENTS[name]
    entries = [value, {"unlearned": value}, {"unlearned": {"test": value}}]
    for accuracy in entries:
        replace_entry(copied / "exact", ("measurements",), {"accuracy": accuracy})
        assert not verification_table([read_certificate(copied / "exact")]).rows


def test_the_request_and_the_strategy_are_those_of_the_config(copied: Path) -> None:
    check_certificate(copied / "tuned")
    replace_entry(copied / "tuned", ("strategy", "name"), "retraining")
    with pytest.raises(CorruptFile, match="strategy"):
        check_certificate(copied / "tuned")
    replace_entry(copied / "exact", ("request", "clients"), [CLIENT, CLIENT + 1])
    with pytest.raises(CorruptFile, match="request"):
        check_certificate(copied / "exact")
