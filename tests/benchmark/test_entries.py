"""Complete entries pass, forged ones are refused by name, and a replay gives the same bits."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_ranking
from fedstill.benchmark.competing import enter_rows
from fedstill.benchmark.entries import MAX_FILE_BYTES, Entry, passed_checks, path_of
from fedstill.benchmark.replays import draw_runs, first_rounds, replay_runs
from fedstill.benchmark.suites import Suite, load_suite
from fedstill.core.files import digest
from forged_entries import refusals, told

RUN = "uneven/seed3"


def rewritten(entry: Entry, name: str, old: str, new: str, with_digest: bool = True) -> None:
    """Change a file of the entry, and its digest with it: a forger can do both."""
    path = entry.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    if with_digest:
        told(entry, lambda tree: tree["digests"].__setitem__(name, digest(path.read_bytes())))


def test_a_whole_entry_passes_every_check(entry: Entry, suite: Suite) -> None:
    assert len(list(passed_checks(entry))) == 4
    assert entry.fields == {"plan.lr": 0.1}
    assert len(list(entry.folder.rglob("journal.jsonl"))) == 2 * 5


def test_an_entry_replaces_all_files_of_an_earlier_one(
    suite: Suite, tiny_entries: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(tiny_entries.parents[1], tmp_path / "out"))
    earlier_file = out / "entries" / suite.name / "fedavg" / "former_name.py"
    earlier_file.write_text("", encoding="utf-8")
    (entry,) = enter_rows(suite, ["FedAvg"], out, tiny_ranking.do)
    assert not earlier_file.exists()
    assert not refusals(entry.folder)


def test_the_runs_of_a_column_with_a_bar_in_its_name_are_in_a_folder_of_the_whole_name(
    suite: Suite,
) -> None:
    recipe = replace(suite.recipe, columns={"a | b": suite.recipe.columns["even"]})
    runs = replace(suite, recipe=recipe).runs("FedNTD", Path())
    assert {Path(path_of(run)).parent.name for run in runs} == {"a-|-b"}


def test_it_holds_no_times_but_the_processors(entry: Entry) -> None:
    keys: set[str] = set()
    for line in (entry.run_folder("uneven", 0) / "journal.jsonl").read_text().splitlines():
        keys |= json.loads(line).keys()
    assert {key for key in keys if key.startswith("seconds")} == {"seconds_cpu"}
    assert {path.name for path in entry.folder.rglob("*.safetensors")} == {"split.safetensors"}


def test_a_changed_key_is_refused(entry: Entry) -> None:
    rewritten(entry, f"{RUN}/config.toml", "epochs = 1", "epochs = 2")
    (wrong,) = refusals(entry.folder)
    assert f"{RUN}: config.toml has plan.train.epochs = 2" in wrong


def test_a_field_that_came_after_an_entry_was_made_has_its_default_there(entry: Entry) -> None:
    text = (entry.folder / RUN / "config.toml").read_text()
    field = re.search(r"^\[method\]\nname = .*\n(.+ = .+\n)", text, re.MULTILINE)
    assert field is not None
    for path in entry.folder.rglob("config.toml"):
        rewritten(entry, path.relative_to(entry.folder).as_posix(), field[1], "")
    assert refusals(entry.folder) == []


def test_another_learning_rate_than_the_chosen_one_is_refused(entry: Entry) -> None:
    rewritten(entry, f"{RUN}/config.toml", "lr = 0.1", "lr = 0.2")
    assert "plan.train.lr = 0.2" in refusals(entry.folder)[0]


def test_a_missing_seed_is_refused(entry: Entry) -> None:
    for path in (entry.folder / RUN).iterdir():
        path.unlink()
    (wrong,) = refusals(entry.folder)
    assert f"{RUN}/config.toml is missing" in wrong


def test_a_seed_more_is_refused(entry: Entry) -> None:
    folder = entry.folder / "uneven" / "seed7"
    folder.mkdir()
    (folder / "config.toml").write_bytes((entry.folder / RUN / "config.toml").read_bytes())
    (wrong,) = refusals(entry.folder)
    assert "uneven/seed7/config.toml" in wrong


def test_a_file_that_was_changed_after_the_entry_was_written_is_refused(entry: Entry) -> None:
    rewritten(entry, f"{RUN}/journal.jsonl", '"accuracy":0.', '"accuracy":0.9', with_digest=False)
    assert f"{RUN}/journal.jsonl" in refusals(entry.folder)[0]


def test_a_summary_that_does_not_follow_from_its_journal_is_refused(entry: Entry) -> None:
    accuracy = json.loads((entry.folder / RUN / "summary.json").read_text())["accuracy"]
    rewritten(entry, f"{RUN}/summary.json", f'"accuracy": {accuracy}', '"accuracy": 0.99')
    assert f"{RUN}: summary.json has accuracy = 0.99" in refusals(entry.folder)[0]


def test_a_swapped_choice_is_refused(entry: Entry) -> None:
    told(entry, lambda tree: tree["choice"].update(scores=[[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]]))
    assert any("try 1" in wrong for wrong in refusals(entry.folder))


def test_tries_that_the_suite_does_not_have_are_refused(entry: Entry) -> None:
    told(entry, lambda tree: tree["choice"]["tries"].__setitem__(0, {"plan.lr": 0.3}))
    (wrong,) = refusals(entry.folder)
    assert "tries" in wrong


def test_a_version_that_is_not_here_and_another_method_are_refused(entry: Entry) -> None:
    told(entry, lambda tree: tree.__setitem__("version", 2))
    assert "version 2 of digits-space" in refusals(entry.folder)[0]
    told(entry, lambda tree: tree.update(version=1, method="fedprox"))
    assert "fedavg" in refusals(entry.folder)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(row=3), "row"),
        (lambda tree: tree.pop("digests"), "'digests'"),
        (lambda tree: tree["choice"].update(scores=[["x"]]), "scores"),
        (lambda tree: tree.update(file="../../evil.py"), "'../../evil.py'"),
        (lambda tree: tree.update(row="mine", method="os:system"), "'os:system'"),
    ],
)
def test_values_that_entry_toml_must_not_have_are_refused(
    entry: Entry, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    told(entry, change)
    assert message in refusals(entry.folder)[0]


def test_links_strange_and_large_files_are_refused_before_anything_is_read(entry: Entry) -> None:
    link = entry.folder / "config.toml"
    link.symlink_to("/etc/hostname")
    assert "config.toml is a link" in refusals(entry.folder)[0]
    link.unlink()
    (entry.folder / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors" in refusals(entry.folder)[0]
    (entry.folder / "model.safetensors").unlink()
    with (entry.folder / RUN / "journal.jsonl").open("ab") as file:
        os.truncate(file.fileno(), MAX_FILE_BYTES + 1)
    assert "larger than 32 MB" in refusals(entry.folder)[0]


def test_a_replay_gives_the_same_bits_and_its_runs_are_drawn_by_the_entry(
    entry: Entry, suite: Suite
) -> None:
    places = draw_runs(entry, suite, 2)
    assert places == draw_runs(entry, suite, 2)
    assert len(set(places)) == 2
    assert len(draw_runs(entry, suite, 99)) == 10

    for replayed in replay_runs(entry, places, tiny_ranking.do):
        assert replayed.level == "bits"
    (replayed,) = replay_runs(entry, places[:1], tiny_ranking.do, rounds=1)
    assert replayed.level == "bits"


def test_a_run_is_shortened_where_its_first_rounds_stay_what_they_are(suite: Suite) -> None:
    assert first_rounds(1, suite, "FedAvg") == {"rounds": 1}
    assert first_rounds(0, suite, "FedAvg") == {}
    assert first_rounds(2, suite, "FedAvg") == {}, "all of its two rounds"

    public = load_suite("digits-public")
    time = load_suite("digits-time")
    assert first_rounds(3, public, "FedMD") == {}, "a stage follows its last round"
    assert first_rounds(3, public, "local only") == {}, "it has a number of its own"
    assert first_rounds(3, time, "replay") == {}, "tasks share the rounds"
    assert first_rounds(3, public, "HiPer-FedKD") == {"rounds": 3}
