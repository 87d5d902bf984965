"""tools/house.py finds what it looks for, in a package made for this."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.house import FILE_LINES, FUNCTION_LINES, House, main


def package(folder: Path, **files: str) -> Path:
    """A package ``pkg`` with these files; ``a__b`` stands for a/b.py."""
    root = folder / "pkg"
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for place in {root, *(p.parent for p in root.rglob("*.py"))}:
        (place / "__init__.py").touch()
    return root


def function(lines: int, docstring: str = "") -> str:
    """A function of so many lines of code, with blank lines and comments between them."""
    return "\n".join(["def f():", docstring, *(f"    # why\n\n    x = {i}" for i in range(lines - 1))])


def test_a_function_is_measured_without_docstring_blank_lines_and_comments(tmp_path: Path) -> None:
    house = House(package(tmp_path, one=function(3, '    """Says\n\n    much.\n    """')))
    assert [(f.lines, f.name) for f in house.functions()] == [(3, "f")]


@pytest.mark.parametrize(("more", "status"), [(0, 0), (1, 1)])
def test_the_limits_are_kept_to_the_line(tmp_path: Path, more: int, status: int) -> None:
    assert main([str(package(tmp_path / "file", one="x = 0\n" * (FILE_LINES + more)))]) == status
    assert main([str(package(tmp_path / "function", one=function(FUNCTION_LINES + more)))]) == status


def test_names_that_occur_twice_fail_if_they_are_public(tmp_path: Path) -> None:
    text = "def twice(): ...\ndef _private(): ...\nclass Once:\n    def method(self): ...\n"
    root = package(tmp_path, a__same=text, b__same="class twice:\n    def method(self): ...\ndef _private(): ...\n")
    assert {name: [p.file for p in places] for name, places in House(root).names().items()} == {
        "same.py": ["pkg/a/same.py", "pkg/b/same.py"],
        "twice": ["pkg/a/same.py", "pkg/b/same.py"],
    }
    assert main([str(root)]) == 1


def test_a_variable_called_found_is_seen_wherever_it_is_bound(tmp_path: Path) -> None:
    text = "found = 1\nprint(found)\nif found := 2: ...\ndef f(found): ...\nimport os as found\n"
    root = package(tmp_path, one=text)
    assert House(root).found() == {"pkg/one.py": [1, 3, 4, 5]}
    assert (main([str(root)]), main([str(root), "--found"])) == (0, 1)


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
def test_a_text_is_read_and_written_in_a_named_encoding(tmp_path: Path, call: str, status: int) -> None:
    assert main([str(package(tmp_path, one=f"def f(path):\n    {call}\n"))]) == status


def test_a_circle_between_packages_is_seen_though_its_modules_form_none(tmp_path: Path) -> None:
    root = package(tmp_path, a__x="from pkg.b import y", b__y="", b__z="def f():\n    import pkg.a.w\n", a__w="")
    (circle,) = House(root).circles()
    assert set(circle) == {"pkg.a", "pkg.b"}
    assert main([str(root)]) == 1


def test_imports_that_point_one_way_are_no_circle(tmp_path: Path) -> None:
    root = package(
        tmp_path, a__x="from pkg.a import w\nimport pkg.b.y", b__y="from pkg import c", a__w="", c="import os"
    )
    assert House(root).circles() == []
