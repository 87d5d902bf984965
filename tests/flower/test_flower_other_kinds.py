"""Sites with tables, series and texts of their own, on a loopback grid: the simulation's bits, and
clear refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, Refused, TooFewReplies
from fedstill.core.records import Payload
from fedstill.flower.facts import Facts
from fedstill.flower.site_settings import Site
from fedstill.privacy.extensions import Budget
from fedstill.privacy.noise import Privacy
from fedstill.running.journal import read_journal
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.standardisation import SumsWork
from flowers import needs_flower, site_grid
from journals import journal_events, refusals
from run_bits import before_round_1, model_bytes

pytestmark = [needs_flower, pytest.mark.usefixtures("with_threads")]

CLIENTS = 3
CLASSES = ["healthy", "ill"]
TABLE = {
    "columns": ["age", "pain", "pressure"],
    "categorical": {"pain": [1, 2, 3]},
    "missing": "mean",
}
NUMBERS = ["age", "pressure"]
NUMBER_FEATURES = [0, 4]
"""Where the numbers are among the features; the three categories of pain are between them."""

DECLARED = {"mean": [50.0, 0.0, 0.0, 0.0, 130.0], "std": [10.0, 1.0, 1.0, 1.0, 20.0]}
SUMMED: dict[str, Any] = {"name": "none", "standardise": "summed", **TABLE}
"""Data of sites that are standardised by the sums that sites report."""

SERVER = {
    "deadline": 30,
    "poll": 1,
    "data": "sites",
    "federation": "/federation",
    "classes": CLASSES,
}
TRAINING = slice(30)
TESTING = slice(30, None)
"""The rows of a site by split."""

ALL_SITES = {"quorum": 1.0}

Change = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test's data and runs, with a cache of its own."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    return tmp_path


def patients(client: int, size: int = 40) -> pd.DataFrame:
    """Rows of a hospital, whose ages and pressures differ from those of other hospitals.

    One pressure is missing. The column ``ward``, which no run uses, is at another position in each
    hospital.
    """
    draw = np.random.default_rng(client)
    age = draw.normal(50 + 10 * client, 8, size).round(1)
    pain = draw.integers(1, 4, size)
    pressure = draw.normal(130 - 5 * client, 15, size).round(0)
    severity = age + 8 * pain + draw.normal(0, 5, size)
    ill = (severity > 62 + 10 * client).astype(int)

    labels = np.array(CLASSES)[ill]
    rows = pd.DataFrame({"age": age, "pain": pain, "pressure": pressure, "label": labels})
    rows.loc[3, "pressure"] = np.nan
    rows.insert(client % 4, "ward", draw.integers(0, 9, size))
    return rows


def saved_table(folder: Path, rows: pd.DataFrame) -> str:
    """A folder with the rows of a site, as CSV files of both splits."""
    folder.mkdir(parents=True)
    rows[TRAINING].to_csv(folder / "train.csv", index=False)
    rows[TESTING].to_csv(folder / "test.csv", index=False)
    return str(folder)


def hospitals(place: Path, change: Change | None = None) -> list[Site]:
    """Three sites with CSV files; ``change`` changes the rows of the last."""
    tables = [patients(client) for client in range(CLIENTS)]
    if change is not None:
        tables[-1] = change(tables[-1])
    return [
        Site(client, place / f"memory{client}", data=saved_table(place / f"own{client}", rows))
        for client, rows in enumerate(tables)
    ]


def pooled_table(place: Path) -> str:
    """A folder with the rows of all hospitals, whose column ``hospital`` has the client."""
    tables = [patients(client).assign(hospital=client) for client in range(CLIENTS)]
    folder = place / "all"
    folder.mkdir()
    pd.concat([rows[TRAINING] for rows in tables]).to_csv(folder / "train.csv", index=False)
    pd.concat([rows[TESTING] for rows in tables]).to_csv(folder / "test.csv", index=False)
    return str(folder)


def simulated(place: Path, **changes: Any) -> Result:
    """A simulation on the rows of all hospitals, in the folder ``simulated``."""
    data = {**SUMMED, "name": pooled_table(place)}
    partition = {"kind": "column", "column": "hospital"}
    simulation = experiment(data, engine="serial", partition=partition, **changes)
    return run(simulation, place / "simulated")


def experiment(data: dict[str, Any], **changes: Any) -> Experiment:
    """Three clients that train a small network for two rounds."""
    values: dict[str, Any] = {
        "method": {"name": "fedavg"},
        "model": {"name": "logistic"},
        "rounds": 2,
        "plan": {"epochs": 1, "batch": 8, "lr": 0.1},
        "topology": {"clients": CLIENTS},
        "data": data,
        "measure": (),
    }
    return Experiment(**{**values, **changes})


def at_sites(
    data: dict[str, Any], flower: dict[str, Any] | None = None, **changes: Any
) -> Experiment:
    """The experiment at sites; ``flower`` changes the server's table."""
    server = {**SERVER, **(flower or {})}
    return experiment(data, engine="flower", flower=server, **changes)


