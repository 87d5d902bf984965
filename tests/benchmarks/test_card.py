"""The measurements of a borrowed GPU, on the CPU: limits of time, failures, and the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.card import Card, Goal, Part, Plan, Report

from benchmarks import card, card_parts

SLEEPS = (
    "import time\n"
    "try:\n"
    "    print('started', flush=True)\n"
    "    time.sleep(60)\n"
    "except KeyboardInterrupt:\n"
    "    print('{\"median_round\": 0.5}')\n"
)


def part(name: str, code: str, seconds: float = 20.0) -> Part:
    return Part(name=name, arguments=("-c", code), seconds=seconds)


def measured(tmp_path: Path, parts: Sequence[Part], seconds: float = 60.0) -> Card:
    file = Card(tmp_path / "cards" / "a.json", {"device": "toy"}, [])
    file.measure(parts, seconds)
    return file


def test_a_failure_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    fails = part("fails", "print('a line'); raise ValueError('no such kernel')")
    file = measured(tmp_path, [fails, part("works", "print('{\"value\": 1}')")])
    failed, done = json.loads(file.path.read_bytes())["parts"]
    assert failed["state"] == "failed"
    assert failed["output"][0] == "a line"
    assert failed["output"][-1] == "ValueError: no such kernel"
    assert done["state"] == "done"
    assert done["result"] == {"value": 1}
    assert not file.is_complete


def test_a_part_without_a_result_has_failed(tmp_path: Path) -> None:
    file = measured(tmp_path, [part("silent", "pass")])
    assert file.reports[0].state == "failed"


def test_a_late_part_reports_what_it_has_done(tmp_path: Path) -> None:
    file = measured(tmp_path, [part("late", SLEEPS, seconds=1.0)])
    (report,) = file.reports
    assert report.state == "out of time"
    assert report.result == {"median_round": 0.5}
    assert report.seconds < 1.0 + card.GRACE


def test_parts_are_skipped_when_the_time_is_over(tmp_path: Path) -> None:
    file = measured(tmp_path, [part("a", "print('{}')")], seconds=card.GRACE)
    assert file.reports[0].state == "skipped"
    assert file.path.is_file()


def test_goals_stand_beside_their_measurement() -> None:
    goal = Goal("a round", "W4", "median_round", 0.005)
    report = Report(name="W4", state="done", result={"median_round": 0.004})
    assert goal.compared([report])["met"] is True
    assert goal.compared([replace(report, result={"median_round": 0.006})])["met"] is False
    assert goal.compared([replace(report, result=None)])["met"] is None


def test_recorded_steps_are_compared_by_their_models() -> None:
    def report(name: str, digest: str) -> Report:
        return Report(name=name, state="done", result={"model_sha256": digest})

    reports = [report("W1", "a"), report("W1, recorded", "a"), report("W2, recorded", "b")]
    assert card.same_bits(reports) == {"W1": True}
    assert card.same_bits([*reports, report("W2", "c")]) == {"W1": True, "W2": False}


def test_a_card_has_all_precisions_with_and_without_recorded_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(card, "has_bfloat16", lambda device: True)
    parts = Plan(device="cuda", quick=False, data="").parts()
    names = {part.name for part in parts}
    for method in ("fedavg", "fedntd"):
        for precision in ("fp32", "tf32", "bf16"):
            assert {f"W1, {method}, {precision}", f"W1, {method}, {precision}, recorded"} <= names
    assert len(names) == len(parts)
    for goal in card.goals("cuda"):
        assert goal.part in names


def test_rounds_of_fedstill_and_of_the_plain_loop(tmp_path: Path) -> None:
    fields = {"workload": "W4", "device": "cpu", "rounds": 2, "quick": True, "data": str(tmp_path)}
    ours = card_parts.rounds({**fields, "method": "fedavg"})
    plain = card_parts.rounds({**fields, "method": card_parts.PLAIN})
    assert ours["rounds"] == plain["rounds"] == 2
    assert ours["seconds_of_all_rounds"] == pytest.approx(ours["seconds"])
    assert len(ours["model_sha256"]) == len(plain["model_sha256"]) == 64


def test_rounds_that_are_missing_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([5.0, 1.0, 3.0, 2.0])

    def interrupted(contestant: card_parts.Contestant, device: str) -> float:
        for value in seconds:
            return value
        raise KeyboardInterrupt

    monkeypatch.setattr(card_parts, "_seconds_of_round", interrupted)
    fields = {"workload": "W4", "method": "fedavg", "device": "cpu", "data": str(tmp_path)}
    result = card_parts.rounds({**fields, "quick": True, "rounds": 10})
    assert result["rounds"] == 4
    assert result["median_round"] == 2.0
    assert result["seconds_of_all_rounds"] == 11.0 + 6 * 2.0


def test_the_transformer_learns_its_texts() -> None:
    data = card_parts.transformer_data(50)
    assert data.train.values.shape == (50, 64)
    assert set(data.train.labels.tolist()) == set(range(10))


def test_resumed_runs_are_compared_with_whole_ones(tmp_path: Path) -> None:
    fields = {"runs": [["W4", "fedavg"]], "quick": True, "device": "cpu", "data": str(tmp_path)}
    assert card_parts.resumes(fields) == {"same_bits": {"W4, fedavg": True}}


def test_another_model_after_a_resume_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_parts, "resumes_to_same_bits", lambda experiment, data: False)
    fields = {"runs": [["W4", "fedavg"]], "quick": True, "device": "cpu", "data": str(tmp_path)}
    with pytest.raises(SystemExit, match="W4, fedavg"):
        card_parts.resumes(fields)


def test_outcomes_of_tests_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure/></testcase>'
        '<testcase classname="a" name="d"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    expected = {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a::c"]}
    assert card_parts.outcomes_of(report) == expected


def test_the_plain_loop_trains_where_its_network_is() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    device = card_parts.Training(workload="W4", method=card_parts.PLAIN, device="cuda", quick=True)
    loop = device.contestant(device.prepared())
    loop.run_round()
    assert {value.device.type for value in loop.parameters().values()} == {"cuda"}
