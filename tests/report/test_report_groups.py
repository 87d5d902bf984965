from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
from run_journals import stop_after

from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.metrics.classification import METRICS
from fedstill.report import data_split, series
from fedstill.report.summary import COLUMNS, measured_columns, rounds_note, split_text
from fedstill.running.runs import differing, group_labels, groups
from run_bits import with_changed_config


def summaries(folder: Path, *names: str) -> list[dict[str, float]]:
    return [json.loads((folder / n / "summary.json").read_text()) for n in names]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_runs_that_differ_in_their_seed_are_one_group(finished: Path) -> None:
    found = groups([finished])
    assert [g.label for g in found] == ["fedavg", "toy_failing"]
    assert [g.seeds for g in found] == [[7, 8], [7, 8]]
    assert all(g.finished for g in found)
    assert "method.who" in differing([g.settings for g in found])


def test_a_directory_named_twice_counts_once(finished: Path) -> None:
    (group,) = groups([finished / "avg7", finished / "avg7", finished / "avg8"])
    assert group.seeds == [7, 8]


def test_measures_are_those_of_the_runs_own_summaries(finished: Path) -> None:
    group = groups([finished])[0]
    own = summaries(finished, "avg7", "avg8")
    for key in (
        "accuracy",
        "best_accuracy",
        "mean_accuracy_last_10",
        "forgetting",
        "bytes_up",
        "bytes_down",
    ):
        values = [s[key] for s in own]
        spread = group.mean_spread(key)
        assert spread is not None
        assert spread.mean == pytest.approx(statistics.fmean(values)), key
        assert spread.std == pytest.approx(statistics.stdev(values)), key
        assert spread.runs == 2
    assert group.run_count_text == "2"
    assert rounds_note(group) == ""
    assert measured_columns([group]) == [
        m
        for m in COLUMNS
        if not m.key.startswith(
            ("query_", "leakage/", "personal_", "own_test_", "epsilon", "best_round")
        )
        and m.key.removeprefix("best_") not in METRICS
    ], "nobody asked for anything"


def test_a_second_run_of_a_seed_is_left_out(some_runs: Path) -> None:
    shutil.copytree(some_runs / "avg7", some_runs / "again")
    stop_after(some_runs / "again", 1)
    group = groups([some_runs])[0]
    assert [r.folder.name for r in group.runs] == ["avg7", "avg8"]
    assert [r.folder.name for r in group.repeats] == ["again"]


def test_labels_name_what_differs_within_a_method(some_runs: Path) -> None:
    text = (some_runs / "avg8" / "config.toml").read_text()
    assert "alpha = 1.0" in text
    assert "lr = 0.2" in text
    with_changed_config(
        some_runs / "avg8",
        text.replace("alpha = 1.0", "alpha = 0.5").replace("lr = 0.2", "lr = 0.1"),
    )
    assert [g.label for g in groups([some_runs])][:2] == [
        "fedavg, alpha=1.0, lr=0.2",
        "fedavg, alpha=0.5, lr=0.1",
    ]


def test_a_whole_number_with_and_without_a_point_is_one_setting(some_runs: Path) -> None:
    text = (some_runs / "avg8" / "config.toml").read_text()
    with_changed_config(some_runs / "avg8", text.replace("alpha = 1.0", "alpha = 1"))
    assert groups([some_runs])[0].seeds == [7, 8]


@pytest.mark.uses("unlearning")
def test_labels_of_unlearned_runs_name_the_strategy() -> None:
    original = {"method.name": "fedavg", "rounds": 3}
    retraining = {
        "method.name": "fedavg",
        "rounds": 5,
        "unlearning.strategy": "retraining",
        "unlearning.clients": [0],
        "unlearning.first_round": 1,
    }
    sifu = {**retraining, "unlearning.strategy": "sifu", "unlearning.options.epsilon": 1.0}
    assert group_labels([original, retraining, sifu]) == [
        "fedavg",
        "fedavg, retraining",
        "fedavg, sifu",
    ]
    of_two_clients = {**retraining, "unlearning.clients": [0, 1]}
    assert group_labels([original, retraining, of_two_clients]) == [
        "fedavg",
        "fedavg, retraining, clients=[0]",
        "fedavg, retraining, clients=[0, 1]",
    ]


