"""Figures of queries: they show a journal's numbers, a run without queries has none, and a damaged
journal is named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_journals import Event, events, round_events, write_events

import toys
from fedstill.core.errors import CorruptFile
from fedstill.querying.queries import because
from fedstill.querying.report import (
    _client,
    _epochs,
    _lost,
    _trade,
    asked,
    noise_probes,
    one_after_another,
    query_rows,
    teacher_counts,
    untaught,
    who_asked,
)
from fedstill.report.class_regions import boundaries
from fedstill.report.figures import Style
from fedstill.report.page import Report
from fedstill.running import runner
from fedstill.running.runs import Group, Run, groups
from pages import as_html, as_json

QUERY = {"draw": "single", "fewer_than": 5}


@dataclass(frozen=True)
class QueryRun:
    """A run with queries, in its folder."""

    folder: Path

    @property
    def group(self) -> Group:
        """The group of this run alone."""
        (group,) = groups([self.folder])
        return group

    @property
    def run(self) -> Run:
        """The run as the report reads it."""
        return self.group.runs[0]

    @property
    def rounds(self) -> list[Event]:
        """The events of its rounds."""
        return round_events(self.folder)

    @property
    def last_answers(self) -> list[Event]:
        """The results of the last round's queries, by client."""
        return events(self.folder)[-1]["answers"]


@pytest.fixture(scope="module")
def single_query(tmp_path_factory: pytest.TempPathFactory) -> QueryRun:
    """A run in which clients query once, and whose decision boundaries are measured."""
    folder = tmp_path_factory.mktemp("queries") / "run"
    experiment = toys.toy(
        "qkt_var_e",
        rounds=1,
        topology={"clients": 6},
        query=QUERY,
        data={"public": 50},
        plan={"epochs": 2, "batch": 10},
        measure=("local", "boundaries"),
    )
    runner.run(experiment, folder, toys.blobs())
    return QueryRun(folder)


@pytest.fixture(scope="module")
def repeated_queries(tmp_path_factory: pytest.TempPathFactory) -> QueryRun:
    """A run of two rounds in which clients query again."""
    folder = tmp_path_factory.mktemp("repeated") / "run"
    runner.run(toys.asking_again(), folder, toys.blobs())
    return QueryRun(folder)


def test_points_are_gain_and_forgetting_of_each_client_and_their_mean(
    single_query: QueryRun,
) -> None:
    gains = [answer["gain"] for answer in single_query.last_answers]
    forgetting = [-answer["forgetting"] for answer in single_query.last_answers]
    compared = [single_query.group]

    clients, mean = as_json(_trade(compared, Style(compared)))["data"]

    assert clients["x"] == pytest.approx(gains, abs=1e-5)
    assert clients["y"] == pytest.approx(forgetting, abs=1e-5)
    assert min(clients["y"]) >= 0, "forgetting is positive, as in the other figures"
    assert mean["x"] == pytest.approx([sum(gains) / len(gains)], abs=1e-5)


def test_bars_are_class_accuracies_with_the_queried_class_first(single_query: QueryRun) -> None:
    answer = single_query.last_answers[0]
    alone, first_phase, second_phase = as_json(_client(single_query.run, answer["client"]))["data"]
    names = [trace["name"] for trace in (alone, first_phase, second_phase)]
    assert names == ["alone", "phase 1", "phase 2"]
    assert "asked for" in alone["x"][0]
    gain = second_phase["y"][0] - alone["y"][0]
    assert gain == pytest.approx(answer["gain"], abs=1e-4)


def test_the_page_has_both_sections_and_a_run_without_queries_none(
    single_query: QueryRun, finished: Path
) -> None:
    report = Report([single_query.group])
    text = as_html(asked(report)) + as_html(noise_probes(report))
    for words in ("Forgetting against gain", "Accuracy by epoch", "Noise probe", "error 0."):
        assert words in text

    without_queries = groups([finished])
    assert asked(Report(without_queries)) is None
    assert noise_probes(Report(without_queries)) is None

    report = Report([*without_queries, Group("qkt <b>", single_query.group.runs)])
    assert "qkt &lt;b&gt;, seed" in as_html(noise_probes(report))
    assert "qkt &lt;b&gt;, seed" in as_html(asked(report))


def test_queries_without_a_teacher_are_counted(tmp_path: Path, single_query: QueryRun) -> None:
    method = {"name": "qkt", "threshold": 1.0}
    plan = {"epochs": 2, "batch": 10}
    experiment = toys.toy(method, rounds=1, topology={"clients": 6}, query=QUERY, plan=plan)
    runner.run(experiment, tmp_path / "run", toys.blobs())
    untaught_run = QueryRun(tmp_path / "run")

    answers = untaught_run.last_answers
    count = len(answers)
    assert untaught_run.rounds[-1]["query_untaught"] == count > 0
    assert {answer["teachers"] for answer in answers} == {0}
    queries = [event for event in events(untaught_run.folder) if "query" in event]
    assert [event["teachers"] for event in queries] == 2 * count * [[]], "in both phases"

    group = untaught_run.group
    assert f": QKT, {count} of {count}." in untaught({"QKT": group.runs, "none": []})
    assert f"{group.label}, {count} of {count}." in as_html(asked(Report([group])))
    assert untaught({"all": single_query.group.runs}) == ""


