"""What a site accepts, and what it refuses with one clear line; a site with data of its own."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.core.errors import BadPayload, ConfigError, Refused
from fedstill.core.files import digest
from fedstill.core.label_counts import census_stage
from fedstill.core.records import Payload, Stage, Tensors
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors, load_dataset
from fedstill.flower import messages
from fedstill.flower.facts import Facts
from fedstill.flower.messages import (
    Contents,
    Request,
    SiteReply,
    answer_content,
    header_and_payload,
)
from fedstill.flower.site import ClientFiles, StageExecutor
from fedstill.flower.site_data import labels_of, read_in_form
from fedstill.flower.site_settings import Site, files_in, load_site
from fedstill.running.preparation import Prepared, prepare
from flowers import needs_flower, saved_data

CLIENTS = 3
TRAIN = Stage(1, 0, "train", tuple(range(CLIENTS)))


def settings_of(method: Any = "fedavg", **changes: Any) -> Settings:
    """Settings of a run over Flower in which all clients act."""
    topology = {"clients": CLIENTS, "sampled": CLIENTS, **changes.pop("topology", {})}
    data = {"name": "blobs", **changes.pop("data", {})}
    experiment = toys.toy(method, topology=topology, **changes)
    return resolve(replace(experiment, engine="flower", data=data))


def request_of(settings: Settings, **changes: Any) -> Request:
    """The request of round 1 to client 0; ``changes`` are fields of the request."""
    config = settings.toml
    initial = prepare(settings, toys.blobs()).world.initial(0)
    request = Request(
        fedstill.__version__,
        config,
        digest(config.encode()),
        run="run1",
        client=0,
        stage=TRAIN,
        payload=Payload(params=initial),
    )
    return replace(request, **changes)


def with_config(request: Request, config: str) -> Request:
    """The request with another configuration and its SHA-256."""
    return replace(request, config=config, sha=digest(config.encode()))


def executor(tmp_path: Path, **site: Any) -> StageExecutor:
    """A site of client 0 that has the toy images."""
    return StageExecutor(Site(0, tmp_path / "memory", **site), toys.blobs(), shows_reasons=True)


def own_data_executor(tmp_path: Path, **site: Any) -> StageExecutor:
    """A site of client 0 with data of its own, or without data."""
    return StageExecutor(Site(0, tmp_path / "memory", **site), shows_reasons=True)


def equal_names(first: Tensors, second: Tensors) -> list[str]:
    """The parameters that are equal in two models."""
    return [name for name, value in first.items() if torch.equal(value, second[name])]


def test_a_repeated_request_gets_the_stored_reply(tmp_path: Path) -> None:
    request = request_of(settings_of())
    reply = executor(tmp_path)(request)
    (stored,) = tmp_path.rglob("*.reply")
    written_at = stored.stat().st_mtime_ns

    repeated = executor(tmp_path)(request)

    assert reply.failure == ""
    assert reply.examples > 0
    assert stored.stat().st_mtime_ns == written_at
    assert repeated.header() == reply.header(), "its seconds are those of the stored reply"
    params = reply.content.params
    assert equal_names(params, repeated.content.params) == list(params)


def test_a_trial_reads_no_file_of_a_site_that_its_operator_has_not_listed(tmp_path: Path) -> None:
    """Else a server could train on any table of the site's disk, and ask for its label counts."""
    table = tmp_path / "patients.csv"
    lines = ["age,chol,sick"]
    for row in range(120):
        sick = "yes" if row % 4 == 0 else "no"
        lines.append(f"{30 + row % 40},{180 + row % 90},{sick}")
    table.write_text("\n".join(lines) + "\n")
    experiment = toys.toy(
        topology={"clients": 1},
        data={"name": str(table), "label_column": "sick"},
        model={"name": "mlp", "hidden": [4]},
    )
    settings = resolve(replace(experiment, engine="flower"))
    initial = prepare(settings).world.initial(0)
    config = settings.toml
    request = Request(
        fedstill.__version__,
        config,
        digest(config.encode()),
        run="run1",
        client=0,
        stage=Stage(1, 0, "train", (0,)),
        payload=Payload(params=initial),
    )

    refusal = own_data_executor(tmp_path)(request)
    answer = own_data_executor(tmp_path, files=(str(table),))(request)

    assert "has this site read" in refusal.failure
    assert "patients.csv" in refusal.failure
    assert not refusal.content
    assert answer.failure == ""


