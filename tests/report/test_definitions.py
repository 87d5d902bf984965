"""Accuracy matrices by whomever: what a CSV file may look like, what is refused, and the table of
definitions.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import toys
from fedstill.cli import call
from fedstill.core.errors import ConfigError, CorruptFile, DataError
from fedstill.report.accuracy_matrix import (
    definitions_table,
    how_they_differ,
    read_matrix,
    run_matrices,
)
from fedstill.running.runner import run

A = "80\n78,60\n75,55,50\n"


def written(folder: Path, text: str, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        A,
        "80,,\n78,60,\n75,55,50\n",
        "0.80,nan,nan\n0.78,0.60,NaN\n0.75,0.55,0.50\n",
        "80;-;-\n78;60;–\n75;55;50\n",
        "80\tnone\n78\t60\n75\t55\t50\n",
        "task 1,task 2,task 3\n80\n78,60\n75,55,50\n",
        "1,80\n2,78,60\n3,75,55,50\n",
        "after,t1,t2,t3\nt1,80%\nt2,78%,60%\nt3,75%,55%,50%\n",
        "\ufeff80\r\n\r\n78,60\r\n75,55,50",
    ],
)
def test_one_matrix_in_many_forms(text: str, tmp_path: Path) -> None:
    nan = np.nan
    matrix = read_matrix(written(tmp_path, text))
    np.testing.assert_allclose(matrix.percent, [[80, nan, nan], [78, 60, nan], [75, 55, 50]])
    assert matrix.initial is None


def test_a_first_row_0_is_the_untrained_model(tmp_path: Path) -> None:
    text = "0,10,10,10\n1,70,30,20\n2,80,60,35\n3,75,65,90\n"
    matrix = read_matrix(written(tmp_path, text))
    assert matrix.initial is not None
    assert matrix.initial.tolist() == [10, 10, 10]
    assert matrix.percent.shape == (3, 3)
    rows = {line[0]: line[3] for line in definitions_table([matrix]).lines}
    assert rows["forward_transfer"] == "22.50"
    named = f"untrained{text.removeprefix('0')}"
    assert definitions_table([read_matrix(written(tmp_path, named))]) == definitions_table([matrix])
    given = read_matrix(written(tmp_path, "70,30,20\n80,60,35\n75,65,90\n"), initial=(10, 10, 10))
    assert definitions_table([given]) == definitions_table([matrix])
    shares = written(tmp_path, "0.7,0.3,0.2\n0.8,0.6,0.35\n0.75,0.65,0.9\n")
    in_shares = read_matrix(shares, initial=(0.1, 0.1, 1)).initial
    assert in_shares is not None
    assert in_shares.tolist() == [10, 10, 100]
    for outside in (10, -0.1):
        with pytest.raises(ConfigError, match=rf"--initial: {outside} is outside"):
            read_matrix(shares, initial=(0.1, outside, 0.1))
    with pytest.raises(ConfigError, match="leave --initial out"):
        read_matrix(written(tmp_path, text), initial=(1, 1, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("80\n78,x\n", "a.csv, line 2, column 2: 'x' is not a number"),
        ("1,80\n2,78,6 0\n", "a.csv, line 2, column 3: '6 0' is not a number"),
        ("\n80\n\n78,inf\n", "line 4, column 2: 'inf' is not a number"),
        ("80\n78,160\n", "line 2, column 2: 160 is outside [0, 100], the range of percentages"),
        ("0.8\n-0.1,0.2\n", "line 2, column 1: -0.1 is outside [0, 1], the range of shares"),
        ("80\n78,60\n75,55\n", "3 rows for 2 tasks"),
        ("80,,\n,,\n75,55,50\n", "line 2: this row has no numbers"),
        ("", "a.csv has no numbers"),
        ("task 1,task 2\n", "line 1, column 1: 'task 1' is not a number"),
        ('80\n"78,' + 50_000 * "60\n", "line 2: field larger than field limit"),
    ],
)
def test_what_is_no_matrix_is_said_with_its_place(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["forgetting", str(written(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_by_class_and_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = written(tmp_path, "90,50,,\n50,90,,80\n50,50,60,80\n")
    for said in ("0,0,2,1", "1,1,3,2"):
        assert call(["forgetting", str(path), "--class-tasks", said]) == 0
        lines = {
            line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()
        }
        assert lines["average_forgetting"].split()[-2:] == ["10.00", "26.67"]
        assert lines["published.lander"].split()[-1] == "–"
    for wrong in ("0,0,2", "0,0,3,1", "2,2,3,3", f"0,0,1,{10**15}"):
        assert call(["forgetting", str(path), "--class-tasks", wrong]) == 2
        assert "without gaps" in capsys.readouterr().err


def test_a_share_is_not_taken_for_a_percentage(tmp_path: Path) -> None:
    low = written(tmp_path, "0.8\n0.7,0.6\n")
    assert read_matrix(low).percent[0, 0] == 80
    assert read_matrix(low, "percent").percent[0, 0] == 0.8
    with pytest.raises(DataError, match=r"outside \[0, 1\]"):
        read_matrix(written(tmp_path, A), "share")


def test_each_definition_says_how_it_differs(tmp_path: Path) -> None:
    lines = list(how_they_differ(read_matrix(written(tmp_path, A))))
    assert "published.lander: 17.67, 12.67 above it; a maximum over tasks, not over time" in lines
    assert any(line.startswith("published.fot: 5.00, the same here") for line in lines)
    assert len(lines) == 7


def test_several_files_side_by_side(tmp_path: Path) -> None:
    read = [
        read_matrix(written(tmp_path, A)),
        read_matrix(written(tmp_path, "70\n80,40\n60,50,90\n", "b.csv")),
    ]
    assert [head.rsplit("/", 1)[-1] for head in definitions_table(read).head[3:]] == [
        "a.csv by task",
        "b.csv by task",
    ]
    rows = {line[0]: line[3:] for line in definitions_table(read).lines}
    assert rows["published.stsa"] == ["5.00", "10.00"]
    assert rows["worst_forgetting"] == ["5.00 (task 1)", "20.00 (task 1)"]


def test_readings_that_change_numbers_are_said(tmp_path: Path) -> None:
    assert "left out" in read_matrix(written(tmp_path, "80,70,60\n78,60,50\n")).notes[-1]
    assert "zeros" in read_matrix(written(tmp_path, "80,0\n78,60\n")).notes[-1]
    assert (
        "no accuracy after task 2 in task 1"
        in read_matrix(written(tmp_path, "80,\n,60\n")).notes[-1]
    )


def test_a_run_with_tasks_is_a_matrix_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = {"kind": "classes", "tasks": 2, "order": [[0, 1, 4], [2, 3]]}
    run(
        toys.toy(rounds=2, partition={"kind": "iid"}, stream=stream), tmp_path / "run", toys.blobs()
    )
    (matrix,) = run_matrices(tmp_path)
    assert matrix.class_tasks == (0, 0, 1, 1, 0)
    assert matrix.columns[0] == "class 0"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    numbers = {line[0]: line[3:] for line in definitions_table([matrix]).lines}
    for name in ("final_accuracy", "average_forgetting", "learned", "kept"):
        assert numbers[name][0] == f"{100 * summary[name]:.2f}"
    assert call(["forgetting", str(tmp_path / "run"), str(written(tmp_path, A))]) == 0
    assert "untrained" in capsys.readouterr().out


OVERLAP = """
import numpy as np
from fedstill.core.stream import Cut

