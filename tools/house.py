"""Figures on how readable the code is, by package, and the limits that CONTRIBUTING.md sets for
them.

``python tools/house.py`` prints the table. The folders beside the package (``FOLDERS``) have rows
of their own, which are not part of the total. It fails if a figure is above its ceiling in
``tools/house_ceilings.csv``, or if a text file is opened without an encoding. ``--lower`` lowers
the ceilings to today's figures and raises none. ``--adopt`` records today's figures of packages
that are new, or that received code from other packages.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[1]

LARGE_STATEMENT = 20
"""A statement with more AST nodes than this is large."""

MANY_POSITIONAL = 6
"""Calls with this many positional arguments, or more, are counted."""

LINE_LENGTH = 100

TABLE_WIDTH = 120

_WORDS = """
own said told what who where when how why there here each every some other others both one many more
less asked given seen known named wanted held made kept whole left rest alike apart shown says came
went had found done sent taken spent begun before after then now so of at
"""

FUNCTION_WORDS = frozenset(_WORDS.split())
"""Words that say nothing about a variable or a parameter that is called so."""

FOLDERS = ("benchmarks", "examples", "tests", "tools")
"""Folders beside the package. Each is a row of the table, and none is part of the total."""

REGISTRARS = frozenset({"register", "method", "partition", "command"})
"""Decorators that enter a class or a function into a registry or the command line."""

PRAGMA = re.compile(r"#\s*(noqa|type:|pragma|fmt:|ruff:|mypy:|!)")
"""A comment for a tool, not for a reader."""

TARGET = re.compile(r"(fedstill(?:\.\w+)+):\w+")
"""An import string of the manifest or of a command; it registers the module that it names."""

TEXT_MODE = re.compile("[rwax][+t]*")
"""A mode in which ``Path.open`` opens a text."""

TOTAL = "total"
"""The row of the whole package in the table and in the file of ceilings."""


@dataclass(frozen=True)
class Rate:
    """A number of cases: per statement or per name if ``out_of`` counts those, a plain count if it
    is 0.
    """

    cases: int
    out_of: int = 0

    def __str__(self) -> str:
        if self.out_of:
            return f"{self.cases:,} of {self.out_of:,}"
        return f"{self.cases:,}"

    def denser_than(self, other_rate: Rate) -> bool:
        """Whether the share of cases is larger; products of integers, so that equal shares compare
        as equal.
        """
        return self.cases * other_rate.out_of > other_rate.cases * self.out_of

    def exceeds(self, ceiling: Rate) -> bool:
        """Whether there are more cases, and a larger share.

        Code that has none of the cases can be added and deleted freely: one leaves the number as it
        is, the other one the share.
        """
        if not ceiling.out_of:
            return self.cases > ceiling.cases
        return self.cases > ceiling.cases and self.denser_than(ceiling)

    def lowered_to(self, current: Rate) -> Rate:
        """This ceiling, with as few cases and as small a share as ``current``; neither rises."""
        cases = min(self.cases, current.cases)
        if not self.out_of:
            return Rate(cases)
        sparser = current
        if current.denser_than(self):
            sparser = self
        if not sparser.cases:
            return Rate(0, sparser.out_of)
        if sparser is self:
            # Rounded up, so that the share never rises.
            return Rate(cases, -(-cases * sparser.out_of // sparser.cases))
        # Rounded down, so that today's figure is not above its own ceiling.
        return Rate(cases, cases * sparser.out_of // sparser.cases)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of the table: what is counted, per what, and the gate that the whole package is to
    meet.
    """

    key: str
    heading: str
    per: str = ""
    """Key of the count that the cases are divided by; empty for a plain count."""
    scale: int = 1
    """The figure is per so many: 100 for a percentage."""
    decimals: int = 0
    gate: float | None = None
    gate_by_package: bool = False
    """Whether every package is to meet the gate, except those in ``PACKAGES_OF_FORMULAS``."""

    @property
    def gate_text(self) -> str:
        """The gate as the table shows it; empty if there is none."""
        if self.gate is None:
            return ""
        return f"{self.gate:g}"

    def rate(self, counts: Counter[str]) -> Rate:
        """The figure of a package with these counts."""
        if self.per:
            return Rate(counts[self.key], counts[self.per])
        return Rate(counts[self.key])

    def value(self, rate: Rate) -> float:
        """The number in the table; 0 for a package without statements."""
        if not self.per:
            return rate.cases
        return self.scale * rate.cases / max(rate.out_of, 1)

    def meets_gate(self, rate: Rate) -> bool:
        """Whether the gate, if there is one, lets this rate pass."""
        return self.gate is None or self.value(rate) <= self.gate

    def text(self, value: float) -> str:
        """A value as the table shows it."""
        return f"{value:,.{self.decimals}f}"