def test_fifty_thousand_columns_fit_a_request_and_the_server_names_what_does_not() -> None:
    names = [f"gene_{i:09d}" for i in range(50_000)]
    facts = {
        "columns": names,
        "features": names,
        "mean": [0.123456789012345] * 50_000,
        "std": [1.0] * 50_000,
    }
    request = replace(request_of(settings_of()), facts=facts)
    assert Request.of(request.header(), request.payload).facts == facts
    with pytest.raises(ConfigError, match="16,777,216"):
        replace(request, facts={"columns": names * 30}).header()


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder and that of ``FEDSTILL_DATA``, with three folders in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    for name in ("owner/here", "kept.json", "wards"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


BY_NAME = {"name": "digits", "public_from": "noise", "tokenizer": "words"}


@pytest.mark.usefixtures("data_folder")
def test_files_that_a_configuration_has_a_site_read(tmp_path: Path) -> None:
    """Known names, names of the hub, and a model that the server sends are no files."""
    assert files_in({"data": {}}) == []
    assert files_in({"data": BY_NAME}) == []
    assert files_in({"data": {"name": "ham10000_28"}}) == []
    assert files_in({"data": {"name": "owner/away", "public_from": "train"}}) == []
    assert files_in({"data": BY_NAME, "start_from": "runs/one"}) == []

    assert files_in({"data": {**BY_NAME, "name": "wards"}}) == ["wards"]
    assert files_in({"data": {**BY_NAME, "folder": "/data"}}) == ["/data"]
    assert files_in({"data": {**BY_NAME, "public_from": "~/scans"}}) == ["~/scans"]
    assert files_in({"data": {**BY_NAME, "tokenizer": "t.json"}}) == ["t.json"]
    assert files_in({"data": "owner/here"}) == ["owner/here"]

    file = str(tmp_path / "kept.json")
    partition = {"kind": "kept", "file": file}
    assert files_in({"partition": partition, "model": {"name": "a/b"}}) == [file]
    assert files_in({"data": {"features_of": {"name": "timm/net", "file": file}}}) == [file]


def test_a_request_for_the_same_stage_with_another_content_is_computed(tmp_path: Path) -> None:
    request = request_of(settings_of())
    moved = {name: value + 1 for name, value in request.payload.params.items()}

    first = executor(tmp_path)(request).content.params
    second = executor(tmp_path)(replace(request, payload=Payload(params=moved))).content.params

    assert len(equal_names(first, second)) < len(first)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another version": (
        {"version": "9.9"},
        {},
        r"the server runs fedstill 9\.9, this site \d.*install the same",
    ),
    "another hash": (
        {"sha": "0" * 64},
        {},
        "the configuration is not the one that its SHA-256 names",
    ),
    "not accepted": (
        {},
        {"accept": ("1" * 64,)},
        r"this site has not accepted [0-9a-f]{64}",
    ),
    "nothing accepted": (
        {},
        {"accept": ()},
        r"this site has not accepted [0-9a-f]{64}",
    ),
    "another client": ({"client": 1}, {}, "this site is client 0, not client 1"),
    "not acting": (
        {"stage": Stage(1, 0, "train", (1, 2))},
        {},
        "client 0 does not act in stage 'train'",
    ),
    "no such stage": (
        {"stage": Stage(1, 0, "spy", (0, 1, 2))},
        {},
        "stage 'spy' is not in the schedule of round 1",
    ),
    "labels": (
        {"stage": Stage(0, 0, "census", (0, 1, 2))},
        {},
        "need label counts, so this site does not send them",
    ),
    "own data only": (
        {},
        {"data": "/data/mine"},
        "trains on its own data only: set flower.data = 'sites'",
    ),
    "memory": (
        {"memory": ("client0-round0-stage0.safetensors", "0" * 64)},
        {},
        "the client state .* cannot be",
    ),
}


