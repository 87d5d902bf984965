"""A search for good values is determined by its seed, can be resumed, and advises the seeds to
report.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment, load
from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.report.setting_effects import advice, trial_table
from fedstill.running.compare import Outcome, Variant
from fedstill.running.tuning import Dimension, Tuning, parse_space

pytest.importorskip("optuna")

SPACE = ["method.beta=0.1..10:log", "plan.epochs=1..5", "model=mlp,logistic"]
COMMON = Experiment(method="fedntd", seed=7, rounds=1)


def beta_of(run: Variant) -> float:
    """The field ``beta`` of a run's method."""
    return float(run.settings.tree["method"]["beta"])


def pretend(runs: Sequence[Variant]) -> Sequence[Outcome]:
    """Runs whose goal is best at beta = 1; seeds differ a little, and large values diverge."""
    outcomes = []
    for run in runs:
        outcome = Outcome(run, 1, state="finished")
        if beta_of(run) > 5:
            outcome.state = "failed"
            outcome.problem = "parameters diverged"
        else:
            run.folder.mkdir(parents=True, exist_ok=True)
            distance_from_best = abs(math.log(beta_of(run)))
            score = 1 - distance_from_best / 10 + run.seed / 1e5
            summary = {"mean_accuracy_last_10": score, "forgetting": 1 - score, "accuracy": None}
            (run.folder / "summary.json").write_text(json.dumps(summary))
        outcomes.append(outcome)
    return outcomes


def succeed(runs: Sequence[Variant]) -> Sequence[Outcome]:
    """Runs of which none fails."""
    for run in runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        summary = {"mean_accuracy_last_10": 0.5 + run.settings.plans["train"].epochs / 100}
        (run.folder / "summary.json").write_text(json.dumps(summary))
    return [Outcome(run, 1, state="finished") for run in runs]


def values_of(tuning: Tuning, trials: int) -> list[Mapping[str, Any]]:
    """The values of a search's trials."""
    return [trial.values for trial in tuning.run(trials)]


def search(out: Path, trials: int, goal: str = "", stop_at: int = 10**9) -> Tuning:
    """A search that is stopped at a trial, or ends after some trials."""

    def do(runs: Sequence[Variant]) -> Sequence[Outcome]:
        trial = int(runs[0].folder.parent.name.removeprefix("trial"))
        if trial >= stop_at:
            return [Outcome(run, 1, state="stopped") for run in runs]
        return pretend(runs)

    tuning = Tuning(COMMON, parse_space(SPACE), (100, 101), out, do=do, goal=goal)
    for _ in tuning.run(trials):
        pass
    return tuning


def succeeding(out: Path, goal: str, experiment: Experiment = COMMON) -> Tuning:
    """A search for a goal, in which no run fails."""
    return Tuning(experiment, parse_space(SPACE), (1,), out, do=succeed, goal=goal)


def test_a_space_has_ends_scale_and_choices() -> None:
    assert parse_space(SPACE) == [
        Dimension("method.beta", 0.1, 10.0, log=True),
        Dimension("plan.epochs", 1, 5, is_whole=True),
        Dimension("model", choices=("mlp", "logistic")),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method.beta", "not of the form KEY=LOW..HIGH"),
        ("method.beta=", "not of the form KEY=LOW..HIGH"),
        ("method.beta=10..1", "the first end must be below the second"),
        ("method.beta=0..1:log", "above 0 with :log"),
        ("method.beta=0.1..1:linear", "the only scale"),
        ("method.beta=low..high", "'low' and 'high' must be numbers"),
        ("method.beta=0.1..inf", "must be finite numbers"),
        ("method.beta=0.1..1e400:log", "must be finite numbers"),
    ],
)
def test_a_faulty_space_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_space([text])
    with pytest.raises(ConfigError, match="twice"):
        parse_space(["a=1..2", "a=2..3"])


