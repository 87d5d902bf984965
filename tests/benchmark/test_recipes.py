"""Every cell of every recipe can be run, and a table is run, resumed and printed beside the
paper's.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

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


def check_split(settings: Settings) -> None:
    """Draw the split on as many examples as the data set has, with equally many of each class."""
    data = KNOWN[settings.data.name]
    size = data.sizes.get("train", data.total or 0) - settings.data.public
    key = repr((data.name, size, settings.named.partition, settings.clients))
    if key in _drawn:
        return
    _drawn.add(key)
    labels = torch.arange(size) % len(data.classes)
    split = draw_split(settings, Examples(torch.zeros(size, 1), labels))
    assert len(split) == settings.clients


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_cell_resolves_and_its_split_can_be_drawn(name: str, tmp_path: Path) -> None:
    recipe = recipes.load_recipe(name)
    assert set(recipe.published) <= set(recipe.cells())
    variants = recipe.variants(recipe.cells(), [1], {}, tmp_path)
    for variant, (row, column) in zip(variants, recipe.cells(), strict=True):
        asked = {**recipe.common, **recipe.columns[column], **recipe.rows[row]}
        assert variant.settings.rounds == asked["rounds"]
        # Another engine would change the last bits of the numbers in docs/results.
        assert variant.settings.engine == "pooled"
        check_split(variant.settings)


def test_a_cell_may_print_several_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["reproduce", "qkt/table20", "--cells", "QKT:Path single", "--seeds", "1", "--table"]
    assert call([*words, "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for number in ("74.6", "78.0", "-16.8", "74.3"):
        assert number in said
    assert "none of these runs" in said


def test_a_table_of_four_measures_is_printed_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "reproduce",
        "qkt/table20",
        "--cells",
        "*:Path single",
        "--seeds",
        "1",
        "--table",
        "--out",
        str(tmp_path),
    ]
    numbers = {"QKT": ["74.6", "78.0", "-16.8", "74.3"], "PFNM": ["14.6", "17.6", "-79.6", "12.4"]}
    for columns, together in (("", True), ("80", False)):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv(
            "COLUMNS", raising=False
        )
        assert call(words) == 0
        lines = capsys.readouterr().out.splitlines()
        for row, wanted in numbers.items():
            said = [
                line.split() for line in lines if line.split(" ")[0] == row and "Light" not in line
            ]
            assert (len(said) == 1) is together
            assert [n for n in wanted if any(n in cells for cells in said)] == wanted
        assert (
            together
            or max(len(line) for line in lines if "published" not in line and "Alballa" not in line)
            <= 80
        )


def test_a_row_has_cells_only_where_it_has_a_meaning() -> None:
    cells = recipes.load_recipe("qkt/table20").cells()
    assert [c for r, c in cells if r.startswith("CLUE")] == ["Path single", "Dir single"]
    assert len([c for r, c in cells if r.startswith("PFNM")]) == 4


def test_cells_are_chosen_by_pattern() -> None:
    recipe = recipes.load_recipe("fedadkd/table2")
    assert recipe.cells(["fedn*:*.1"]) == [
        ("FedNTD", "CIFAR-10 .1"),
        ("FedNTD+ASD", "CIFAR-10 .1"),
        ("FedNova", "CIFAR-10 .1"),
        ("FedNova as published", "CIFAR-10 .1"),
    ]
    with pytest.raises(UnknownName, match="FedXYZ"):
        recipe.cells(["FedXYZ:*"])
    with pytest.raises(UnknownName, match="fedadkd/table2"):
        recipes.load_recipe("fedadkd/tabel2")


def test_a_reduced_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    smaller = [
        "-s",
        "topology.clients=10",
        "-s",
        "topology.sampled=3",
        "-s",
        "plan.epochs=1",
        "-s",
        "data.augment=[]",
    ]
    smaller += ["-s", "data.train_size=400", "-s", "data.test_size=60"]
    words = [
        "reproduce",
        "fedadkd/figure7",
        "--data",
        "digits",
        "--rounds",
        "2",
        "--seeds",
        "2",
        "-q",
        *smaller,
    ]
    assert call([*words, "--cells", "full:*"]) == 0
    said = capsys.readouterr().out
    assert "REDUCED OR CHANGED" in said
    assert "55.8" in said
    assert call([*words, "--table"]) == 0
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("full", "without"))
    ]
    assert [row[-1] for row in rows] == ["2", "0", "0"], (
        "two seeds of one row are there, of the others none"
    )


def test_a_table_says_which_of_its_runs_have_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that are older than a change of the recipe are printed, but not as if they were the
    recipe's.
    """
    monkeypatch.chdir(tmp_path)
    small = [
        "-s",
        "topology.clients=6",
        "-s",
        "topology.sampled=3",
        "-s",
        "plan.epochs=1",
        "-s",
        "data.augment=[]",
    ]
    words = [
        "reproduce",
        "fedadkd/figure7",
        "--data",
        "digits",
        "--rounds",
        "1",
        "--seeds",
        "1",
        "-q",
        "--out",
        "r",
    ]
    words += [*small, "--cells", "full:*"]
    assert call(words) == 0
    assert "OTHER SETTINGS" not in capsys.readouterr().out
    changed = ["-s", "method.alpha=2.0", "-s", "data.mean=[0.25]"]
    assert call([*words, *changed, "--table"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "data.mean, method.alpha" in said
    assert call([*words, *changed]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "(data.mean, method.alpha)" in refused
    (summary,) = Path("r").rglob("summary.json")
    ended = json.loads(summary.read_text())["accuracy"]
    summary.unlink()
    assert call([*words, "--table"]) == 0
    said = capsys.readouterr().out
    assert f"not finished: full, seed 1: 1 of 1 rounds, {100 * ended:.1f} % after the last" in said


def test_differences_to_a_row_are_paired_by_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    kept = RESULTS / "fedadkd-table2-reduced"
    reduced = [
        "data.train_size=10000",
        "data.test_size=2000",
        "data.augment=[]",
        "topology.clients=50",
    ]
    words = ["reproduce", "fedadkd/table2", "--table", "--rounds", "40", "--out", str(kept)]
    words += [w for value in (*reduced, "topology.sampled=5") for w in ("-s", value)]
    words += ["--cells", "FedAvg:CIFAR-10 .1,FedNTD:CIFAR-10 .1,FedADKD:CIFAR-10 .1"]
    assert call([*words, "--against", "FedNTD"]) == 0
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("FedADKD, CIFAR-10 .1")
    ]
    with tarfile.open(packs.pack_of(kept)) as packed:
        names = [n for n in packed.getnames() if n.endswith("summary.json")]
        read = {n: json.load(packed.extractfile(n) or io.BytesIO()) for n in names}
    one, other = (
        [
            100 * read[n]["mean_accuracy_last_10"]
            for n in sorted(read)
            if n.startswith(f"CIFAR-10_.1_{row}/")
        ]
        for row in ("FedADKD", "FedNTD")
    )
    low, high = stats.ttest_rel(one, other).confidence_interval(0.95)
    (line,) = [line for line in lines if "last 10" in line]
    assert line.split()[5:9] == [
        f"{np.mean(np.subtract(one, other)):+.1f}",
        f"{low:+.1f}",
        "to",
        f"{high:+.1f}",
    ]
    assert call([*words, "--against", "fedntd"]) == 0, "as in --cells, case does not matter"
    assert [line for line in capsys.readouterr().out.splitlines() if line in lines] == lines
    assert call([*words, "--against", "FedProx"]) == 2
    assert (
        "'FedProx' among the cells; name one of FedAvg, FedNTD, FedADKD" in capsys.readouterr().err
    )


def test_differences_to_other_runs_and_by_round_are_paired_by_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a recomputation from the journals of two tables that differ in their rounds and
    nothing else.
    """
    monkeypatch.setenv("COLUMNS", "200")
    short, long = (
        RESULTS / "sfedkd-table1-cifar10-reduced",
        RESULTS / "sfedkd-table1-cifar10-longer",
    )
    reduced = [
        "data.train_size=10000",
        "data.test_size=2000",
        "topology.clients=50",
        "model=lenet5",
    ]
    words = ["reproduce", "sfedkd/table1", "--table", "--rounds", "480", "--out", str(long)]
    words += [
        *(w for value in reduced for w in ("-s", value)),
        "--cells",
        "FedAvg:CIFAR-10 2/.5,SFedKD:CIFAR-10 2/.5",
    ]

    def last_ten(folder: Path, row: str, end: int) -> list[float]:
        journals = [
            packs.readable(folder) / f"CIFAR-10_2-.5_{row}" / f"seed{s}" / "journal.jsonl"
            for s in (1, 2, 3)
        ]
        events = [
            [json.loads(line) for line in journal.read_text().splitlines()] for journal in journals
        ]
        by_round = [
            {e["round"]: e["accuracy"] for e in each if e["event"] == "round"} for each in events
        ]
        return [
            100 * float(np.mean([curve[n] for n in range(end - 9, end + 1)])) for curve in by_round
        ]

    def said(one: list[float], other: list[float]) -> list[str]:
        low, high = stats.ttest_rel(one, other).confidence_interval(0.95)
        return [f"{np.mean(np.subtract(one, other)):+.1f}", f"{low:+.1f}", "to", f"{high:+.1f}"]

    assert call([*words, "--beside", str(short)]) == 0
    printed = capsys.readouterr().out
    assert "SFedKD, CIFAR-10 2/.5: rounds = 480, there 120" in printed
    (line,) = [
        line for line in printed.splitlines() if line.startswith("SFedKD, CIFAR-10 2/.5  last 10")
    ]
    assert line.split()[5:9] == said(last_ten(long, "SFedKD", 480), last_ten(short, "SFedKD", 120))
    one_row = [*words[:-1], "SFedKD:CIFAR-10 2/.5", "--beside", str(short), "--against"]
    assert call([*one_row, "FedAvg"]) == 0, "the row need be there alone"
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("SFedKD, CIFAR-10 2/.5  last")
    ]
    assert line.split()[5:9] == said(last_ten(long, "SFedKD", 480), last_ten(short, "FedAvg", 120))
    assert call([*one_row, "FedBest"]) == 2
    assert "'FedBest'" in " ".join(capsys.readouterr().err.split())

    assert call([*words, "--at", "120,240,500", "--against", "FedAvg"]) == 0
    lines = [
        x.split()
        for x in capsys.readouterr().out.splitlines()
        if x.startswith("SFedKD, CIFAR-10 2/.5  ")
    ][-3:]
    ours, base = last_ten(long, "SFedKD", 240), last_ten(long, "FedAvg", 240)
    assert lines[1][3:] == [
        "240", f"{np.mean(ours):.1f}", "±", f"{np.std(ours, ddof=1):.1f}", "3",
        *said(ours, base), "told", "apart",
    ]  # fmt: skip
    assert lines[2][3:6] == ["500", "–", "0"]
    for too_early in ("0", "5"):
        assert call([*words, "--at", too_early]) == 2, "a mean of ten rounds needs ten"
        assert f"--at {too_early}" in capsys.readouterr().err
    assert call([*words, "--beside", str(RESULTS / "fedadkd-alpha-five")]) == 2
    assert "no run of these rows" in " ".join(capsys.readouterr().err.split())


def test_a_table_says_which_queries_had_no_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = [
        "data.train_size=300",
        "data.test_size=60",
        "model=digits_cnn",
        "plan.epochs=1",
        "query.fewer_than=5",
    ]
    words = [
        "reproduce",
        "qkt/table20",
        "--data",
        "digits",
        "--seeds",
        "1",
        "-q",
        "--out",
        str(tmp_path),
    ]
    words += [w for s in smaller for w in ("-s", s)]
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
    smaller = [
        "topology.clients=10",
        "topology.sampled=3",
        "plan.epochs=1",
        "data.augment=[]",
        f"model.name={model}",
    ]
    smaller += ["data.train_size=400", "data.test_size=60"]
    words = [
        "reproduce",
        name,
        "--data",
        "digits",
        "--rounds",
        "2",
        "--seeds",
        "1",
        "-q",
        "--cells",
        cell,
        "--out",
        "r",
    ]
    assert call([*words, *(w for s in smaller for w in ("-s", s))]) == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert f'<section id="{section}">' in page
    said = capsys.readouterr().out
    if name == "fedntd/table2":
        lines = [
            line.split() for line in said.splitlines() if "alignment layers features local" in line
        ]
        assert [(row[0], *row[-2:]) for row in lines] == [
            ("FedAvg", "0.635", "1"),
            ("FedNTD", "0.703", "1"),
        ]
        assert all(0 <= float(row[-3]) <= 1 for row in lines)


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_cells_can_be_named_on_a_command_line(name: str) -> None:
    """A comma or colon in a name would part it."""
    recipe = recipes.load_recipe(name)
    for row, column in recipe.cells():
        assert not set(",") & set(row + column)
        assert ":" not in row
        assert (row, column) in recipe.cells([f"{row}:{column}"])


def published(table: str, row: str, column: str) -> list[float]:
    recipe = recipes.load_recipe(table)
    return [recipe.published[row, column].values[m] for m in recipe.measures]


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


def cell(name: str, row: str, column: str, out: Path) -> Settings:
    return recipes.load_recipe(name).variants([(row, column)], [1], {}, out)[0].settings


@pytest.mark.parametrize("row", ["var-E", "uniform"])
def test_a_column_may_set_fields_of_the_rows_methods(row: str, tmp_path: Path) -> None:
    """QKT's lambda is larger for CIFAR-100 than for other data."""
    columns = recipes.load_recipe("qkt/table19").columns
    assert len(columns) == 20
    for column in columns:
        method = cell("qkt/table19", row, column, tmp_path).method
        assert method.query_weight == (3.0 if column.startswith("CIFAR-100") else 1.5)  # type: ignore[attr-defined]


def test_a_rows_own_fields_come_before_its_columns() -> None:
    recipe = replace(
        recipes.load_recipe("qkt/table19"),
        rows={"named": {"method": "qkt"}, "own": {"method": {"name": "qkt", "query_weight": 2.0}}},
        columns={"c": {"method": {"query_weight": 3.0, "threshold": 0.5}}, "none": {}},
    )
    made = {
        v.label: v.settings.method
        for v in recipe.variants(recipe.cells(), [1], {}, Path("nowhere"))
    }
    assert {k: (m.query_weight, m.threshold) for k, m in made.items()} == {  # type: ignore[attr-defined]
        "named | c": (3.0, 0.5),
        "own | c": (2.0, 0.5),
        "named | none": (1.5, 0.01),
        "own | none": (2.0, 0.01),
    }


def test_figure_3s_second_panel_has_the_true_class_term_of_the_tables(tmp_path: Path) -> None:
    recipe = recipes.load_recipe("fedadkd/figure3")
    made = {
        row: cell("fedadkd/figure3", row, "LDA .1", tmp_path).method
        for row in recipe.rows
        if row != "FedNTD"
    }
    terms = {row: (m.tckd, m.nckd_mode) for row, m in made.items()}  # type: ignore[attr-defined]
    assert len(terms) == 10
    assert {t for row, t in terms.items() if row.startswith("original")} == {("binary", "zero")}
    assert {t for row, t in terms.items() if row.startswith("removed")} == {("target", "removed")}


@pytest.mark.parametrize("name", ["table1", "table2", "figure5", "figure5c"])
def test_cwc_has_the_weight_with_which_it_does_not_diverge(name: str, tmp_path: Path) -> None:
    rows = {r for r, _ in recipes.load_recipe(f"sfedkd/{name}").cells() if r.startswith("CWC")}
    assert rows
    for row in rows:
        column = next(c for r, c in recipes.load_recipe(f"sfedkd/{name}").cells() if r == row)
        assert cell(f"sfedkd/{name}", row, column, tmp_path).method.weight == 0.01  # type: ignore[attr-defined]


def test_every_dirichlet_split_of_qkt_gives_each_client_ten_examples(tmp_path: Path) -> None:
    found = 0
    for name in recipes.recipe_names():
        for column in recipes.load_recipe(name).columns.values() if name.startswith("qkt/") else ():
            split = column.get("partition", {})
            found += split.get("kind") == "dirichlet"
            assert split.get("kind") != "dirichlet" or split.get("min_size") == 10
    assert found > 20


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
    runs = recipe.variants(recipe.cells(), (1,), changes, tmp_path)
    for settings in (run.settings for run in runs):
        assert settings.rounds == 3
        assert settings.data.name == "digits"
        assert settings.named.model.name == "mlp"
        assert {plan.lr for plan in settings.plans.values()} == {0.07}