@pytest.mark.parametrize(("changes", "site", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_site_refuses_a_request_with_one_line(
    changes: dict[str, Any], site: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    answer = executor(tmp_path, **site)(request_of(settings_of(), **changes))

    assert answer.examples == 0
    assert not answer.content
    assert re.search(reason, answer.failure), answer.failure
    assert "\n" not in answer.failure


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "toy_logits", "data": {"public": toys.PUBLIC}},
        {"plan": {"epochs": 1, "class_weights": "balanced_overall"}},
    ],
    ids=["for the method", "for class weights"],
)
def test_a_census_is_answered_where_the_run_needs_it(
    changes: dict[str, object], tmp_path: Path
) -> None:
    settings = settings_of(**changes, rounds=2)
    ready = prepare(settings, toys.blobs())
    request = request_of(settings, stage=census_stage(ready.world), payload=Payload())

    answer = executor(tmp_path)(request)

    assert answer.content.tensor("labels").tolist() == ready.sites.label_counts(0).tolist()


def test_a_site_takes_no_part_in_a_run_with_a_measure_that_it_refuses(tmp_path: Path) -> None:
    request = request_of(settings_of(measure=("contributions",)))
    refusing = executor(tmp_path, refuse=("contributions",))

    assert executor(tmp_path)(request).failure == ""
    assert "'contributions'" in refusing(request).failure
    assert refusing(request_of(settings_of())).failure == ""


CODE = """
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg

open({marker!r}, "w").close()

@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""
"""A method in a file, which creates the file ``marker`` when it is imported."""


def test_code_runs_only_where_the_site_lists_it(tmp_path: Path) -> None:
    """A refused file is not even imported."""
    marker = tmp_path / "imported"
    file = tmp_path / "mine.py"
    file.write_text(CODE.format(marker=str(marker)))
    name = f"{file}:Mine"
    request = request_of(settings_of())
    config = request.config.replace('name = "fedavg"', f'name = "{name}"')
    request = with_config(request, config)

    refusal = executor(tmp_path)(request)
    assert "names code, " in refusal.failure
    assert "does not list under imports" in refusal.failure
    assert not marker.exists()

    assert executor(tmp_path, imports=(name,))(request).failure == ""
    assert marker.exists()


@pytest.mark.parametrize(
    ("line", "changed"),
    [("seed = 7", "seed = 7.5"), ("seed = 7", "sede = 7"), ("rounds = 3", "rounds = 3\nx = 1")],
)
def test_a_configuration_that_does_not_resolve_at_the_site_is_refused(
    line: str, changed: str, tmp_path: Path
) -> None:
    request = request_of(settings_of())
    config = request.config.replace(line, changed)
    assert config != request.config

    answer = executor(tmp_path)(with_config(request, config))

    assert answer.failure


def test_a_configuration_that_resolves_to_something_else_is_refused(tmp_path: Path) -> None:
    request = request_of(settings_of())
    config = request.config.replace("measure_every = 2\n", "")

    answer = executor(tmp_path)(with_config(request, config))

    assert "other values" in answer.failure


def own_data(folder: Path, ready: Prepared) -> str:
    """A folder with the part of client 0 and the test set."""
    part = ready.sites.train.take(ready.sites.positions(0))
    return saved_data(folder, part, ready.dataset.test)


def on_sites(method: Any = "fedavg", **changes: Any) -> Settings:
    """Settings of a run whose sites have data of their own."""
    settings = settings_of(method, **changes)
    flower = {**settings.flower.table, "federation": "/federation", "data": "sites"}
    return resolve(Experiment(**{**settings.tree, "flower": flower}))


def facts_of(settings: Settings) -> dict[str, Any]:
    """The facts that a server with the toy images sends."""
    return Facts.known_by(prepare(settings, toys.blobs())).plain()


def test_on_its_own_data_a_site_gives_the_bits_of_the_simulation_and_keeps_its_labels(
    tmp_path: Path,
) -> None:
    ready = prepare(settings_of(), toys.blobs())
    simulated = executor(tmp_path / "simulated")(request_of(ready.settings))
    settings = on_sites()
    request = request_of(settings, facts=facts_of(settings))

    answer = own_data_executor(tmp_path, data=own_data(tmp_path / "own", ready))(request)

    assert answer.failure == ""
    assert answer.examples == simulated.examples
    params = simulated.content.params
    assert equal_names(params, answer.content.params) == list(params)
    assert 0 <= answer.metrics["site_accuracy"] <= 1
    assert "label_counts" not in answer.metrics


NORMED = """
from torch import nn

