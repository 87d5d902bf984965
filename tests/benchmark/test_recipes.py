"""All cells of recipes can be run; a table is run, resumed and printed beside the paper's."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedstill.benchmark import recipes
from fedstill.benchmark.commands import recipe_changes
from fedstill.cli import call
from fedstill.config.settings import Settings
from fedstill.core.errors import UnknownName
from fedstill.core.records import Examples
from fedstill.data.sources.catalog import KNOWN
from fedstill.running import packs
from fedstill.running.splitting import draw_split

RESULTS = Path(__file__).parents[2] / "results"

_drawn: set[str] = set()
"""The splits that are drawn already."""


def overrides(*changes: str) -> list[str]:
    """The words of a command that change settings."""
    words = []
    for change in changes:
        words += ["-s", change]
    return words


def printed_words(capsys: pytest.CaptureFixture[str]) -> str:
    """The printed text, without its line breaks."""
    return " ".join(capsys.readouterr().out.split())


def printed_rows(capsys: pytest.CaptureFixture[str], *starts: str) -> list[list[str]]:
    """The words of each printed line that begins with one of some texts."""
    lines = capsys.readouterr().out.splitlines()
    return [line.split() for line in lines if line.startswith(starts)]


def paired_difference(accuracies: list[float], base: list[float]) -> list[str]:
    """The words of a mean difference with its interval, from SciPy."""
    mean = np.mean(np.subtract(accuracies, base))
    low, high = stats.ttest_rel(accuracies, base).confidence_interval(0.95)
    return [f"{mean:+.1f}", f"{low:+.1f}", "to", f"{high:+.1f}"]


def is_slow_split(settings: Settings, size: int) -> bool:
    """Whether a split is that of ``test_dirichlet_005_is_accepted_at_the_19126th_draw``, which is a
    slow test: one takes 26 CPU seconds.
    """
    partition = settings.named.partition
    slow_values = {"alpha": 0.05, "min_size": 10, "stream": "official", "seed": 19940817}
    return (
        settings.data.name == "cifar10"
        and size == 50_000
        and settings.clients == 100
        and partition.name == "dirichlet"
        and slow_values.items() <= partition.values.items()
        and partition.values["max_tries"] >= 19_126
    )


def check_split(settings: Settings) -> None:
    """Draw the split on as many examples as the data set has, with equally many of each class."""
    data = KNOWN[settings.data.name]
    size = data.sizes.get("train", data.total or 0) - settings.data.public
    key = repr((data.name, size, settings.named.partition, settings.clients))
    if key in _drawn:
        return
    _drawn.add(key)
    if is_slow_split(settings, size):
        return
    labels = torch.arange(size) % len(data.classes)
    split = draw_split(settings, Examples(torch.zeros(size, 1), labels))
    assert len(split) == settings.clients


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_cell_resolves_and_its_split_can_be_drawn(name: str, tmp_path: Path) -> None:
    recipe = recipes.load_recipe(name)
    assert set(recipe.published) <= set(recipe.cells())
    variants = recipe.variants(recipe.cells(), [1], {}, tmp_path)
    for variant, (row, column) in zip(variants, recipe.cells(), strict=True):
        tree = {**recipe.common, **recipe.columns[column], **recipe.rows[row]}
        assert variant.settings.rounds == tree["rounds"]
        # Another engine would change the last bits of the numbers in docs/results.
        assert variant.settings.engine == "pooled"
        check_split(variant.settings)


def test_a_cell_may_print_several_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["reproduce", "qkt/table20", "--cells", "QKT:Path single", "--seeds", "1", "--table"]
    assert call([*words, "--out", str(tmp_path)]) == 0
    printed = printed_words(capsys)
    for number in ("74.6", "78.0", "-16.8", "74.3"):
        assert number in printed
    assert "none of these runs" in printed


FOUR_MEASURES = {
    "QKT": {"74.6", "78.0", "-16.8", "74.3"},
    "PFNM": {"14.6", "17.6", "-79.6", "12.4"},
}
"""Published numbers of rows in the column Path single."""


def print_four_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a table with four measures; all runs are missing."""
    words = ["reproduce", "qkt/table20", "--cells", "*:Path single", "--seeds", "1", "--table"]
    assert call([*words, "--out", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def lines_of_row(lines: list[str], row: str) -> list[list[str]]:
    """The words of the lines of a row, and not of its light variant."""
    words_of_lines = [line.split() for line in lines]
    return [words for words in words_of_lines if words[:1] == [row] and "Light" not in words]


def test_a_wide_table_has_all_measures_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = print_four_measures(tmp_path, capsys)
    for row, numbers in FOUR_MEASURES.items():
        (words,) = lines_of_row(lines, row)
        assert numbers <= set(words)


def test_a_narrow_table_has_its_measures_one_below_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = print_four_measures(tmp_path, capsys)
    for row, numbers in FOUR_MEASURES.items():
        words_of_lines = lines_of_row(lines, row)
        assert len(words_of_lines) != 1
        assert numbers <= set(itertools.chain.from_iterable(words_of_lines))
    for line in lines:
        assert len(line) <= 80 or "published" in line or "Alballa" in line


def test_a_row_has_cells_only_where_it_has_a_meaning() -> None:
    cells = recipes.load_recipe("qkt/table20").cells()
    columns_of_clue = [column for row, column in cells if row.startswith("CLUE")]
    columns_of_pfnm = [column for row, column in cells if row.startswith("PFNM")]
    assert columns_of_clue == ["Path single", "Dir single"]
    assert len(columns_of_pfnm) == 4


def test_cells_are_chosen_by_pattern() -> None:
    recipe = recipes.load_recipe("fedadkd/table2")
    cells = recipe.cells(["fedn*:*.1"])
    assert {column for _, column in cells} == {"CIFAR-10 .1"}
    rows = [row for row, _ in cells]
    assert rows == ["FedNTD", "FedNTD+ASD", "FedNova", "FedNova as published"]

    with pytest.raises(UnknownName, match="FedXYZ"):
        recipe.cells(["FedXYZ:*"])
    with pytest.raises(UnknownName, match="fedadkd/table2"):
        recipes.load_recipe("fedadkd/tabel2")


TINY = (
    "topology.clients=10",
    "topology.sampled=3",
    "plan.epochs=1",
    "data.augment=[]",
    "data.train_size=400",
    "data.test_size=60",
)
"""Changes with which a run of a recipe takes a second."""


def test_a_reduced_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "fedadkd/figure7", "--data", "digits", "--rounds", "2", "--seeds", "2"]
    words += ["-q", *overrides(*TINY)]
    assert call([*words, "--cells", "full:*"]) == 0
    printed = capsys.readouterr().out
    assert "REDUCED OR CHANGED" in printed
    assert "55.8" in printed

    assert call([*words, "--table"]) == 0
    seeds_of_rows = [row[-1] for row in printed_rows(capsys, "full", "without")]
    assert seeds_of_rows == ["2", "0", "0"], "only the first row has runs"


def test_a_table_says_which_of_its_runs_have_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that are older than a change of the recipe are printed, but not as if they were the
    recipe's.
    """
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "fedadkd/figure7", "--data", "digits", "--rounds", "1", "--seeds", "1"]
    words += ["-q", "--out", "r", "--cells", "full:*", *overrides(*TINY)]
    assert call(words) == 0
    assert "OTHER SETTINGS" not in capsys.readouterr().out

    changes = overrides("method.alpha=2.0", "data.mean=[0.25]")
    assert call([*words, *changes, "--table"]) == 0
    assert "data.mean, method.alpha" in printed_words(capsys)
    assert call([*words, *changes]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "(data.mean, method.alpha)" in error


def test_a_table_names_runs_that_are_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "fedadkd/figure7", "--data", "digits", "--rounds", "1", "--seeds", "1"]
    words += ["-q", "--out", "r", "--cells", "full:*", *overrides(*TINY)]
    assert call(words) == 0
    (summary,) = Path("r").rglob("summary.json")
    accuracy = json.loads(summary.read_text())["accuracy"]
    summary.unlink()
    capsys.readouterr()

    assert call([*words, "--table"]) == 0
    line = f"not finished: full, seed 1: 1 of 1 rounds, {100 * accuracy:.1f} % after the last"
    assert line in capsys.readouterr().out

    for damaged in ('{"seed": 1', "[]", "{}"):
        summary.write_text(damaged)
        assert call([*words, "--table"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(summary) in line
    summary.unlink()
    assert call(words) == 0, "the advice can be followed"


def test_differences_to_a_row_are_paired_by_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = RESULTS / "fedadkd-table2-reduced"
    words = ["reproduce", "fedadkd/table2", "--table", "--rounds", "40", "--out", str(folder)]
    words += ["--cells", "FedAvg:CIFAR-10 .1,FedNTD:CIFAR-10 .1,FedADKD:CIFAR-10 .1"]
    words += overrides(
        "data.train_size=10000",
        "data.test_size=2000",
        "data.augment=[]",
        "topology.clients=50",
        "topology.sampled=5",
    )
    assert call([*words, "--against", "FedNTD"]) == 0
    rows = printed_rows(capsys, "FedADKD, CIFAR-10 .1")
    (row,) = [row for row in rows if "last 10" in " ".join(row)]
    unpacked = packs.readable(folder)
    fedadkd = last_accuracies(unpacked / "CIFAR-10_.1_FedADKD")
    fedntd = last_accuracies(unpacked / "CIFAR-10_.1_FedNTD")
    assert row[5:9] == paired_difference(fedadkd, fedntd)

    assert call([*words, "--against", "fedntd"]) == 0, "as in --cells, case does not matter"
    assert printed_rows(capsys, "FedADKD, CIFAR-10 .1") == rows

    assert call([*words, "--against", "FedProx"]) == 2
    error = capsys.readouterr().err
    assert "'FedProx' among the cells; name one of FedAvg, FedNTD, FedADKD" in error


def last_accuracies(folder: Path) -> list[float]:
    """By seed, the mean accuracy in % of the last ten rounds, from the summaries of a cell."""
    summaries = [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]
    return [100 * summary["mean_accuracy_last_10"] for summary in summaries]


def last_ten(folder: Path, row: str, end: int) -> list[float]:
    """By seed, the mean accuracy in % of ten rounds until one, from the journals of a row."""
    means = []
    for seed in (1, 2, 3):
        path = packs.readable(folder) / f"CIFAR-10_2-.5_{row}" / f"seed{seed}" / "journal.jsonl"
        accuracies = {}
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] == "round":
                accuracies[event["round"]] = event["accuracy"]
        means.append(100 * float(np.mean([accuracies[end - back] for back in range(10)])))
    return means


SHORT = RESULTS / "sfedkd-table1-cifar10-reduced"
LONG = RESULTS / "sfedkd-table1-cifar10-longer"


def test_differences_to_other_runs_and_by_round_are_paired_by_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a recomputation from the journals of two tables that differ in their rounds and
    nothing else.
    """
    monkeypatch.setenv("COLUMNS", "200")
    words = ["reproduce", "sfedkd/table1", "--table", "--rounds", "480", "--out", str(LONG)]
    words += overrides(
        "data.train_size=10000", "data.test_size=2000", "topology.clients=50", "model=lenet5"
    )
    both_rows = [*words, "--cells", "FedAvg:CIFAR-10 2/.5,SFedKD:CIFAR-10 2/.5"]
    sfedkd = last_ten(LONG, "SFedKD", 480)

    assert call([*both_rows, "--beside", str(SHORT)]) == 0
    printed = capsys.readouterr().out
    assert "SFedKD, CIFAR-10 2/.5: rounds = 480, there 120" in printed
    (line,) = re.findall("^SFedKD, CIFAR-10 2/.5  last 10.*", printed, re.MULTILINE)
    assert line.split()[5:9] == paired_difference(sfedkd, last_ten(SHORT, "SFedKD", 120))

    one_row = [*words, "--cells", "SFedKD:CIFAR-10 2/.5", "--beside", str(SHORT), "--against"]
    assert call([*one_row, "FedAvg"]) == 0, "only the other folder needs the row"
    (row,) = printed_rows(capsys, "SFedKD, CIFAR-10 2/.5  last")
    assert row[5:9] == paired_difference(sfedkd, last_ten(SHORT, "FedAvg", 120))
    assert call([*one_row, "FedBest"]) == 2
    assert "'FedBest'" in " ".join(capsys.readouterr().err.split())

    assert call([*both_rows, "--at", "120,240,500", "--against", "FedAvg"]) == 0
    *_, at_240, at_500 = printed_rows(capsys, "SFedKD, CIFAR-10 2/.5  ")
    ours = last_ten(LONG, "SFedKD", 240)
    difference = paired_difference(ours, last_ten(LONG, "FedAvg", 240))
    mean_and_spread = [f"{np.mean(ours):.1f}", "±", f"{np.std(ours, ddof=1):.1f}"]
    assert at_240[3:] == ["240", *mean_and_spread, "3", *difference, "told", "apart"]
    assert at_500[3:6] == ["500", "–", "0"]

    for too_early in ("0", "5"):
        assert call([*both_rows, "--at", too_early]) == 2, "a mean of ten rounds needs ten"
        assert f"--at {too_early}" in capsys.readouterr().err
    assert call([*both_rows, "--beside", str(RESULTS / "fedadkd-alpha-five")]) == 2
    assert "no run of these rows" in " ".join(capsys.readouterr().err.split())


def test_a_table_says_which_queries_had_no_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "qkt/table20", "--data", "digits", "--seeds", "1", "-q"]
    words += ["--out", str(tmp_path)]
    words += overrides(
        "data.train_size=300",
        "data.test_size=60",
        "model=digits_cnn",
        "plan.epochs=1",
        "query.fewer_than=5",
    )
    assert call([*words, "--cells", "QKT:Path single", "-s", "method.threshold=1.0"]) == 0
    assert "QKT, 10 of 10" in capsys.readouterr().out
    assert call([*words, "--cells", "KD:Path single"]) == 0
    assert "no teacher" not in capsys.readouterr().out, "all teach there"


