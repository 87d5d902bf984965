"""The files of a comparison's table hold its numbers, and the differences are those of a paired
test.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import toys
from fedstill.cli import call
from fedstill.metrics.ranks import paired_difference
from fedstill.report.page import page
from fedstill.report.summary import Column
from fedstill.report.table_files import (
    GroupDifference,
    TextTable,
    differences_table,
    write_tables,
)
from fedstill.running.runner import run
from fedstill.running.runs import Group, groups

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "runs"
    for name, momentum in (("a_slow", 0.0), ("b_fast", 0.9)):
        for seed in SEEDS:
            what = toys.toy(
                rounds=2, seed=seed, plan={"epochs": 1, "batch": 10, "momentum": momentum}
            )
            run(what, folder / name / f"seed{seed}", data=toys.blobs())
    return folder


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def accuracies(runs: Path, name: str) -> list[float]:
    (group,) = groups([runs / name])
    return [100 * v for v in group.values("accuracy")]


def test_the_csv_has_all_digits(runs: Path, tmp_path: Path) -> None:
    paths = write_tables(groups([runs]), tmp_path / "new/tables")
    assert [p.name for p in paths] == [
        f"{n}.{k}" for n in ("results", "differences") for k in ("csv", "md", "tex")
    ]
    lines = read(tmp_path / "new/tables/results.csv")
    for line, name in zip(lines, ("a_slow", "b_fast"), strict=True):
        values = accuracies(runs, name)
        assert float(line["accuracy, last [%] mean"]) == pytest.approx(np.mean(values), abs=1e-12)
        assert float(line["accuracy, last [%] sd"]) == pytest.approx(
            np.std(values, ddof=1), abs=1e-12
        )
        assert line["accuracy, last [%] seeds"] == "3"


def test_one_seed_has_no_spread(runs: Path, tmp_path: Path) -> None:
    write_tables(groups([runs / "a_slow/seed1"]), tmp_path)
    (line,) = read(tmp_path / "results.csv")
    assert (line["accuracy, last [%] seeds"], line["accuracy, last [%] sd"]) == ("1", "")


def test_differences_are_those_of_a_paired_test(runs: Path, tmp_path: Path) -> None:
    first, other = groups([runs])
    write_tables([first, other], tmp_path, against=other.label)
    (line,) = [d for d in read(tmp_path / "differences.csv") if d["number"] == "accuracy, last"]
    a, b = accuracies(runs, "a_slow"), accuracies(runs, "b_fast")
    test = stats.ttest_rel(a, b)
    low, high = test.confidence_interval(0.95)
    assert (line["compared"], line["with"], line["seeds"]) == (first.label, other.label, "3")
    got = [float(line[k]) for k in ("difference", "low", "high", "p")]
    assert got == pytest.approx([np.mean(np.subtract(a, b)), low, high, test.pvalue], rel=1e-9)
    assert (
        f"| {first.label} − {other.label} | accuracy, last [%] |"
        in (tmp_path / "differences.md").read_text()
    )


def test_a_difference_has_the_decimals_of_its_column_and_zero_no_sign() -> None:
    percent = Column(key="a", title="a", unit="%", scale=100, digits=1, description="")
    small = Column(key="b", title="b", unit="latest", scale=1, digits=4, description="")
    group = Group("group", [])
    cells = {}
    for column, numbers in ((percent, (-1e-6, 1e-6)), (small, (0.0012, 0.0014))):
        for value in numbers:
            by_seed = {seed: value * (1 + seed / 9) for seed in (0, 1)}
            paired = paired_difference(by_seed, dict.fromkeys(by_seed, 0.0))
            assert paired is not None
            difference = GroupDifference(group=group, base=group, column=column, paired=paired)
            (line,) = differences_table([difference]).lines
            cells[value] = line[2]
            assert "-0.00 " not in f"{line[2]} {line[3]} "
    assert [cells[value] for value in (-1e-6, 1e-6)] == ["0.00", "0.00"]
    assert cells[0.0012] == "+0.0013"


def test_unfinished_runs_are_not_paired(runs: Path, tmp_path: Path) -> None:
    for folder in ("all", "stopped"):
        shutil.copytree(runs, tmp_path / folder)
    (tmp_path / "stopped/b_fast/seed3/summary.json").unlink()
    shutil.rmtree(tmp_path / "all/b_fast/seed3")
    for folder in ("all", "stopped"):
        write_tables(groups([tmp_path / folder]), tmp_path / f"{folder}_tables")
    lines = read(tmp_path / "stopped_tables/differences.csv")
    assert {line["seeds"] for line in lines} == {"2"}
    assert lines == read(tmp_path / "all_tables/differences.csv")

    text = page(groups([tmp_path / "stopped"]))
    assert "Unfinished runs are left out." in text
    assert "Unfinished runs are left out." not in page(groups([runs]))
    (tmp_path / "stopped/a_slow/seed2/summary.json").unlink()
    assert "Differences to" not in page(groups([tmp_path / "stopped"]))


def test_the_page_folds_them_below_the_results(runs: Path) -> None:
    compared = groups([runs])
    assert f"<summary>Differences to {compared[0].label}</summary>" in page(compared)
    alone = groups([runs / "a_slow/seed1", runs / "b_fast/seed1"])
    assert "Differences to" not in page(alone), "one seed has no interval"
    other = compared[1].label
    text = page(compared, against=other)
    assert f"<summary>Differences to {other}</summary>" in text
    assert f"{compared[0].label} − {other}" in text


def test_the_commands_write_them(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "report",
        str(runs),
        "--out",
        str(tmp_path / "page.html"),
        "--tables",
        str(tmp_path / "tables"),
    ]
    assert call([*words, "--against", groups([runs])[1].label]) == 0
    assert str(tmp_path / "tables/differences.tex") in capsys.readouterr().out
    (tmp_path / "page.html").unlink()
    assert call([*words[:-2], "--against", "fedxyz"]) == 2
    assert not (tmp_path / "page.html").exists()
    assert "'fedxyz'" in capsys.readouterr().err
    (tmp_path / "small.toml").write_text(toys.SMALL)
    small = [
        "compare",
        str(tmp_path / "small.toml"),
        "--methods",
        "fedavg,fedntd",
        "--out",
        str(tmp_path / "out"),
        "-q",
    ]
    assert call(small) == 0
    assert len(read(tmp_path / "out/tables/results.csv")) == 2
    assert all(d["low"] == "" for d in read(tmp_path / "out/tables/differences.csv")), (
        "one seed has no interval"
    )


def test_latex_prints_what_it_would_read_as_a_command() -> None:
    assert r"50\% of a\_b \& c \#1 & $-1.0 \pm 0.5$ \\" in (
        TextTable(["", "x"], [["50% of a_b & c #1", "-1.0 ± 0.5"]]).latex()
    )
    table = TextTable(
        ["", "difference", "interval"],
        [["a-b, lr=-1", "-0.50", "-1.25 to +0.25"], ["c", "–", "0.31"]],
    )
    signed = table.latex()
    assert r"a-b, lr=-1 & $-0.50$ & $-1.25$ to $+0.25$ \\" in signed
    assert r"c & -- & 0.31 \\" in signed


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="LaTeX is not installed")
def test_latex_compiles(runs: Path, tmp_path: Path) -> None:
    write_tables(groups([runs]), tmp_path)
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
    parts = [
        head,
        *((tmp_path / f"{n}.tex").read_text() for n in ("results", "differences")),
        r"\end{document}",
    ]
    (tmp_path / "page.tex").write_text("\n".join(parts))
    subprocess.run(
        ["pdflatex", "-halt-on-error", "page.tex"], cwd=tmp_path, check=True, capture_output=True
    )