@pytest.mark.parametrize(
    ("low", "high"), [(0.9991, 0.9999), (0.12345, 0.12346), (1234.5, 1235.5), (-0.9999, -0.9991)]
)
def test_a_proposal_is_in_a_narrow_range(low: float, high: float, tmp_path: Path) -> None:
    (dimension,) = parse_space([f"method.beta={low}..{high}"])
    study = Tuning(COMMON, [dimension], (1,), tmp_path, succeed).study
    proposals = {dimension.suggested(study.ask()) for _ in range(10)}
    assert len(proposals) > 5
    assert all(low <= proposal <= high for proposal in proposals)


def test_a_proposal_has_three_digits_if_the_range_allows_it(tmp_path: Path) -> None:
    (dimension,) = parse_space(["method.beta=0.1..10"])
    study = Tuning(COMMON, [dimension], (1,), tmp_path, succeed).study
    for _ in range(10):
        proposal = dimension.suggested(study.ask())
        assert proposal == float(f"{proposal:.3g}")


def test_a_stopped_search_is_resumed_with_the_same_trials(tmp_path: Path) -> None:
    uninterrupted = search(tmp_path / "whole", 14)
    assert len(uninterrupted.trials) == 14
    assert len(search(tmp_path / "other", 14, stop_at=4).trials) == 4

    resumed = search(tmp_path / "other", 14)
    for trial, expected in zip(resumed.trials, uninterrupted.trials, strict=True):
        assert trial.values == expected.values
        assert trial.scores == expected.scores
        assert trial.problem == expected.problem
        assert list(trial.values) == ["method.beta", "plan.epochs", "model"]


def test_a_search_is_continued_if_failed_trials_succeed(tmp_path: Path) -> None:
    """As after a repeat with more memory: the folders of the trials hold runs with their values."""
    failing = search(tmp_path, 14)
    assert any(t.problem for t in failing.trials)

    repeated = Tuning(COMMON, parse_space(SPACE), (100, 101), tmp_path, succeed)
    values = values_of(repeated, 17)
    assert values[:14] == [t.values for t in failing.trials]

    again = Tuning(COMMON, parse_space(SPACE), (100, 101), tmp_path, succeed)
    assert values_of(again, 17) == values
    assert len(again.study.trials) == 17


def test_another_search_in_the_folder_is_replaced_on_request(tmp_path: Path) -> None:
    space = parse_space(["plan.epochs=1..5"])
    first = values_of(Tuning(COMMON, space, (100,), tmp_path, succeed), 3)
    wider = parse_space(["plan.epochs=6..9"])

    with pytest.raises(RunExists, match="--overwrite"):
        next(Tuning(COMMON, wider, (100,), tmp_path, succeed).run(3))
    assert values_of(Tuning(COMMON, space, (100,), tmp_path, succeed), 3) == first

    replaced = Tuning(COMMON, wider, (100,), tmp_path, succeed, overwrite=True)
    values = values_of(replaced, 3)
    assert all(6 <= trial["plan.epochs"] <= 9 for trial in values)
    assert values_of(Tuning(COMMON, wider, (100,), tmp_path, succeed), 3) == values


def test_a_space_may_be_corrected_before_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epochs"):
        values_of(Tuning(COMMON, parse_space(["plan.epochs=-2,-1"]), (1,), tmp_path, succeed), 1)
    corrected = Tuning(COMMON, parse_space(["plan.epochs=1,2"]), (1,), tmp_path, succeed)
    assert len(values_of(corrected, 1)) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"search": {}, "proposals": [1]}'])
def test_a_file_that_is_no_search_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(text)
    with pytest.raises(CorruptFile, match="--out"):
        search(tmp_path, 1)
    assert (tmp_path / "trials.json").read_text() == text