def overlap(labels):
    return Cut((labels > 1).astype(np.int64), ((0, 1, 2), (2, 3)))
"""
"""Both tasks name class 2, and none names class 4."""


def test_columns_are_tasks_unless_each_class_belongs_to_one_task(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OVERLAP)
    stream = {"kind": "mine.py:overlap", "tasks": 2}
    experiment = toys.toy(rounds=2, partition={"kind": "iid"}, stream=stream)
    run(replace(experiment, base=tmp_path), tmp_path / "run", toys.blobs())
    (matrix,) = run_matrices(tmp_path)
    assert matrix.class_tasks is None
    assert matrix.columns == ("task 1", "task 2")


def test_a_run_without_tasks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(toys.toy(rounds=1), tmp_path / "run", toys.blobs())
    assert call(["forgetting", str(tmp_path / "run")]) == 2
    assert "has finished a task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "value"), [("row", [0.5]), ("task", 7), ("totals", [[1, 2]]), ("correct", "much")]
)
def test_a_damaged_end_of_a_task_is_named(what: str, value: object, tmp_path: Path) -> None:
    run(toys.toy(rounds=2, stream={"kind": "drift", "tasks": 2}), tmp_path / "run", toys.blobs())
    journal = tmp_path / "run" / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    ends = [event for event in events if event["event"] == "task"]
    ends[1][what] = value
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # they know what the journal was
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line \d+"):
        run_matrices(tmp_path / "run")