def test_unfinished_runs_count_up_to_where_they_are(some_runs: Path) -> None:
    stop_after(some_runs / "avg8", 1)
    group = groups([some_runs])[0]
    assert not group.finished
    assert rounds_note(group) == "1 of 2 runs unfinished, at round 1 of 3"
    assert [v.runs for v in series.over_seeds(group, "accuracy").values] == [2, 2, 1, 1]


def test_a_run_without_a_round_has_no_measures(some_runs: Path) -> None:
    for name in ("avg7", "avg8"):
        stop_after(some_runs / name, 0)
    group = groups([some_runs])[0]
    assert measured_columns([group]) == []
    assert COLUMNS[0].text(group.mean_spread(COLUMNS[0].key)) == "–"


def test_how_data_are_split_is_said_of_partitions_and_of_sites() -> None:
    assert split_text({"partition.kind": "iid", "engine": "serial"}) == "iid"
    at_sites = {"partition.kind": "iid", "engine": "flower", "flower.data": "sites"}
    assert split_text(at_sites) == "local data of the sites"
    assert split_text({**at_sites, "flower.data": "simulated"}) == "iid"


def test_distinct_splits_are_one_a_seed(finished: Path) -> None:
    found = data_split.splits(groups([finished]))
    names = [f"seed {seed} (dirichlet alpha 1.0, 6 clients)" for seed in (7, 8)]
    assert [s.name for s in found] == names
    assert [len(s.runs) for s in found] == [2, 2]


def test_phases_sum_to_the_seconds_of_the_rounds(finished: Path) -> None:
    for run in groups([finished])[0].runs:
        phases = series.phases(run)
        total = sum(e["seconds"] for e in run.rounds)
        assert phases.training + phases.measuring + phases.other == pytest.approx(total)
        assert min(phases.training, phases.measuring, phases.other) >= 0


def test_directories_without_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no run"):
        groups([tmp_path])
    with pytest.raises(ConfigError, match="there is no directory"):
        groups([tmp_path / "absent"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"event":"initial"', '{"event":"initial'),
        ('{"event":"start"', '{"event":"begin"'),
        ('"class_accuracy":[', '"class_accuracy":[0.5,'),
        ('{"event":"round","round":2', '{"event":"round","round":1'),
        ('{"event":"round","round":1', '{"event":"round","round":null'),
        ('"forgetting":', '"forgetting":"much","was":'),
        ('"split":{', '"split":7,"was":{'),
        ('"classes":[', '"classes":7,"were":['),
        ('"sources":{}', '"sources":[]'),
    ],
)
def test_a_damaged_journal_is_named(some_runs: Path, old: str, new: str) -> None:
    path = some_runs / "avg7" / "journal.jsonl"
    edit(path, old, new)
    with pytest.raises(CorruptFile, match=r"journal\.jsonl"):
        groups([some_runs])


def test_a_malformed_report_of_a_client_is_named_with_its_line(some_runs: Path) -> None:
    path = some_runs / "avg7" / "journal.jsonl"
    edit(path, '"seconds_training":', '"seconds_training":[],"was":')
    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line 3: .*seconds_training"):
        groups([some_runs])


@pytest.mark.parametrize("text", ["rounds = ", "rounds = 3\n", 'rounds = "3"\nseed = 1\n'])
def test_a_damaged_config_is_named(some_runs: Path, text: str) -> None:
    (some_runs / "avg7" / "config.toml").write_text(text)
    with pytest.raises(CorruptFile, match=r"config\.toml"):
        groups([some_runs])
