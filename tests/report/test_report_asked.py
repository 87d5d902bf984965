"""Pictures of queries: drawn from a journal's numbers, left out where nobody asked, named when
damaged.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_journals import events

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
from fedstill.running.runs import Group, groups
from pages import as_html, as_json


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked") / "run"
    given = {"rounds": 1, "topology": {"clients": 6}, "query": {"draw": "single", "fewer_than": 5}}
    plan = {"epochs": 2, "batch": 10}
    measure = ("local", "boundaries")
    runner.run(
        toys.toy("qkt_var_e", data={"public": 50}, plan=plan, measure=measure, **given),
        folder,
        toys.blobs(),
    )
    return folder


def test_the_points_are_gain_and_forgetting_of_each_client_and_their_mean(one: Path) -> None:
    found = groups([one])
    told = events(one)[-1]["answers"]
    small, large = as_json(_trade(found, Style(found)))["data"]
    assert small["x"] == pytest.approx([a["gain"] for a in told], abs=1e-5)
    assert small["y"] == pytest.approx([-a["forgetting"] for a in told], abs=1e-5)
    assert min(small["y"]) >= 0, "forgetting is positive, as in the other figures"
    assert large["x"] == pytest.approx([sum(a["gain"] for a in told) / len(told)], abs=1e-5)


def test_the_bars_are_class_accuracies_with_what_was_asked_for_first(one: Path) -> None:
    run = groups([one])[0].runs[0]
    answer = events(one)[-1]["answers"][0]
    figure = as_json(_client(run, answer["client"]))
    assert [t["name"] for t in figure["data"]] == ["alone", "phase 1", "phase 2"]
    assert "asked for" in figure["data"][0]["x"][0]
    before, after = (figure["data"][i]["y"][0] for i in (0, 2))
    assert after - before == pytest.approx(answer["gain"], abs=1e-4)


def test_the_page_has_both_sections_and_a_run_without_queries_none(
    one: Path, finished: Path
) -> None:
    found = groups([one])
    text = as_html(asked(Report(found))) + as_html(noise_probes(Report(found)))
    for words in ("Forgetting against gain", "Accuracy by epoch", "Noise probe", "error 0."):
        assert words in text
    others = groups([finished])
    assert asked(Report(others)) is None
    assert noise_probes(Report(others)) is None
    compared = [*others, Group("qkt <b>", found[0].runs)]
    assert "qkt &lt;b&gt;, seed" in as_html(noise_probes(Report(compared)))
    assert "qkt &lt;b&gt;, seed" in as_html(asked(Report(compared)))


def test_queries_without_a_teacher_are_told(tmp_path: Path, one: Path) -> None:
    given = {"rounds": 1, "topology": {"clients": 6}, "query": {"draw": "single", "fewer_than": 5}}
    method = {"name": "qkt", "threshold": 1.0}
    runner.run(
        toys.toy(method, plan={"epochs": 2, "batch": 10}, **given), tmp_path / "run", toys.blobs()
    )
    last = events(tmp_path / "run")[-1]
    count = len(last["answers"])
    assert last["query_untaught"] == count > 0
    assert {a["teachers"] for a in last["answers"]} == {0}
    asking = [e for e in events(tmp_path / "run") if "query" in e]
    assert [e["teachers"] for e in asking] == 2 * count * [[]], "in both phases"
    found = groups([tmp_path / "run"])
    sentence = untaught({"QKT": found[0].runs, "none": []})
    assert f": QKT, {count} of {count}." in sentence
    assert f"{found[0].label}, {count} of {count}." in as_html(asked(Report(found)))
    assert untaught({"all": groups([one])[0].runs}) == ""


def test_the_epochs_of_both_phases_stand_beside_what_a_client_knew_before(one: Path) -> None:
    run = groups([one])[0].runs[0]
    answer = events(one)[-1]["answers"][0]
    curve, before = as_json(_epochs(run))["data"][:2]
    scores = [
        s for e in events(one) if e.get("client") == answer["client"] for s in e.get("scores", [])
    ]
    phases = scores[-len(curve["y"]) :]
    assert len(curve["y"]) == 4, "two epochs a phase"
    assert curve["y"] == pytest.approx(phases, abs=1e-4)
    assert before["y"] == pytest.approx([answer["average_accuracy_before"]] * 2, abs=1e-4)


def test_the_lines_between_classes_are_drawn_stage_by_stage(one: Path, finished: Path) -> None:
    found = groups([one])
    text = as_html(boundaries(Report(found)))
    assert text.count("<figcaption>") == 3
    for words in ("alone", "phase 1", "phase 2", "queried"):
        assert words in text
    others = groups([finished])
    assert boundaries(Report(others)) is None


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("again") / "run"
    runner.run(toys.asking_again(), folder, toys.blobs())
    return folder


def test_who_asked_for_what_and_why_stands_in_a_table(one: Path, again: Path) -> None:
    (first,) = groups([one])
    counts, told = first.runs[0].label_counts, events(one)[-1]["answers"]
    assert query_rows(first) == [
        [
            "1",
            str(a["client"]),
            f"class {c}",
            f"class {c}: {because({'lack': counts[a['client']][c]})}",
        ]
        for a in told
        for c in a["query"]
    ], "of runs of before, too, by their label counts"
    (both,) = groups([again])
    rows = query_rows(both)
    assert [r[:2] for r in rows] == [
        [str(e["round"]), str(a["client"])]
        for e in events(again)
        if e["event"] == "round"
        for a in e["answers"]
    ]
    assert any("held out" in str(r[3]) for r in rows)
    assert any("example" in str(r[3]) for r in rows)
    assert len(who_asked([first, first])) == 1, "the same queries in both"
    assert len(who_asked([first, both])) == 2
    text = as_html(asked(Report([both])))
    assert "Queries and their reasons" in text


def test_query_after_query_is_drawn_where_clients_ask_again(one: Path, again: Path) -> None:
    (first,), (both,) = groups([one]), groups([again])
    assert one_after_another([first], Style([first])) is None
    drawn = as_html(one_after_another([both], Style([both])))
    gains = [round(e["query_gain"], 5) for e in events(again) if e["event"] == "round"]
    assert len(gains) == 2
    for title in (
        "Average accuracy by round",
        "Gain by round",
        "Forgetting by round",
    ):
        assert title in drawn
    assert json.dumps(gains).replace(" ", "") in drawn
    changes = [e["query_forgetting"] for e in events(again) if e["event"] == "round"]
    lost = _lost(both).mean
    assert lost == pytest.approx([-change for change in changes])
    assert max(lost) > 0, "forgetting is positive, as in the other figures"
    run = both.runs[0]
    last = events(again)[-1]["answers"][0]
    figure = as_json(_client(run, last["client"]))
    assert [t["name"] for t in figure["data"]] == ["alone", "phase 1", "phase 2"], (
        "of the last query"
    )
    assert len(teacher_counts(run)) == sum(
        len(e["answers"]) for e in events(again) if e["event"] == "round"
    )


@pytest.mark.parametrize("event", ["round", "client"])
def test_what_is_damaged_is_named(one: Path, tmp_path: Path, event: str) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.toml", "summary.json", "split.safetensors"):
        (tmp_path / "run" / name).write_bytes((one / name).read_bytes())
    told = events(one)
    for e in told:
        if e["event"] == event == "round":
            e["answers"] = [{**e["answers"][0], "forgetting": "much"}]
        elif e["event"] == event and "probe" in e:
            e["probe"] = [0.5]
    (tmp_path / "run" / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in told))
    with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
        noise_probes(Report(groups([tmp_path / "run"])))