def test_the_sampler_has_the_seed_of_the_config(tmp_path: Path) -> None:
    space = parse_space(["plan.epochs=1..1000"])
    values = {}
    for name, overrides in (("typed", ("seed=5",)), ("again", ("seed=5",)), ("other", ())):
        experiment = load(None, overrides)
        tuning = Tuning(experiment, space, (100, 101), tmp_path / name, succeed)
        values[name] = values_of(tuning, 4)
        assert [run.seed for run in tuning.runs(0, values[name][0])] == [100, 101]
        _, command = advice(tuning, "", overrides).splitlines()
        assert "seed=" not in command, "compare would refuse it beside --seeds"

    assert values["typed"] == values["again"]
    assert values["typed"] != values["other"]
    with pytest.raises(ConfigError, match="seed"):
        Tuning(load(None, ("seed=five",)), space, (100,), tmp_path / "no", succeed)


@pytest.mark.parametrize(
    ("overrides", "space"),
    [
        (("select_on=held_out",), "plan.epochs=1,2"),
        (("stop.patience=2",), "plan.epochs=1,2"),
        ((), "stop.patience=2,3"),
    ],
)
def test_the_score_of_the_best_round_may_be_the_goal(
    overrides: tuple[str, ...], space: str, tmp_path: Path
) -> None:
    tuning = Tuning(
        load(None, overrides),
        parse_space([space]),
        seeds=(1,),
        out=tmp_path,
        do=succeed,
        goal="best_round_score",
    )

    assert tuning.goal == "best_round_score"


def test_the_score_of_the_best_round_needs_a_selection(tmp_path: Path) -> None:
    """The goal is refused before the first trial."""
    with pytest.raises(ConfigError, match="select_on"):
        succeeding(tmp_path, "best_round_score")


def test_a_metric_on_the_command_line_may_be_the_goal(tmp_path: Path) -> None:
    tuning = succeeding(tmp_path, "best_auc", load(None, ("metrics=auc",)))
    assert tuning.metric == "auc"


def test_blanks_around_the_parts_of_a_range_do_not_matter() -> None:
    (dimension,) = parse_space(["method.beta = 0.1 .. 10 : log"])
    assert dimension == Dimension("method.beta", low=0.1, high=10.0, log=True)


def test_an_unknown_goal_is_refused_with_the_goals_that_the_runs_may_have(tmp_path: Path) -> None:
    """The number of a measure is none: nothing says whether more of it is better."""
    experiment = replace(COMMON, metrics=("f1",))
    with pytest.raises(ConfigError, match=r"accuracy.*best_f1") as caught:
        succeeding(tmp_path, "movement.py/norm", experiment)
    assert "best_auc" not in str(caught.value)
    assert "best_round_score" not in str(caught.value)


def test_a_trial_that_fails_is_last_and_its_reason_is_shown(tmp_path: Path) -> None:
    tuning = search(tmp_path, 14)
    assert any(t.problem for t in tuning.trials), "some betas are above 5"

    ranked = tuning.ranked()
    means = [t.mean for t in ranked if t.scores]
    assert means == sorted(means, reverse=True)

    has_failed = [bool(t.problem) for t in ranked]
    assert has_failed == sorted(has_failed)
    assert trial_table(tuning).lines[-1][-1] == "parameters diverged"


def test_less_forgetting_is_better(tmp_path: Path) -> None:
    tuning = search(tmp_path, 8, goal="forgetting")
    means = [t.mean for t in tuning.ranked() if t.scores]
    assert means == sorted(means)
    with pytest.raises(ConfigError, match="'acc'"):
        search(tmp_path / "no", 1, goal="acc")
    with pytest.raises(ConfigError, match="mean_accuracy_last_10, forgetting"):
        search(tmp_path / "none", 1, goal="accuracy")


def test_values_are_reported_on_seeds_that_did_not_choose_them(tmp_path: Path) -> None:
    tuning = Tuning(COMMON, parse_space(SPACE[:1]), (1, 2, 100), tmp_path, pretend)
    for _ in tuning.run(3):
        pass
    best = tuning.ranked()[0]
    advised = advice(tuning, "my.toml", ("rounds=5",))

    assert (
        f"fedstill compare my.toml -s rounds=5 -s method.beta={best.values['method.beta']}"
        in advised
    )
    assert advised.endswith("--seeds 3,4,5,6,7")


