"""Sites with tables, series and texts of their own, on a loopback grid: the simulation's bits, and
clear refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, Refused, TooFewReplies
from fedstill.core.records import Payload
from fedstill.flower.engine import LoopbackGrid
from fedstill.flower.facts import Facts
from fedstill.flower.site import StageExecutor, client_app
from fedstill.flower.site_settings import Site
from fedstill.privacy.extensions import Budget
from fedstill.privacy.noise import Privacy
from fedstill.running.journal import read_journal
from fedstill.running.runner import resume, run
from fedstill.running.standardisation import SumsWork
from flowers import needs_flower
from run_bits import before_round_1

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

CLIENTS = 3
CLASSES = ["healthy", "ill"]
TABLE = {
    "columns": ["age", "pain", "pressure"],
    "categorical": {"pain": [1, 2, 3]},
    "missing": "mean",
}
SERVER = {
    "deadline": 30,
    "poll": 1,
    "data": "sites",
    "federation": "/federation",
    "classes": CLASSES,
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    return tmp_path


def patients(client: int, size: int = 40) -> pd.DataFrame:
    """Rows of a hospital: ages of its own, one missing pressure, and a column elsewhere that nobody
    asked for.
    """
    draw = np.random.default_rng(client)
    age, pain = draw.normal(50 + 10 * client, 8, size).round(1), draw.integers(1, 4, size)
    pressure = draw.normal(130 - 5 * client, 15, size).round(0)
    ill = (age + 8 * pain + draw.normal(0, 5, size) > 62 + 10 * client).astype(int)
    rows = pd.DataFrame(
        {"age": age, "pain": pain, "pressure": pressure, "label": np.array(CLASSES)[ill]}
    )
    rows.loc[3, "pressure"] = np.nan
    rows.insert(client % 4, "ward", draw.integers(0, 9, size))
    return rows


def written(folder: Path, rows: pd.DataFrame) -> str:
    folder.mkdir(parents=True)
    for split, part in (("train", rows[:30]), ("test", rows[30:])):
        part.to_csv(folder / f"{split}.csv", index=False)
    return str(folder)


def hospitals(
    place: Path, change: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows
) -> list[Site]:
    """Three sites with CSV files; ``change`` is done to the files of the last."""
    made = []
    for client in range(CLIENTS):
        rows = change(patients(client)) if client == CLIENTS - 1 else patients(client)
        made.append(
            Site(client, place / f"memory{client}", data=written(place / f"own{client}", rows))
        )
    return made


def grid(sites: list[Site]) -> LoopbackGrid:
    executors = {site.client: StageExecutor(site, shows_reasons=True) for site in sites}
    app = client_app(
        lambda c: (c.node_config["partition-id"], executors[c.node_config["partition-id"]]), 1 << 30
    )
    return LoopbackGrid(app, range(CLIENTS))


def experiment(
    data: dict[str, Any], flower: dict[str, Any] | None = None, **more: Any
) -> Experiment:
    """Three clients, two rounds of a small network; without ``flower`` a simulation."""
    over = (
        {"engine": "flower", "flower": {**SERVER, **flower}}
        if flower is not None
        else {"engine": "serial"}
    )
    plan = {"epochs": 1, "batch": 8, "lr": 0.1}
    common: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "model": {"name": "logistic"},
        "rounds": 2,
        "plan": plan,
    }
    topology = {"clients": CLIENTS}
    return Experiment(
        **{**common, "topology": topology, "data": data, "measure": (), **over, **more}
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_journal(folder / "journal.jsonl") if e.get("name") == name]


def test_sums_of_sites_give_the_bits_of_a_simulation_on_all_rows(place: Path) -> None:
    every = [patients(client).assign(hospital=client) for client in range(CLIENTS)]
    (place / "all").mkdir()
    for split, rows in (("train", slice(30)), ("test", slice(30, None))):
        pd.concat([own[rows] for own in every]).to_csv(place / "all" / f"{split}.csv", index=False)
    by_owner = {"kind": "column", "column": "hospital"}
    here = {"name": str(place / "all"), "standardise": "summed", **TABLE}
    run(experiment(here, partition=by_owner), place / "simulated")
    there = {"name": "none", "standardise": "summed", **TABLE}
    run(experiment(there, {}), place / "run", grid=grid(hospitals(place)))
    same = [(place / k / "model.safetensors").read_bytes() for k in ("simulated", "run")]
    assert same[0] == same[1]
    start, simulated = (
        read_journal(place / k / "journal.jsonl")[0]["inputs"] for k in ("run", "simulated")
    )
    assert start == simulated
    rows = pd.concat([own[:30] for own in every])[["age", "pressure"]]
    assert start["features"] == ["age", "pain=1", "pain=2", "pain=3", "pressure"]
    np.testing.assert_allclose(np.array(start["mean"])[[0, 4]], rows.mean(), rtol=1e-6)
    np.testing.assert_allclose(np.array(start["std"])[[0, 4]], rows.std(ddof=0), rtol=1e-5)
    assert start["mean"][1:4] == [0, 0, 0]
    sent = events(place / "run", "moments")
    assert [(e["round"], e["client"], e["examples"], e["bytes_up"]) for e in sent] == [
        (0, client, 30, 3 * 5 * 8) for client in range(CLIENTS)
    ]
    trained = events(place / "run", "train")
    assert all("site_accuracy" in e for e in trained)
    first = next(e for e in read_journal(place / "run" / "journal.jsonl") if e["event"] == "round")
    assert first["bytes_up"] == sum(e["bytes_up"] for e in [*sent, *trained[:CLIENTS]])


def test_a_server_without_data_has_the_metrics_of_all_sites_together(place: Path) -> None:
    every = [patients(client).assign(hospital=client) for client in range(CLIENTS)]
    (place / "all").mkdir()
    for split, rows in (("train", slice(30)), ("test", slice(30, None))):
        pd.concat([own[rows] for own in every]).to_csv(place / "all" / f"{split}.csv", index=False)
    metrics = ("auc", "recall", "log_loss", "confusion")
    here = {"name": str(place / "all"), "standardise": "summed", **TABLE}
    by_owner = {"kind": "column", "column": "hospital"}
    whole = run(experiment(here, partition=by_owner, metrics=metrics), place / "simulated")

    asked = experiment({"name": "none", "standardise": "summed", **TABLE}, {}, metrics=metrics)
    sites = hospitals(place)
    there = run(asked, place / "run", grid=grid(sites))
    for event, exact in zip(there.history, whole.history, strict=True):
        assert event["accuracy"] is None
        assert event["confusion"] == exact["confusion"]
        assert event["recall"] == exact["recall"]
        assert event["log_loss"] == pytest.approx(exact["log_loss"], abs=0.01)
        assert event["auc"] == pytest.approx(exact["auc"], abs=0.02)
        counts = [np.array(matrix) for matrix in event["own_test_confusions"].values()]
        assert np.sum(counts, axis=0).tolist() == event["confusion"]
    assert there.summary["best_auc"] == max(event["auc"] for event in there.history)

    def stop(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, place / "stopped", grid=grid(sites), on_round=stop)
    again = resume(place / "stopped", grid=grid(sites))
    names = ("auc", "own_test_auc", "own_test_log_loss_by_client")
    for event, expected in zip(again.history, there.history, strict=True):
        assert {name: event[name] for name in names} == {name: expected[name] for name in names}


def test_a_run_that_goes_on_keeps_its_sums(place: Path) -> None:
    data, sites = {"name": "none", "standardise": "summed", **TABLE}, hospitals(place)
    run(experiment(data, {}), place / "whole", grid=grid(sites))

    def stop(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment(data, {}), place / "stopped", grid=grid(sites), on_round=stop)
    resume(place / "stopped", grid=grid(sites))
    assert [e["round"] for e in events(place / "stopped", "train")] == [1] * CLIENTS + [2] * CLIENTS
    assert (place / "stopped" / "model.safetensors").read_bytes() == (
        place / "whole" / "model.safetensors"
    ).read_bytes()
    assert len(events(place / "stopped", "moments")) == CLIENTS
    resume(before_round_1(place / "stopped"), grid=grid(sites))
    assert len(events(place / "stopped", "moments")) == CLIENTS
    same = [(place / k / "model.safetensors").read_bytes() for k in ("whole", "stopped")]
    assert same[0] == same[1]


def test_sums_and_a_census_both_come_before_round_1(place: Path) -> None:
    noise = {"public": toys.PUBLIC, "public_from": "noise"}
    data = {"name": "none", "standardise": "summed", **TABLE, **noise}
    what = experiment(
        data, {}, method={"name": "toy_logits"}, model={"name": "mlp", "hidden": (4,)}
    )
    run(what, place / "run", grid=grid(hospitals(place)))
    names = [
        e["name"] for e in read_journal(place / "run" / "journal.jsonl") if e["event"] == "client"
    ]
    assert names[: 2 * CLIENTS] == ["moments"] * CLIENTS + ["census"] * CLIENTS


def test_a_site_counts_its_sums_with_noise_too_whatever_the_server_counts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is that of two uploads of logits; the sums before them are over it."""
    noise = {"clip": 3.0, "noise": 20.0}
    most = Privacy(**noise).spent(2 * toys.PUBLIC)
    limits = {"age": [0, 100], "pressure": [50, 250]}
    data = {
        "name": "none",
        "standardise": "summed",
        **TABLE,
        "public": toys.PUBLIC,
        "public_from": "noise",
    }
    changes = {
        "method": {"name": "hiper_fedkd"},
        "privacy": {**noise, "epsilon": most},
        "rounds": 2,
    }
    monkeypatch.setattr(Budget, "over", lambda *_: "")
    what = experiment({**data, "limits": limits}, {}, **changes)
    with pytest.raises(TooFewReplies):
        run(what, place / "run", grid=grid(hospitals(place)))
    refused = [(e["round"], e["refused"]) for e in events(place / "run", "local") if "refused" in e]
    assert refused == [(2, REFUSES)] * CLIENTS