def normed(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""  # noqa: E501


def test_at_a_site_a_single_last_example_joins_the_batch_before_it(tmp_path: Path) -> None:
    """Batch normalisation cannot train on one example."""
    file = tmp_path / "normed.py"
    file.write_text(NORMED)
    model = f"{file}:normed"
    changes = {"model": model, "partition": "iid", "plan": {"epochs": 1, "batch": 33, "lr": 0.1}}
    ready = prepare(settings_of(**changes), toys.blobs())
    size = ready.sites.size(0)
    assert size % 33 == 1
    simulated = executor(tmp_path / "simulated", imports=(model,))(request_of(ready.settings))
    settings = on_sites(**changes)
    request = request_of(settings, facts=facts_of(settings))
    data = own_data(tmp_path / "own", ready)

    answer = own_data_executor(tmp_path, data=data, imports=(model,))(request)

    assert answer.failure == ""
    assert answer.metrics["steps"] == size // 33
    params = simulated.content.params
    assert equal_names(params, answer.content.params) == list(params)
    assert "correct_by_class" not in answer.metrics


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": [3, 4, 4]}, r"images at this site have shape \(1, 4, 4\), not \(3, 4, 4\)"),
        ({"classes": ["a", "b"]}, "has a class '0' that the server does not list"),
    ],
)
def test_data_of_another_kind_are_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    data = own_data(tmp_path / "own", prepare(settings_of(), toys.blobs()))
    settings = on_sites()
    request = request_of(settings, facts={**facts_of(settings), **changes})

    answer = own_data_executor(tmp_path, data=data)(request)

    assert re.search(reason, answer.failure), answer.failure


def test_another_public_set_than_the_servers_is_refused(tmp_path: Path) -> None:
    data = own_data(tmp_path / "own", prepare(settings_of(), toys.blobs()))
    settings = on_sites("toy_logits", data={"public": toys.PUBLIC}, rounds=2)
    public = prepare(settings, toys.blobs()).sites.public
    assert public is not None
    public_copy = saved_data(tmp_path / "public", public, public)
    stage = replace(TRAIN, name="local")
    request = request_of(settings, facts=facts_of(settings), stage=stage, payload=Payload())

    without = own_data_executor(tmp_path, data=data)(request)
    with_other_set = own_data_executor(tmp_path, data=data, public=data)(request)
    equal = own_data_executor(tmp_path, data=data, public=public_copy)(request)

    assert "set public" in without.failure
    assert "differs from the server's" in with_other_set.failure
    assert equal.failure == ""


IMAGES = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 0, 1])


def labelled_images(classes: list[str]) -> Dataset:
    """Images of a site whose two classes have these names."""
    return from_tensors("own", (IMAGES, LABELS), (IMAGES, LABELS), classes=classes)


