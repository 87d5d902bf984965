"""The suites that ship: they are whole, every run of them can be resolved, and their draws are
frozen.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_ranking
from fedstill.benchmark import suites
from fedstill.benchmark.competing import choose_fields, with_stored_choices
from fedstill.benchmark.suites import MAX_TRIES, TIE, Choice, Suite, load_suite, suite_names
from fedstill.core.errors import ConfigError, UnknownName
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
        runs = suite.recipe.variants(cells, (0,), {}, Path("runs"))
        assert all(
            run.settings.threads == (1, 1) and run.settings.precision == "fp32" for run in runs
        )
        for one in suite.tries.get(row, ()):
            suite.recipe.variants(cells, (0,), one, Path("runs"))


@pytest.mark.parametrize("name", suite_names())
def test_every_method_has_as_many_tries_and_the_first_is_the_suites_own(name: str) -> None:
    suite = load_suite(name)
    assert {len(own) for own in suite.tries.values()} == {MAX_TRIES}
    for row, own in suite.tries.items():
        assert own[0] == {}, row
        assert len({json.dumps(one, sort_keys=True) for one in own}) == MAX_TRIES, row


@pytest.mark.parametrize("name", suite_names())
def test_a_try_is_tested_on_training_images_and_nothing_else_of_it_differs(name: str) -> None:
    suite = load_suite(name)
    first = (
        {suite.rate_row: Choice(((0.5,),) * MAX_TRIES, (1,) * MAX_TRIES)} if suite.rate_row else {}
    )
    suite = replace(suite, choices={**first, **suite.choices})
    row, there = suite.ranked_rows[-1], suite.choosing_suite
    for number, (one, runs) in enumerate(
        zip(suite.tries_of(row), suite.trials(row, Path("runs")), strict=True)
    ):
        assert [run.seed for run in runs] == [100, 101, 102]
        assert {run.settings.data.test_from for run in runs} == {"held_out"}
        (plain,) = there.recipe.variants([(row, there.choosing_column)], (100,), one, Path("runs"))
        assert plain.settings.named == runs[0].settings.named, number
        assert plain.settings.plans == runs[0].settings.plans


def test_a_try_has_the_learning_rate_that_the_reference_chose_unless_it_sets_one() -> None:
    tries = {"A": [{}, {"plan.lr": 0.1}], "B": [{}, {"method.beta": 3.0}, {"plan.lr": 0.2}]}
    suite = replace(load_suite("digits-space"), tries=tries, rate_row="A", choices={})
    with pytest.raises(ConfigError, match="for A"):
        suite.tries_of("B")
    assert suite.tries_of("A") == tries["A"]
    slow, fast = (
        replace(suite, choices={"A": Choice(scores, (1, 1))})
        for scores in (((2.0,), (1.0,)), ((1.0,), (2.0,)))
    )
    assert slow.tries_of("B") == tries["B"], "the suite's own"
    wanted = [{"plan.lr": 0.1}, {"plan.lr": 0.1, "method.beta": 3.0}, {"plan.lr": 0.2}]
    assert fast.tries_of("B") == wanted
    assert (
        replace(
            fast, choices={**fast.choices, "B": Choice(((1.0,), (2.0,), (1.0,)), (1, 1, 1))}
        ).chosen_fields("B")
        == wanted[1]
    )
    assert replace(fast, rate_row="").tries_of("B") == tries["B"]


def test_both_takes_what_time_chose() -> None:
    assert load_suite("digits-both").choices == load_suite("digits-time").choices
    assert load_suite("digits-both").tries == load_suite("digits-time").tries


@pytest.mark.parametrize("tier", suites.TIERS)
def test_a_newcomer_in_both_is_tried_in_time_as_the_rows_that_ship_were(tier: str) -> None:
    """Its runs are in both, where clients differ; its trials in time, where they are alike."""
    both, time = (
        load_suite(f"{tier}-{t}").with_row("mine", "fedprox", [{}, {"mu": 0.5}])
        for t in ("both", "time")
    )
    tried, there = (
        [run.settings.toml for runs in s.trials("mine", Path()) for run in runs]
        for s in (both, time)
    )
    assert tried == there
    assert len(tried) == 2 * 3
    assert all('kind = "iid"' in text for text in tried)
    chosen = replace(both, choices={**both.choices, "mine": Choice(((0.1,), (0.2,)), (1, 1))})
    assert all(
        "alpha = 0.5" in run.settings.toml and "mu = 0.5" in run.settings.toml
        for run in chosen.runs("mine", Path())
    )
    assert both.choose_command == time.choose_command == f"fedstill rank choose {tier} --track time"


def test_fields_of_a_suite_that_another_chooses_are_tried_and_kept_in_the_others_folder(
    suite: Suite, tmp_path: Path
) -> None:
    recipe = replace(suite.recipe, columns={"even": suite.recipe.columns["even"]})
    both = replace(
        suite, track="both", recipe=recipe, choosing_column="even", choices_from=suite, choices={}
    )
    chosen = choose_fields(both, ["FedAvg"], tmp_path, tiny_ranking.do)
    configs = [path.read_text() for path in tmp_path.rglob("config.toml")]
    assert len(configs) == 2 * 3
    assert all("alpha = 1.0" in text for text in configs), (
        "the column on which the other suite chooses"
    )
    assert [path.name for path in tmp_path.iterdir()] == [suite.name]
    for one in (both, replace(suite, choices={})):
        assert with_stored_choices(one, tmp_path).choices == chosen.choices


def test_a_suite_whose_tries_are_not_those_of_the_one_that_chooses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = suites.recipe_text
    text = whole("rank/digits-both").replace("{ mu = 1.0 }", "{ mu = 9.0 }")
    monkeypatch.setattr(
        suites, "recipe_text", lambda name: text if name == "rank/digits-both" else whole(name)
    )
    with pytest.raises(
        ConfigError,
        match=r"FedProx .*digits-time",
    ):
        load_suite("digits-both")


def drawn_here(folder: Path) -> dict[str, object]:
    """The split, the tasks and the clients of three rounds of each column of the digits tier, seeds
    0 and 4.
    """
    out: dict[str, object] = {}
    for name in suite_names("digits"):
        suite = load_suite(name)
        for column in suite.recipe.columns:
            for run in suite.recipe.variants([(suite.baseline, column)], (0, 4), {}, Path("runs")):
                ready = prepare(run.settings)
                split = StoredSplit.of_sites(ready.sites, ready.world.client_models)
                assert split is not None
                rounds = range(1, min(3, run.settings.rounds) + 1)
                stages = [
                    [list(s.clients) for s in run.settings.schedule(r, ready.world)] for r in rounds
                ]
                out[f"{name}, {column}, seed {run.seed}"] = {
                    "split": write_split(folder, split)["sha256"],
                    "tasks": [list(own) for own in ready.world.stream.by_task],
                    "clients": stages,
                }
    return out


def test_the_draws_of_the_digits_tier_are_what_they_were(tmp_path: Path) -> None:
    assert json.loads(json.dumps(drawn_here(tmp_path))) == json.loads(DRAWN.read_text())


def test_the_best_mean_is_chosen_and_of_those_alike_the_one_that_sends_less() -> None:
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
    assert time.find_rows(["replay", "20", "FedNTD"]) == ["replay, 20", "FedNTD"], (
        "a name may hold a comma"
    )
    assert time.find_rows(["fedavg", "replay"]) == ["FedAvg", "replay"]
    with pytest.raises(UnknownName, match="FedNTD"):
        suite.find_row("fedntdd")


@pytest.mark.parametrize(
    ("tries", "said"),
    [
        ([{"plan.epochs": 9}], "not 'plan.epochs'"),
        ([{"name": "fedavg"}], "not 'name'"),
        ([{}] * 6, "6 tries; every method has 1 to 5"),
        ([], "0 tries"),
    ],
)
def test_a_newcomer_may_try_its_own_fields_and_the_two_free_keys_only(
    tries: list[dict[str, object]], said: str
) -> None:
    suite = load_suite("digits-space")
    with pytest.raises(ConfigError, match=said):
        suite.with_row("mine", "fedavg", tries)
    with pytest.raises(ConfigError, match="'FedAvg'"):
        suite.with_row("FedAvg", "fedavg", [{}])
    assert suite.with_row("mine", "fedprox", [{"mu": 0.5}]).tries["mine"] == [{"method.mu": 0.5}]


def test_a_suite_that_says_something_of_a_row_it_has_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = suites.recipe_text("rank/digits-space")
    for key, wrong, said in (
        ('against = "FedAvg"', 'against = "FedAvgg"', "'FedAvgg'"),
        ('rate = "FedAvg"', 'rate = "FedAvgg"', "'FedAvgg'"),
        ('rate = "FedAvg"', 'lr = "FedAvg"', "column and rounds"),
    ):
        text = whole.replace(key, wrong)
        assert text != whole
        monkeypatch.setattr(suites, "recipe_text", lambda name, text=text: text)
        with pytest.raises(ConfigError, match=said):
            load_suite("digits-space")


@pytest.mark.parametrize(
    ("line", "more", "said"),
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
    ],
)
def test_two_rows_or_columns_that_would_have_one_folder_are_refused(
    line: str, more: str, said: str, tmp_path: Path
) -> None:
    """An entry keeps the runs of a column in the folder of its name, in small letters and without
    blanks.
    """
    (tmp_path / "clinics.toml").write_text(tiny_ranking.TINY.replace(line, more), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        suites.read_suite(tmp_path / "clinics.toml")


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