REFUSES = (
    f"failed: {toys.PUBLIC} more rows of logits would cost this site more than privacy.epsilon "
    "allows it"
)


MEANS = {"mean": [50.0, 0.0, 0.0, 0.0, 130.0], "std": [10.0, 1.0, 1.0, 1.0, 20.0]}
ORIGINS: dict[str, dict[str, Any]] = {"declared": MEANS, "own": {"standardise": "own"}}


@pytest.mark.parametrize("origin", ORIGINS)
def test_sites_standardise_by_what_is_declared_or_their_own(origin: str, place: Path) -> None:
    run(
        experiment({"name": "none", **TABLE, **ORIGINS[origin]}, {}),
        place / "run",
        grid=grid(hospitals(place)),
    )
    assert not events(place / "run", "moments")
    trained = events(place / "run", "train")
    assert not [e for e in trained if "refused" in e]
    assert np.mean([e["site_accuracy"] for e in trained[CLIENTS:]]) > 0.6


def test_sites_standardise_as_the_servers_public_set(place: Path) -> None:
    public = written(place / "public", patients(7))
    sites = [Site(s.client, s.memory, s.data, public=public) for s in hospitals(place)]
    data = {
        "name": "none",
        **TABLE,
        "public_from": public,
        "public_labels": False,
        "standardise": "server",
    }
    run(experiment(data, {}, method={"name": "hiper_fedkd"}), place / "run", grid=grid(sites))
    seen = read_journal(place / "run" / "journal.jsonl")
    assert not [e for e in seen if "refused" in e and e["event"] == "client"]
    np.testing.assert_allclose(
        seen[0]["inputs"]["mean"][0], patients(7)[:30]["age"].mean(), rtol=1e-6
    )