def test_class_names_make_labels_the_same_at_all_sites() -> None:
    dataset = labelled_images(["melanoma", "naevus"])
    facts = Facts(("naevus", "keratosis", "melanoma"), (1, 4, 4))

    assert labels_of(dataset, dataset.train, facts).tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("classes", "labels"),
    [(("1", "0"), [1, 0, 1, 0]), (("0", "1", "2"), [0, 1, 0, 1]), (("cat", "dog"), [0, 1, 0, 1])],
)
def test_numbers_are_matched_by_name_if_the_run_lists_them(
    classes: tuple[str, ...], labels: list[int]
) -> None:
    dataset = labelled_images(["0", "1"])
    facts = Facts(classes, (1, 4, 4))

    assert labels_of(dataset, dataset.train, facts).tolist() == labels


@pytest.mark.parametrize("present", [[1, 2, 3], [1, 2], [2, 3], [1]])
def test_numbers_that_count_from_1_are_matched_by_name(present: list[int]) -> None:
    labels = torch.tensor([present[i % len(present)] for i in range(4)])
    dataset = from_tensors("own", (IMAGES, labels), (IMAGES, labels))
    facts = Facts(("1", "2", "3"), (1, 4, 4))

    assert torch.equal(labels_of(dataset, dataset.train, facts), labels - 1)


def test_a_number_that_the_run_does_not_list_is_refused_even_if_others_are_listed() -> None:
    dataset = from_tensors("own", (IMAGES, LABELS), (IMAGES, LABELS))

    with pytest.raises(Refused, match="has a class '0' that the server does not list"):
        labels_of(dataset, dataset.train, Facts(("1", "2"), (1, 4, 4)))


def test_a_site_reads_its_images_as_the_run_does_and_reports_what_it_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "own"
    for name in ("cat", "dog"):
        (data / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), 9).save(data / name / f"{number}.png")
        (data / name / "5.png").write_bytes(b"no image")
    settings = settings_of(data={"name": "digits", "size": 4, "mode": "grey", "broken": "skip"})

    dataset = read_in_form(settings, Facts(("cat", "dog"), (1, 4, 4)), str(data), {})

    assert dataset.input_shape == (1, 4, 4)
    assert "2 broken images of 12" in caplog.text


OWN_FUNCTION = """
import torch
from fedstill import from_tensors
from fedstill.core.registry import register

@register("dataset", "lab")
def lab():
    images = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 0, 1])
    return from_tensors("lab", (images, labels), (images, labels))
"""


@pytest.mark.parametrize("name", ["{folder}/own.py:lab", "{folder}/own.py", "own_package.data:lab"])
def test_the_data_of_a_site_may_come_from_a_function(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "data.py").write_text(OWN_FUNCTION.replace('"lab")', '"lab of a package")'))
    (tmp_path / "own.py").write_text(OWN_FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of()
    form = {"columns": ("age",), "label_column": "label"}

    dataset = read_in_form(
        settings, Facts(("cat", "dog"), (1, 4, 4)), name.format(folder=tmp_path), form
    )

    assert len(dataset.train) == 4


def test_class_names_are_the_same_in_every_unicode_form(tmp_path: Path) -> None:
    names = ["frei", unicodedata.normalize("NFD", "gestört")]
    rows = [f"{row},{names[row % 2]}\n" for row in range(10)]
    file = tmp_path / "own.csv"
    file.write_text("x,label\n" + "".join(rows), encoding="utf-8")
    dataset = load_dataset(file)

    for form in ("NFC", "NFD"):
        facts = Facts((unicodedata.normalize(form, "gestört"), "frei"), (1,))
        assert torch.equal(labels_of(dataset, dataset.train, facts), 1 - dataset.train.labels)


def test_a_site_toml_is_read_with_paths_relative_to_it_and_wrong_keys_are_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "own").mkdir()
    path = tmp_path / "site.toml"

    path.write_text('client = 2\nmemory = "memory"\ndata = "own"\n')
    assert load_site(path) == Site(2, tmp_path / "memory", str(tmp_path / "own"))

    path.write_text('client = 2\nmemory = "memory"\nacept = []\n')
    with pytest.raises(ConfigError, match=r"'site\.toml\.acept'.*'accept'"):
        load_site(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('refuse = ["contribution"]', "unknown measure or metric 'contribution'; did you mean"),
        ('refuse = ["auc", "acuracy"]', "unknown measure or metric 'acuracy'"),
        (f'accept = ["{"0" * 64}.toml"]', "which is not a SHA-256 of 64 digits; .* without .toml"),
    ],
)
def test_a_name_that_would_have_no_effect_is_refused(
    line: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f'client = 2\nmemory = "memory"\n{line}\n')
    with pytest.raises(ConfigError, match=reason):
        load_site(path)


