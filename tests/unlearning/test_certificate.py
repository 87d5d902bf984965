"""The certificate of an unlearning: its content, and a check that finds one changed byte."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest
from fedstill.running.journal import read_journal
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.unlearning.certificate import (
    CERTIFICATE,
    CERTIFICATE_SHA256,
    _canonical,
    check_certificate,
    file_bytes,
    read_certificate,
)
from fedstill.unlearning.report import verification_table
from fedstill.unlearning.request import UnlearningRequest, strategy_named
from fedstill.unlearning.strategy import OriginalRun
from fedstill.unlearning.unlearn import unlearn

CLIENT = 3
FILES = ("config.toml", "journal.jsonl", "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a retraining of it, and a fine-tuning that is compared with it."""
    folder = tmp_path_factory.mktemp("certified")
    experiment = toys.toy("fedavg", rounds=2, keep_checkpoints_every=1)
    run(experiment, folder / "run", toys.blobs())
    request = UnlearningRequest(clients=(CLIENT,))
    retraining = strategy_named("retraining", {})
    unlearn(folder / "run", request, retraining, folder / "exact", data=toys.blobs())
    tuning = strategy_named("fine_tuning", {"repair_rounds": 1})
    unlearn(
        folder / "run",
        request,
        tuning,
        folder / "tuned",
        exact=folder / "exact",
        data=toys.blobs(),
    )
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The same, to change. The certificate names the run by its path, which is that of the copy."""
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    return folder


def read(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / CERTIFICATE).read_text(encoding="utf-8"))
    return content


def test_it_names_the_request_the_strategy_and_all_files(made: Path) -> None:
    certificate = read(made / "tuned")
    assert certificate["request"] == {"clients": [CLIENT], "classes": [], "examples": []}
    assert certificate["strategy"] == {
        "name": "fine_tuning",
        "exact": False,
        "options": {"repair_rounds": 1},
    }
    assert certificate["rounds"] == {"first": 3, "last": 3}
    for key, folder in (("original", made / "run"), ("unlearned", made / "tuned")):
        digests = certificate[key]
        assert isinstance(digests, dict)
        for name, file_key in zip(FILES, ("config", "journal", "model"), strict=True):
            assert digests[file_key] == digest((folder / name).read_bytes())
    assert check_certificate(made / "tuned").original_checked


def test_its_measurements_are_those_of_the_models(made: Path) -> None:
    measured = read(made / "tuned")["measurements"]
    assert isinstance(measured, dict)
    original = OriginalRun.of(made / "run", toys.blobs())
    sites = original.prepared.sites
    own = sites.train.take(sites.positions(CLIENT))
    passes = sites.passes(original.prepared.world.model(-1))
    results = {
        "original": Result.of(made / "run"),
        "unlearned": Result.of(made / "tuned"),
        "exact": Result.of(made / "exact"),
    }
    models = {name: result.model for name, result in results.items()}
    for name, result in results.items():
        right = passes.logits(result.model, own).argmax(1) == own.labels
        assert measured["accuracy"][name]["forgotten"] == float(right.double().mean())
        assert measured["accuracy"][name]["test"] == pytest.approx(result.accuracy)
    exact = torch.cat([tensor.flatten().double() for tensor in models["exact"].values()])
    for name in ("original", "unlearned"):
        model = torch.cat([models[name][entry].flatten().double() for entry in models["exact"]])
        expected = float((model - exact).norm() / exact.norm())
        assert measured["distance_to_exact"][name]["weights"] == pytest.approx(expected)


def retrained(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """The measurements of a retraining, and of a second one that is compared with the first."""
    run(experiment, folder / "run", toys.blobs())
    request = UnlearningRequest(clients=(CLIENT,))
    strategy = strategy_named("retraining", {})
    unlearn(folder / "run", request, strategy, folder / "exact", data=toys.blobs())
    second = unlearn(
        folder / "run",
        request,
        strategy,
        folder / "second",
        exact=folder / "exact",
        data=toys.blobs(),
    )
    return dict(second.certificate["measurements"])


@pytest.mark.parametrize("method", ["analytic", "pfnm"])
def test_the_model_of_the_method_is_measured(method: str, tmp_path: Path) -> None:
    """It has another network than the clients train."""
    measured = retrained(toys.toy(method, **toys.suited(method)), tmp_path)
    for name, folder in (("original", "run"), ("unlearned", "second"), ("exact", "exact")):
        expected = Result.of(tmp_path / folder).accuracy
        assert measured["accuracy"][name]["test"] == pytest.approx(expected)
    assert measured["distance_to_exact"]["unlearned"]["predictions"] == 0


@pytest.mark.parametrize(
    "method", ["fedrep", pytest.param("qkt", marks=pytest.mark.uses("querying"))]
)
def test_clients_with_models_of_their_own_are_measured_by_the_journals(
    method: str, tmp_path: Path
) -> None:
    measured = retrained(toys.toy(method, **toys.suited(method)), tmp_path)
    assert measured["accuracy"] == {"original": {}, "unlearned": {}, "exact": {}}
    assert measured["cost"]["relative_to_exact"]["bytes"] == 1
    assert call(["unlearn", str(tmp_path / "second"), "--check"]) == 0


def test_a_round_in_which_the_client_leaves_is_not_said_to_be_without_its_data(
    tmp_path: Path,
) -> None:
    experiment = toys.toy("fedavg", rounds=2, keep_updates=True, topology={"clients": 6})
    run(experiment, tmp_path / "run", toys.blobs())
    new = unlearn(
        tmp_path / "run",
        UnlearningRequest(clients=(CLIENT,)),
        strategy_named("gradient_ascent", {"repair_rounds": 2}),
        tmp_path / "new",
        data=toys.blobs(),
    )
    first = new.certificate["rounds"]["first"]
    acting = {
        event["round"]
        for event in read_journal(tmp_path / "new" / "journal.jsonl")
        if event["event"] == "client" and event["client"] == CLIENT
    }
    assert max(acting) == first - 1 == 3


def test_an_exact_result_is_of_the_same_request_and_run(made: Path, tmp_path: Path) -> None:
    """It is checked before anything is trained."""
    request = UnlearningRequest(clients=(CLIENT,))
    retraining = strategy_named("retraining", {})
    other = UnlearningRequest(clients=(CLIENT + 1,))
    unlearn(made / "run", other, retraining, tmp_path / "other", data=toys.blobs())
    seed = toys.toy("fedavg", rounds=2, keep_checkpoints_every=1, seed=8)
    run(seed, tmp_path / "seed", toys.blobs())
    unlearn(tmp_path / "seed", request, retraining, tmp_path / "seed exact", data=toys.blobs())
    wrong = {
        made / "run": "has forgotten nothing",
        tmp_path / "other": f"has forgotten client {CLIENT + 1}",
        made / "tuned": "fine_tuning, which is not exact",
        tmp_path / "seed exact": "another value of seed",
    }
    tuning = strategy_named("fine_tuning", {"repair_rounds": 1})
    for exact, reason in wrong.items():
        with pytest.raises(ConfigError, match=reason):
            unlearn(made / "run", request, tuning, tmp_path / "new", exact=exact, data=toys.blobs())
    assert not (tmp_path / "new").exists()


def test_an_intact_certificate_keeps_its_measurements(copied: Path) -> None:
    def again(**options: Path) -> object:
        new = unlearn(
            copied / "run",
            UnlearningRequest(clients=(CLIENT,)),
            strategy_named("fine_tuning", {"repair_rounds": 1}),
            copied / "tuned",
            data=toys.blobs(),
            **options,
        )
        return new.certificate["measurements"]

    again(exact=copied / "exact")
    before = (copied / "tuned" / CERTIFICATE).read_bytes()
    measured = again()
    assert isinstance(measured, dict)
    assert "distance_to_exact" in measured
    assert (copied / "tuned" / CERTIFICATE).read_bytes() == before
    (copied / "tuned" / CERTIFICATE).write_bytes(before[:-9])
    again()
    assert check_certificate(copied / "tuned").original_checked


def test_retraining_has_distance_zero_to_itself(made: Path, tmp_path: Path) -> None:
    again = unlearn(
        made / "run",
        UnlearningRequest(clients=(CLIENT,)),
        strategy_named("retraining", {}),
        tmp_path / "again",
        exact=made / "exact",
        data=toys.blobs(),
    )
    distances = again.certificate["measurements"]["distance_to_exact"]["unlearned"]
    assert {distances[key] for key in ("weights", "predictions", "probabilities")} == {0.0}


@pytest.mark.parametrize("name", [*FILES, CERTIFICATE])
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
    for position, old in enumerate(data):
        if old == byte:
            continue
        path.write_bytes(data[:position] + bytes([byte]) + data[position + 1 :])
        with pytest.raises(CorruptFile, match=CERTIFICATE):
            read_certificate(copied / "tuned")


def test_a_changed_byte_of_the_original_run_is_found(made: Path) -> None:
    path = made / "run" / "model.safetensors"
    data = path.read_bytes()
    try:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptFile, match="model"):
            check_certificate(made / "exact")
    finally:
        path.write_bytes(data)


def test_without_the_original_run_only_the_new_one_is_checked(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / "tuned" / CERTIFICATE
    content = json.loads(path.read_text(encoding="utf-8"))
    content["original"]["folder"] = str(copied / "gone")
    del content["sha256"]
    content["sha256"] = digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    path.write_bytes(file_bytes(content))
    assert not check_certificate(copied / "tuned").original_checked
    assert call(["unlearn", str(copied / "tuned"), "--check"]) == 0
    assert "gone" in capsys.readouterr().err


def test_a_forgotten_client_that_acts_is_found(made: Path, copied: Path) -> None:
    """Even if somebody adapts the SHA-256 of the changed journal."""
    folder = copied / "exact"
    line = next(
        line
        for line in (made / "run" / "journal.jsonl").read_bytes().splitlines()
        if json.loads(line).get("client") == CLIENT
    )
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines()
    first = next(i for i, old in enumerate(lines) if json.loads(old)["event"] == "client")
    journal.write_bytes(b"\n".join([*lines[:first], line, *lines[first:]]) + b"\n")
    path = folder / CERTIFICATE
    content = json.loads(path.read_text(encoding="utf-8"))
    content["unlearned"]["journal"] = digest(journal.read_bytes())
    del content["sha256"]
    content["sha256"] = digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    path.write_bytes(file_bytes(content))
    with pytest.raises(CorruptFile, match=f"client {CLIENT}"):
        check_certificate(folder)


def test_a_directory_without_a_certificate(made: Path) -> None:
    with pytest.raises(CorruptFile, match=CERTIFICATE):
        check_certificate(made / "run")


def test_the_command_checks(made: Path, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["unlearn", str(made / "tuned"), "--check"]) == 0
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
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    acted = {event["client"] for event in events if event["event"] == "client"}
    request = UnlearningRequest(clients=(min(set(range(6)) - acted),))
    folder = tmp_path / "idle"
    unlearn(tmp_path / "run", request, strategy_named("retraining", {}), folder, data=toys.blobs())
    assert call(["unlearn", str(folder), "--check"]) == 0
    assert not re.search(r"rounds \d+ to \d+", capsys.readouterr().out)


def recertified(folder: Path, path: tuple[str, ...], value: object) -> None:
    """Change an entry of a certificate, and adapt the SHA-256 of the certificate."""
    certificate = read(folder)
    table: Any = certificate
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    certificate[CERTIFICATE_SHA256] = digest(_canonical(certificate))
    (folder / CERTIFICATE).write_bytes(file_bytes(certificate))


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
    recertified(copied / "exact", path, value)
    with pytest.raises(CorruptFile, match=path[0]):
        check_certificate(copied / "exact")


NO_MEASUREMENTS: dict[str, object] = {
    "text": "text",
    "too large": 10**400,
    "list": [1],
    "nan": float("nan"),
    "inf": float("inf"),
}


@pytest.mark.parametrize("name", NO_MEASUREMENTS)
def test_a_strangers_measurements_are_left_out(name: str, copied: Path) -> None:
    value = NO_MEASUREMENTS[name]
    entries = [value, {"unlearned": value}, {"unlearned": {"test": value}}]
    for accuracy in entries:
        recertified(copied / "exact", ("measurements",), {"accuracy": accuracy})
        assert not verification_table([read_certificate(copied / "exact")]).rows


def test_the_request_and_the_strategy_are_those_of_the_config(copied: Path) -> None:
    check_certificate(copied / "tuned")
    recertified(copied / "tuned", ("strategy", "name"), "retraining")
    with pytest.raises(CorruptFile, match="strategy"):
        check_certificate(copied / "tuned")
    recertified(copied / "exact", ("request", "clients"), [CLIENT, CLIENT + 1])
    with pytest.raises(CorruptFile, match="request"):
        check_certificate(copied / "exact")