@pytest.mark.parametrize(
    ("name", "cell", "section", "model"),
    [
        ("fedntd/table2", "*:s=2", "weights", "digits_cnn"),
        ("fedntd/figure6", "*:s=2", "epochs", "digits_cnn"),
        ("fedntd/figure18", "FedAvg:*", "sphere", "sphere_digits_cnn"),
        ("fedntd/figure21", "*:*", "joint", "digits_cnn"),
        ("fedadkd/figure4", "IID alpha [05]:*", "sensitivity", "digits_cnn"),
        ("fedadkd/figure6", "FedAvg:*", "knowledge", "digits_cnn"),
    ],
)
def test_a_figure_at_a_tiny_size_is_in_the_report(
    name: str,
    cell: str,
    section: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    full_text = recipes.recipe_text

    def with_short_starts(name: str) -> str:
        return full_text(name).replace("rounds = 100, method", "rounds = 2, method")

    monkeypatch.setattr(recipes, "recipe_text", with_short_starts)
    words = ["reproduce", name, "--data", "digits", "--rounds", "2", "--seeds", "1", "-q"]
    words += ["--cells", cell, "--out", "r", *overrides(*TINY, f"model.name={model}")]
    assert call(words) == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert f'<section id="{section}">' in page
    if name == "fedntd/table2":
        printed = capsys.readouterr().out
        lines = re.findall("^.*alignment layers features local.*$", printed, re.MULTILINE)
        fedavg, fedntd = [line.split() for line in lines]
        assert fedavg[0] == "FedAvg"
        assert fedavg[-2:] == ["0.635", "1"]
        assert fedntd[0] == "FedNTD"
        assert fedntd[-2:] == ["0.703", "1"]
        assert 0 <= float(fedavg[-3]) <= 1
        assert 0 <= float(fedntd[-3]) <= 1


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_cells_can_be_named_on_a_command_line(name: str) -> None:
    """A comma or colon in a name would part it."""
    recipe = recipes.load_recipe(name)
    for row, column in recipe.cells():
        assert "," not in row + column
        assert ":" not in row
        assert (row, column) in recipe.cells([f"{row}:{column}"])


def published(table: str, row: str, column: str) -> list[float]:
    """The numbers of a cell in the paper, one for each measure."""
    recipe = recipes.load_recipe(table)
    return [recipe.published[row, column].values[measure] for measure in recipe.measures]


@pytest.mark.parametrize(
    ("table", "row", "column", "printed"),
    [
        ("qkt/table10", "QKT", "Path multi", [54.98, 54.56, -10.19, 55.06]),
        ("qkt/table10", "QKT", "Dir single", [51.42, 44.00, -3.36, 33.39]),
        ("qkt/table10", "student data", "Path multi", [54.60, 54.16, -10.37, 54.87]),
        ("qkt/table10", "student data", "Dir single", [49.37, 41.30, -3.83, 30.99]),
        ("qkt/table12", "QKT", "Dir multi", [63.12, 55.12, -33.31, 54.16]),
        ("qkt/table13", "student data", "Dir multi", [67.11, 67.01, -28.33, 50.40]),
        ("qkt/table21", "QKT", "Dir single", [51.42, 43.99, -3.36, 33.39]),
        ("qkt/table23", "QKT", "Dir multi", [63.31, 55.11, -33.31, 54.16]),
        ("qkt/table24", "QKT Light", "Dir multi", [67.09, 67.01, -28.33, 50.39]),
    ],
)
def test_a_number_is_that_of_the_table_which_the_recipe_names(
    table: str, row: str, column: str, printed: list[float]
) -> None:
    """QKT's tables 9 to 13 print some numbers of tables 20 to 24 again, with other digits."""
    assert published(table, row, column) == printed


def method_of_cell(name: str, row: str, column: str) -> Any:
    """The method of a cell, with its fields."""
    (run,) = recipes.load_recipe(name).variants([(row, column)], [1], {}, Path("nowhere"))
    return run.settings.method


@pytest.mark.parametrize("row", ["var-E", "uniform"])
def test_a_column_may_set_fields_of_the_rows_methods(row: str) -> None:
    """QKT's lambda is larger for CIFAR-100 than for other data."""
    columns = recipes.load_recipe("qkt/table19").columns
    assert len(columns) == 20
    for column in columns:
        expected = 1.5
        if column.startswith("CIFAR-100"):
            expected = 3.0
        assert method_of_cell("qkt/table19", row, column).query_weight == expected


def test_a_rows_own_fields_come_before_its_columns() -> None:
    row = {"method": {"name": "qkt", "query_weight": 2.0}}
    column = {"method": {"query_weight": 3.0, "threshold": 0.5}}
    recipe = replace(
        recipes.load_recipe("qkt/table19"),
        rows={"without": {"method": "qkt"}, "with": row},
        columns={"with": column, "without": {}},
    )
    runs = recipe.variants(recipe.cells(), [1], {}, Path("nowhere"))
    methods: dict[str, Any] = {run.label: run.settings.method for run in runs}
    fields = {label: (method.query_weight, method.threshold) for label, method in methods.items()}
    assert fields == {
        "without | with": (3.0, 0.5),
        "with | with": (2.0, 0.5),
        "without | without": (1.5, 0.01),
        "with | without": (2.0, 0.01),
    }


def test_figure_3s_second_panel_has_the_true_class_term_of_the_tables() -> None:
    rows = set(recipes.load_recipe("fedadkd/figure3").rows) - {"FedNTD"}
    assert len(rows) == 10
    for row in rows:
        method = method_of_cell("fedadkd/figure3", row, "LDA .1")
        if row.startswith("original"):
            assert method.tckd == "binary"
            assert method.nckd_mode == "zero"
        if row.startswith("removed"):
            assert method.tckd == "target"
            assert method.nckd_mode == "removed"
    assert any(row.startswith("original") for row in rows)
    assert any(row.startswith("removed") for row in rows)


@pytest.mark.parametrize("name", ["table1", "table2", "figure5", "figure5c"])
def test_cwc_has_the_weight_with_which_it_does_not_diverge(name: str) -> None:
    cells = recipes.load_recipe(f"sfedkd/{name}").cells()
    column_of_row = {row: column for row, column in cells if row.startswith("CWC")}
    assert column_of_row
    for row, column in column_of_row.items():
        assert method_of_cell(f"sfedkd/{name}", row, column).weight == 0.01


def test_every_dirichlet_split_of_qkt_gives_each_client_ten_examples() -> None:
    splits = []
    for name in recipes.recipe_names():
        if name.startswith("qkt/"):
            columns = recipes.load_recipe(name).columns.values()
            splits += [column.get("partition", {}) for column in columns]
    dirichlet_splits = [split for split in splits if split.get("kind") == "dirichlet"]
    assert len(dirichlet_splits) > 20
    for split in dirichlet_splits:
        assert split["min_size"] == 10


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["-s", "seed=5"], "seed"),
        (["-s", "rounds=5", "--rounds", "6"], "rounds"),
        (["-s", "data=digits", "--data", "mnist"], "data.name"),
        (["-s", "data.name=digits", "--data", "mnist"], "data.name"),
        (["-s", "method=fedavg"], "method.name"),
        (["-s", "method={name='fedavg'}"], "method.name"),
        (["-s", "plan.train.lr=0.1", "-s", "plan.lr=0.2"], "plan.lr"),
        (["-s", "topology=peer_to_peer"], "rounds"),
        (["-s", "model.nosuch=1"], "model.nosuch"),
        (["-s", "seed=4"], "-s seed"),
    ],
)
def test_an_override_of_a_recipe_without_effect_is_refused(
    words: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["reproduce", "fedntd/table14", "--table", "--out", str(tmp_path)]
    assert call([*command, *words]) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--against", "other"],
        ["--against", "FedNTD", "--cells", "beta 0:*"],
        ["--beside", "absent"],
        ["--at", "9"],
    ],
)
def test_an_option_of_the_tables_is_checked_before_the_runs(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def carry_out(*_: object, **__: object) -> int:
        pytest.fail("the runs may take days")

    monkeypatch.setattr("fedstill.cli.comparisons.carry_out", carry_out)
    command = ["reproduce", "fedntd/table14", "--out", str(tmp_path)]
    assert call([*command, *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_a_date_in_place_of_a_text_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --out, the name of the folder depends on the values of -s."""
    monkeypatch.chdir(tmp_path)
    assert call(["reproduce", "fedntd/table14", "-s", "data.test_from=2020-01-01"]) == 2
    assert "data.test_from" in capsys.readouterr().err


def test_a_start_of_ones_own_is_refused_where_cells_have_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(name for name in recipes.recipe_names() if recipes.load_recipe(name).starts)
    command = ["reproduce", name, "--table", "--out", str(tmp_path)]
    assert call([*command, "-s", "start_from=runs/x"]) == 2
    assert "start_from" in capsys.readouterr().err


def test_overrides_of_a_recipe_hold_in_every_cell(tmp_path: Path) -> None:
    recipe = recipes.load_recipe("fedntd/table14")
    changes = recipe_changes(recipe, ("plan.lr=0.07", "model=mlp"), 3, "digits")
    for run in recipe.variants(recipe.cells(), (1,), changes, tmp_path):
        settings = run.settings
        assert settings.rounds == 3
        assert settings.data.name == "digits"
        assert settings.named.model.name == "mlp"
        assert {plan.lr for plan in settings.plans.values()} == {0.07}
