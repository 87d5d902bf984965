"""The size of the package, and the names in it: what CONTRIBUTING.md asks of both is checked here.

``python tools/house.py`` prints the numbers. It fails on a file or a function that is too long, on a circle of imports,
on a name that occurs twice and on a text that is read or written without an encoding; with ``--found`` on a variable
called ``found``, too.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FILE_LINES = 250
"""The most lines in a file, all of them counted."""

FUNCTION_LINES = 40
"""The most lines of code in a function: from ``def`` to its end, without docstring, blank lines and comment lines."""

TEXT_MODE = re.compile("[rwax][+t]*")
"""A mode in which ``Path.open`` opens a text."""

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """Where something stands: a file below the package's parent, a line of it (0: the file as a whole)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Sized:
    """A file or a function, and how many lines it has."""

    lines: int
    place: Place
    name: str = ""

    def __str__(self) -> str:
        return f"{self.lines:>6,}  {self.place}{'  ' if self.name else ''}{self.name}"


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, its text and what the text parses to."""

    name: str
    place: Place
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__.py`` of a package."""
        return self.place.file.endswith("__init__.py")


class House:
    """Every file of a package, and what can be counted in them. Raises SyntaxError for a file that does not parse."""

    def __init__(self, package: Path) -> None:
        self.modules = [_module(path, package.parent) for path in sorted(package.rglob("*.py"))]

    def files(self) -> list[Sized]:
        """All files, the longest first."""
        return _longest_first(Sized(len(m.text.splitlines()), m.place) for m in self.modules)

    def functions(self) -> list[Sized]:
        """All functions and methods, the longest first; one inside another counts for both."""
        return _longest_first(each for m in self.modules for each in _functions(m))

    def names(self) -> dict[str, list[Place]]:
        """Names of files, and public names of functions and classes of modules, that occur more than once."""
        places: dict[str, list[Place]] = defaultdict(list)
        for module in self.modules:
            if not module.is_package:
                places[f"{module.name.rpartition('.')[2]}.py"].append(module.place)
            for node in module.tree.body:
                if isinstance(node, Definition | ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(Place(module.place.file, node.lineno))
        return {name: each for name, each in sorted(places.items()) if len(each) > 1}

    def found(self) -> dict[str, list[int]]:
        """The lines of each file on which a variable or a parameter is called ``found``."""
        lines = {m.place.file: sorted(_called(m.tree, "found")) for m in self.modules}
        return {file: each for file, each in lines.items() if each}

    def unsaid_encodings(self) -> list[Place]:
        """Where a text is read or written in the encoding of whoever's machine it is."""
        return [Place(m.place.file, line) for m in self.modules for line in _without_encoding(m.tree)]

    def circles(self) -> list[list[str]]:
        """For each package whose parts import each other in a circle: one such circle, by dotted names."""
        imports = self._imports()
        circles = []
        for package in (m.name for m in self.modules if m.is_package):
            try:
                TopologicalSorter(_between_parts(package, imports)).prepare()
            except CycleError as error:
                circles.append(list(error.args[1]))
        return circles

    def _imports(self) -> dict[str, set[str]]:
        """Which modules each module imports; imports for the type checker and inside functions count."""
        known = {m.name for m in self.modules}
        return {m.name: {name for name in _imported(m) if name in known} for m in self.modules}


def _module(path: Path, root: Path) -> Module:
    text, file = path.read_text(encoding="utf-8"), path.relative_to(root)
    parts = file.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, Place(file.as_posix()), text, ast.parse(text, str(path)))


def _longest_first(each: Iterator[Sized]) -> list[Sized]:
    return sorted(each, key=lambda s: (-s.lines, str(s.place)))


def _functions(module: Module) -> Iterator[Sized]:
    code = _lines_of_code(module.text)
    for node in ast.walk(module.tree):
        if isinstance(node, Definition):
            own = code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            yield Sized(len(own - _docstring(node)), Place(module.place.file, node.lineno), node.name)