def lacks(name: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: rows.drop(columns=name)


REFUSED: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "a column is missing": (lacks("age"), "has no column 'age' among"),
    "a category is unknown": (
        lambda rows: rows.assign(pain=4),
        "has '4' in column 'pain', which is none of 1, 2, 3",
    ),
    "a class is unknown": (
        lambda rows: rows.assign(label="dead"),
        "has a class 'dead' that the server does not list",
    ),
    "a column is of text": (
        lambda rows: rows.assign(age="old"),
        "column 'age' contains text, not numbers",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_site_whose_table_is_another_refuses_in_one_line(what: str, place: Path) -> None:
    change, line = REFUSED[what]
    data = {"name": "none", **TABLE, **MEANS}
    whole = {"clients": {"quorum": 1.0}}
    with pytest.raises(TooFewReplies, match=line) as raised:
        run(experiment(data, {}, **whole), place / "run", grid=grid(hospitals(place, change)))
    assert "\n" not in str(raised.value)


UNCLEAR: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pooled": ({**TABLE, "standardise": "pooled"}, {}, "'pooled' needs all data in one place"),
    "unset": (
        TABLE,
        {},
        "needs all data in one place, but sites keep theirs; set data.mean and data.std",
    ),
    "no columns": ({"kind": "table"}, {}, "needs data.columns"),
    "no names": (
        {**TABLE, **MEANS, "categorical": ["pain"]},
        {},
        "needs the names in column 'pain'",
    ),
    "another width": (
        {**TABLE, **MEANS},
        {"shape": [4]},
        r"flower.shape = \[4\] .* give flower.shape = \[5\]",
    ),
    "one number": (MEANS, {"shape": [5]}, "data.kind"),
    "no shape": ({"kind": "vector"}, {}, "needs flower.shape, the shape of one of the vectors"),
    "no vocabulary": ({"tokenizer": "t.json"}, {}, "needs flower.vocabulary"),
    "ids of a table": ({**TABLE, **MEANS}, {"vocabulary": 9}, "flower.vocabulary is for texts"),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_a_server_without_data_must_say_what_examples_are(what: str, place: Path) -> None:
    data, flower, line = UNCLEAR[what]
    with pytest.raises(ConfigError, match=line):
        run(experiment({"name": "none", **data}, flower), place / "run", grid=grid([]))


def texts(place: Path, client: int) -> str:
    """A folder of texts of a site, ill ones with a word of their own."""
    draw = np.random.default_rng(client)
    ill = draw.integers(0, 2, 40)
    words = [
        " ".join(["fever" if one else "well", *draw.choice(["a", "b", "c"], 5)]) for one in ill
    ]
    return written(
        place / f"texts{client}", pd.DataFrame({"text": words, "label": np.array(CLASSES)[ill]})
    )


def tokenizer(place: Path, *words: str) -> str:
    """A tokenizer's file that knows these words."""
    made = pytest.importorskip("tokenizers")
    ids = {"[PAD]": 0, "[UNK]": 1, **{word: 2 + i for i, word in enumerate(words)}}
    model = made.Tokenizer(made.models.WordLevel(ids, unk_token="[UNK]"))
    model.pre_tokenizer = made.pre_tokenizers.Whitespace()
    place.mkdir(exist_ok=True)
    model.save(str(place / "tokenizer.json"))
    return str(place / "tokenizer.json")


BAG = {
    "model": {"name": "bag", "width": 4},
    "plan": {"epochs": 4, "batch": 8, "lr": 0.5},
    "clients": {"quorum": 1.0},
}


def test_texts_of_sites_become_ids_of_words(place: Path) -> None:
    sites = [Site(c, place / f"memory{c}", data=texts(place, c)) for c in range(CLIENTS)]
    data = {"name": "none", "kind": "text", "vocabulary": 100, "length": 6}
    run(experiment(data, {}, **BAG), place / "run", grid=grid(sites))
    assert all(e["site_accuracy"] > 0.9 for e in events(place / "run", "train")[CLIENTS:])


def test_a_site_reads_texts_by_its_copy_of_the_tokenizer_and_by_no_other(place: Path) -> None:
    theirs, copy = (
        tokenizer(place / "server", "fever", "well"),
        tokenizer(place / "site", "fever", "well"),
    )
    data = {"name": "none", "tokenizer": theirs, "length": 6}
    sites = [
        Site(c, place / f"memory{c}", data=texts(place, c), tokenizer=copy) for c in range(CLIENTS)
    ]
    run(experiment(data, {"vocabulary": 4}, **BAG), place / "run", grid=grid(sites))
    assert all(e["site_accuracy"] > 0.9 for e in events(place / "run", "train")[CLIENTS:])
    with pytest.raises(TooFewReplies, match="4 token ids, not 5"):
        run(experiment(data, {"vocabulary": 5}, **BAG), place / "five", grid=grid(sites))
    tokenizer(place / "site", "fever", "sick")
    with pytest.raises(TooFewReplies, match="tokenizer"):
        run(experiment(data, {"vocabulary": 4}, **BAG), place / "other", grid=grid(sites))
    without = [Site(s.client, s.memory, s.data) for s in sites]
    with pytest.raises(TooFewReplies, match="set tokenizer"):
        run(experiment(data, {"vocabulary": 4}, **BAG), place / "none", grid=grid(without))


def test_series_of_sites_are_standardised_by_channel_by_their_sums(place: Path) -> None:
    sites, every = [], []
    for client in range(CLIENTS):
        draw = np.random.default_rng(client)
        ill = draw.integers(0, 2, 40)
        values = draw.normal(0, 1, (40, 2, 12)) * [[5.0], [0.1]] + ill[:, None, None] * [
            [6.0],
            [0.0],
        ]
        rows = pd.DataFrame(
            {"signal": [v.astype("float32").tolist() for v in values], "label": ill}
        )
        (folder := place / f"series{client}").mkdir()
        for split, part in (("train", slice(30)), ("test", slice(30, None))):
            rows[part].to_parquet(folder / f"{split}.parquet", index=False)
        sites.append(Site(client, place / f"memory{client}", data=str(folder)))
        every.append(values[:30].astype("float32"))
    data = {"name": "none", "standardise": "summed"}
    network = {"model": {"name": "series_cnn", "hidden": 4}}
    run(experiment(data, {"shape": [2, 12]}, **network), place / "run", grid=grid(sites))
    inputs = read_journal(place / "run" / "journal.jsonl")[0]["inputs"]
    np.testing.assert_allclose(
        inputs["mean"], np.concatenate(every).mean((0, 2)), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(inputs["std"], np.concatenate(every).std((0, 2)), rtol=1e-5)


def test_sums_that_no_numbers_have_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SumsWork.end

    def end(self: SumsWork, params: Any, start: Any, result: Any, view: Any, world: Any) -> Any:
        up, memory = whole(self, params, start, result, view, world)
        wrong = {1: {"squares": up.tensor("squares") / 2}, 2: {"count": up.tensor("count") * 2}}
        return Payload(up, **wrong.get(view.client, {})), memory

    monkeypatch.setattr(SumsWork, "end", end)
    data = {"name": "none", "standardise": "summed", **TABLE}
    with pytest.raises(TooFewReplies, match="'moments': 1 of 3 clients"):
        run(experiment(data, {}), place / "run", grid=grid(hospitals(place)))
    assert read_journal(place / "run" / "journal.jsonl")[0]["event"] == "start", "as in any run"
    refused = {
        e["client"]: e["refused"] for e in events(place / "run", "moments") if "refused" in e
    }
    assert "sums of squares" in refused[1]
    assert "60 values" in refused[2]


def test_what_is_said_of_images_is_what_sites_have_always_been_told() -> None:
    assert list(Facts(("a", "b"), (1, 8, 8), (0.5,), (0.5,)).plain()) == [
        "classes",
        "shape",
        "mean",
        "std",
        "public",
    ]


WRONG: dict[str, dict[str, Any]] = {
    "another kind": {"kind": "sound"},
    "no spread": {"kind": "table", "shape": [1], "mean": [0.0], "std": [0.0], "origin": "declared"},
    "another width": {
        "kind": "table",
        "shape": [2],
        "mean": [0.0],
        "std": [1.0],
        "origin": "declared",
    },
    "other names": {
        "kind": "table",
        "shape": [1],
        "columns": ["age"],
        "features": ["sex"],
        "marks": [],
    },
    "a mark of no column": {
        "kind": "table",
        "shape": [2],
        "columns": ["a"],
        "features": ["a", "b is missing"],
        "marks": [1],
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_facts_that_contradict_themselves_are_refused(what: str) -> None:
    with pytest.raises(Refused, match="malformed"):
        Facts.of(WRONG[what])


NOISED: dict[str, Any] = {
    "name": "none",
    **TABLE,
    "standardise": "summed",
    "limits": {"age": [0, 120], "pressure": [50, 250]},
    "public": 9,
    "public_from": "noise",
}


def test_sums_with_noise_are_drawn_once_and_counted(place: Path) -> None:
    sites = hospitals(place)
    privacy = {"method": {"name": "hiper_fedkd"}, "privacy": {"clip": 2.0, "noise": 8.0}}
    what = experiment(NOISED, {}, **privacy, clients={"quorum": 1.0})
    away = [*sites[:2], Site(2, place / "memory2", data=str(place / "nowhere"))]
    with pytest.raises(TooFewReplies, match="'moments': 2 of 3 clients"):
        run(what, place / "run", grid=grid(away))
    (drawn,) = (place / "memory0").rglob("0000000-0000001.reply")
    before = drawn.read_bytes(), drawn.stat().st_mtime_ns
    resume(place / "run", grid=grid(sites))
    assert (drawn.read_bytes(), drawn.stat().st_mtime_ns) == before, (
        "the same question has the same answer"
    )
    assert len(list((place / "memory0").rglob("0000000-0000001.reply"))) == 1
    sent, seen = events(place / "run", "moments"), read_journal(place / "run" / "journal.jsonl")
    assert [(e["noised_rows"], e["bytes_up"]) for e in sent] == [(2, 2 * 2 * 8)] * CLIENTS
    told = [e["privacy"]["epsilon"] for e in seen if e["event"] == "round"]
    assert told == [[Privacy(clip=2.0, noise=8.0).spent(2 + 9 * k)] * CLIENTS for k in (1, 2)]
    mean, std = (np.array(seen[0]["inputs"][k])[[0, 4]] for k in ("mean", "std"))
    assert (mean >= [0, 50]).all()
    assert (mean <= [120, 250]).all()
    assert (std >= [6, 10]).all()
