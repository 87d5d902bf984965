"""What a site accepts, and what it refuses with one clear line; a site with data of its own."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.core.errors import BadPayload, ConfigError
from fedstill.core.files import digest
from fedstill.core.label_counts import census_stage
from fedstill.core.records import Payload, Stage
from fedstill.flower import messages
from fedstill.flower.facts import Facts
from fedstill.flower.messages import (
    Contents,
    Request,
    SiteReply,
    answer_content,
    header_and_payload,
)
from fedstill.flower.site import StageExecutor
from fedstill.flower.site_settings import Site, files_in, load_site
from fedstill.running.preparation import prepare
from flowers import needs_flower

CLIENTS = 3


def settings_of(method: Any = "fedavg", **changes: Any) -> Settings:
    topology = {"clients": CLIENTS, "sampled": CLIENTS, **changes.pop("topology", {})}
    experiment = toys.toy(method, topology=topology, **changes)
    return resolve(
        replace(experiment, engine="flower", data={"name": "blobs", **changes.get("data", {})})
    )


def request_of(settings: Settings, client: int = 0, **changes: Any) -> Request:
    config = settings.toml
    ready = prepare(settings, toys.blobs())
    down = Payload(params=ready.world.initial(client))
    stage = Stage(1, 0, "train", tuple(range(CLIENTS)))
    made = Request(
        fedstill.__version__, config, digest(config.encode()), "run1", client, stage, payload=down
    )
    return replace(made, **changes)


def executor(tmp_path: Path, **site: Any) -> StageExecutor:
    return StageExecutor(Site(0, tmp_path / "memory", **site), toys.blobs(), shows_reasons=True)


def test_a_request_is_answered_and_the_same_one_again_from_the_kept_reply(tmp_path: Path) -> None:
    request = request_of(settings_of())
    first = executor(tmp_path)(request)
    assert first.failure == ""
    assert first.examples > 0
    (kept,) = tmp_path.rglob("*.reply")
    before = kept.stat().st_mtime_ns
    again = executor(tmp_path)(request)
    assert kept.stat().st_mtime_ns == before
    assert again.header() == first.header(), "seconds and all: it is the kept one"
    assert all(
        torch.equal(again.content.params[k], first.content.params[k]) for k in first.content.params
    )


def test_a_trial_reads_no_file_of_a_site_that_its_operator_has_not_listed(tmp_path: Path) -> None:
    """Else a server could have any table on the site's disk trained on, and ask for its label
    counts.
    """
    rows = [f"{30 + i % 40},{180 + i % 90},{'yes' if i % 4 == 0 else 'no'}" for i in range(120)]
    private = tmp_path / "patients.csv"
    private.write_text("\n".join(["age,chol,sick", *rows]) + "\n")
    asked = toys.toy(topology={"clients": 1}, data={"name": str(private), "label_column": "sick"})
    settings = resolve(replace(asked, engine="flower", model={"name": "mlp", "hidden": [4]}))
    world, config = prepare(settings).world, settings.toml
    stage, down = Stage(1, 0, "train", (0,)), Payload(params=world.initial(0))
    request = Request(
        fedstill.__version__, config, digest(config.encode()), "run1", 0, stage, payload=down
    )
    answer = StageExecutor(Site(0, tmp_path / "memory"), shows_reasons=True)(request)
    assert "has this site read" in answer.failure
    assert "patients.csv" in answer.failure
    assert not answer.content
    assert (
        StageExecutor(Site(0, tmp_path / "memory", files=(str(private),)), shows_reasons=True)(
            request
        ).failure
        == ""
    )


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


def test_what_a_configuration_has_a_site_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTILL_DATA", str(tmp_path))
    for name in ("owner/here", "kept.json", "wards"):
        (tmp_path / name).mkdir(parents=True)
    by_name = {"name": "digits", "public_from": "noise", "tokenizer": "words"}
    for data in (
        {},
        by_name,
        {"name": "ham10000_28"},
        {"name": "owner/away", "public_from": "train"},
    ):
        assert files_in({"data": data}) == []
    for key, value in {
        "name": "wards",
        "folder": "/data",
        "public_from": "~/scans",
        "tokenizer": "t.json",
    }.items():
        assert files_in({"data": {**by_name, key: value}}) == [value]
    assert files_in({"data": "owner/here"}) == ["owner/here"]
    assert files_in({"data": by_name, "start_from": "runs/one"}) == [], "the server sends it"
    there = str(tmp_path / "kept.json")
    assert files_in({"partition": {"kind": "kept", "file": there}, "model": {"name": "a/b"}}) == [
        there
    ]
    assert files_in({"data": {"features_of": {"name": "timm/net", "file": there}}}) == [there]


def test_a_request_for_the_same_stage_with_another_content_is_worked_out_anew(
    tmp_path: Path,
) -> None:
    request = request_of(settings_of())
    first = executor(tmp_path)(request)
    moved = Payload(params={k: v + 1 for k, v in request.payload.params.items()})
    second = executor(tmp_path)(replace(request, payload=moved))
    assert not all(
        torch.equal(second.content.params[k], first.content.params[k]) for k in first.content.params
    )


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


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses_with_one_line(what: str, tmp_path: Path) -> None:
    changes, site, line = REFUSED[what]
    answer = executor(tmp_path, **site)(request_of(settings_of(), **changes))
    assert answer.examples == 0
    assert not answer.content
    with pytest.raises(AssertionError, match=line):
        raise AssertionError(answer.failure)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "toy_logits", "data": {"public": toys.PUBLIC}},
        {"plan": {"epochs": 1, "class_weights": "balanced_overall"}},
    ],
    ids=["for the method", "for class weights"],
)
def test_a_census_is_answered_where_the_run_needs_it(
    settings: dict[str, object], tmp_path: Path
) -> None:
    settings = settings_of(**settings, rounds=2)
    ready = prepare(settings, toys.blobs())
    request = request_of(settings, stage=census_stage(ready.world), payload=Payload())
    answer = executor(tmp_path)(request)
    assert answer.content.tensor("labels").tolist() == ready.sites.label_counts(0).tolist()


def test_a_site_takes_no_part_in_a_run_with_a_measure_that_it_refuses(tmp_path: Path) -> None:
    request = request_of(settings_of(measure=("contributions",)))
    assert executor(tmp_path)(request).failure == ""
    refusing = executor(tmp_path, refuse=("contributions",))
    assert "'contributions'" in refusing(request).failure
    assert refusing(request_of(settings_of())).failure == ""


OWN = """
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg

