"""tools/house.py counts what it describes and holds it to the ceilings, in packages made for
this.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tools.house import TOTAL, Rate, count_by_package, main, read_ceilings, read_modules

LARGE = "x = [" + ", ".join(["0"] * 30) + "]\n"
SMALL = "y = 0\n"


def package(folder: Path, **files: str) -> Path:
    """A package ``pkg`` with these files; ``a__b`` stands for a/b.py."""
    root = folder / "pkg"
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for directory in {root, *(path.parent for path in root.rglob("*.py"))}:
        (directory / "__init__.py").touch()
    return root


def counts(folder: Path, **files: str) -> dict[str, Counter[str]]:
    return count_by_package(read_modules(package(folder, **files)))


def house(root: Path, *options: str) -> int:
    """The exit status of the tool for a package, with ceilings beside the package."""
    ceilings = root.parent / "ceilings.csv"
    return main([str(root), "--repository", str(root), "--ceilings", str(ceilings), *options])


@pytest.mark.parametrize(
    ("text", "figure", "cases"),
    [
        ("x = 1 if y else 2\n", "conditional_expressions", 1),
        ("f(a if b else c if d else e)\n", "conditional_expressions", 2),
        ("a, b = 1, 2\n", "parallel_assignments", 1),
        ("a, b = b, a\n", "parallel_assignments", 0),
        ("x[0], x[1] = x[1], x[0]\n", "parallel_assignments", 0),
        ("a, b = f()\n", "parallel_assignments", 0),
        ("f(1, 2, 3, 4, 5, 6)\n", "long_calls", 1),
        ("f(1, 2, 3, 4, 5, six=6)\n", "long_calls", 0),
        ("own = 1\nfor each in own: ...\n", "function_words", 2),
        ("def f(self, what, *, why): ...\n", "function_words", 2),
        ("def f(self, what, *, why): ...\n", "names", 2),
        ("x.own = f(what=2)\n", "function_words", 0),
        ("# A licence.\nx = 1  # why\n# why, too\ny = 2  # noqa: E741\n", "comments", 2),
        (
            '"""A docstring."""\nimport os\nfrom a import b\nX = 1\n"""Another."""\n',
            "statements",
            1,
        ),
        ('"""A docstring."""\nimport os\nfrom a import b\nX = 1\n"""Another."""\n', "imports", 2),
    ],
)
def test_counts(tmp_path: Path, text: str, figure: str, cases: int) -> None:
    assert counts(tmp_path, one=text)[TOTAL][figure] == cases


@pytest.mark.parametrize(
    ("text", "nodes", "depth"),
    [
        ("x = 1\n", 3, 1),
        ("x = f(a.b)\n", 6, 3),
        ("x: dict[str, list[int]] = y\n", 3, 1),
        ("def f(a: int, b: str = 'b') -> None: ...\n", 1 + 1 + 2 + 1 + 2, 2 + 1),
        ("if a:\n    f(b)\n", 2 + 4, 1 + 2),
    ],
)
def test_nodes_of_a_statement_are_its_expressions_without_nested_statements_and_annotations(
    tmp_path: Path, text: str, nodes: int, depth: int
) -> None:
    total = counts(tmp_path, one=text)[TOTAL]
    assert total["nodes"] == nodes
    assert total["depth"] == depth


def test_packages_are_the_folders_and_modules_in_the_root_are_one_row(tmp_path: Path) -> None:
    rows = counts(tmp_path, one=LARGE, a__two=SMALL, b__c__three=LARGE + SMALL)
    assert {row: row_counts["large_statements"] for row, row_counts in rows.items()} == {
        "pkg": 1,
        "a": 0,
        "b": 1,
        TOTAL: 2,
    }
    assert rows[TOTAL]["files"] == 6
    assert rows[TOTAL]["longest_line"] == rows["b"]["longest_line"] == len(LARGE) - 1


def test_modules_with_a_single_importer_are_counted_unless_they_register_something(
    tmp_path: Path,
) -> None:
    rows = counts(
        tmp_path,
        a__single=SMALL,
        a__twice=SMALL,
        a__registered="@register('model', 'x')\ndef x(): ...\n",
        a__command="@app.command\ndef x(): ...\n",
        b__x="from pkg.a import single, twice\nimport pkg.a.registered\ndef f():\n    import "
        "pkg.a.command\n",
        b__y="from pkg.a.twice import y\n",
    )
    assert rows["a"]["single_importer"] == 1
    assert rows["b"]["single_importer"] == 0


@pytest.mark.parametrize(
    ("cases", "out_of", "exceeds"),
    [
        (10, 100, False),
        (11, 100, True),
        (11, 120, False),  # clean code was added
        (10, 50, False),  # clean code was deleted
        (11, 110, False),
        (11, 109, True),
    ],
)
def test_a_rate_rises_if_there_are_more_cases_and_a_larger_share(
    cases: int, out_of: int, exceeds: bool
) -> None:
    assert Rate(cases, out_of).exceeds(Rate(10, 100)) == exceeds


@pytest.mark.parametrize(
    ("current", "ceiling"),
    [
        (Rate(8, 100), Rate(8, 100)),
        (Rate(12, 100), Rate(10, 100)),
        (Rate(12, 240), Rate(10, 200)),
        (Rate(5, 40), Rate(5, 50)),
        (Rate(7, 60), Rate(7, 70)),
        (Rate(0, 90), Rate(0, 90)),
    ],
)
def test_neither_the_cases_nor_the_share_of_a_ceiling_rise(current: Rate, ceiling: Rate) -> None:
    assert Rate(10, 100).lowered_to(current) == ceiling


def test_a_figure_is_not_above_the_ceiling_that_was_lowered_to_it() -> None:
    current = Rate(107, 2355)
    ceiling = Rate(105, 2134)
    assert not current.exceeds(ceiling)
    assert not current.exceeds(ceiling.lowered_to(current))


def test_a_figure_above_its_ceiling_fails_in_its_package_and_in_total(tmp_path: Path) -> None:
    root = package(tmp_path, a__one=LARGE + 9 * SMALL, b__two=10 * SMALL)
    assert house(root, "--adopt") == 0
    assert house(root) == 0
    package(tmp_path, b__two=LARGE + 9 * SMALL)
    assert house(root) == 1
    package(tmp_path, a__one=10 * SMALL)
    assert house(root) == 1, "the total is as it was, but b has risen"
    assert house(root, "--adopt", "b") == 0
    assert house(root) == 0


def test_ceilings_are_lowered_and_never_raised(tmp_path: Path) -> None:
    root = package(tmp_path, a__one=2 * LARGE + 8 * SMALL)
    house(root, "--adopt")
    package(tmp_path, a__one=LARGE + 9 * SMALL)
    assert house(root, "--lower") == 0
    ceilings = read_ceilings(tmp_path / "ceilings.csv")
    assert ceilings["a"]["large_statements"] == ceilings[TOTAL]["large_statements"] == Rate(1, 10)
    package(tmp_path, a__one=2 * LARGE + 8 * SMALL)
    assert house(root, "--lower") == 1
    assert read_ceilings(tmp_path / "ceilings.csv") == ceilings
    assert house(root, "--adopt", "a") == 1, "the total has risen"
    assert read_ceilings(tmp_path / "ceilings.csv") == ceilings


def test_a_new_package_is_held_to_the_total_until_it_is_adopted(tmp_path: Path) -> None:
    root = package(tmp_path, a__one=2 * LARGE + 18 * SMALL)
    house(root, "--adopt")
    (root / "a" / "one.py").write_text(20 * SMALL, encoding="utf-8")
    package(tmp_path, new__one=LARGE + 9 * SMALL)
    assert house(root) == 0
    package(tmp_path, new__one=2 * LARGE + 8 * SMALL)
    assert house(root) == 1
    assert house(root, "--adopt") == 0
    assert read_ceilings(tmp_path / "ceilings.csv")["new"]["large_statements"] == Rate(2, 10)


def test_below_its_gate_a_figure_may_rise(tmp_path: Path) -> None:
    root = package(tmp_path, a__one=100 * SMALL)
    house(root, "--adopt")
    package(tmp_path, a__one=LARGE + 99 * SMALL)
    assert house(root) == 0


def test_gates_fail_on_request_and_formulas_may_be_long(tmp_path: Path) -> None:
    root = package(tmp_path, losses__one=LARGE, a__one=99 * SMALL)
    house(root, "--adopt")
    assert house(root, "--gates") == 0
    package(tmp_path, b__one=LARGE + 9 * SMALL)
    house(root, "--adopt")
    assert house(root) == 0
    assert house(root, "--gates") == 1


def house_of_repository(repository: Path, *options: str) -> int:
    """The exit status of the tool for a repository, with ceilings in it."""
    ceilings = repository / "ceilings.csv"
    package_root = repository / "pkg"
    arguments = ["--repository", str(repository), "--ceilings", str(ceilings), *options]
    return main([str(package_root), *arguments])


def write_folder(repository: Path, name: str, text: str) -> None:
    """A folder beside the package with one module."""
    (repository / name).mkdir(exist_ok=True)
    (repository / name / "one.py").write_text(text, encoding="utf-8")


def test_folders_beside_the_package_have_rows_that_are_not_in_the_total(tmp_path: Path) -> None:
    package(tmp_path, a__one=10 * SMALL)
    write_folder(tmp_path, "tools", LARGE + 99 * SMALL)
    assert house_of_repository(tmp_path, "--adopt") == 0
    ceilings = read_ceilings(tmp_path / "ceilings.csv")
    assert ceilings["tools"]["large_statements"] == Rate(1, 100)
    assert ceilings[TOTAL]["large_statements"] == Rate(0, 10)
    assert "examples" not in ceilings


@pytest.mark.parametrize(
    ("name", "status"),
    [("tools", 1), ("examples", 1), ("benchmarks", 1), ("tests", 1), ("results", 0)],
)
def test_the_gates_hold_in_the_folders_beside_the_package(
    tmp_path: Path, name: str, status: int
) -> None:
    package(tmp_path, a__one=10 * SMALL)
    write_folder(tmp_path, name, "x = 1 if y else 2\n" + 9 * SMALL)
    assert house_of_repository(tmp_path, "--adopt") == 0
    assert house_of_repository(tmp_path, "--gates") == status


def test_ceilings_hold_in_all_folders(tmp_path: Path) -> None:
    package(tmp_path, a__one=10 * SMALL)
    write_folder(tmp_path, "benchmarks", LARGE + 9 * SMALL)
    house_of_repository(tmp_path, "--adopt")
    write_folder(tmp_path, "benchmarks", 2 * LARGE + 8 * SMALL)
    assert house_of_repository(tmp_path) == 1
    write_folder(tmp_path, "benchmarks", 10 * SMALL)
    assert house_of_repository(tmp_path, "--lower") == 0
    assert read_ceilings(tmp_path / "ceilings.csv")["benchmarks"]["large_statements"] == Rate(0, 10)


def test_what_ruff_finds_may_not_rise(tmp_path: Path) -> None:
    root = package(tmp_path, one="def f(a, b, c, d, e, f): ...\n")
    house(root, "--adopt")
    assert read_ceilings(tmp_path / "ceilings.csv")[TOTAL]["PLR0917"] == Rate(1)
    package(tmp_path, two="def g(a, b, c, d, *, e, f, g, h, i): ...\n")
    assert house(root) == 1
    package(tmp_path, two="def g(a, b, c, d, *, e, f, g, h): ...\n")
    assert house(root) == 0


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ("path.read_text()", 1),
        ("path.write_text('a')", 1),
        ("path.read_text(encoding='utf-8')", 0),
        ("path.write_bytes(b'a')", 0),
        ("path.open('w')", 1),
        ("path.open('rb')", 0),
        ("path.open('a', encoding='utf-8')", 0),
        ("open(path)", 1),
        ("open(path, 'rb')", 0),
        ("open(path, 'r+')", 1),
    ],
)
def test_a_text_is_read_and_written_in_a_named_encoding(
    tmp_path: Path, call: str, status: int
) -> None:
    root = package(tmp_path, one=f"def f(path):\n    {call}\n")
    assert house(root, "--adopt") == status