def stop_in_round_1(federation: Experiment, folder: Path, sites: list[Site]) -> None:
    """Run until the end of round 1."""

    def interrupt(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(federation, folder, grid=site_grid(sites), on_round=interrupt)


def test_sums_of_sites_give_the_bits_of_a_simulation_on_all_rows(place: Path) -> None:
    simulated(place)
    run(at_sites(SUMMED), place / "run", grid=site_grid(hospitals(place)))

    assert model_bytes(place / "run") == model_bytes(place / "simulated")
    inputs = read_journal(place / "run" / "journal.jsonl")[0]["inputs"]
    assert inputs == read_journal(place / "simulated" / "journal.jsonl")[0]["inputs"]

    numbers = pd.concat([patients(client)[TRAINING] for client in range(CLIENTS)])[NUMBERS]
    mean = np.array(inputs["mean"])
    std = np.array(inputs["std"])
    assert inputs["features"] == ["age", "pain=1", "pain=2", "pain=3", "pressure"]
    np.testing.assert_allclose(mean[NUMBER_FEATURES], numbers.mean(), rtol=1e-6)
    np.testing.assert_allclose(std[NUMBER_FEATURES], numbers.std(ddof=0), rtol=1e-5)
    assert inputs["mean"][1:4] == [0, 0, 0]

    sums = journal_events(place / "run", name="moments")
    trained = journal_events(place / "run", name="train")
    assert [event["client"] for event in sums] == list(range(CLIENTS))
    assert {event["round"] for event in sums} == {0}
    assert {event["examples"] for event in sums} == {30}
    # Three sums of each of five features, in float64.
    assert {event["bytes_up"] for event in sums} == {3 * 5 * 8}
    assert all("site_accuracy" in event for event in trained)
    first_round = journal_events(place / "run", event="round")[0]
    uploads = [*sums, *trained[:CLIENTS]]
    assert first_round["bytes_up"] == sum(event["bytes_up"] for event in uploads)


def test_a_server_without_data_has_the_metrics_of_all_sites_together(place: Path) -> None:
    metrics = ("auc", "recall", "log_loss", "confusion")
    pooled = simulated(place, metrics=metrics)

    federation = at_sites(SUMMED, metrics=metrics)
    sites = hospitals(place)
    result = run(federation, place / "run", grid=site_grid(sites))

    for event, exact in zip(result.history, pooled.history, strict=True):
        assert event["accuracy"] is None
        assert event["confusion"] == exact["confusion"]
        assert event["recall"] == exact["recall"]
        assert event["log_loss"] == pytest.approx(exact["log_loss"], abs=0.01)
        assert event["auc"] == pytest.approx(exact["auc"], abs=0.02)
        counts = [np.array(matrix) for matrix in event["own_test_confusions"].values()]
        assert np.sum(counts, axis=0).tolist() == event["confusion"]
    assert result.summary["best_auc"] == max(event["auc"] for event in result.history)

    stop_in_round_1(federation, place / "stopped", sites)
    resumed = resume(place / "stopped", grid=site_grid(sites))
    for event, expected in zip(resumed.history, result.history, strict=True):
        for name in ("auc", "own_test_auc", "own_test_log_loss_by_client"):
            assert event[name] == expected[name]


def test_a_resumed_run_keeps_its_sums(place: Path) -> None:
    sites = hospitals(place)
    run(at_sites(SUMMED), place / "uninterrupted", grid=site_grid(sites))

    stop_in_round_1(at_sites(SUMMED), place / "stopped", sites)
    resume(place / "stopped", grid=site_grid(sites))

    rounds = [event["round"] for event in journal_events(place / "stopped", name="train")]
    assert rounds == [1] * CLIENTS + [2] * CLIENTS
    assert model_bytes(place / "stopped") == model_bytes(place / "uninterrupted")
    assert len(journal_events(place / "stopped", name="moments")) == CLIENTS

    resume(before_round_1(place / "stopped"), grid=site_grid(sites))
    assert len(journal_events(place / "stopped", name="moments")) == CLIENTS
    assert model_bytes(place / "stopped") == model_bytes(place / "uninterrupted")


def test_sums_and_a_census_both_come_before_round_1(place: Path) -> None:
    data = {**SUMMED, "public": toys.PUBLIC, "public_from": "noise"}
    model = {"name": "mlp", "hidden": (4,)}
    federation = at_sites(data, method={"name": "toy_logits"}, model=model)

    run(federation, place / "run", grid=site_grid(hospitals(place)))

    stages = [event["name"] for event in journal_events(place / "run", event="client")]
    assert stages[: 2 * CLIENTS] == ["moments"] * CLIENTS + ["census"] * CLIENTS


def test_a_site_counts_the_noise_of_its_sums_even_if_the_server_does_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is that of two uploads of logits; with the sums before them, it is exceeded."""
    noise = {"clip": 3.0, "noise": 20.0}
    epsilon = Privacy(**noise).spent(2 * toys.PUBLIC)
    data = {
        **SUMMED,
        "public": toys.PUBLIC,
        "public_from": "noise",
        "limits": {"age": [0, 100], "pressure": [50, 250]},
    }
    monkeypatch.setattr(Budget, "over", lambda *_: "")
    federation = at_sites(
        data, method={"name": "hiper_fedkd"}, privacy={**noise, "epsilon": epsilon}
    )

    with pytest.raises(TooFewReplies):
        run(federation, place / "run", grid=site_grid(hospitals(place)))

    refused = [event for event in refusals(place / "run") if event["name"] == "local"]
    assert [event["round"] for event in refused] == [2] * CLIENTS
    assert {event["refused"] for event in refused} == {OVER_BUDGET}


OVER_BUDGET = (
    f"failed: {toys.PUBLIC} more rows of logits would cost this site more than privacy.epsilon "
    "allows it"
)

ORIGINS: dict[str, dict[str, Any]] = {"declared": DECLARED, "own": {"standardise": "own"}}


@pytest.mark.parametrize("origin", ORIGINS)
def test_sites_standardise_by_declared_values_or_by_their_own(origin: str, place: Path) -> None:
    federation = at_sites({"name": "none", **TABLE, **ORIGINS[origin]})

    run(federation, place / "run", grid=site_grid(hospitals(place)))

    assert not journal_events(place / "run", name="moments")
    assert not refusals(place / "run")
    second_round = journal_events(place / "run", name="train", round=2)
    assert len(second_round) == CLIENTS
    assert np.mean([event["site_accuracy"] for event in second_round]) > 0.6


def test_sites_standardise_as_the_servers_public_set(place: Path) -> None:
    public = saved_table(place / "public", patients(7))
    sites = [Site(site.client, site.memory, site.data, public=public) for site in hospitals(place)]
    data = {
        "name": "none",
        **TABLE,
        "public_from": public,
        "public_labels": False,
        "standardise": "server",
    }

    run(at_sites(data, method={"name": "hiper_fedkd"}), place / "run", grid=site_grid(sites))

    assert not refusals(place / "run")
    inputs = read_journal(place / "run" / "journal.jsonl")[0]["inputs"]
    mean_age = patients(7)[TRAINING]["age"].mean()
    np.testing.assert_allclose(inputs["mean"][0], mean_age, rtol=1e-6)


REFUSED: dict[str, tuple[Change, str]] = {
    "a column is missing": (
        lambda rows: rows.drop(columns="age"),
        "has no column 'age' among",
    ),
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
"""Changes of a site's table, and the reason why the site refuses it."""


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_site_with_an_unsuitable_table_refuses_in_one_line(
    change: Change, reason: str, place: Path
) -> None:
    federation = at_sites({"name": "none", **TABLE, **DECLARED}, clients=ALL_SITES)

    with pytest.raises(TooFewReplies, match=reason) as raised:
        run(federation, place / "run", grid=site_grid(hospitals(place, change)))

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
        {**TABLE, **DECLARED, "categorical": ["pain"]},
        {},
        "needs the names in column 'pain'",
    ),
    "another width": (
        {**TABLE, **DECLARED},
        {"shape": [4]},
        r"flower.shape = \[4\] .* give flower.shape = \[5\]",
    ),
    "one number": (DECLARED, {"shape": [5]}, "data.kind"),
    "no shape": ({"kind": "vector"}, {}, "needs flower.shape, the shape of one of the vectors"),
    "no vocabulary": ({"tokenizer": "t.json"}, {}, "needs flower.vocabulary"),
    "ids of a table": ({**TABLE, **DECLARED}, {"vocabulary": 9}, "flower.vocabulary is for texts"),
}
"""Tables ``[data]`` and ``[flower]`` of a server without data, and what is missing or wrong."""


