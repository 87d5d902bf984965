"""The commands of the ranking, on a tiny suite in the place of one that ships."""

from __future__ import annotations

import csv
import html
import io
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forged_entries
import tiny_ranking
from fedstill.benchmark import maps, replays, suites, tables
from fedstill.benchmark.entries import read_entry
from fedstill.benchmark.standings import read_rows
from fedstill.benchmark.suites import read_choice
from fedstill.cli import call
from fedstill.core import user_modules
from fedstill.core.errors import DataAbsent
from fedstill.core.files import parse_toml
from fedstill.report import comparison
from fedstill.running.compare import Outcome, Variant, clear_other_runs

DOCS = Path(__file__).parents[2] / "docs"

FEW = """
from fedstill.data.sources import load_dataset


def few():
    return load_dataset("digits")
"""
"""A data set of one's own."""

MINE = """
from typing import ClassVar

from fedstill.methods.fedavg import FedAvg
from fedstill.core.registry import method


@method("mine")
class Mine(FedAvg):
    tries: ClassVar = ({}, {"plan.lr": 0.2})
"""
"""A method of one's own, with two tries."""


def install(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the tiny suite the one that ships, without entries, and execute runs in this process; a
    folder becomes the working directory.
    """
    tiny_ranking.install(patch)

    def here(runs: Sequence[Variant], *_: object, **__: object) -> list[Any]:
        return tiny_ranking.do(runs)

    patch.setattr(comparison, "followed_outcomes", here)
    patch.setattr(tables, "shipped_rows", dict)
    patch.chdir(folder)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the command's runs and entries for FedAvg and FedNTD."""
    folder = tmp_path_factory.mktemp("ranked")
    command = ["rank", "run", "digits", "--track", "space", "--methods", "fedavg,fedntd"]
    with pytest.MonkeyPatch.context() as patch:
        install(patch, folder)
        assert call([*command, "--out", "out"]) == 0
    return folder / "out"


@pytest.fixture
def entries(ranked: Path, tmp_path: Path) -> Path:
    """Their entries, in the working directory, where they may be changed."""
    out = Path(shutil.copytree(ranked, tmp_path / "out"))
    return out / "entries" / "digits-space"


def test_run_check_page_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["rank", "run", "digits", "--track", "space", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "FedNTD" in printed
    assert "joint" in printed
    entries = tmp_path / "out" / "entries" / "digits-space"
    assert sorted(path.name for path in entries.iterdir()) == ["fedavg", "fedntd", "joint"]

    journals = list((tmp_path / "out" / "digits-space").rglob("journal.jsonl"))
    times = [path.stat().st_mtime_ns for path in journals]
    assert call(["rank", "run", "digits", "--track", "space", "--out", "out"]) == 0
    assert [path.stat().st_mtime_ns for path in journals] == times, "nothing is run again"

    capsys.readouterr()
    assert call(["rank", "check", str(entries), "--replay", "1", "--note", str(entries)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("replayed here: bits") == 3

    entry_file = entries / "fedntd" / "entry.toml"
    text = entry_file.read_text()
    entry_file.write_text("# another entry in its place\n" + text)
    rows = read_rows([entries]).rows["digits-space"]
    statuses = {row.name: row.status for row in rows}
    assert statuses == {"FedAvg": "bits", "FedNTD": "not replayed", "joint": "bits"}

    entry_file.write_text(text)
    assert call(["rank", "page", str(entries), "--out", "page"]) == 0
    names = sorted(path.name for path in (tmp_path / "page").iterdir())
    assert names == ["index.html", "standings.csv", "table.csv", "table.md", "table.tex"]
    runs = list(csv.DictReader(io.StringIO((tmp_path / "page" / "table.csv").read_text())))
    assert len(runs) == 3 * 2 * 5
    assert {run["replayed"] for run in runs} == {"bits"}


@pytest.mark.parametrize(
    "command",
    [
        ["run", "digits", "--track", "space"],
        ["choose", "digits"],
        ["map", "fedntd", "--grid", "topology.sampled=1,2"],
    ],
)
def test_a_command_that_is_stopped_says_so_in_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(runs: Sequence[Variant], *_: object, **__: object) -> list[Outcome]:
        return [Outcome(run, run.settings.rounds, state="stopped") for run in runs]

    monkeypatch.setattr(comparison, "followed_outcomes", stopped)
    assert call(["rank", *command, "--out", "out"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("fedstill: stopped; ")
    assert printed.count("\n") == 1


@pytest.mark.usefixtures("entries")
def test_a_replay_that_is_stopped_has_no_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the same bits as far as it came."""

    def stopped(runs: Sequence[Variant], *_: object, **__: object) -> list[Outcome]:
        return [replace(outcome, state="stopped") for outcome in tiny_ranking.do(runs)]

    monkeypatch.setattr(comparison, "followed_outcomes", stopped)
    capsys.readouterr()
    check = ["rank", "check", "out/entries/digits-space/fedavg", "--replay", "1"]
    assert call([*check, "--note", "levels"]) == 1
    printed = capsys.readouterr()
    assert "replayed here" not in printed.out
    assert printed.err.startswith("fedstill: stopped; ")
    number = printed.out.partition("--draw ")[2].partition(":")[0]
    assert f"--draw {number} " in printed.err, "nothing is kept: the same command draws other runs"
    assert not (tmp_path / "levels").exists()


def test_a_forged_entry_is_said_and_left_out(
    entries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = entries / "fedntd"
    path = forged / "even" / "seed0" / "config.toml"
    path.write_text(path.read_text().replace("epochs = 1", "epochs = 9"))
    capsys.readouterr()
    again = ["rank", "run", "digits", "--track", "space", "--methods", "joint", "--out", "out"]
    assert call(again) == 1, "the table lacks an entry"
    assert "left out: fedntd: " in capsys.readouterr().err
    shutil.rmtree(entries / "joint")
    assert call(["rank", "check", str(forged.parent)]) == 1
    assert "even/seed0/config.toml" in capsys.readouterr().out
    assert call(["rank", "page", str(forged.parent), "--out", "page"]) == 1
    assert "left out: fedntd: " in capsys.readouterr().err
    rows = csv.DictReader(io.StringIO((tmp_path / "page" / "table.csv").read_text()))
    assert {row["method"] for row in rows} == {"FedAvg"}


def test_invented_entries_are_rejected_by_one_replayed_run(
    entries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = entries / "fedntd"
    for change in (
        forged_entries.invented,
        forged_entries.invented_with_outlier,
        forged_entries.with_spread,
    ):
        entry = read_entry(Path(shutil.copytree(honest, tmp_path / change.__name__)))
        forged_entries.forged(entry, change)
        for processor in (entry.made_with["processor"], "AMD EPYC"):
            forged_entries.made_on(entry, processor)
            check = ["rank", "check", str(entry.folder)]
            assert call(check) == 0, "nothing is replayed"
            capsys.readouterr()
            assert call([*check, "--replay", "1", "--note", "levels"]) == 1
            assert "replayed here: disagrees" in capsys.readouterr().out
            assert ",disagrees," in (tmp_path / "levels" / "replayed.csv").read_text()

    first_round = ["--replay", "1", "--rounds", "1", "--note", "short"]
    assert call(["rank", "check", str(honest), *first_round]) == 0
    assert not (tmp_path / "short").exists(), "some rounds are no proof"


@pytest.mark.usefixtures("entries")
def test_an_entry_whose_data_are_not_here_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise DataAbsent("dataset 'digits' is not here: FEDSTILL_DATA is not set")

    monkeypatch.setattr(replays, "read_data", absent)
    capsys.readouterr()
    assert call(["rank", "check", "out/entries/digits-space/fedavg"]) == 0
    capsys.readouterr()
    assert call(["rank", "check", "out/entries/digits-space/fedavg", "--replay", "1"]) == 1
    printed = capsys.readouterr().out
    assert "REFUSED" not in printed
    assert "dataset 'digits'" in printed


def test_choose_prints_its_choice_and_stores_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["rank", "choose", "digits", "--track", "space", "--methods", "fedntd"]
    assert call([*command, "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "try 2 [%]" in printed
    assert "FedNTD" in printed
    assert (tmp_path / "out" / "digits-space" / "chosen.toml").is_file()


def test_choosing_again_what_ships_changes_no_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choices that ship are part of the suite, so an entry with others could not be checked."""
    suite = suites.load_suite(tiny_ranking.NAME)
    words = ["digits", "--track", "space", "--methods", "fedavg", "--out", "out"]
    assert call(["rank", "choose", *words]) == 0
    stored = parse_toml((tmp_path / "out" / "digits-space" / "chosen.toml").read_bytes())
    assert read_choice("FedAvg", stored["FedAvg"], 2) != suite.choices["FedAvg"]
    assert "ship with digits-space" in capsys.readouterr().out

    assert call(["rank", "run", *words]) == 0
    assert "left out" not in capsys.readouterr().err
    assert call(["rank", "check", "out/entries"]) == 0


def test_entries_of_a_suite_whose_learning_rate_one_row_chooses_need_only_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others who check them do not have the choices."""
    monkeypatch.setattr(suites, "shipped_choices", lambda *_: {})
    monkeypatch.setattr(suites, "_suites_from_files", {})
    rounds = "rounds = 1 }"
    assert rounds in tiny_ranking.TINY
    text = tiny_ranking.TINY.replace(rounds, 'rounds = 1, rate = "FedAvg" }')
    (tmp_path / "clinics.toml").write_text(text)
    assert call(["rank", "choose", "clinics.toml", "--out", "out"]) == 0
    assert call(["rank", "run", "clinics.toml", "--methods", "fedntd", "--out", "out"]) == 0
    assert "left out" not in capsys.readouterr().err
    check = ["rank", "check", "out/entries", "--suite", "clinics.toml"]
    assert call(check) == 0

    entry = read_entry(tmp_path / "out" / "entries" / "clinics" / "fedntd")
    other_rate = [{**values, "plan.lr": 0.3} for values in entry.tries]
    forged_entries.told(entry, lambda tree: tree["choice"].update(tries=other_rate))
    assert call(check) == 1, "a learning rate that FedAvg does not try"


def test_choosing_for_a_bound_which_has_no_tries_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choose = ["rank", "choose", "digits", "--track", "space", "--out", "out"]
    assert call([*choose, "--methods", "fedntd,joint"]) == 2
    assert capsys.readouterr().err == (
        "fedstill: digits-space: joint is a bound, so it has no fields to choose; leave it out\n"
    )


def test_choosing_a_track_whose_fields_another_chooses_says_which(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["rank", "choose", "digits", "--track", "both", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "digits-time" in printed
    assert printed.endswith(" fedstill rank choose digits --track time --out out\n")
    assert not Path("out").exists(), "nothing is run"


def test_a_newcomer_in_both_is_tried_in_the_suite_that_chooses_and_its_entry_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_text = suites.recipe_text
    line = 'choosing = { column = "uneven", rounds = 1 }'
    column = '"uneven" = { partition = { kind = "dirichlet", alpha = 1.0 } }\n'
    assert line in tiny_ranking.TINY
    assert column in tiny_ranking.TINY
    new_line = f'choosing = {{ of = "{tiny_ranking.NAME}" }}'
    text_of_both = tiny_ranking.TINY.replace(line, new_line).replace(column, "")

    def recipe_text(name: str) -> str:
        if name == "rank/digits-both":
            return text_of_both
        return tiny_text(name)

    monkeypatch.setattr(suites, "recipe_text", recipe_text)
    (tmp_path / "mine.py").write_text(MINE)

    assert call(["rank", "enter", "mine.py", "--track", "both", "--out", "out"]) == 0

    trials = tmp_path / "out" / "digits-space" / "choosing"
    trial_configs = [path.read_text() for path in trials.rglob("config.toml")]
    assert len(trial_configs) == 2 * 3
    assert all('kind = "dirichlet"' in config for config in trial_configs)

    entry = tmp_path / "out" / "entries" / "digits-both" / "mine"
    entry_configs = [path.read_text() for path in entry.rglob("config.toml")]
    assert len(entry_configs) == 5
    assert all('kind = "iid"' in config for config in entry_configs)
    assert "digits-space, on the column uneven" in " ".join(capsys.readouterr().out.split())
    assert call(["rank", "check", str(entry)]) == 0, capsys.readouterr().out


def test_a_row_that_one_of_the_tracks_lacks_is_an_error_before_the_runs_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["digits", "--methods", "fedntd", "--out", "out"]
    for command in ("run", "choose"):
        assert call(["rank", command, *words]) == 2
        assert "digits-chain" in capsys.readouterr().err
    assert not Path("out").exists(), "nothing is run"


def test_a_newcomer_to_a_suite_of_ones_own_stands_beside_the_entries_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suites, "_suites_from_files", {})
    even = '"even" = { partition = { kind = "iid" } }\n'
    assert even in tiny_ranking.TINY
    (tmp_path / "clinics.toml").write_text(tiny_ranking.TINY.replace(even, ""))
    (tmp_path / "mine.py").write_text(MINE)
    assert call(["rank", "run", "clinics.toml", "--methods", "fedavg", "--out", "out"]) == 0
    assert "1 method, 1 column × 5 seeds" in capsys.readouterr().out
    assert call(["rank", "enter", "mine.py", "--tier", "clinics.toml", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    check = printed.partition("check it: fedstill ")[2].splitlines()[0]
    monkeypatch.setattr(suites, "_suites_from_files", {})
    assert call(shlex.split(check)) == 0, "the printed command can be run"
    assert "2 methods, 1 column × 5 seeds" in printed
    assert "FedNTD, joint\n" in printed


def test_the_page_on_adding_a_method_gives_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The FedGap of the documents, with the line on its tries that the page on the ranking adds."""
    page = (DOCS / "add_a_method.md").read_text()
    text = page.partition('```python title="fedgap.py"\n')[2].partition("```")[0]
    line = "    temperature: Positive = 1.0\n"
    assert line in text
    tries = 'tries: ClassVar = ({"beta": 0.3}, {"beta": 1.0}, {"beta": 2.0})\n'
    assert tries in (DOCS / "enter_the_ranking.md").read_text()
    text = text.replace(line, f"{line}    {tries}")
    text = text.replace("import dataclass\n", "import dataclass\nfrom typing import ClassVar\n")
    (tmp_path / "fedgap.py").write_text(text)

    enter = ["rank", "enter", "fedgap.py", "--tier", "digits", "--track", "space"]
    assert call([*enter, "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "FedGap" in printed
    entry = tmp_path / "out" / "entries" / "digits-space" / "fedgap"
    assert f"fedstill rank check {entry.relative_to(tmp_path)} --replay 1" in printed
    (tmp_path / "fedgap.py").unlink()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(user_modules, "_used", set())
        elsewhere.setenv(user_modules.STATE, str(tmp_path / "of another user"))
        assert call(["rank", "check", str(entry), "--replay", "2"]) == 2
        assert "--trust-code" in capsys.readouterr().err
    assert call(["rank", "check", str(entry), "--replay", "2"]) == 0
    printed = capsys.readouterr().out
    assert str(entry / "fedgap.py") in printed
    assert "replayed here: bits" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "digit"], "unknown tier 'digit'; did you mean 'digits'?"),
        (["run", "digits", "--track", "spac"], "unknown track 'spac'; did you mean 'space'?"),
        (["run", "digits", "--track", "space", "--methods", "fednt"], "FedNTD"),
        (["check"], "rank check"),
        (["check", "nowhere"], "nowhere"),
        (["check", "nowhere", "--note", "levels"], "--replay"),
        (["check", "nowhere", "--draw", "0"], "--replay"),
        (["check", "nowhere", "--rounds", "1"], "--replay"),
        (["check", "nowhere", "--replay", "1", "--note", __file__], "replayed.csv"),
        (["run", "clinics.toml", "--track", "time"], "--track"),
        (["choose", "clinics.toml", "--track", "time"], "--track"),
        (["enter", "mine.py", "--tier", "clinics.toml", "--track", "space"], "--track"),
        (["map", "fedntd", "--grid", "topology.sampled=1,1"], "twice"),
        (["enter", "nowhere.py"], "there is no file nowhere.py"),
        (["enter", "mine.py:Mine"], "write @method"),
        (["page", "nowhere"], "nowhere"),
        (["map", "fedlcc"], "unknown method 'fedlcc'; did you mean 'fedlc'?"),
        (["map", "fedntd"], "topology.sampled = 5"),
        (["map", "fedmd", "--grid", "rounds=1"], "public"),
        (
            ["map", "fedntd", "--into-package", "--grid", "rounds=1"],
            "--into-package",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["rank", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_method_without_a_row_is_mapped_and_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command to the page and to what explain says of a config on the same setting."""
    monkeypatch.setattr(maps, "_map_folder", lambda: tmp_path / "maps")
    monkeypatch.setattr(maps, "AXES", {"partition.alpha": (0.5, "even"), "plan.epochs": (1, 4)})
    assert call(["rank", "map", "FedLC", "--out", "out", "--into-package"]) == 0
    printed = capsys.readouterr().out
    assert "FedLC helps " in printed
    folder = tmp_path / "out" / "map-digits"
    shipped_text = (tmp_path / "maps" / "fedlc.csv").read_text()
    assert shipped_text == (folder / "fedlc" / "map.csv").read_text()

    assert call(["rank", "page", "--out", "page"]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert maps.shipped_maps()["fedlc"].summary in page
    assert "of FedNTD, FedADKD" in page
    capsys.readouterr()

    (config,) = folder.glob("runs/*alpha_even*epochs_4*FedLC*/seed0/config.toml")
    assert call(["explain", str(config), "--no-split"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "alpha even, epochs 4" in printed
    assert "map: FedLC was " in printed
    assert call(["explain", str(config), "--no-split", "-s", "plan.train.epochs=400"]) == 0
    assert "map:" not in capsys.readouterr().out, "too far from every cell"


@pytest.mark.usefixtures("entries")
def test_a_folder_without_an_entry_is_an_error_beside_one_with_entries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(["rank", "check", "out/entries", "out/entires"]) == 2
    assert "out/entires" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "page"])
def test_the_help_has_no_option_for_an_empty_list_of_suites(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["rank", command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--suite" in printed
    assert "--empty" not in printed


def test_a_method_whose_file_was_edited_is_entered_again_with_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real function that carries runs out, which refuses the runs of other code."""

    def here(runs: Sequence[Variant], *_: object, overwrite: bool, **__: object) -> list[Outcome]:
        clear_other_runs(runs, overwrite)
        return tiny_ranking.do(runs)

    monkeypatch.setattr(comparison, "followed_outcomes", here)
    (tmp_path / "mine.py").write_text(MINE)
    enter = ["rank", "enter", "mine.py", "--out", "out"]
    assert call(enter) == 0
    (tmp_path / "mine.py").write_text(MINE + "\n# edited\n")
    assert call(enter) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert call([*enter, "--overwrite"]) == 0
    entry = read_entry(tmp_path / "out" / "entries" / "digits-space" / "mine")
    assert "# edited" in (entry.folder / "mine.py").read_text()
    assert call(["rank", "page", "out/entries", "--no-shipped", "--out", "page"]) == 0
    page = html.unescape((tmp_path / "page" / "index.html").read_text())
    assert '[method]\nname = "mine.py"\n' in page, "to copy"
    for command in ("run", "choose", "map"):
        assert call(["rank", command, "--help"]) == 0
        assert "--overwrite" in capsys.readouterr().out


def test_a_suite_of_ones_own_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its paths are relative to its folder, and commands name its file and the folder of runs."""
    monkeypatch.setattr(suites, "shipped_choices", lambda *_: {})
    monkeypatch.setattr(suites, "_suites_from_files", {})
    folder = tmp_path / "my suites"
    folder.mkdir()
    data = 'name = "digits"'
    assert data in tiny_ranking.TINY
    text = tiny_ranking.TINY.replace(data, 'name = "few.py:few"')
    (folder / "clinics.toml").write_text(text)
    (folder / "few.py").write_text(FEW)
    suite = "my suites/clinics.toml"
    run = ["rank", "run", suite, "--methods", "fedntd", "--out", "my runs"]
    assert call(run) == 2
    advice = capsys.readouterr().err.partition("run fedstill ")[2]
    assert call(shlex.split(advice)) == 0, "the advice can be followed"
    assert call(run) == 0
    assert call(["rank", "check", "my runs/entries", "--suite", suite, "--replay", "1"]) == 0
    grid = ["--grid", "topology.sampled=1,2"]
    assert call(["rank", "map", "fedntd", "--tier", suite, "--out", "my runs", *grid]) == 0
    assert (tmp_path / "my runs" / "map-clinics" / "fedntd" / "index.html").is_file()


def test_a_suite_of_ones_own_from_choosing_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file and the commands that the page on entering shows."""
    monkeypatch.setattr(suites, "shipped_choices", lambda *_: {})
    monkeypatch.setattr(suites, "_suites_from_files", {})
    page_text = (DOCS / "enter_the_ranking.md").read_text()
    _, _, from_the_file_on = page_text.partition('```toml title="clinics.toml"\n')
    suite_file, _, commands, *_ = from_the_file_on.split("```")
    data = 'data = { name = "digits", train_size = 200, test_size = 100 }'
    own_data = 'data = { name = "mine.py:few", train_size = 200, test_size = 100 }'
    assert data in suite_file
    (tmp_path / "clinics.toml").write_text(suite_file.replace(data, own_data))
    (tmp_path / "mine.py").write_text(FEW)

    printed = {}
    for line in commands.strip().splitlines():
        program, *words = line.split()
        assert program == "fedstill"
        assert call(words) == 0
        printed[words[1]] = capsys.readouterr().out

    assert list(printed) == ["choose", "run", "check", "page"]
    assert "Clinics, two splits" in printed["run"]
    assert printed["check"].count("replayed here: bits") == 3
    assert (tmp_path / "clinics" / "clinics" / "chosen.toml").is_file()
    page = (tmp_path / "clinics" / "page" / "index.html").read_text()
    assert "clinics: Clinics, two splits" in page
    assert "map ships" not in page
    monkeypatch.setattr(suites, "_suites_from_files", {})
    assert call(["rank", "check", "clinics/entries/clinics"]) != 0
    elsewhere = tmp_path / "elsewhere"
    for part in ("mine.py", "clinics.toml", "clinics/entries"):
        (elsewhere / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).rename(elsewhere / part)
    monkeypatch.chdir(elsewhere)
    check = ["rank", "check", "clinics/entries/clinics", "--suite", "clinics.toml"]
    assert call(check) == 0, capsys.readouterr().out
    configs = [path.read_text() for path in (elsewhere / "clinics").rglob("config.toml")]
    assert configs
    assert not any(str(tmp_path) in text for text in configs)