open({marker!r}, "w").close()

@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def test_code_runs_only_where_the_site_lists_it(tmp_path: Path) -> None:
    marker, file = tmp_path / "imported", tmp_path / "mine.py"
    file.write_text(OWN.format(marker=str(marker)))
    name = f"{file}:Mine"
    request = request_of(settings_of())
    config = request.config.replace('name = "fedavg"', f'name = "{name}"')
    request = replace(request, config=config, sha=digest(config.encode()))
    assert "names code, " in (why := executor(tmp_path)(request).failure)
    assert "does not list under imports" in why
    assert not marker.exists(), "a refused file is not even imported"
    assert executor(tmp_path, imports=(name,))(request).failure == ""
    assert marker.exists()


@pytest.mark.parametrize(
    "edit",
    [("seed = 7", "seed = 7.5"), ("seed = 7", "sede = 7"), ("rounds = 3", "rounds = 3\nx = 1")],
)
def test_a_configuration_that_does_not_resolve_here_is_refused(
    edit: tuple[str, str], tmp_path: Path
) -> None:
    request = request_of(settings_of())
    config = request.config.replace(*edit)
    assert config != request.config
    answer = executor(tmp_path)(replace(request, config=config, sha=digest(config.encode())))
    assert answer.failure


def test_a_configuration_that_resolves_to_something_else_is_refused(tmp_path: Path) -> None:
    request = request_of(settings_of())
    config = request.config.replace("measure_every = 2\n", "")
    answer = executor(tmp_path)(replace(request, config=config, sha=digest(config.encode())))
    assert "other values" in answer.failure


def own_data(folder: Path, ready: Any, client: int, test: Any) -> Path:
    """A client's part of the blobs as a site's own folder."""
    part = ready.sites.train.take(ready.sites.positions(client))
    folder.mkdir(parents=True)
    arrays = {"train": part, "test": test}
    named = {f"{s}_images": e.values[:, 0].numpy() for s, e in arrays.items()}
    np.savez(
        folder / "data.npz", **named, **{f"{s}_labels": e.labels.numpy() for s, e in arrays.items()}
    )
    return folder