def test_a_site_may_refuse_measures_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        f'client = 2\nmemory = "m"\nrefuse = ["contributions", "auc", "mylab.own:Measure"]\n'
        f'accept = ["{"0" * 64}"]\n'
    )
    site = load_site(path)
    assert site.refuse == ("contributions", "auc", "mylab.own:Measure")
    assert site.accept == ("0" * 64,)


@needs_flower
def test_requests_and_answers_survive_the_wire() -> None:
    state_file = ("client0-round1-stage0.safetensors", "ab")
    request = request_of(settings_of(), facts={"classes": ["a"]}, memory=state_file)
    reply = SiteReply(
        client=0,
        round=1,
        stage=0,
        content=Payload(b=torch.ones(2), a=1.5),
        examples=3,
        metrics={"loss": {"ce": float("nan")}},
        memory=("x.safetensors", "y"),
    )

    request_records = Contents().of_request(request)
    received_request = Request.of(*header_and_payload(request_records, 1 << 30))
    received_reply = SiteReply.of(*header_and_payload(answer_content(reply), 1 << 30))

    assert received_request.digest() == request.digest()
    assert list(received_request.payload.params) == list(request.payload.params)
    assert received_reply.header() == reply.header()


@needs_flower
def test_malformed_messages_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of a small payload are in the header, those of a large one are arrays."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    small = answer_content(SiteReply(0, 1, 0, Payload(a=1)))
    monkeypatch.setattr(messages, "HEADER_BYTES", 0)
    large = answer_content(SiteReply(0, 1, 0, Payload(a=1)))
    three_bytes = ArrayRecord({"0": Array("uint8", (3,), "x", b"abc")})
    further = {"more": ConfigRecord({})}

    def refused(records: dict[str, Any], reason: str) -> None:
        with pytest.raises(BadPayload, match=reason):
            header_and_payload(RecordDict(records), 1 << 20)

    refused({}, "no header")
    refused({**large, "header": ConfigRecord({"json": 3})}, "no header")
    refused({**small, **further}, "other records")
    refused({**large, **further}, "other records")
    refused({"header": large["header"]}, "other records")
    refused({**small, "groups": three_bytes}, "other records")
    refused({"header": ConfigRecord({"json": "{}", "groups": [3]})}, "other records")
    refused({**large, "groups": three_bytes}, "too few for a payload")
    refused({"header": ConfigRecord({"json": "{}", "groups": [b"abc"]})}, "too few")
    for correct in (small, large):
        with pytest.raises(BadPayload, match="over the limit of 10"):
            header_and_payload(correct, 10)


@pytest.mark.parametrize(
    "header",
    [
        "{",
        "[]",
        "{}",
        '{"client": true}',
        SiteReply(0, 1, 0).header().replace('"examples": 0', '"examples": -1'),
        SiteReply(0, 1, 0, metrics={"refused": "no"}).header(),
        SiteReply(0, 1, 0, metrics={"seconds": "long"}).header(),
        SiteReply(0, 1, 0, metrics={"mine": [[[[1]]]]}).header(),
        SiteReply(0, 1, 0, memory=("../../etc/passwd", "x")).header(),
        SiteReply(0, 1, 0, memory=("A b", "x")).header(),
    ],
)
def test_a_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(BadPayload):
        SiteReply.of(header, Payload())