def test_the_epochs_of_both_phases_are_drawn_with_the_accuracy_before_the_query(
    single_query: QueryRun,
) -> None:
    answer = single_query.last_answers[0]
    scores = []
    for event in events(single_query.folder):
        if event.get("client") == answer["client"]:
            scores += event.get("scores", [])

    curve, initial = as_json(_epochs(single_query.run))["data"][:2]

    assert len(curve["y"]) == 4, "two epochs a phase"
    assert curve["y"] == pytest.approx(scores[-4:], abs=1e-4)
    assert initial["y"] == pytest.approx([answer["average_accuracy_before"]] * 2, abs=1e-4)


def test_the_lines_between_classes_are_drawn_stage_by_stage(
    single_query: QueryRun, finished: Path
) -> None:
    text = as_html(boundaries(Report([single_query.group])))
    assert text.count("<figcaption>") == 3
    for words in ("alone", "phase 1", "phase 2", "queried"):
        assert words in text
    assert boundaries(Report(groups([finished]))) is None


def test_rows_of_queries_without_recorded_reasons_have_those_of_the_label_counts(
    single_query: QueryRun,
) -> None:
    """Runs of former versions recorded no reasons."""
    label_counts = single_query.run.label_counts
    expected = []
    for answer in single_query.last_answers:
        client = answer["client"]
        for label in answer["query"]:
            reason = because({"lack": label_counts[client][label]})
            name = f"class {label}"
            expected.append(["1", str(client), name, f"{name}: {reason}"])
    assert query_rows(single_query.group) == expected


def test_each_query_and_its_reasons_are_a_row(
    single_query: QueryRun, repeated_queries: QueryRun
) -> None:
    rows = query_rows(repeated_queries.group)
    expected = []
    for event in repeated_queries.rounds:
        number = str(event["round"])
        expected += [[number, str(answer["client"])] for answer in event["answers"]]
    assert [row[:2] for row in rows] == expected
    assert any("held out" in str(row[3]) for row in rows)
    assert any("example" in str(row[3]) for row in rows)

    single = single_query.group
    repeated = repeated_queries.group
    assert len(who_asked([single, single])) == 1, "the same queries in both"
    assert len(who_asked([single, repeated])) == 2
    assert "Queries and their reasons" in as_html(asked(Report([repeated])))


def test_gain_and_forgetting_by_round_are_drawn_if_clients_query_again(
    single_query: QueryRun, repeated_queries: QueryRun
) -> None:
    single = [single_query.group]
    repeated = [repeated_queries.group]
    assert one_after_another(single, Style(single)) is None

    charts = as_html(one_after_another(repeated, Style(repeated)))

    for title in ("Average accuracy by round", "Gain by round", "Forgetting by round"):
        assert title in charts
    rounds = repeated_queries.rounds
    gains = [round(event["query_gain"], 5) for event in rounds]
    assert len(gains) == 2
    assert json.dumps(gains).replace(" ", "") in charts

    forgetting = _lost(repeated_queries.group).mean
    assert forgetting == pytest.approx([-event["query_forgetting"] for event in rounds])
    assert max(forgetting) > 0, "forgetting is positive, as in the other figures"


def test_bars_are_those_of_the_last_query_and_each_query_has_a_number_of_teachers(
    repeated_queries: QueryRun,
) -> None:
    client = repeated_queries.last_answers[0]["client"]
    bars = as_json(_client(repeated_queries.run, client))["data"]
    assert [trace["name"] for trace in bars] == ["alone", "phase 1", "phase 2"]
    queries = sum(len(event["answers"]) for event in repeated_queries.rounds)
    assert len(teacher_counts(repeated_queries.run)) == queries


def damage_answers(event: Event) -> None:
    """Replace the answers of a round by one whose forgetting is no number."""
    if event["event"] == "round":
        event["answers"] = [{**event["answers"][0], "forgetting": "much"}]


def damage_probe(event: Event) -> None:
    """Replace the noise probe of a client by one of the wrong length."""
    if event["event"] == "client" and "probe" in event:
        event["probe"] = [0.5]


@pytest.mark.parametrize("damage", [damage_answers, damage_probe])
def test_a_damaged_journal_is_named(
    damage: Callable[[Event], None], single_query: QueryRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.toml", "summary.json", "split.safetensors"):
        shutil.copy(single_query.folder / name, folder / name)
    journal = events(single_query.folder)
    for event in journal:
        damage(event)
    write_events(folder, journal)

    with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
        noise_probes(Report(groups([folder])))