def on_sites(method: Any = "fedavg", **changes: Any) -> Settings:
    settings = settings_of(method, **changes)
    tree = {
        **settings.tree,
        "flower": {**settings.flower.table, "federation": "/federation", "data": "sites"},
    }
    return resolve(Experiment(**tree))


def test_on_its_own_data_a_site_gives_the_bits_of_the_simulation_and_keeps_its_labels(
    tmp_path: Path,
) -> None:
    ready = prepare(settings_of(), toys.blobs())
    simulated = executor(tmp_path / "a")(request_of(ready.settings))
    folder = own_data(tmp_path / "own", ready, 0, toys.blobs().test)
    settings = on_sites()
    facts = Facts.known_by(prepare(settings, toys.blobs())).plain()
    request = request_of(settings, facts=facts)
    answer = StageExecutor(Site(0, tmp_path / "memory", data=str(folder)), shows_reasons=True)(
        request
    )
    assert answer.failure == ""
    assert answer.examples == simulated.examples
    assert all(
        torch.equal(answer.content.params[k], simulated.content.params[k])
        for k in simulated.content.params
    )
    assert 0 <= answer.metrics["site_accuracy"] <= 1
    assert "label_counts" not in answer.metrics


NORMED = """
from torch import nn

def normed(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""  # noqa: E501


def test_at_a_site_a_left_over_example_joins_the_batch_before_it(tmp_path: Path) -> None:
    file = tmp_path / "normed.py"
    file.write_text(NORMED)
    model = f"{file}:normed"
    changes = {"model": model, "partition": "iid", "plan": {"epochs": 1, "batch": 33, "lr": 0.1}}
    ready = prepare(settings_of(**changes), toys.blobs())
    size = ready.sites.size(0)
    assert size % 33 == 1
    folder = own_data(tmp_path / "own", ready, 0, toys.blobs().test)
    settings = on_sites(**changes)
    facts = Facts.known_by(prepare(settings, toys.blobs())).plain()
    site = Site(0, tmp_path / "memory", data=str(folder), imports=(model,))
    answer = StageExecutor(site, shows_reasons=True)(request_of(settings, facts=facts))
    assert answer.failure == ""
    assert answer.metrics["steps"] == size // 33
    simulated = executor(tmp_path / "simulated", imports=(model,))(request_of(ready.settings))
    for name, value in simulated.content.params.items():
        assert torch.equal(answer.content.params[name], value), name
    assert "correct_by_class" not in answer.metrics


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"shape": [3, 4, 4]}, r"images at this site have shape \(1, 4, 4\), not \(3, 4, 4\)"),
        ({"classes": ["a", "b"]}, "has a class '0' that the server does not list"),
    ],
)
def test_data_of_another_kind_are_refused(facts: dict[str, Any], line: str, tmp_path: Path) -> None:
    folder = own_data(tmp_path / "own", prepare(settings_of(), toys.blobs()), 0, toys.blobs().test)
    settings = on_sites()
    known = {**Facts.known_by(prepare(settings, toys.blobs())).plain(), **facts}
    answer = StageExecutor(Site(0, tmp_path / "memory", data=str(folder)), shows_reasons=True)(
        request_of(settings, facts=known)
    )
    with pytest.raises(AssertionError, match=line):
        raise AssertionError(answer.failure)


def test_another_public_set_than_the_servers_is_refused(tmp_path: Path) -> None:
    ready = prepare(settings_of(), toys.blobs())
    folder = own_data(tmp_path / "own", ready, 0, toys.blobs().test)
    settings = on_sites("toy_logits", data={"public": toys.PUBLIC}, rounds=2)
    facts = Facts.known_by(prepare(settings, toys.blobs())).plain()
    stage = Stage(1, 0, "local", (0, 1, 2))
    request = request_of(settings, facts=facts, stage=stage, payload=Payload())
    site = Site(0, tmp_path / "memory", data=str(folder))
    assert "set public" in StageExecutor(site, shows_reasons=True)(request).failure
    assert (
        "differs from the server's"
        in StageExecutor(replace(site, public=str(folder)), shows_reasons=True)(request).failure
    )
    public = prepare(settings, toys.blobs()).sites.public
    assert public is not None
    right = tmp_path / "public"
    right.mkdir()
    images, labels = public.values[:, 0].numpy(), public.labels.numpy()
    np.savez(
        right / "d.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    assert (
        StageExecutor(replace(site, public=str(right)), shows_reasons=True)(request).failure == ""
    )


def test_class_names_make_labels_the_same_at_all_sites() -> None:
    from fedstill.data.sources import from_tensors
    from fedstill.flower.site_data import labels_of

    images, labels = torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    own = from_tensors("own", (images, labels), (images, labels), classes=["melanoma", "naevus"])
    facts = Facts(("naevus", "keratosis", "melanoma"), (1, 4, 4))
    assert labels_of(own, own.train, facts).tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("classes", "labels"),
    [(("1", "0"), [1, 0, 1, 0]), (("0", "1", "2"), [0, 1, 0, 1]), (("cat", "dog"), [0, 1, 0, 1])],
)
def test_numbers_are_matched_by_name_if_the_run_lists_them(
    classes: tuple[str, ...], labels: list[int]
) -> None:
    from fedstill.data.sources import from_tensors
    from fedstill.flower.site_data import labels_of

    images, numbers = torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    own = from_tensors("own", (images, numbers), (images, numbers), classes=["0", "1"])
    assert labels_of(own, own.train, Facts(classes, (1, 4, 4))).tolist() == labels


def test_a_site_reads_its_images_as_the_run_does_and_reports_what_it_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from PIL import Image

    from fedstill.flower.site_data import read_in_form

    for name in ("cat", "dog"):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), 9).save(tmp_path / "own" / name / f"{number}.png")
        (tmp_path / "own" / name / "5.png").write_bytes(b"no image")
    settings = settings_of(data={"name": "digits", "size": 4, "mode": "grey", "broken": "skip"})
    facts = Facts(("cat", "dog"), (1, 4, 4))
    own = read_in_form(settings, facts, str(tmp_path / "own"), {})
    assert own.input_shape == (1, 4, 4)
    assert "2 broken images of 12" in caplog.text


def test_class_names_are_the_same_in_every_unicode_form(tmp_path: Path) -> None:
    from fedstill.data.sources import load_dataset
    from fedstill.flower.site_data import labels_of

    names = ["frei", unicodedata.normalize("NFD", "gestört")]
    (tmp_path / "own.csv").write_text(
        "x,label\n" + "".join(f"{i},{names[i % 2]}\n" for i in range(10)), encoding="utf-8"
    )
    own = load_dataset(tmp_path / "own.csv")
    for form in ("NFC", "NFD"):
        facts = Facts((unicodedata.normalize(form, "gestört"), "frei"), (1,))
        assert torch.equal(labels_of(own, own.train, facts), 1 - own.train.labels)


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


@needs_flower
def test_requests_and_answers_survive_the_wire() -> None:
    request = request_of(
        settings_of(), facts={"classes": ["a"]}, memory=("client0-round1-stage0.safetensors", "ab")
    )
    back = Request.of(*header_and_payload(Contents().of_request(request), 1 << 30))
    assert back.digest() == request.digest()
    assert list(back.payload.params) == list(request.payload.params)
    answer = SiteReply(
        0,
        1,
        0,
        Payload(b=torch.ones(2), a=1.5),
        3,
        {"loss": {"ce": float("nan")}},
        ("x.safetensors", "y"),
    )
    assert (
        SiteReply.of(*header_and_payload(answer_content(answer), 1 << 30)).header()
        == answer.header()
    )


@needs_flower
def test_messages_that_are_none_of_ours_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    small = answer_content(SiteReply(0, 1, 0, Payload(a=1)))
    monkeypatch.setattr(messages, "HEADER_BYTES", 0)
    large = answer_content(SiteReply(0, 1, 0, Payload(a=1)))
    three = ArrayRecord({"0": Array("uint8", (3,), "x", b"abc")})
    more = {"more": ConfigRecord({})}
    for bad, line in [
        (RecordDict({}), "no header"),
        (RecordDict({**small, **more}), "other records"),
        (RecordDict({**large, **more}), "other records"),
        (RecordDict({"header": large["header"]}), "other records"),
        (RecordDict({**small, "groups": three}), "other records"),
        (RecordDict({"header": ConfigRecord({"json": "{}", "groups": [3]})}), "other records"),
        (RecordDict({**large, "header": ConfigRecord({"json": 3})}), "no header"),
        (RecordDict({**large, "groups": three}), "too few for a payload"),
        (RecordDict({"header": ConfigRecord({"json": "{}", "groups": [b"abc"]})}), "too few"),
    ]:
        with pytest.raises(BadPayload, match=line):
            header_and_payload(bad, 1 << 20)
    for good in (small, large):
        with pytest.raises(BadPayload, match="over the limit of 10"):
            header_and_payload(good, 10)


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


def test_two_versions_are_kept_beside_the_one_that_counts(tmp_path: Path) -> None:
    from fedstill.flower.site import ClientFiles

    files, request = ClientFiles(tmp_path, "run1", 0), request_of(settings_of())
    versions = []
    for round in range(1, 6):
        asked = replace(
            request,
            stage=Stage(round, 0, "train", (0, 1, 2)),
            memory=versions[0] if versions else None,
        )
        versions.append(
            files.store_answer(asked, SiteReply(0, round, 0), Payload(round=round)).memory
        )
    there = sorted(p.name for p in files.place.glob("*.safetensors"))
    assert there == [f"client0-round{r}-stage0.safetensors" for r in (1, 4, 5)]
    assert files.client_state(versions[0]).number("round") == 1


def test_memories_that_the_servers_checkpoints_name_stay(tmp_path: Path) -> None:
    from fedstill.flower.site import ClientFiles

    named = "client0-round2-stage0.safetensors"
    files, request = ClientFiles(tmp_path, "run1", 0), request_of(settings_of())
    for round in range(1, 7):
        stage = Stage(round, 0, "train", (0, 1, 2))
        asked = replace(request, stage=stage, named=(named,) if round > 2 else ())
        assert Request.of(asked.header(), asked.payload) == asked
        assert asked.digest() == replace(asked, named=()).digest()
        files.store_answer(asked, SiteReply(0, round, 0), Payload(round=round))
    there = sorted(path.name for path in files.place.glob("*.safetensors"))
    assert there == [f"client0-round{number}-stage0.safetensors" for number in (2, 5, 6)]


def test_named_memories_that_are_no_names_are_refused() -> None:
    request = request_of(settings_of())
    header = {**json.loads(request.header()), "named": [1]}
    with pytest.raises(BadPayload, match="named"):
        Request.of(json.dumps(header), request.payload)


def test_a_stage_asked_anew_by_a_server_that_went_back_keeps_its_reply_and_memory(
    tmp_path: Path,
) -> None:
    from fedstill.flower.site import ClientFiles

    files, request = ClientFiles(tmp_path, "run1", 0), request_of(settings_of())
    for round in (1, 2, 3, 4):
        files.store_answer(
            replace(request, stage=Stage(round, 0, "train", (0, 1, 2))),
            SiteReply(0, round, 0),
            Payload(a=round),
        )
    anew = replace(request, stage=Stage(1, 0, "train", (0, 1, 2)), version="another")
    version = files.store_answer(anew, SiteReply(0, 1, 0), Payload(a=7)).memory
    assert files.client_state(version).number("a") == 7
    assert files.stored_answer(anew) is not None


PRIVATE = {"gradient_clip": 0.5, "gradient_noise": 50.0}


@pytest.mark.parametrize(
    ("method", "topology", "stage", "line"),
    [
        ("fedavg", {"last": "ridge"}, "ridge", "stage 'ridge'"),
        ("scaffold", {}, "train", "with method scaffold"),
        ("fedlc", {}, "train", "with method fedlc"),
    ],
)
def test_a_site_sees_for_itself_that_private_training_is_private(
    method: str, topology: dict[str, str], stage: str, line: str, tmp_path: Path
) -> None:
    """A server that is hostile would not refuse it, and the site would count an epsilon that is not
    so.
    """
    pytest.importorskip("opacus")
    ready = prepare(settings_of(), toys.blobs())
    folder = own_data(tmp_path / "own", ready, 0, toys.blobs().test)
    facts = Facts.known_by(prepare(on_sites(), toys.blobs())).plain()
    config = on_sites(method, topology=topology, privacy=PRIVATE).toml
    asked = request_of(on_sites(), facts=facts, stage=Stage(1, 0, stage, (0, 1, 2)))
    asked = replace(asked, config=config, sha=digest(config.encode()))
    answer = StageExecutor(Site(0, tmp_path / "memory", data=str(folder)), shows_reasons=True)(
        asked
    )
    assert line in answer.failure
    assert not answer.content