def _lines_of_code(text: str) -> set[int]:
    """Numbers of the lines on which something stands that is no comment."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring(node: Definition) -> set[int]:
    """Numbers of the lines that a function's docstring takes."""
    if ast.get_docstring(node) is None:
        return set()
    first = node.body[0]
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def _called(tree: ast.Module, name: str) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=own, ctx=ast.Store()) | ast.arg(arg=own) | ast.alias(asname=own) if own == name:
                yield node.lineno


def _without_encoding(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="read_text" | "write_text"), keywords=keywords):
                unsaid = True
            case ast.Call(func=ast.Name("open"), args=[_], keywords=keywords):
                unsaid = "mode" not in {k.arg for k in keywords}
            case ast.Call(func=ast.Name("open"), args=[_, ast.Constant(str(mode)), *_], keywords=keywords):
                unsaid = "b" not in mode
            case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(str(mode)), *_], keywords=keywords):
                unsaid = TEXT_MODE.fullmatch(mode) is not None
            case _:
                continue
        if unsaid and "encoding" not in {k.arg for k in keywords}:
            yield node.lineno


def _imported(module: Module) -> Iterator[str]:
    """Dotted names that a module imports; of ``from a import b`` both ``a`` and ``a.b``, as ``b`` may be a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _between_parts(package: str, imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Which parts of a package (its modules and packages) import which others, themselves or by what is in them."""

    def part(name: str) -> str:
        inside = name.removeprefix(f"{package}.")
        return "" if inside == name else f"{package}.{inside.partition('.')[0]}"

    parts: dict[str, set[str]] = defaultdict(set)
    for importer, imported in imports.items():
        if own := part(importer):
            parts[own] |= {part(name) for name in imported} - {"", own}
    return parts


def report(house: House, found_counts: bool) -> tuple[str, bool]:
    """What is printed of a package, and whether all is as CONTRIBUTING.md asks."""
    files, functions, names, circles = house.files(), house.functions(), house.names(), house.circles()
    long_files = [f for f in files if f.lines > FILE_LINES]
    long_functions = [f for f in functions if f.lines > FUNCTION_LINES]
    twice = [f"{name}: {', '.join(map(str, places))}" for name, places in names.items()]
    unsaid = house.unsaid_encodings()
    found = [f"{file}: {', '.join(map(str, lines))}" for file, lines in house.found().items()]
    sections = [
        ("files", f"{len(files):,}", []),
        ("lines", f"{sum(f.lines for f in files):,}", []),
        ("longest file", ", ".join(str(f).strip() for f in files[:1]), []),
        ("longest function", ", ".join(str(f).strip() for f in functions[:1]), []),
        (f"files over {FILE_LINES} lines", str(len(long_files)), map(str, long_files)),
        (f"functions over {FUNCTION_LINES} lines", str(len(long_functions)), map(str, long_functions)),
        ("circles of imports", str(len(circles)), (" -> ".join(c) for c in circles)),
        ("names that occur twice", str(len(twice)), twice),
        ("texts without an encoding", str(len(unsaid)), map(str, unsaid)),
        ("files with a variable `found`", str(len(found)), found),
    ]
    lines = [line for name, value, more in sections for line in (f"{name:<31}{value}", *(f"  {m}" for m in more))]
    good = not (long_files or long_functions or circles or twice or unsaid or (found_counts and found))
    return "\n".join(lines), good


def main(arguments: list[str]) -> int:
    """Print the report on a package; 1 if something in it is not as CONTRIBUTING.md asks."""
    parser = argparse.ArgumentParser(description="What CONTRIBUTING.md asks of files, functions and names.")
    parser.add_argument("package", nargs="?", type=Path, default=Path(__file__).parents[1] / "src" / "fedstill")
    parser.add_argument("--found", action="store_true", help="fail on a variable called `found`, too")
    asked = parser.parse_args(arguments)
    text, good = report(House(asked.package), asked.found)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
