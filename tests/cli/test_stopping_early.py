"""Early stopping and the best round, as the commands show them and as a comparison has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fedstill
from fedstill.cli import call
from fedstill.core.errors import ConfigError, CorruptFile

STOPPING = """
rounds = 30
measure = []
method = "fedavg"
model = "mlp"
[data]
train_size = 300
test_size = 60
[topology]
clients = 6
sampled = 3
[partition]
alpha = 1.0
[plan]
epochs = 1
batch = 10
lr = 0.1
validation = 0.2
[stop]
patience = 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "stopping.toml"
    path.write_text(STOPPING)
    return path


def summary_of(folder: Path) -> dict[str, object]:
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return summary


def test_run_and_resume_say_which_round_is_the_best_and_why_the_run_stopped(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["run", str(config), "--out", "one"], ["resume", "one"]):
        assert call(words) == 0
        screen = capsys.readouterr()
        summary = summary_of(tmp_path / "one")
        assert f"round {summary['stopped_in_round']} of 30" in screen.out
        assert f"{summary['best_round']}, by accuracy on" in screen.out
        assert "held-out data" in screen.out
        assert "stop.patience" in screen.out + screen.err


def test_a_selection_on_the_test_set_is_stated(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "one", "-s", "select_on=test"]) == 0
    assert "on the test set" in capsys.readouterr().out
    assert summary_of(tmp_path / "one")["selected_on"] == "test"
    assert call(["report", "one"]) == 0
    assert "on the test set" in (tmp_path / "one/report.html").read_text()


@pytest.mark.uses("export")
def test_the_model_of_the_best_round_is_exported_with_the_numbers_of_that_round(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "one"]) == 0
    summary = summary_of(tmp_path / "one")
    best = summary["best_round"]
    assert best != summary["stopped_in_round"]
    words = ["export", "one", "--round", "best", "--pt2", "best.pt2", "--folder", "best"]
    assert call(words) == 0
    model = fedstill.load_model("one", round="best")
    noise = model.noise(3)
    program = torch.export.load(tmp_path / "best.pt2").module()
    assert torch.allclose(program(noise), model(noise), atol=1e-5)
    card = (tmp_path / "best/README.md").read_text()
    assert f"after round {best} of 30" in card
    accuracy = summary["best_round_accuracy"]
    assert isinstance(accuracy, float)
    assert f"{100 * accuracy:.1f} %" in card
    assert "trained further" not in card
    assert f"stopped early, in round {summary['stopped_in_round']} of 30" in card

    assert call(["export", "one", "--round", str(best), "--pt2", "same.pt2"]) == 0
    for round in ("1", "last"):
        assert call(["export", "one", "--round", round, "--pt2", "none.pt2"]) != 0
        assert f"{round}" in capsys.readouterr().err
    assert not (tmp_path / "none.pt2").exists()
    assert call(["export", "one", "--round", "best", "--csv", "tables"]) != 0


def test_the_runs_of_a_comparison_stop_each_on_its_own_and_are_finished(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(config), "--methods", "fedavg", "--seeds", "0,1,2", "--out", "all"]
    assert call([*words, "--jobs", "1"]) == 0
    screen = capsys.readouterr()
    folders = [tmp_path / f"all/fedavg/seed{seed}" for seed in (0, 1, 2)]
    rounds = [summary_of(folder)["stopped_in_round"] for folder in folders]
    assert len(set(rounds)) > 1
    assert screen.err.count("stopped early") == 3
    assert "3 of 3 runs stopped early" in screen.out
    assert "unfinished" not in screen.out
    assert "selected round" in screen.out
    selected = fedstill.Comparison.of("all").table()["best_round_accuracy"]
    accuracies = [summary_of(folder)["best_round_accuracy"] for folder in folders]
    assert selected.item() == pytest.approx(sum(accuracies) / 3)  # type: ignore[arg-type]
    runs = fedstill.Comparison.of("all").runs()
    assert runs["finished"].all()
    assert runs["rounds"].tolist() == rounds
    page = (tmp_path / "all/report.html").read_text()
    assert f"{rounds[0]} of 30" in page
    assert page.count("stopped early: accuracy did not improve") >= 3

    journals = [(folder / "journal.jsonl").read_bytes() for folder in folders]
    assert call([*words, "--jobs", "1"]) == 0
    assert [(folder / "journal.jsonl").read_bytes() for folder in folders] == journals


def test_a_stopped_run_with_a_journal_that_lacks_its_end_is_refused(
    config: Path, tmp_path: Path
) -> None:
    assert call(["run", str(config), "--out", "one", "-q"]) == 0
    journal = tmp_path / "one/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    rounds = [number for number, line in enumerate(lines) if '"event":"round"' in line]
    journal.write_text("".join(lines[: rounds[-2] + 1]))
    with pytest.raises(CorruptFile, match="journal"):
        fedstill.resume("one")


@pytest.mark.uses("benchmark")
def test_tune_works_with_runs_that_stop_early(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    words = ["tune", str(config), "--space", "plan.lr=0.05..0.2", "--trials", "2"]
    assert call([*words, "--seeds", "5", "--out", "tuned", "--jobs", "1"]) == 0
    summaries = sorted((tmp_path / "tuned").rglob("summary.json"))
    assert len(summaries) == 2
    assert all("stopped_in_round" in summary_of(summary.parent) for summary in summaries)
    screen = capsys.readouterr().out
    assert "unfinished" not in screen
    assert "best_round_score" in screen
    means = [summary_of(summary.parent)["best_round_score"] for summary in summaries]
    best = max(range(2), key=lambda number: means[number])  # type: ignore[arg-type]
    assert f"trial {best} is the best" in screen


def test_the_number_of_a_round_is_a_whole_one(config: Path, tmp_path: Path) -> None:
    assert call(["run", str(config), "--out", "one", "-q"]) == 0
    with pytest.raises(ConfigError, match="round"):
        fedstill.load_model("one", round=2.5)  # type: ignore[arg-type]


@pytest.mark.uses("attribution")
def test_rounds_that_a_stopped_run_does_not_have_are_not_gone_through_again(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "one", "-q"]) == 0
    last = summary_of(tmp_path / "one")["stopped_in_round"]
    assert isinstance(last, int)
    capsys.readouterr()
    words = ["why", "one", "--without", "0", "--from", str(last - 1), "--rounds", "9", "-q"]
    assert call(words) == 0
    table = capsys.readouterr().out
    rounds = [line.split()[0] for line in table.splitlines() if line[:1].isdigit()]
    assert rounds == [str(last - 1), str(last)]
    assert call(["why", "one", "--without", "0", "--from", str(last + 1), "-q"]) == 2
