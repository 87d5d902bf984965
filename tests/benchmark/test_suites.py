"""The suites that ship: all their runs can be resolved, and their draws are frozen."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_ranking
from fedstill.benchmark import suites
from fedstill.benchmark.competing import choose_fields, with_stored_choices
from fedstill.benchmark.suites import MAX_TRIES, TIE, Choice, Suite, load_suite, suite_names
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.running.compare import Variant
from fedstill.running.preparation import prepare
from fedstill.running.split_file import StoredSplit, write_split

DRAWN = Path(__file__).parent / "drawn.json"
"""What seeds 0 and 4 of the digits tier draw in each column: a change of it means a new version of
the suite.
"""


@pytest.mark.parametrize("name", suite_names())
def test_every_row_of_a_suite_can_be_run_and_tried(name: str) -> None:
    suite = load_suite(name)
    assert suite.choosing_column in suite.recipe.columns
    assert {suite.baseline, suite.floor} <= set(suite.ranked_rows)
    bounds = set(suite.recipe.rows) - set(suite.ranked_rows)
    assert set(suite.ceilings) == {row for row in bounds if row.startswith("joint")}
    assert all(row.startswith(("joint", "past kept")) for row in bounds)
    for row in suite.recipe.rows:
        cells = [(row, column) for column in suite.columns_of(row)]
        for run in suite.recipe.variants(cells, (0,), {}, Path("runs")):
            assert run.settings.threads == (1, 1)
            assert run.settings.precision == "fp32"
        for changes in suite.tries.get(row, ()):
            suite.recipe.variants(cells, (0,), changes, Path("runs"))


@pytest.mark.parametrize("name", suite_names())
def test_every_method_has_as_many_tries_and_the_first_is_the_suites_own(name: str) -> None:
    suite = load_suite(name)
    for row, tries in suite.tries.items():
        assert len(tries) == MAX_TRIES, row
        assert tries[0] == {}, row
        different = {json.dumps(changes, sort_keys=True) for changes in tries}
        assert len(different) == MAX_TRIES, row


@pytest.mark.parametrize("name", suite_names())
def test_a_try_is_tested_on_training_images_and_nothing_else_of_it_differs(name: str) -> None:
    suite = load_suite(name)
    if suite.rate_row:
        first_is_best = Choice(((0.5,),) * MAX_TRIES, (1,) * MAX_TRIES)
        suite = replace(suite, choices={suite.rate_row: first_is_best, **suite.choices})
    row = suite.ranked_rows[-1]
    choosing_suite = suite.choosing_suite
    cell = (row, choosing_suite.choosing_column)
    trials = suite.trials(row, Path("runs"))
    for changes, runs in zip(suite.tries_of(row), trials, strict=True):
        assert [run.seed for run in runs] == [100, 101, 102]
        assert {run.settings.data.test_from for run in runs} == {"held_out"}
        (plain,) = choosing_suite.recipe.variants([cell], (100,), changes, Path("runs"))
        assert plain.settings.named == runs[0].settings.named, changes
        assert plain.settings.plans == runs[0].settings.plans


def test_a_try_has_the_learning_rate_that_the_reference_chose_unless_it_sets_one() -> None:
    tries = {"A": [{}, {"plan.lr": 0.1}], "B": [{}, {"method.beta": 3.0}, {"plan.lr": 0.2}]}
    suite = replace(load_suite("digits-space"), tries=tries, rate_row="A", choices={})
    with pytest.raises(ConfigError, match="for A"):
        suite.tries_of("B")
    assert suite.tries_of("A") == tries["A"]

    first_is_best = Choice(((2.0,), (1.0,)), (1, 1))
    of_first = replace(suite, choices={"A": first_is_best})
    assert of_first.tries_of("B") == tries["B"], "the suite's own"

    second_is_best = Choice(((1.0,), (2.0,)), (1, 1))
    of_second = replace(suite, choices={"A": second_is_best})
    expected = [{"plan.lr": 0.1}, {"plan.lr": 0.1, "method.beta": 3.0}, {"plan.lr": 0.2}]
    assert of_second.tries_of("B") == expected
    assert replace(of_second, rate_row="").tries_of("B") == tries["B"]

    second_of_three = Choice(((1.0,), (2.0,), (1.0,)), (1, 1, 1))
    chosen = replace(of_second, choices={"A": second_is_best, "B": second_of_three})
    assert chosen.chosen_fields("B") == expected[1]


def test_both_takes_what_time_chose() -> None:
    assert load_suite("digits-both").choices == load_suite("digits-time").choices
    assert load_suite("digits-both").tries == load_suite("digits-time").tries


@pytest.mark.parametrize("tier", suites.TIERS)
def test_a_newcomer_in_both_is_tried_in_time_as_the_rows_that_ship_were(tier: str) -> None:
    """Its runs are in both, where clients differ; its trials in time, where they are alike."""
    tries = [{}, {"mu": 0.5}]
    suite = load_suite(f"{tier}-both").with_row("mine", "fedprox", tries)
    time = load_suite(f"{tier}-time").with_row("mine", "fedprox", tries)

    trial_configs = configs_of_trials(suite, "mine")
    assert trial_configs == configs_of_trials(time, "mine")
    assert len(trial_configs) == 2 * 3
    assert all('kind = "iid"' in config for config in trial_configs)

    second_is_best = Choice(((0.1,), (0.2,)), (1, 1))
    chosen = replace(suite, choices={**suite.choices, "mine": second_is_best})
    for run in chosen.runs("mine", Path()):
        assert "alpha = 0.5" in run.settings.toml
        assert "mu = 0.5" in run.settings.toml
    command = f"fedstill rank choose {tier} --track time"
    assert suite.choose_command == time.choose_command == command


def configs_of_trials(suite: Suite, row: str) -> list[str]:
    """The configs of the runs by which a row's fields are chosen."""
    runs = itertools.chain.from_iterable(suite.trials(row, Path()))
    return [run.settings.toml for run in runs]