@pytest.mark.parametrize(("data", "flower", "problem"), UNCLEAR.values(), ids=UNCLEAR)
def test_a_server_without_data_must_describe_the_examples(
    data: dict[str, Any], flower: dict[str, Any], problem: str, place: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(at_sites({"name": "none", **data}, flower), place / "run", grid=site_grid([]))


TEXT_MARKS = {"healthy": "well", "ill": "fever"}
"""The word of a text that shows its class."""


def saved_texts(place: Path, client: int) -> str:
    """A folder with the texts of a site: the mark of the class, and five arbitrary words."""
    draw = np.random.default_rng(client)
    labels = [CLASSES[ill] for ill in draw.integers(0, 2, 40)]
    texts = []
    for label in labels:
        words = [TEXT_MARKS[label], *draw.choice(["a", "b", "c"], 5)]
        texts.append(" ".join(words))
    return saved_table(place / f"texts{client}", pd.DataFrame({"text": texts, "label": labels}))


def text_sites(place: Path, tokenizer: str = "") -> list[Site]:
    """Three sites with texts, and a file of a tokenizer if it is not empty."""
    return [
        Site(
            client=client,
            memory=place / f"memory{client}",
            data=saved_texts(place, client),
            tokenizer=tokenizer,
        )
        for client in range(CLIENTS)
    ]


def saved_tokenizer(folder: Path, *words: str) -> str:
    """The file of a tokenizer that knows these words."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {"[PAD]": 0, "[UNK]": 1}
    for word in words:
        ids[word] = len(ids)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


BAG = {
    "model": {"name": "bag", "width": 4},
    "plan": {"epochs": 4, "batch": 8, "lr": 0.5},
    "clients": ALL_SITES,
}


def assert_learned(folder: Path) -> None:
    """All sites are accurate in round 2, so the mark of the class has reached the model."""
    second_round = journal_events(folder, name="train", round=2)
    assert len(second_round) == CLIENTS
    assert all(event["site_accuracy"] > 0.9 for event in second_round)


def test_texts_of_sites_become_ids_of_words(place: Path) -> None:
    data = {"name": "none", "kind": "text", "vocabulary": 100, "length": 6}

    run(at_sites(data, **BAG), place / "run", grid=site_grid(text_sites(place)))

    assert_learned(place / "run")


def test_a_site_reads_texts_by_its_copy_of_the_tokenizer_and_by_no_other(place: Path) -> None:
    server_file = saved_tokenizer(place / "server", "fever", "well")
    site_file = saved_tokenizer(place / "site", "fever", "well")
    data = {"name": "none", "tokenizer": server_file, "length": 6}
    federation = at_sites(data, {"vocabulary": 4}, **BAG)
    sites = text_sites(place, site_file)

    run(federation, place / "run", grid=site_grid(sites))
    assert_learned(place / "run")

    with pytest.raises(TooFewReplies, match="4 token ids, not 5"):
        run(at_sites(data, {"vocabulary": 5}, **BAG), place / "five", grid=site_grid(sites))

    saved_tokenizer(place / "site", "fever", "sick")
    with pytest.raises(TooFewReplies, match="tokenizer"):
        run(federation, place / "other", grid=site_grid(sites))

    without_tokenizer = [Site(site.client, site.memory, site.data) for site in sites]
    with pytest.raises(TooFewReplies, match="set tokenizer"):
        run(federation, place / "none", grid=site_grid(without_tokenizer))


@dataclass(frozen=True)
class Recordings:
    """Series of two channels, with the labels of their patients."""

    values: np.ndarray
    labels: np.ndarray

    def save(self, folder: Path) -> str:
        """Write both splits as Parquet files."""
        series = [values.tolist() for values in self.values]
        rows = pd.DataFrame({"signal": series, "label": self.labels})
        folder.mkdir()
        rows[TRAINING].to_parquet(folder / "train.parquet", index=False)
        rows[TESTING].to_parquet(folder / "test.parquet", index=False)
        return str(folder)


def recordings(client: int) -> Recordings:
    """40 series of a site; the first channel of ill patients is higher."""
    draw = np.random.default_rng(client)
    ill = draw.integers(0, 2, 40)
    scales = np.array([[5.0], [0.1]])
    values = draw.normal(0, 1, (40, 2, 12)) * scales
    values[:, 0] += 6.0 * ill[:, None]
    return Recordings(values.astype("float32"), ill)


def test_series_of_sites_are_standardised_by_channel_by_their_sums(place: Path) -> None:
    by_site = [recordings(client) for client in range(CLIENTS)]
    sites = [
        Site(client, place / f"memory{client}", data=site.save(place / f"series{client}"))
        for client, site in enumerate(by_site)
    ]
    data = {"name": "none", "standardise": "summed"}
    federation = at_sites(data, {"shape": [2, 12]}, model={"name": "series_cnn", "hidden": 4})

    run(federation, place / "run", grid=site_grid(sites))

    inputs = read_journal(place / "run" / "journal.jsonl")[0]["inputs"]
    values = np.concatenate([site.values[TRAINING] for site in by_site])
    np.testing.assert_allclose(inputs["mean"], values.mean((0, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inputs["std"], values.std((0, 2)), rtol=1e-5)


def test_impossible_sums_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1 halves its sums of squares, and client 2 doubles its counts."""
    honest_end = SumsWork.end

    def end(
        self: SumsWork, params: Any, start: Any, result: Any, view: Any, world: Any
    ) -> tuple[Payload, Payload]:
        reply, memory = honest_end(self, params, start, result, view=view, world=world)
        if view.client == 1:
            reply = Payload(reply, squares=reply.tensor("squares") / 2)
        if view.client == 2:
            reply = Payload(reply, count=reply.tensor("count") * 2)
        return reply, memory

    monkeypatch.setattr(SumsWork, "end", end)

    with pytest.raises(TooFewReplies, match="'moments': 1 of 3 clients"):
        run(at_sites(SUMMED), place / "run", grid=site_grid(hospitals(place)))

    first_event = read_journal(place / "run" / "journal.jsonl")[0]
    assert first_event["event"] == "start", "as in any run"
    reasons = {event["client"]: event["refused"] for event in refusals(place / "run")}
    assert reasons.keys() == {1, 2}
    assert "sums of squares" in reasons[1]
    assert "60 values" in reasons[2]


def test_facts_of_images_have_the_fields_of_earlier_releases_only() -> None:
    """Sites with an earlier release know no other fields."""
    facts = Facts(classes=("a", "b"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))

    assert list(facts.plain()) == ["classes", "shape", "mean", "std", "public"]


CONTRADICTIONS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("facts", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_facts_that_contradict_themselves_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="malformed"):
        Facts.of(facts)


def test_noised_sums_are_drawn_once_and_counted(place: Path) -> None:
    """A site stores its noised sums: the same question gets the same answer."""
    data = {
        **SUMMED,
        "limits": {"age": [0, 120], "pressure": [50, 250]},
        "public": 9,
        "public_from": "noise",
    }
    noise = Privacy(clip=2.0, noise=8.0)
    federation = at_sites(
        data,
        method={"name": "hiper_fedkd"},
        privacy={"clip": 2.0, "noise": 8.0},
        clients=ALL_SITES,
    )
    sites = hospitals(place)
    absent_site = Site(2, place / "memory2", data=str(place / "nowhere"))

    with pytest.raises(TooFewReplies, match="'moments': 2 of 3 clients"):
        run(federation, place / "run", grid=site_grid([*sites[:2], absent_site]))
    (stored,) = (place / "memory0").rglob("0000000-0000001.reply")
    content = stored.read_bytes()
    written_at = stored.stat().st_mtime_ns
    resume(place / "run", grid=site_grid(sites))

    assert stored.read_bytes() == content
    assert stored.stat().st_mtime_ns == written_at
    assert list((place / "memory0").rglob("0000000-0000001.reply")) == [stored]

    sums = journal_events(place / "run", name="moments")
    assert [event["noised_rows"] for event in sums] == [2] * CLIENTS
    # Two sums of each of two numbers, in float64.
    assert [event["bytes_up"] for event in sums] == [2 * 2 * 8] * CLIENTS
    rounds = journal_events(place / "run", event="round")
    assert [event["privacy"]["epsilon"] for event in rounds] == [
        [noise.spent(2 + 9)] * CLIENTS,
        [noise.spent(2 + 9 * 2)] * CLIENTS,
    ]

    inputs = read_journal(place / "run" / "journal.jsonl")[0]["inputs"]
    mean = np.array(inputs["mean"])[NUMBER_FEATURES]
    std = np.array(inputs["std"])[NUMBER_FEATURES]
    assert (mean >= [0, 50]).all()
    assert (mean <= [120, 250]).all()
    assert (std >= [6, 10]).all()