def test_the_advised_command_quotes_values_for_a_shell(tmp_path: Path) -> None:
    tuning = Tuning(COMMON, parse_space(SPACE[:1]), (1, 2), tmp_path, pretend)
    next(iter(tuning.run(1)))
    advised = advice(tuning, "my runs.toml", ("data='my data'",))
    words = shlex.split(advised.splitlines()[-1])
    assert words[:5] == ["fedstill", "compare", "my runs.toml", "-s", "data='my data'"]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "small.toml").write_text(toys.SMALL)
    options = ["--space", "method.beta=0.1..10:log", "--seeds", "100", "--out", "out", "-q"]
    words = ["tune", "small.toml", *options]

    assert call([*words, "--trials", "1"]) == 0

    began = (tmp_path / "out/trial000/seed100/summary.json").stat().st_mtime_ns
    assert call([*words, "--trials", "2"]) == 0
    assert (tmp_path / "out/trial000/seed100/summary.json").stat().st_mtime_ns == began, (
        "it is not run again"
    )

    lines = capsys.readouterr().out.splitlines()
    assert "is the best of 2" in "\n".join(lines)
    assert "--seeds 1,2,3,4,5" in "\n".join(lines)

    page = (tmp_path / "out/tuning.html").read_text()
    assert page.count('class="chart"') == 2
    assert "Do not report" in page


def test_the_command_continues_a_packed_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(toys.SMALL)
    words = ["tune", "small.toml", "--space", "method.beta=0.5,1.0", "--seeds", "100", "-q"]
    words += ["--trials", "1", "--out", "out"]
    summary = Path("out/trial000/seed100/summary.json")

    assert call(words) == 0
    first = summary.read_bytes()
    assert call(["pack", "out"]) == 0
    shutil.rmtree("out")
    assert call(words) == 0
    assert summary.read_bytes() == first, "it is not run again"


@pytest.mark.parametrize("options", [[], ["--space", "a"], ["--space", "rounds=1,2", "--goal=a"]])
def test_a_wrong_command_leaves_no_folder(options: Sequence[str], tmp_path: Path) -> None:
    assert call(["tune", "--out", str(tmp_path / "out"), *options]) == 2
    assert not (tmp_path / "out").exists()


def test_the_command_replaces_runs_with_other_settings_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(toys.SMALL)
    words = ["tune", "small.toml", "--space", "method.beta=0.5,1.0", "--seeds", "100", "-q"]
    words += ["--trials", "1", "--out", "out"]

    assert call(words) == 0
    assert call([*words, "-s", "rounds=1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert call([*words, "-s", "rounds=1", "--overwrite"]) == 0
    assert json.loads(Path("out/trial000/seed100/summary.json").read_text())["rounds"] == 1


@pytest.mark.parametrize(
    ("overrides", "space", "key"),
    [
        (("method.beta=2.0",), "method.beta=0.1..10", "method.beta"),
        (("plan={epochs=2}",), "plan.epochs=1..5", "plan.epochs"),
        ((), "seed=1,2", "seed"),
        (("seed=3",), "seed=1,2", "seed"),
    ],
)
def test_a_value_that_the_search_sets_too_is_refused(
    overrides: tuple[str, ...], space: str, key: str, tmp_path: Path
) -> None:
    tuning = Tuning(load(None, overrides), parse_space([space]), (100,), tmp_path, pretend)
    with pytest.raises(ConfigError, match=f"{key} is set twice"):
        next(tuning.run(1))


def test_a_field_of_the_command_line_holds_in_every_trial(tmp_path: Path) -> None:
    space = parse_space(["method=fedntd,fedntd_mse"])
    tuning = Tuning(load(None, ("method.beta=2.0",)), space, (100,), tmp_path, pretend)
    for number, method in enumerate(("fedntd", "fedntd_mse")):
        (run,) = tuning.runs(number, {"method": method})
        assert run.settings.named.method.name == method
        assert beta_of(run) == 2.0