def test_fields_of_a_suite_that_another_chooses_are_tried_and_kept_in_the_others_folder(
    suite: Suite, tmp_path: Path
) -> None:
    recipe = replace(suite.recipe, columns={"even": suite.recipe.columns["even"]})
    dependent = replace(
        suite, track="both", recipe=recipe, choosing_column="even", choices_from=suite, choices={}
    )

    chosen = choose_fields(dependent, ["FedAvg"], tmp_path, tiny_ranking.do)

    configs = [path.read_text() for path in tmp_path.rglob("config.toml")]
    assert len(configs) == 2 * 3
    on_the_other_column = ["alpha = 1.0" in config for config in configs]
    assert all(on_the_other_column), "the column on which the other suite chooses"
    assert [path.name for path in tmp_path.iterdir()] == [suite.name]
    for reader in (dependent, replace(suite, choices={})):
        assert with_stored_choices(reader, tmp_path).choices == chosen.choices


def test_a_suite_whose_tries_are_not_those_of_the_one_that_chooses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped_text = suites.recipe_text

    def changed_text(name: str) -> str:
        text = shipped_text(name)
        if name == "rank/digits-both":
            return text.replace("{ mu = 1.0 }", "{ mu = 9.0 }")
        return text

    monkeypatch.setattr(suites, "recipe_text", changed_text)
    with pytest.raises(ConfigError, match=r"FedProx .*digits-time"):
        load_suite("digits-both")


def draws_of_run(run: Variant, folder: Path) -> dict[str, object]:
    """The split, the tasks and the clients of three rounds of a run."""
    ready = prepare(run.settings)
    split = StoredSplit.of_sites(ready.sites, ready.world.client_models)
    assert split is not None
    clients_by_round = []
    for round in range(1, min(3, run.settings.rounds) + 1):
        stages = run.settings.schedule(round, ready.world)
        clients_by_round.append([list(stage.clients) for stage in stages])
    return {
        "split": write_split(folder, split)["sha256"],
        "tasks": [list(classes) for classes in ready.world.stream.by_task],
        "clients": clients_by_round,
    }