def _per_thousand(key: str, heading: str, gate: float | None = None) -> Figure:
    return Figure(key=key, heading=heading, per="statements", scale=1000, decimals=1, gate=gate)


FIGURES = (
    Figure(key="files", heading="files", gate=320),
    Figure(key="statements", heading="state-\nments"),
    Figure(
        key="large_statements",
        heading=f"% over\n{LARGE_STATEMENT} nodes",
        per="statements",
        scale=100,
        decimals=1,
        gate=4,
        gate_by_package=True,
    ),
    _per_thousand("conditional_expressions", "condit.\nexpr.", gate=15),
    _per_thousand("parallel_assignments", "parallel\nassign.", gate=3),
    _per_thousand("long_calls", f"calls of\n{MANY_POSITIONAL}+ pos.", gate=2),
    Figure(
        key="function_words", heading="% func.\nwords", per="names", scale=100, decimals=1, gate=1.5
    ),
    Figure(key="single_importer", heading="one im-\nporter", gate=39),
    Figure(key="nodes", heading="nodes", per="statements", decimals=1),
    Figure(key="depth", heading="depth", per="statements", decimals=1),
    _per_thousand("comments", "com-\nments"),
    _per_thousand("imports", "imports"),
    Figure(key="longest_line", heading="longest\nline"),
    Figure(key="long_lines", heading=f"lines\nover {LINE_LENGTH}"),
)
"""The columns of the table."""

RUFF_RULES = (
    Figure(key="C901", heading="functions with a complexity over 10 (C901)", gate=0),
    Figure(key="PLR0913", heading="functions with more than 8 parameters (PLR0913)", gate=0),
    Figure(
        key="PLR0917", heading="functions with more than 5 positional parameters (PLR0917)", gate=0
    ),
)
"""Rules of ruff over the whole repository; the limits themselves are in ``pyproject.toml``.

``ruff check`` enforces them in ``src``. In all other code their counts may not rise, but
``--gates`` does not ask for 0.
"""

PACKAGES_OF_FORMULAS = frozenset({"losses", "metrics", "methods"})
"""Formulas are long statements and still read well: ceilings hold in these packages, and no
gate.
"""


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, its text and its syntax tree."""

    name: str
    path: Path
    package: str
    text: str
    nodes: list[ast.AST]
    """All nodes of the syntax tree, which is walked once: this takes most of the time."""

    @property
    def has_own_name(self) -> bool:
        """Whether it is imported by its own name, unlike ``__init__.py`` and ``__main__.py``."""
        return not self.path.name.startswith("__")


def read_modules(root: Path) -> list[Module]:
    """Every file of a package. Raises SyntaxError for one that does not parse."""
    return [_read_module(path, root) for path in sorted(root.rglob("*.py"))]


def _read_module(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    inside = path.relative_to(root)
    parts = [root.name, *inside.with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    # Modules directly in the root are a row of their own, which has the root's name.
    package = root.name
    if len(inside.parts) > 1:
        package = inside.parts[0]
    nodes = list(ast.walk(ast.parse(text, str(path))))
    return Module(name=".".join(parts), path=path, package=package, text=text, nodes=nodes)


def count_by_package(modules: list[Module]) -> dict[str, Counter[str]]:
    """What is counted in each package, and in all of them under ``TOTAL``."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    single = _with_single_importer(modules)
    for module in modules:
        module_counts = _count(module)
        module_counts["single_importer"] = int(module.name in single)
        for row in (module.package, TOTAL):
            longest = max(counts[row]["longest_line"], module_counts["longest_line"])
            counts[row].update(module_counts)
            counts[row]["longest_line"] = longest
    return dict(counts)


def count_folders(repository: Path) -> dict[str, Counter[str]]:
    """The counts of each of ``FOLDERS`` that the repository has."""
    counts = {}
    for name in FOLDERS:
        modules = read_modules(repository / name)
        if modules:
            counts[name] = count_by_package(modules)[TOTAL]
    return counts