def test_the_run_of_a_request_cannot_be_a_path() -> None:
    request = request_of(settings_of(), run="../x")
    with pytest.raises(BadPayload, match="letters and digits"):
        Request.of(request.header(), request.payload)


def in_round(request: Request, round_index: int) -> Request:
    """The request in another round."""
    return replace(request, stage=replace(TRAIN, round=round_index))


def state_files(files: ClientFiles) -> list[str]:
    """The names of the client's states on its disk."""
    return sorted(path.name for path in files.place.glob("*.safetensors"))


def test_two_states_are_kept_beside_the_servers_current_one(tmp_path: Path) -> None:
    files = ClientFiles(tmp_path, "run1", 0)
    request = in_round(request_of(settings_of()), 1)
    current = files.store_answer(request, SiteReply(0, 1, 0), Payload(round=1)).memory

    for round_index in range(2, 6):
        later = replace(in_round(request, round_index), memory=current)
        files.store_answer(later, SiteReply(0, round_index, 0), Payload(round=round_index))

    assert state_files(files) == [
        f"client0-round{round_index}-stage0.safetensors" for round_index in (1, 4, 5)
    ]
    assert files.client_state(current).number("round") == 1


def test_states_that_the_servers_checkpoints_name_are_kept(tmp_path: Path) -> None:
    in_checkpoint = "client0-round2-stage0.safetensors"
    files = ClientFiles(tmp_path, "run1", 0)
    request = request_of(settings_of())

    for round_index in range(1, 7):
        unnamed = in_round(request, round_index)
        naming = unnamed
        if round_index > 2:
            naming = replace(unnamed, named=(in_checkpoint,))
        assert Request.of(naming.header(), naming.payload) == naming
        assert naming.digest() == unnamed.digest()
        files.store_answer(naming, SiteReply(0, round_index, 0), Payload(round=round_index))

    assert state_files(files) == [
        f"client0-round{round_index}-stage0.safetensors" for round_index in (2, 5, 6)
    ]


def test_named_states_that_are_no_names_are_refused() -> None:
    request = request_of(settings_of())
    header = {**json.loads(request.header()), "named": [1]}
    with pytest.raises(BadPayload, match="named"):
        Request.of(json.dumps(header), request.payload)


def test_a_server_that_went_back_gets_the_reply_and_the_state_of_the_repeated_stage(
    tmp_path: Path,
) -> None:
    files = ClientFiles(tmp_path, "run1", 0)
    request = request_of(settings_of())
    for round_index in (1, 2, 3, 4):
        reply = SiteReply(0, round_index, 0)
        files.store_answer(in_round(request, round_index), reply, Payload(a=round_index))

    repeated = replace(in_round(request, 1), version="another")
    state_file = files.store_answer(repeated, SiteReply(0, 1, 0), Payload(a=7)).memory

    assert files.client_state(state_file).number("a") == 7
    assert files.stored_answer(repeated) is not None


PRIVATE = {"gradient_clip": 0.5, "gradient_noise": 50.0}


@pytest.mark.parametrize(
    ("method", "topology", "stage", "reason"),
    [
        ("fedavg", {"last": "ridge"}, "ridge", "stage 'ridge'"),
        ("scaffold", {}, "train", "with method scaffold"),
        ("fedlc", {}, "train", "with method fedlc"),
    ],
)
def test_a_site_checks_itself_that_private_training_is_private(
    method: str, topology: dict[str, str], stage: str, reason: str, tmp_path: Path
) -> None:
    """A hostile server would not refuse such a run, and the site would count a wrong epsilon."""
    pytest.importorskip("opacus")
    data = own_data(tmp_path / "own", prepare(settings_of(), toys.blobs()))
    honest = on_sites()
    request = request_of(honest, facts=facts_of(honest), stage=replace(TRAIN, name=stage))
    hostile = on_sites(method, topology=topology, privacy=PRIVATE)

    answer = own_data_executor(tmp_path, data=data)(with_config(request, hostile.toml))

    assert reason in answer.failure
    assert not answer.content