def draws_of_digits(folder: Path) -> dict[str, object]:
    """The draws of each column of the digits tier, seeds 0 and 4."""
    draws: dict[str, object] = {}
    for name in suite_names("digits"):
        suite = load_suite(name)
        for column in suite.recipe.columns:
            for run in suite.recipe.variants([(suite.baseline, column)], (0, 4), {}, Path("runs")):
                draws[f"{name}, {column}, seed {run.seed}"] = draws_of_run(run, folder)
    return draws


def test_the_draws_of_the_digits_tier_are_what_they_were(tmp_path: Path) -> None:
    assert json.loads(json.dumps(draws_of_digits(tmp_path))) == json.loads(DRAWN.read_text())


def test_the_best_mean_is_chosen_and_of_equal_ones_the_try_that_sends_less() -> None:
    assert Choice(((0.5, 0.5), (0.6, 0.6), (0.4, 0.4)), (1, 9, 1)).best_try == 1
    assert Choice(((0.6, 0.6), (0.6 - TIE / 2, 0.6 - TIE / 2)), (9, 1)).best_try == 1
    assert Choice(((0.6, 0.6), (0.6 - 2 * TIE, 0.6 - 2 * TIE)), (9, 1)).best_try == 0
    assert Choice(((0.6, 0.6), (0.6, 0.6)), (9, 9)).best_try == 0
    assert Choice(((0.0, 0.0), (0.1, 0.0)), (1, 1)).best_try == 1, "a try that diverged scores 0"


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(UnknownName, match="digits-space"):
        load_suite("digit-space")
    with pytest.raises(UnknownName, match="space"):
        suite_names("digits", "spce")
    suite = load_suite("digits-space")
    assert suite.find_row("fedntd") == suite.find_row("FEDNTD") == "FedNTD"
    assert suite.find_row("fedavg_asd") == "ASD"
    time = load_suite("digits-time")
    words = ["replay", "20", "FedNTD"]
    assert time.find_rows(words) == ["replay, 20", "FedNTD"], "a name may hold a comma"
    assert time.find_rows(["fedavg", "replay"]) == ["FedAvg", "replay"]
    with pytest.raises(UnknownName, match="FedNTD"):
        suite.find_row("fedntdd")


@pytest.mark.parametrize(
    ("tries", "message"),
    [
        ([{"plan.epochs": 9}], "not 'plan.epochs'"),
        ([{"name": "fedavg"}], "not 'name'"),
        ([{}] * 6, "6 tries; every method has 1 to 5"),
        ([], "0 tries"),
    ],
)
def test_a_newcomer_may_try_its_own_fields_and_the_two_free_keys_only(
    tries: list[dict[str, object]], message: str
) -> None:
    suite = load_suite("digits-space")
    with pytest.raises(ConfigError, match=message):
        suite.with_row("mine", "fedavg", tries)
    with pytest.raises(ConfigError, match="'FedAvg'"):
        suite.with_row("FedAvg", "fedavg", [{}])
    assert suite.with_row("mine", "fedprox", [{"mu": 0.5}]).tries["mine"] == [{"method.mu": 0.5}]


def test_a_suite_that_names_a_row_or_key_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped_text = suites.recipe_text("rank/digits-space")
    for line, wrong_line, message in (
        ('against = "FedAvg"', 'against = "FedAvgg"', "'FedAvgg'"),
        ('rate = "FedAvg"', 'rate = "FedAvgg"', "'FedAvgg'"),
        ('rate = "FedAvg"', 'lr = "FedAvg"', "column and rounds"),
    ):
        text = shipped_text.replace(line, wrong_line)
        assert text != shipped_text
        monkeypatch.setattr(suites, "recipe_text", lambda name, text=text: text)
        with pytest.raises(ConfigError, match=message):
            load_suite("digits-space")