def _count(module: Module) -> Counter[str]:
    counts = Counter({"files": 1, "comments": _comments(module.text)})
    line_lengths = [len(line) for line in module.text.splitlines()]
    counts["longest_line"] = max(line_lengths, default=0)
    counts["long_lines"] = sum(length > LINE_LENGTH for length in line_lengths)
    for node in module.nodes:
        _count_node(node, counts)
        if isinstance(node, ast.stmt):
            _count_statement(node, counts)
    return counts


def _count_node(node: ast.AST, counts: Counter[str]) -> None:
    match node:
        case ast.IfExp():
            counts["conditional_expressions"] += 1
        case ast.Call(args=arguments) if len(arguments) >= MANY_POSITIONAL:
            counts["long_calls"] += 1
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            counts["parallel_assignments"] += not _is_swap(targets, values)
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name not in ("self", "cls"):
            counts["names"] += 1
            counts["function_words"] += name in FUNCTION_WORDS


def _is_swap(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    return sorted(map(ast.unparse, targets)) == sorted(map(ast.unparse, values))


def _count_statement(statement: ast.stmt, counts: Counter[str]) -> None:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        counts["imports"] += 1
        return
    if _is_docstring(statement):
        return
    extent = _extent(statement)
    counts["statements"] += 1
    counts["nodes"] += extent.nodes
    counts["depth"] += extent.depth - 1
    counts["large_statements"] += extent.nodes > LARGE_STATEMENT


def _is_docstring(statement: ast.stmt) -> bool:
    """Whether it is a docstring; that of a field or a constant is below it."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


@dataclass(frozen=True)
class Extent:
    """How many nodes there are from a node down, itself included, and how many of them are above
    each other.
    """

    nodes: int
    depth: int


def _extent(node: ast.AST) -> Extent:
    children = [_extent(child) for child in _expressions(node)]
    return Extent(
        nodes=1 + sum(child.nodes for child in children),
        depth=1 + max((child.depth for child in children), default=0),
    )


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes right below a node, without nested statements, annotations, Load and Store."""
    for field in node._fields:
        if field in ("annotation", "returns"):
            continue
        value = getattr(node, field, None)
        if isinstance(value, list):
            yield from (
                child
                for child in value
                if isinstance(child, ast.AST) and not isinstance(child, ast.stmt)
            )
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            yield value


def _comments(text: str) -> int:
    """The number of comments for a reader, without those at the top of the file (a licence, for
    example).
    """
    if "#" not in text:
        return 0
    comments = 0
    in_header = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not in_header and not PRAGMA.match(token.string)
        elif token.type not in (tokenize.NL, tokenize.NEWLINE):
            in_header = False
    return comments


def _with_single_importer(modules: list[Module]) -> set[str]:
    """Names of the modules that exactly one module imports, and that register nothing."""
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in _imported(module, names):
            importers[name].add(module.name)

    targets = set(chain.from_iterable(map(_targets, modules)))
    single = set()
    for module in modules:
        if module.name in targets:
            continue
        other_modules = importers[module.name] - {module.name}
        if module.has_own_name and len(other_modules) == 1 and not _registers(module):
            single.add(module.name)
    return single


def _imported(module: Module, names: set[str]) -> Iterator[str]:
    """The modules that a module imports, anywhere in it; ``from a import b`` imports ``a.b`` if
    that is a module.
    """
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in names:
                    yield submodule
                else:
                    yield node.module


def _targets(module: Module) -> Iterator[str]:
    """The modules that import strings in a module name."""
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = TARGET.fullmatch(node.value)
            if match:
                yield match[1]


def _registers(module: Module) -> bool:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = {_name_of(decorator) for decorator in node.decorator_list}
            if decorators & REGISTRARS:
                return True
    return False


def _name_of(decorator: ast.expr) -> str:
    match decorator:
        case ast.Call(func=function):
            return _name_of(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def unencoded_texts(modules: list[Module]) -> list[str]:
    """Lines that read or write a text in whatever encoding a machine's locale has."""
    places = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Call) and _opens_text(node):
                keywords = {keyword.arg for keyword in node.keywords}
                if "encoding" not in keywords:
                    places.append(f"{module.path}:{node.lineno}")
    return places


def _opens_text(call: ast.Call) -> bool:
    match call:
        case ast.Call(func=ast.Attribute(attr="read_text" | "write_text")):
            return True
        case ast.Call(func=ast.Name("open"), args=[_], keywords=keywords):
            return "mode" not in {keyword.arg for keyword in keywords}
        case ast.Call(func=ast.Name("open"), args=[_, ast.Constant(str(mode)), *_]):
            return "b" not in mode
        case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(str(mode)), *_]):
            return TEXT_MODE.fullmatch(mode) is not None
    return False