@pytest.mark.parametrize(
    ("line", "new_lines", "message"),
    [
        (
            "[rows]\n",
            '"Uneven" = { partition = { kind = "iid" } }\n[rows]\n',
            "columns 'uneven' and 'Uneven'",
        ),
        (
            "[tries]\n",
            '"fed ntd" = { method = "fedntd" }\n"fed/ntd" = { method = "fedntd" }\n[tries]\n',
            "the rows 'fed",
        ),
        (
            "[tries]\n",
            '"fed ntd" = { method = "fedntd" }\n"fed_ntd" = { method = "fedntd" }\n[tries]\n',
            "'fed_ntd' in 'uneven' share a folder",
        ),
    ],
)
def test_two_rows_or_columns_that_would_have_one_folder_are_refused(
    line: str, new_lines: str, message: str, tmp_path: Path
) -> None:
    """An entry keeps the runs of a column in the folder of its name, in small letters and without
    blanks; the folder of a cell's runs has underscores for blanks.
    """
    path = tmp_path / "clinics.toml"
    path.write_text(tiny_ranking.TINY.replace(line, new_lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        suites.read_suite(path)


@pytest.mark.parametrize(
    ("line", "wrong_line", "key"),
    [
        (', ceiling = ["joint"] }', " }", "bounds.ceiling"),
        ('ceiling = ["joint"]', 'ceiling = "joint"', "bounds.ceiling"),
        ('choosing = { column = "uneven", rounds = 1 }', 'choosing = "uneven"', "choosing"),
        ("rounds = 1 }", 'rounds = "1" }', "choosing.rounds"),
        ("version = 1", 'version = "1"', "version"),
        ("version = 1\n", "", "version"),
        ("version = 1", "version = 1\nverison = 1", "verison"),
        ('"FedAvg" = { method = "fedavg" }', '"FedAvg" = "fedavg"', "rows.FedAvg"),
        ('"FedAvg" = { method = "fedavg" }', '"FedAvg" = {}', "row 'FedAvg'"),
        ('"even" = { partition = { kind = "iid" } }', '"even" = "iid"', "columns.even"),
        ("[{}, { beta = 3.0 }]", '["beta"]', "tries.FedNTD.0"),
    ],
)
def test_a_missing_or_wrong_value_of_a_suites_file_is_an_error_that_names_its_key(
    line: str, wrong_line: str, key: str, tmp_path: Path
) -> None:
    assert line in tiny_ranking.TINY
    path = tmp_path / "clinics.toml"
    path.write_text(tiny_ranking.TINY.replace(line, wrong_line), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^suite clinics[,:] {key}"):
        suites.read_suite(path)


@pytest.mark.parametrize(("file", "row"), [("clinics", "Gäp"), ("klinik-ä", "FedNTD")])
def test_names_that_tables_cannot_show_are_refused_before_any_run(
    file: str, row: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{file}.toml"
    path.write_text(tiny_ranking.TINY.replace('"FedNTD"', f'"{row}"'), encoding="utf-8")
    with pytest.raises(ConfigError, match="ä"):
        suites.read_suite(path)


def test_a_ranked_row_that_lacks_a_column_is_refused_and_a_bound_may_lack_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "_suites_from_files", {})
    path = tmp_path / "clinics.toml"
    fedntd = '"FedNTD" = { method = { name = "fedntd", beta = 1.0 }'
    joint = '"joint" = { method = "fedavg"'
    assert fedntd in tiny_ranking.TINY
    assert joint in tiny_ranking.TINY
    only = ', only = ["uneven"]'
    path.write_text(tiny_ranking.TINY.replace(joint, joint + only), encoding="utf-8")
    assert suites.read_suite(path).columns_of("joint") == ["uneven"]
    path.write_text(tiny_ranking.TINY.replace(fedntd, fedntd + only), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"FedNTD.*even"):
        suites.read_suite(path)