def ruff_counts(folder: Path) -> Counter[str]:
    """How often ruff finds each of ``RUFF_RULES`` in a folder, by the repository's
    configuration, also in files where ``ruff check`` does not enforce them.
    """
    rules = ",".join(rule.key for rule in RUFF_RULES)
    configuration = REPOSITORY / "pyproject.toml"
    options = [
        "--select",
        rules,
        "--config",
        str(configuration),
        "--config",
        "lint.per-file-ignores = {}",
        "--output-format",
        "json",
        "--exit-zero",
    ]
    command = [sys.executable, "-m", "ruff", "check", *options, str(folder)]
    result = subprocess.run(command, capture_output=True, check=True)
    return Counter(violation["code"] for violation in json.loads(result.stdout))


Ceilings = dict[str, dict[str, Rate]]
"""The ceilings of each row of the table, by key of a figure."""


def read_ceilings(path: Path) -> Ceilings:
    """The ceilings in a file; none if there is no such file."""
    ceilings: Ceilings = defaultdict(dict)
    if path.exists():
        with path.open("r", encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                ceilings[line["package"]][line["figure"]] = Rate(
                    int(line["cases"]), int(line["out_of"])
                )
    return ceilings


def write_ceilings(path: Path, ceilings: Ceilings) -> None:
    """Write the ceilings, the total's first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["package", "figure", "cases", "out_of"])
        for package in sorted(ceilings, key=lambda name: (name != TOTAL, name)):
            for key, rate in ceilings[package].items():
                writer.writerow([package, key, rate.cases, rate.out_of])


def current_rates(counts: dict[str, Counter[str]]) -> Ceilings:
    """Today's figures, as far as they have ceilings: every gated figure in total, and those per
    statement or per name in the other rows.
    """
    rates = {}
    for row, row_counts in counts.items():
        figures = [
            figure for figure in FIGURES if figure.gate is not None and (figure.per or row == TOTAL)
        ]
        if row == TOTAL:
            figures.extend(RUFF_RULES)
        rates[row] = {figure.key: figure.rate(row_counts) for figure in figures}
    return rates


def lowered(ceilings: Ceilings, rates: Ceilings) -> Ceilings:
    """The ceilings of the packages that there are, each lowered to today's figure if that is below
    it.
    """
    return {
        row: {key: ceiling.lowered_to(rates[row][key]) for key, ceiling in row_ceilings.items()}
        for row, row_ceilings in ceilings.items()
        if row in rates
    }


def adopted(ceilings: Ceilings, rates: Ceilings, packages: Iterable[str]) -> Ceilings:
    """The ceilings of the packages that there are; today's figures for new packages and for those
    named.
    """
    remaining = {row: row_ceilings for row, row_ceilings in ceilings.items() if row in rates}
    replaced = set(packages) | (rates.keys() - ceilings.keys())
    return remaining | {row: rates[row] for row in replaced}


def obstacles_to_adopting(
    ceilings: Ceilings, rates: Ceilings, packages: Iterable[str]
) -> list[str]:
    """Why the figures of these packages cannot become ceilings; nothing if they can.

    Code that moves between packages leaves the total as it is, so its ceilings hold throughout and
    are not adopted.
    """
    unknown = set(packages) - (rates.keys() - {TOTAL})
    obstacles = [f"{name}: no such package" for name in sorted(unknown)]
    if TOTAL in ceilings:
        obstacles += above_ceilings(ceilings, {TOTAL: rates[TOTAL]})
    return obstacles


def above_ceilings(ceilings: Ceilings, rates: Ceilings) -> list[str]:
    """One line for each figure that is above its ceiling and does not meet its gate."""
    lines = []
    for row, row_rates in rates.items():
        for key, rate in row_rates.items():
            if _figure(key).meets_gate(rate):
                continue
            if row in ceilings:
                ceiling = ceilings[row][key]
                is_above = rate.exceeds(ceiling)
            else:
                # A new package is held to the share of the whole; the number of cases there says
                # nothing about it.
                ceiling = ceilings[TOTAL][key]
                is_above = rate.denser_than(ceiling)
            if is_above:
                lines.append(f"{row}: {key} rose to {rate}, above its ceiling of {ceiling}")
    return lines


@functools.cache
def _figure(key: str) -> Figure:
    return next(figure for figure in (*FIGURES, *RUFF_RULES) if figure.key == key)


def above_gates(rates: Ceilings) -> list[str]:
    """One line for each figure of the table that does not meet its gate."""
    lines = []
    for row, row_rates in rates.items():
        for key, rate in row_rates.items():
            figure = _figure(key)
            if _has_gate(row, figure) and not figure.meets_gate(rate):
                lines.append(
                    f"{row}: {key} is {figure.text(figure.value(rate))}, its gate is "
                    f"{figure.gate_text}"
                )
    return lines


def _has_gate(row: str, figure: Figure) -> bool:
    """Whether a row of the table must meet the gate of a figure."""
    if figure in RUFF_RULES:
        return False
    if row == TOTAL or row in FOLDERS:
        return True
    return figure.gate_by_package and row not in PACKAGES_OF_FORMULAS


def figures_table(counts: dict[str, Counter[str]]) -> Table:
    """The table of all figures by package, with the total, the folders and the gates."""
    caption = (
        "condit. expr., parallel assign., calls, comments and imports are per 1,000 statements"
    )
    table = Table(
        "package", box=box.SIMPLE_HEAD, padding=0, caption=caption, caption_justify="left"
    )
    for figure in FIGURES:
        table.add_column(figure.heading, justify="right", no_wrap=True)
    folders = [name for name in FOLDERS if name in counts]
    packages = sorted(counts.keys() - {TOTAL, *folders})
    for row in [*packages, TOTAL, *folders]:
        cells = [figure.text(figure.value(figure.rate(counts[row]))) for figure in FIGURES]
        table.add_row(row, *cells, end_section=row == TOTAL)
    table.add_section()
    table.add_row("gate", *(figure.gate_text for figure in FIGURES))
    return table


def print_report(counts: dict[str, Counter[str]], problems: list[str]) -> None:
    """Print the table, what ruff counts, and what is wrong."""
    # In a pipe, rich would fold the table to 80 columns.
    console = Console(width=TABLE_WIDTH)
    console.print(figures_table(counts))
    for rule in RUFF_RULES:
        console.print(f"{rule.heading}: {counts[TOTAL][rule.key]}", highlight=False)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line; ``--help`` prints this module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="?", type=Path, default=REPOSITORY / "src" / "fedstill")
    parser.add_argument(
        "--repository",
        type=Path,
        default=REPOSITORY,
        help=f"the folder that has {', '.join(FOLDERS)}, and in which ruff counts",
    )
    parser.add_argument(
        "--ceilings", type=Path, default=REPOSITORY / "tools" / "house_ceilings.csv"
    )
    parser.add_argument(
        "--gates", action="store_true", help="fail on a figure that does not meet its gate, too"
    )
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--lower", action="store_true", help="lower the ceilings to today's figures"
    )
    change.add_argument(
        "--adopt",
        nargs="*",
        metavar="PACKAGE",
        help="record today's figures of new packages, and of those named: they received code from "
        "other packages. "
        "Refused while the total is above its ceilings.",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a figure is above its ceiling or a text has no encoding."""
    options = parse_arguments(arguments)
    modules = read_modules(options.package)
    counts = count_by_package(modules)
    counts.update(count_folders(options.repository))
    counts[TOTAL].update(ruff_counts(options.repository))
    rates = current_rates(counts)
    ceilings = read_ceilings(options.ceilings)

    if options.adopt is not None:
        obstacles = obstacles_to_adopting(ceilings, rates, options.adopt)
        if obstacles:
            print_report(counts, obstacles)
            return 1
        ceilings = adopted(ceilings, rates, options.adopt)
        write_ceilings(options.ceilings, ceilings)
    elif options.lower:
        ceilings = lowered(ceilings, rates)
        write_ceilings(options.ceilings, ceilings)

    problems = [f"{place}: no encoding" for place in unencoded_texts(modules)]
    problems += above_ceilings(ceilings, rates)
    if options.gates:
        problems += above_gates(rates)
    print_report(counts, problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
