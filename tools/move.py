"""Moves and merges modules by the table ``tools/moves.toml``, and rewrites all that names them.

``python tools/move.py`` moves all modules, ``--tests`` the tests. ``--contract`` writes the import
contract of the tree as it is then into pyproject.toml. ``--public-api`` notes the moves for
tools/public_api.py. ``--list`` only says what the table lacks and what it has too much.

The tool can be run again: what was moved already, or no longer exists, is passed over. It refuses
what it cannot do safely: two things with one name in a merged module, and a name that is used
through a module's alias where a local variable hides it.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedstill"
TABLE = ROOT / "tools" / "moves.toml"
NAME = "fedstill"
TEXT_FILES = (
    "*.md",
    "*.toml",
    "*.yml",
    "*.yaml",
    "*.ipynb",
    "*.cfg",
    "*.html",
    "*.css",
    "Makefile",
    ".ci/*",
)
NOT_REWRITTEN = (
    "tools/moves.toml",
    "tools/move.py",
    "tools/golden*",  # they run in both trees, by names that stay
    "tools/public_api*",  # old names are what it compares with
    "CHANGELOG.md",
    "tests/**/begun_before/*",
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Refused(Exception):
    """What cannot be moved safely, as lines to print."""


@dataclass(frozen=True)
class Table:
    """The table: new paths with their old ones, docstrings, names that change, tests."""

    modules: Mapping[str, tuple[str, ...]]
    docs: Mapping[str, str]
    renames: Mapping[str, Mapping[str, str]]
    tests: Mapping[str, str]
    """Old path: new path, below tests."""
    test_folders: Mapping[str, str]
    test_folder_names: Mapping[str, str]
    kept_strings: frozenset[str]
    text: Mapping[str, Mapping[str, str]]
    """Path below the repository's root: old text, new text."""

    @classmethod
    def read(cls) -> Table:
        table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
        modules = {new: tuple(olds) for new, olds in table["modules"].items()}
        tests = {
            old: f"{new}/{Path(old).name}" for new, olds in table["tests"].items() for old in olds
        }
        return cls(
            modules=modules,
            docs=table["docs"],
            renames=table["renames"],
            tests=tests,
            test_folders=table["test_folders"],
            test_folder_names=table["test_folder_names"],
            kept_strings=frozenset(table["kept_strings"]),
            text=table["text"],
        )

    def patched(self, path: Path) -> str:
        """A file's text, with what the table says to change in it by hand."""
        text = path.read_text(encoding="utf-8")
        for old, new in self.text.get(path.relative_to(ROOT).as_posix(), {}).items():
            if old not in text and new not in text:
                print(
                    f"{path.relative_to(ROOT)} lacks the text to change: {old!r}", file=sys.stderr
                )
            text = text.replace(old, new)
        return text


def dotted(path: str) -> str:
    """The module of a path below the package, as it is imported."""
    parts = [NAME, *path.removesuffix(".py").split("/")]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


# -------------------------------------------------------------------------------------------------
# Text edits at the positions of syntax nodes


class Source:
    """A file's text with its syntax tree, and edits that are applied at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.edits: list[tuple[int, int, str]] = []
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        end = self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return start, end

    def whole_lines(self, node: ast.stmt) -> tuple[int, int]:
        """All of a statement's lines, with comments behind it."""
        assert node.end_lineno is not None
        return self._starts[node.lineno - 1], self._starts[node.end_lineno]

    def parents(self) -> dict[int, ast.AST]:
        """Each node's parent, by the node's id."""
        pairs = [
            (node, child) for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        ]
        return {id(child): node for node, child in pairs}

    def replace(self, start: int, end: int, new: str) -> None:
        self.edits.append((start, end, new))

    def result(self) -> str:
        text = self.text
        last = len(text) + 1
        for start, end, new in sorted(set(self.edits), reverse=True):
            if end > last:
                raise Refused(f"edits overlap at {text[start:end]!r}")
            text = text[:start] + new + text[end:]
            last = start
        return text


# -------------------------------------------------------------------------------------------------
# Scopes: which names mean the module's own


def bound_in(body: Iterable[ast.AST]) -> set[str]:
    """Names that statements bind in their own scope, not in scopes inside."""
    names: set[str] = set()
    not_here: set[str] = set()
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        names |= bound_by(node)
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            not_here |= set(node.names)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting += node.decorator_list
        elif isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
            waiting += [inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
        else:
            waiting += ast.iter_child_nodes(node)
    return names - not_here


def bound_by(node: ast.AST) -> set[str]:
    """Names that a node itself binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return {node.id}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(a.asname or a.name).partition(".")[0] for a in node.names}
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        return {node.name}
    return set()


def arguments_of(node: Function) -> list[ast.arg]:
    listed = node.args
    named = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs]
    return named + [a for a in (listed.vararg, listed.kwarg) if a is not None]


@dataclass(frozen=True)
class NameUse:
    """A name where it is used: whether it is the module's, what is local, and if in an f-string."""

    node: ast.Name
    hidden: frozenset[str]
    in_f_string: bool

    @property
    def of_module(self) -> bool:
        return self.node.id not in self.hidden


def name_uses(tree: ast.Module) -> Iterator[NameUse]:
    """Every name of a module."""
    for statement in tree.body:
        yield from _uses(statement, frozenset(), False)


def _uses(node: ast.AST, hidden: frozenset[str], inside: bool) -> Iterator[NameUse]:
    if isinstance(node, ast.Name):
        yield NameUse(node, hidden, inside)
        return
    inside = inside or isinstance(node, ast.JoinedStr)
    for child, names in _with_scopes(node, hidden):
        yield from _uses(child, names, inside)


def _with_scopes(node: ast.AST, hidden: frozenset[str]) -> list[tuple[ast.AST, frozenset[str]]]:
    """A node's children, each with the local names where it stands."""
    if isinstance(node, FUNCTIONS):
        return _in_function(node, hidden)
    if isinstance(node, ast.ClassDef):
        outside: list[ast.AST] = [*node.decorator_list, *node.bases, *node.keywords]
        inner = hidden | bound_in(node.body)
        methods = [s for s in node.body if isinstance(s, FUNCTIONS)]
        others = [s for s in node.body if not isinstance(s, FUNCTIONS)]
        return [(child, hidden) for child in [*outside, *methods]] + [(s, inner) for s in others]
    if isinstance(node, COMPREHENSIONS):
        targets = [inner for generator in node.generators for inner in ast.walk(generator.target)]
        hidden = hidden | {n.id for n in targets if isinstance(n, ast.Name)}
    return [(child, hidden) for child in ast.iter_child_nodes(node)]


def _in_function(node: Function, hidden: frozenset[str]) -> list[tuple[ast.AST, frozenset[str]]]:
    body: list[ast.AST] = [*node.body] if isinstance(node.body, list) else [node.body]
    of_module = {n for s in ast.walk(node) if isinstance(s, ast.Global) for n in s.names}
    inner = (hidden | {a.arg for a in arguments_of(node)} | bound_in(body)) - of_module
    outside: list[ast.AST] = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
    outside += [a.annotation for a in arguments_of(node) if a.annotation]
    if not isinstance(node, ast.Lambda):
        outside += node.decorator_list
        outside += [node.returns] if node.returns else []
    return [(child, hidden) for child in outside] + [(child, inner) for child in body]


# -------------------------------------------------------------------------------------------------
# The moves


@dataclass
class Moves:
    """Old and new modules: what exists now and goes somewhere else, or is merged."""

    table: Table
    groups: dict[str, list[str]] = field(default_factory=dict)
    """New path: its old paths that exist."""
    homes: dict[str, str] = field(default_factory=dict)
    """Old dotted name: new dotted name."""
    renames: dict[str, dict[str, str]] = field(default_factory=dict)
    """Old dotted name: names of it that change."""
    unlisted: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    @classmethod
    def plan(cls, table: Table) -> Moves:
        here = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")}
        moves = cls(table)
        owner = {old: new for new, olds in table.modules.items() for old in olds}
        news = set(table.modules)
        for old, new in owner.items():
            if old in news and owner.get(old) != new:
                raise Refused(f"{old} is a new path and the old one of {new}")
        moves.gone = sorted(old for old in owner if old not in here and owner[old] not in here)
        moves.unlisted = sorted(
            p for p in here if p not in owner and p not in news and not _stays(p)
        )
        for new, olds in table.modules.items():
            there = [old for old in olds if old in here]
            if (there and there != [new]) or (not olds and new not in here):
                moves.groups[new] = there
        for new, existing in moves.groups.items():
            for old in existing:
                moves.homes[dotted(old)] = dotted(new)
                moves.renames[dotted(old)] = dict(table.renames.get(old, {}))
        return moves

    def home(self, module: str) -> str:
        return self.homes.get(module, module)

    def new_name(self, module: str, name: str) -> str:
        return self.renames.get(module, {}).get(name, name)


def _stays(path: str) -> bool:
    """Whether a module that the table does not name is at its place: one file a thing."""
    folder, _, _ = path.rpartition("/")
    return folder in ("methods", "data/partition")


@dataclass(frozen=True, order=True)
class Import:
    """One imported name, or a whole module (name empty)."""

    module: str
    name: str
    alias: str = ""

    @property
    def local(self) -> str:
        return self.alias or self.name or self.module

    def __str__(self) -> str:
        if not self.name:
            return f"import {self.module}" + (f" as {self.alias}" if self.alias else "")
        return f"from {self.module} import {self.name}" + (
            f" as {self.alias}" if self.alias else ""
        )


class Rewriter:
    """Rewrites one file's text for the moves."""

    def __init__(self, moves: Moves, modules: set[str]) -> None:
        self.moves = moves
        self.modules = modules
        self.leaves: dict[str, str] = {}
        """Modules' names that the file at hand changes, too."""

    def moved(self, module: str, name: str, alias: str) -> Import:
        """An import of today as it is after the move; the local name stays what it was."""
        whole = self.submodule(module, name)
        if whole:
            parent, _, leaf = self.moves.home(whole).rpartition(".")
            if not alias and self.leaves.get(name) == leaf:
                return Import(parent, leaf)
            return Import(parent, leaf, alias if alias else ("" if leaf == name else name))
        new = self.moves.new_name(module, name)
        return Import(
            self.moves.home(module), new, alias if alias else ("" if new == name else name)
        )

    def submodule(self, module: str, name: str) -> str:
        """The module that ``from module import name`` gives; empty if it gives another thing."""
        whole = f"{module}.{name}"
        if whole not in self.modules:
            return ""
        own = [s for s in self.trees(module).body if not isinstance(s, ast.If)]
        if name in bound_in(own) and not any(_imports_submodule(s, module, name) for s in own):
            return ""
        return whole

    def statement(self, node: ast.ImportFrom | ast.Import, indent: str) -> str | None:
        """An import statement anew; None if nothing changes."""
        if isinstance(node, ast.Import):
            new = [(self.moves.home(a.name), a.asname) for a in node.names]
            if new == [(a.name, a.asname) for a in node.names]:
                return None
            return f"\n{indent}".join(f"import {n}" + (f" as {a}" if a else "") for n, a in new)
        module = node.module or ""
        if module.partition(".")[0] != NAME or node.level:
            return None
        old = [Import(module, a.name, a.asname or "") for a in node.names]
        new_imports = [self.moved(i.module, i.name, i.alias) for i in old]
        if old == new_imports:
            return None
        return f"\n{indent}".join(joined(new_imports))

    def code(self, source: Source) -> None:
        """Edit all import statements of a file, and its uses of modules' names that changed."""
        self.leaves = self._free_leaves(source.tree)
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                start, end = source.span(node)
                new = self.statement(node, " " * node.col_offset)
                if new is not None:
                    source.replace(start, end, new)
        parents = {
            id(child): node
            for node in ast.walk(source.tree)
            for child in ast.iter_child_nodes(node)
        }
        f_strings: dict[tuple[int, int], str] = {}
        for name in ast.walk(source.tree):
            if not isinstance(name, ast.Name) or name.id not in self.leaves:
                continue
            new = self.leaves[name.id]
            outer = _f_string(name, parents)
            if outer is None:
                source.replace(*source.span(name), new)
            else:
                span = source.span(outer)
                f_strings[span], _ = _in_braces(
                    f_strings.get(span, source.text[slice(*span)]), name.id, new
                )
        for (start, end), text in f_strings.items():
            source.replace(start, end, text)
        self.leaves = {}

    def _free_leaves(self, tree: ast.Module) -> dict[str, str]:
        """New names of imported modules that a file can use: nothing else in it has them."""
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
        wanted: dict[str, str] = {}
        homes: dict[str, set[str]] = {}
        for node in imports:
            for alias in node.names:
                whole = self.submodule(node.module or "", alias.name)
                if not whole:
                    continue
                leaf = self.moves.home(whole).rpartition(".")[2]
                homes.setdefault(leaf, set()).add(self.moves.home(whole))
                if not alias.asname and leaf != alias.name:
                    wanted[alias.name] = leaf
        taken = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        taken |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
        stored = {
            n.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        }
        stored |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
        exported = {
            c.value
            for s in tree.body
            if _assigned(s) == "__all__"
            for c in ast.walk(s)
            if isinstance(c, ast.Constant)
        }
        bound: list[str] = []
        for inner in ast.walk(tree):
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                bound += [a.asname or a.name for a in inner.names]
            elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound.append(inner.name)
        free = {}
        for old, leaf in wanted.items():
            clash = (
                leaf in taken or leaf in bound or hasattr(builtins, leaf) or len(homes[leaf]) > 1
            )
            if (
                not clash
                and old not in exported
                and old not in stored
                and list(wanted.values()).count(leaf) == 1
            ):
                free[old] = leaf
        return free

    def definition(self, name: str, new_module: str) -> str:
        """The new module that defines a name, which others may have from there."""
        for old, new in [
            *self.moves.homes.items(),
            *((m, m) for m in self.modules if m not in self.moves.homes),
        ]:
            if new != new_module:
                continue
            for statement in self.trees(old).body:
                if isinstance(statement, ast.ImportFrom) and name in [
                    a.asname or a.name for a in statement.names
                ]:
                    home = self.moves.home(statement.module or "")
                    if home != new_module and home.partition(".")[0] == NAME:
                        return self.definition(name, home)
        return new_module

    @functools.cache  # noqa: B019 - one rewriter, which lives as long as the program
    def trees(self, module: str) -> ast.Module:
        path = PACKAGE.joinpath(*module.split(".")[1:])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(file.read_text(encoding="utf-8"))

    def text(self, text: str, *, python: bool) -> str:
        """Dotted names in strings, comments and prose, and import lines in them."""
        text = _IMPORT_LINE.sub(self._import_line, text)
        text = _DOTTED.sub(lambda m: self._dotted(m, python), text)
        text = _SHORT.sub(self._short, text)
        return in_paths(text, self.moves, _QUOTED_PATH) if python else text

    def _short(self, match: re.Match[str]) -> str:
        """A module in backticks without the package's name, as in ``wire.privacy``."""
        parts = match[0].split(".")
        for cut in range(len(parts), 1, -1):
            module = ".".join([NAME, *parts[:cut]])
            if module in self.moves.homes:
                return ".".join([self.moves.homes[module].removeprefix(f"{NAME}."), *parts[cut:]])
        return match[0]

    def _import_line(self, match: re.Match[str]) -> str:
        before, module, names, end = match.groups()
        listed = [n.strip() for n in names.split(",") if n.strip()]
        if not all(re.fullmatch(r"\w+( as \w+)?", n) for n in listed):
            return match[0]
        imports = [Import(module, n.partition(" as ")[0], n.partition(" as ")[2]) for n in listed]
        new = [self.moved(i.module, i.name, i.alias) for i in imports]
        if new == imports:
            return match[0]
        return f"\n{before}".join(joined(new)).join((before, end))

    def _dotted(self, match: re.Match[str], python: bool) -> str:
        whole = match[0]
        if whole in self.moves.table.kept_strings and python:
            return whole
        parts = whole.split(".")
        for cut in range(len(parts), 1, -1):
            module = ".".join(parts[:cut])
            if module in self.moves.homes:
                rest = parts[cut:]
                if rest:
                    rest[0] = self.moves.new_name(module, rest[0])
                return ".".join([self.moves.homes[module], *rest])
            if module in self.modules:
                return whole
        return whole


_DOTTED = re.compile(r"(?<![\w./-])fedstill(?:\.\w+)+")
_IMPORT_LINE = re.compile(
    r"^([ \t]*(?:>>> |\.\.\. )?)from (fedstill[\w.]*) import ([\w ,]+?)([ \t]*(?:#.*)?)$",
    re.MULTILINE,
)


def _imports_submodule(statement: ast.stmt, package: str, name: str) -> bool:
    """Whether a package's own import gives its submodule of that name."""
    return (
        isinstance(statement, ast.ImportFrom)
        and statement.module == package
        and name in [a.name for a in statement.names if a.asname in (None, name)]
    )


def joined(imports: Iterable[Import]) -> list[str]:
    """Import statements, one for each module."""
    names: dict[str, list[str]] = {}
    for it in dict.fromkeys(imports):
        names.setdefault(it.module, []).append(it.name + (f" as {it.alias}" if it.alias else ""))
    return [f"from {module} import {', '.join(many)}" for module, many in names.items()]


# -------------------------------------------------------------------------------------------------
# Merging modules


@dataclass
class Member:
    """One old module of a group: its text, what it defines, and the imports that it needs."""

    path: str
    module: str
    source: Source
    doc: str = ""
    body: str = ""
    imports: list[Import] = field(default_factory=list)
    typing_only: list[Import] = field(default_factory=list)
    raw_imports: list[str] = field(default_factory=list)
    public: list[str] | None = None
    future: bool = False

    @property
    def defined(self) -> set[str]:
        body = [s for s in self.source.tree.body if not _is_import(s)]
        return bound_in(body) - {"__all__"}


def _is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Import, ast.ImportFrom)) or _is_typing_block(statement)


def _is_typing_block(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and ast.unparse(statement.test) == "TYPE_CHECKING"
        and not statement.orelse
        and all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in statement.body)
    )


def _as_imports(node: ast.Import | ast.ImportFrom) -> list[Import]:
    if isinstance(node, ast.Import):
        return [Import(a.name, "", a.asname or "") for a in node.names]
    return [Import(node.module or "", a.name, a.asname or "") for a in node.names]


class Merger:
    """Makes one module of several."""

    def __init__(self, rewriter: Rewriter, new: str, olds: list[str]) -> None:
        self.rewriter = rewriter
        self.moves = rewriter.moves
        self.new = new
        self.members = [
            Member(old, dotted(old), Source(self.moves.table.patched(PACKAGE / old)))
            for old in olds
        ]
        self.inside = {m.module: m for m in self.members}
        self.problems: list[str] = []

    def text(self) -> str:
        for member in self.members:
            self._take_apart(member)
        self._import_from_one_home()
        self._refuse_collisions()
        if self.problems:
            raise Refused("\n".join(f"{self.new}: {p}" for p in dict.fromkeys(self.problems)))
        return self._put_together()

    # -- one member

    def _take_apart(self, member: Member) -> None:
        source = member.source
        new_names = self.moves.renames.get(member.module, {})
        local: dict[str, str] = dict(new_names)  # module-level names that are called otherwise now
        modules: dict[str, str] = {}  # aliases of other members
        for statement in source.tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                member.future = True
                source.replace(*source.whole_lines(statement), "")
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                start, end = source.whole_lines(statement)
                if "#" in source.text[start:end]:
                    member.raw_imports.append(source.text[start:end].rstrip("\n"))
                else:
                    member.imports += self._outside(_as_imports(statement), local, modules)
                source.replace(start, end, "")
            elif _is_typing_block(statement):
                assert isinstance(statement, ast.If)
                for inner in statement.body:
                    assert isinstance(inner, (ast.Import, ast.ImportFrom))
                    member.typing_only += self._outside(_as_imports(inner), local, modules)
                source.replace(*source.whole_lines(statement), "")
            elif _assigned(statement) == "__all__":
                member.public = list(ast.literal_eval(statement.value))  # type: ignore[attr-defined]
                source.replace(*source.whole_lines(statement), "")
        member.doc = ast.get_docstring(source.tree, clean=True) or ""
        first = source.tree.body[0] if source.tree.body else None
        if member.doc and first is not None:
            source.replace(*source.whole_lines(first), "")
        self._inner_imports(member, local, modules)
        self._names(member, local, modules)
        member.body = source.result().strip("\n")

    def _outside(
        self, imports: list[Import], local: dict[str, str], modules: dict[str, str]
    ) -> list[Import]:
        """The imports of other modules; those of members note what a name is called now."""
        needed = []
        for it in imports:
            whole = self.rewriter.submodule(it.module, it.name) if it.name else ""
            if whole in self.inside:
                modules[it.local] = whole
            elif it.module in self.inside and it.name:
                new = self.moves.new_name(it.module, it.name)
                if it.local != new:
                    local[it.local] = new
            elif it.module in self.inside:
                self.problems.append(f"imports {it.module} as a whole")
            else:
                needed.append(
                    self.rewriter.moved(it.module, it.name, it.alias)
                    if it.module.partition(".")[0] == NAME and it.name
                    else it
                )
        return needed

    def _inner_imports(
        self, member: Member, local: dict[str, str], modules: dict[str, str]
    ) -> None:
        """Import statements inside functions: those of members go, the others are rewritten."""
        source = member.source
        top = {id(s) for s in source.tree.body}
        for parent in ast.walk(source.tree):
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(parent, name, None)
                if (
                    not isinstance(statements, list)
                    or parent is source.tree
                    or _is_typing_block_node(parent)
                ):
                    continue
                for node in statements:
                    if not isinstance(node, (ast.Import, ast.ImportFrom)) or id(node) in top:
                        continue
                    self._inner_import(member, node, statements)

    def _inner_import(
        self, member: Member, node: ast.Import | ast.ImportFrom, siblings: list[ast.stmt]
    ) -> None:
        source = member.source
        imports = _as_imports(node)
        local: dict[str, str] = {}
        modules: dict[str, str] = {}
        needed = self._outside(imports, local, modules)
        if local or modules:
            self.problems.append(
                f"line {node.lineno} of {member.path} imports a member under another name"
            )
        if len(needed) == len(imports):
            new = self.rewriter.statement(node, " " * node.col_offset)
            if new is not None:
                source.replace(*source.span(node), new)
        elif needed:
            source.replace(*source.span(node), f"\n{' ' * node.col_offset}".join(joined(needed)))
        elif len(siblings) == 1:
            source.replace(*source.span(node), "pass")
        else:
            source.replace(*source.whole_lines(node), "")

    def _names(self, member: Member, local: dict[str, str], modules: dict[str, str]) -> None:
        """Uses of names that changed, and of members through their alias."""
        source = member.source
        parents = source.parents()
        f_strings: list[tuple[ast.JoinedStr | None, str, str]] = []
        for use in name_uses(source.tree):
            changed = self._changed(member, use, local, modules, parents.get(id(use.node)))
            if changed is None:
                continue
            node, old, new = changed
            if new in use.hidden:
                where = f"{member.path}:{use.node.lineno}"
                self.problems.append(f"{where} {old}, now {new}, is hidden by a local")
            elif use.in_f_string:
                f_strings.append((_f_string(use.node, parents), old, new))
            else:
                source.replace(*source.span(node), new)
        self._in_f_strings(source, f_strings)
        for statement in ast.walk(source.tree):
            if isinstance(statement, ast.Global) and set(statement.names) & set(local):
                names = ", ".join(local.get(n, n) for n in statement.names)
                source.replace(*source.span(statement), f"global {names}")
        for statement in source.tree.body:
            self._definition_renamed(source, statement, local)

    def _changed(
        self,
        member: Member,
        use: NameUse,
        local: dict[str, str],
        modules: dict[str, str],
        parent: ast.AST | None,
    ) -> tuple[ast.AST, str, str] | None:
        """What of a use is replaced: its node, and the old and the new text; None if nothing is."""
        name = use.node.id
        if use.of_module and name in modules:
            if isinstance(parent, ast.Attribute):
                new = self.moves.new_name(modules[name], parent.attr)
                return parent, f"{name}.{parent.attr}", new
            where = f"{member.path}:{use.node.lineno}"
            self.problems.append(f"{where} uses the module {name} itself")
        elif use.of_module and name in local:
            return use.node, name, local[name]
        return None

    @staticmethod
    def _definition_renamed(source: Source, node: ast.stmt, local: dict[str, str]) -> None:
        """Rename a function or class where it is defined."""
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        if node.name not in local:
            return
        start, _ = source.span(node)
        found = re.compile(r"(?:async\s+)?(?:def|class)\s+").match(source.text, start)
        assert found
        source.replace(found.end(), found.end() + len(node.name), local[node.name])

    def _in_f_strings(
        self, source: Source, found: list[tuple[ast.JoinedStr | None, str, str]]
    ) -> None:
        """Before Python 3.12 names in an f-string have no positions: its text is changed."""
        spans: dict[tuple[int, int], set[tuple[str, str]]] = {}
        for node, old, new in found:
            assert node is not None
            spans.setdefault(source.span(node), set()).add((old, new))
        for (start, end), changes in spans.items():
            text = source.text[start:end]
            for old, new in changes:
                text, count = _in_braces(text, old, new)
                if not count:
                    self.problems.append(f"{old} in the f-string {text!r}")
            source.replace(start, end, text)

    # -- all members

    def _import_from_one_home(self) -> None:
        """Import from one module what members import from two, of which one re-exports it."""
        homes: dict[str, list[str]] = {}
        for member in self.members:
            for it in [*member.imports, *member.typing_only]:
                if it.name:
                    homes.setdefault(f"{it.local} {it.name}", []).append(it.module)
        usual = {
            key: max(sorted(set(many)), key=lambda m: (many.count(m), len(m)))
            for key, many in homes.items()
        }
        alike = {
            key
            for key, many in homes.items()
            if len({self.rewriter.definition(key.split(" ")[1], m) for m in many}) == 1
        }
        for member in self.members:
            for listed in (member.imports, member.typing_only):
                for place, it in enumerate(listed):
                    key = f"{it.local} {it.name}"
                    if key in alike:
                        listed[place] = Import(usual[key], it.name, it.alias)

    def _refuse_collisions(self) -> None:
        defined: dict[str, list[tuple[str, str]]] = {}
        for member in self.members:
            names = self.moves.renames.get(member.module, {})
            for name in member.defined:
                place = (member.path, _definition(member, name))
                defined.setdefault(names.get(name, name), []).append(place)
        for name, places in defined.items():
            if len({text for _, text in places}) > 1:
                self.problems.append(f"{name} is defined in {', '.join(p for p, _ in places)}")
        self.twice = {name for name, places in defined.items() if len(places) > 1}
        imported: dict[str, dict[Import, str]] = {}
        for member in self.members:
            for it in [*member.imports, *member.typing_only]:
                imported.setdefault(it.local, {})[it] = member.path
        for name, sources in imported.items():
            if len({(i.module, i.name) for i in sources}) > 1:
                said = " and ".join(f"{i} ({p})" for i, p in sources.items())
                self.problems.append(f"{name} is imported as {said}")
            if name in defined:
                importers = ", ".join(sources.values())
                self.problems.append(
                    f"{name} is defined in {defined[name][0][0]} and imported by {importers}"
                )
        self._refuse_hidden_builtins({*defined, *imported})

    def _refuse_hidden_builtins(self, names: set[str]) -> None:
        for member in self.members:
            own = member.defined | {i.local for i in [*member.imports, *member.typing_only]}
            for use in name_uses(member.source.tree):
                name = use.node.id
                builtin = use.of_module and name not in own and hasattr(builtins, name)
                if builtin and name in names:
                    self.problems.append(f"{name} is a builtin in {member.path}, not elsewhere")

    def _put_together(self) -> str:
        doc = self._docstring()
        future = any(m.future for m in self.members)
        imports = sorted({i for m in self.members for i in m.imports})
        typing_only = sorted({i for m in self.members for i in m.typing_only} - set(imports))
        parts = [doc]
        if future:
            parts.append("from __future__ import annotations")
        lines = [str(i) for i in imports if not i.name]
        lines += joined(i for i in imports if i.name)
        lines += dict.fromkeys(r for m in self.members for r in m.raw_imports)
        if lines:
            parts.append("\n".join(lines))
        if typing_only:
            block = [str(i) for i in typing_only if not i.name]
            block += joined(i for i in typing_only if i.name)
            parts.append("if TYPE_CHECKING:\n" + "\n".join(f"    {line}" for line in block))
        public = sorted({n for m in self.members for n in m.public or ()})
        if public:
            parts.append("__all__ = [\n" + "".join(f'    "{n}",\n' for n in public) + "]")
        head = "\n\n".join(parts)
        kept: set[str] = set()
        bodies = []
        for member in self.members:
            body = self._without_repeats(member, kept)
            if body:
                bodies.append(self._section(member) + body)
        return "\n\n\n".join([head, *bodies]) + "\n"

    def _without_repeats(self, member: Member, kept: set[str]) -> str:
        """A member's body without definitions that an earlier member has in the same words."""
        body = member.body
        if not self.twice & member.defined:
            return body
        source = Source(body)
        for statement in source.tree.body:
            name = _assigned(statement)
            if name not in self.twice:
                continue
            if name in kept:
                source.replace(*source.whole_lines(statement), "")
            kept.add(name)
        return source.result().strip("\n")

    def _main(self) -> Member | None:
        leaf = Path(self.new).name
        same = [m for m in self.members if Path(m.path).name == leaf and m.doc]
        return same[0] if same else None

    def _docstring(self) -> str:
        text = self.moves.table.docs.get(self.new, "")
        if not text and len(self.members) == 1:
            text = self.members[0].doc
        if not text:
            main = self._main()
            if main is None:
                raise Refused(f"{self.new}: no docstring in the table")
            text = main.doc
        quote = '"""'
        prefix = "r" if "\\" in text else ""
        if "\n" in text:
            return f"{prefix}{quote}{text}\n{quote}"
        return f"{prefix}{quote}{text}{quote}"

    def _section(self, member: Member) -> str:
        """A member's docstring as a comment above its part, if it is not the module's."""
        if len(self.members) == 1 or (
            member is self._main() and self.new not in self.moves.table.docs
        ):
            return ""
        lines: list[str] = []
        for block in _blocks(member.doc):
            lines += textwrap.wrap(
                " ".join(block), 98, break_on_hyphens=False, break_long_words=False
            ) or [""]
        lines = [f"# {line}".rstrip() for line in lines]
        return "\n".join(lines) + "\n\n\n" if lines else ""


def _blocks(doc: str) -> list[list[str]]:
    """A docstring's sentences that flow together; an empty block for an empty line."""
    blocks: list[list[str]] = []
    for line in doc.splitlines():
        begins = (
            not line
            or not blocks
            or not blocks[-1]
            or re.match(r"Source|Reading|[-*|] |\s|\d+\. |>>>", line)
        )
        if begins:
            blocks.append([])
        if line:
            blocks[-1].append(line)
    return blocks


def _is_typing_block_node(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and _is_typing_block(node)


def _in_braces(text: str, old: str, new: str) -> tuple[str, int]:
    """An f-string's text with a name replaced where it stands in braces, and how often."""
    parts = re.split(r"(\{\{|\}\}|[{}])", text)
    depth = 0
    count = 0
    for place, part in enumerate(parts):
        depth += {"{": 1, "}": -1}.get(part, 0)
        if depth > 0:
            parts[place], found = re.subn(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, part)
            count += found
    return "".join(parts), count


def _f_string(name: ast.Name, parents: Mapping[int, ast.AST]) -> ast.JoinedStr | None:
    """The outermost f-string around a name."""
    node: ast.AST | None = name
    found = None
    while node is not None:
        if isinstance(node, ast.JoinedStr):
            found = node
        node = parents.get(id(node))
    return found


def _assigned(statement: ast.stmt) -> str:
    """The name that an assignment binds; empty for other statements."""
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    ):
        return statement.targets[0].id
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return ""


def _definition(member: Member, name: str) -> str:
    """The words of a definition, to compare; a place of its own for what is no plain assignment."""
    for statement in member.source.tree.body:
        if _assigned(statement) == name:
            return ast.unparse(statement)
    return f"{member.path}:{name}"


# -------------------------------------------------------------------------------------------------
# The whole tree


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def tracked(*patterns: str) -> list[Path]:
    return [ROOT / line for line in git("ls-files", "--", *patterns).splitlines()]


def _excluded(path: Path) -> bool:
    relative = path.relative_to(ROOT)
    return any(
        relative.match(p) or relative.as_posix().startswith(p.removesuffix("*"))
        for p in NOT_REWRITTEN
    )


def move_modules(table: Table) -> list[str]:
    """Move the package's modules; lines that say what was done, and what is left to look at."""
    moves = Moves.plan(table)
    if moves.unlisted:
        raise Refused("not in the table: " + ", ".join(moves.unlisted))
    modules = {dotted(p.relative_to(PACKAGE).as_posix()) for p in PACKAGE.rglob("*.py")}
    rewriter = Rewriter(moves, modules)
    written: dict[str, str] = {}
    refused: list[str] = []
    for new, olds in moves.groups.items():
        try:
            if len(olds) == 1 and new not in table.docs:
                source = Source(table.patched(PACKAGE / olds[0]))
                rewriter.code(source)
                written[new] = source.result()
            else:
                written[new] = Merger(rewriter, new, olds).text()
        except Refused as why:
            refused.append(str(why))
    if refused:
        raise Refused("\n".join(refused))
    merged = {PACKAGE / old for olds in moves.groups.values() for old in olds}
    others = [p for p in tracked("*.py") if p not in merged and p.exists() and not _excluded(p)]
    report = []
    for path in others:
        below_tests = path.is_relative_to(ROOT / "tests")
        source = Source(path.read_text(encoding="utf-8") if below_tests else table.patched(path))
        rewriter.code(source)
        _write_if_new(path, rewriter.text(source.result(), python=True))
    for new, olds in moves.groups.items():
        _move(new, olds, rewriter.text(written[new], python=True))
    for path in tracked(*TEXT_FILES):
        if path.exists() and not _excluded(path):
            _write_if_new(path, _in_prose(path, rewriter))
    _name_packages()
    report += [f"in the table, but gone: {p}" for p in moves.gone]
    _remove_empty_folders(PACKAGE)
    return report


def _move(new: str, olds: list[str], text: str) -> None:
    """The file with most lines is renamed, so that git follows it; the others are deleted."""
    target = PACKAGE / new
    target.parent.mkdir(parents=True, exist_ok=True)
    if not olds:
        target.write_text(text, encoding="utf-8")
        git("add", str(target))
        return
    longest = max(olds, key=lambda old: len((PACKAGE / old).read_text(encoding="utf-8")))
    if longest != new:
        if target.exists():
            git("rm", "-q", "--cached", str(target))
            target.unlink()
        git("mv", str(PACKAGE / longest), str(target))
    for old in olds:
        if old not in (longest, new):
            git("rm", "-q", "-f", str(PACKAGE / old))
    target.write_text(text, encoding="utf-8")


def _name_packages() -> None:
    """The package's own list of what it consists of: its folders that are packages now."""
    path = PACKAGE / "__init__.py"
    text = path.read_text(encoding="utf-8")
    packages = sorted(
        p.parent.name for p in PACKAGE.glob("*/__init__.py") if p.parent.name != "recipes"
    )
    listed = "".join(f'    "{name}",\n' for name in packages)
    text = re.sub(
        r"^_MODULES = \(.*?^\)",
        lambda _: f"_MODULES = (\n{listed})",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    _write_if_new(path, text)


def _write_if_new(path: Path, text: str) -> None:
    if text != path.read_text(encoding="utf-8"):
        path.write_text(text, encoding="utf-8")


def _remove_empty_folders(folder: Path) -> None:
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        for cache in inner.glob("__pycache__"):
            if not any(p.suffix == ".py" for p in inner.iterdir()):
                for file in cache.iterdir():
                    file.unlink()
                cache.rmdir()
        if not any(inner.iterdir()):
            inner.rmdir()


# -- prose: documents, configuration, notebooks

_PATH = re.compile(r"(?<![\w./-])((?:\.\./)*(?:src/fedstill/)?)((?:\w+/)*\w+\.py)\b")
_FOLDER = re.compile(r"(?<![\w./-])((?:\.\./)*(?:src/fedstill/)?)((?:\w+/)+)(?=[`)])")
_WHOLE_PATH = re.compile(r"((?:\.\./)*src/fedstill/)((?:\w+/)*\w+\.py)\b")
_WHOLE_FOLDER = re.compile(r"((?:\.\./)*src/fedstill/)((?:\w+/)+)(?=[`)\"'\s])")
_QUOTED_PATH = re.compile(r"(?<=`)((?:src/fedstill/)?)((?:\w+/)+\w+\.py)(?=`)")
_SHORT = re.compile(r"(?<=`)\w+(?:\.\w+)+(?=`)")
_TWICE = re.compile(r"(`[\w/]+\.py`)(?:[,;] \1)+")


def _in_prose(path: Path, rewriter: Rewriter) -> str:
    text = rewriter.text(path.read_text(encoding="utf-8"), python=False)
    if path.suffix == ".md":
        return _once(in_paths(text, rewriter.moves, _PATH, _FOLDER))
    return in_paths(text, rewriter.moves, _WHOLE_PATH, _WHOLE_FOLDER)


def _once(text: str) -> str:
    """A page that names each module of the reference once."""
    known: set[str] = set()
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("::: ") and line in known:
            continue
        known.add(line)
        lines.append(line)
    return "".join(lines)


def in_paths(text: str, moves: Moves, *patterns: re.Pattern[str]) -> str:
    """Paths of modules and folders, with or without ``src/fedstill`` before them."""
    changed: dict[str, str] = {}
    for new, olds in moves.groups.items():
        for old in olds:
            changed[old] = new
            if old.endswith("/__init__.py"):
                changed[old.removesuffix("__init__.py")] = new.removesuffix(
                    "__init__.py"
                ).removesuffix(".py")

    def anew(match: re.Match[str]) -> str:
        before, path = match.groups()
        if not before.endswith("fedstill/") and (ROOT / path).exists():
            return match[0]
        return before + changed.get(path, path)

    result = text
    for pattern in patterns:
        result = pattern.sub(anew, result)
    return _TWICE.sub(r"\1", result) if result != text else text


# -------------------------------------------------------------------------------------------------
# Tests


def move_tests(table: Table) -> list[str]:
    """Move the tests, and change paths that are relative to their own file."""
    tests = ROOT / "tests"
    for old_folder, new_folder in table.test_folders.items():
        if (tests / old_folder).exists() and not (tests / new_folder).exists():
            (tests / new_folder).parent.mkdir(parents=True, exist_ok=True)
            git("mv", str(tests / old_folder), str(tests / new_folder))
    patched: set[Path] = set()
    for old, new in table.tests.items():
        source = tests / old
        target = tests / new
        if not source.exists() or source == target:
            continue
        text = table.patched(source) if source.suffix == ".py" else ""
        patched.add(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        git("mv", str(source), str(target))
        if text:
            deeper = len(Path(new).parts) - len(Path(old).parts)
            target.write_text(_with_parents(text, deeper), encoding="utf-8")
    moved = {f"tests/{o}": f"tests/{n}" for o, n in table.tests.items()}
    moved |= {f"tests/{o}": f"tests/{n}" for o, n in table.test_folder_names.items()}
    for path in tracked("*.py", *TEXT_FILES):
        if path.exists() and not _excluded(path):
            text = (
                table.patched(path)
                if path.is_relative_to(tests) and path not in patched
                else path.read_text(encoding="utf-8")
            )
            named = re.compile(r"\btests/[\w/]*\w(?:\.\w+)?")
            _write_if_new(path, named.sub(lambda match: moved.get(match[0], match[0]), text))
    _remove_empty_folders(tests)
    return [
        f"still in an old folder: {p}"
        for o in table.test_folder_names
        for p in sorted((tests / o).rglob("*.py"))
    ]


def _with_parents(text: str, deeper: int) -> str:
    """``Path(__file__).parents[n]`` of a file that is deeper by some folders now."""
    pattern = re.compile(r"(Path\(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)\]")
    return pattern.sub(lambda match: f"{match[1]}{int(match[2]) + deeper}]", text)


# -------------------------------------------------------------------------------------------------
# The import contract

OUTER = ("attribution", "benchmark", "export", "flower", "privacy", "querying")
LAYERS = (
    "cli",
    "report",
    "running",
    "config",
    "measures",
    "engines",
    "continual | data | methods",
    "metrics | models",
    "core",
    "losses",
)


def contract() -> str:
    """The import contract's part of pyproject.toml, with today's violations as exceptions."""
    violations = sorted(set(_violations()))
    rank = {name: place for place, layer in enumerate(LAYERS) for name in layer.split(" | ")}
    by_pair: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for importer, imported in violations:
        by_pair.setdefault((importer.split(".")[1], imported.split(".")[1]), []).append(
            (importer, imported)
        )
    assert set(rank) | set(OUTER) >= {name for pair in by_pair for name in pair}
    lines = [
        "[tool.importlinter]",
        f'root_package = "{NAME}"',
        "exclude_type_checking_imports = false",
        "",
    ]
    lines += [
        "[[tool.importlinter.contracts]]",
        'name = "Imports point one way, and outer packages are independent"',
    ]
    lines += ['type = "layers"', "layers = ["]
    top = " | ".join(f"{NAME}.{name}" for name in OUTER)
    lines += [f'  "{top}",']
    for layer in LAYERS:
        named = " | ".join(f"{NAME}.{name}" for name in layer.split(" | "))
        lines.append(f'  "{named}",')
    lines += [
        "]",
        f"# {len(violations)} exceptions, to be removed as capabilities become hooks of the core.",
    ]
    lines += ["ignore_imports = ["]
    for (importer, imported), modules in sorted(by_pair.items()):
        lines.append(f"  # {importer} imports {imported}")
        lines += [f'  "{a} -> {b}",' for a, b in modules]
    lines += ["]", ""]
    lines += [
        "[[tool.importlinter.contracts]]",
        'name = "No circles between siblings inside a package"',
    ]
    lines += ['type = "acyclic_siblings"', f'ancestors = ["{NAME}.*", "{NAME}.**"]', ""]
    return "\n".join(lines)


def _violations() -> Iterator[tuple[str, str]]:
    """Imports of an outer package by another package, and of an upper layer by a lower one."""
    rank = {name: place for place, layer in enumerate(LAYERS) for name in layer.split(" | ")}
    modules = {dotted(p.relative_to(PACKAGE).as_posix()): p for p in PACKAGE.rglob("*.py")}
    for module, path in modules.items():
        package = f"{module}.".split(".")[1]
        if package not in rank and package not in OUTER:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                not isinstance(node, ast.ImportFrom)
                or (node.module or "").partition(".")[0] != NAME
            ):
                continue
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                imported = whole if whole in modules else node.module or ""
                other = f"{imported}.".split(".")[1]
                if other == package or (other not in rank and other not in OUTER):
                    continue
                outward = other in OUTER
                upward = package in rank and other in rank and rank[other] <= rank[package]
                if outward or upward:
                    yield module, imported


def write_public_api() -> list[str]:
    """Note for tools/public_api.py which modules moved, and names that merging made public."""
    file = ROOT / "tools" / "public_api_changes.toml"
    text = file.read_text(encoding="utf-8")
    table = Table.read()
    moved = {dotted(old): dotted(new) for new, olds in table.modules.items() for old in olds}
    moved = {old: new for old, new in moved.items() if old != new}
    lines = "".join(f'"{old}" = "{new}"\n' for old, new in sorted(moved.items()))
    start = text.index("[modules]\n") + len("[modules]\n")
    end = text.index("\n[[", start)

    def renamed(match: re.Match[str]) -> str:
        home, _, name = match[1].rpartition(".")
        return f'name = "{moved.get(home, home)}.{name}"'

    changes = re.sub(r'^name = "(.*)"$', renamed, text[end:], flags=re.MULTILINE)
    file.write_text(text[:start] + lines + changes, encoding="utf-8")
    command = [sys.executable, "tools/public_api.py"]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    merged = [("added", name) for name in re.findall(r"^added: (\S+)$", found, re.MULTILINE)]
    hidden = re.findall(r"^signature: (\S+)\n +- module$", found, re.MULTILINE)
    merged += [("signature", name) for name in hidden]
    removed = re.findall(r"^removed: (\S+)$", found, re.MULTILINE)
    merged += [("removed", name) for name in removed if name in moved]
    reasons = {
        "added": "It is in a module that the reference documents, since modules were merged.",
        "signature": "The module of this name is merged into another one; the function stays.",
        "removed": "The module of this name is merged into another one.",
    }
    entries = [
        f'\n[[change]]\nname = "{name}"\nkind = "{kind}"\nreason = "{reasons[kind]}"\n'
        for kind, name in merged
    ]
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(entries)
    return [f"{len(moved)} modules moved, {len(merged)} public names by merging"]


def write_contract() -> list[str]:
    file = ROOT / "pyproject.toml"
    text = file.read_text(encoding="utf-8")
    start = text.index("[tool.importlinter]")
    following = re.search(r"^\[(?!\[?tool\.importlinter)", text[start:], re.MULTILINE)
    end = start + following.start() if following else len(text)
    file.write_text(
        text[:start] + contract() + ("\n" if following else "") + text[end:], encoding="utf-8"
    )
    pairs: dict[str, int] = {}
    for importer, imported in set(_violations()):
        pair = f"{importer.split('.')[1]} imports {imported.split('.')[1]}"
        pairs[pair] = pairs.get(pair, 0) + 1
    return [f"{count:4} {pair}" for pair, count in sorted(pairs.items(), key=lambda item: -item[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tests", action="store_true", help="move the tests instead")
    parser.add_argument(
        "--contract", action="store_true", help="write the import contract of the tree as it is"
    )
    parser.add_argument(
        "--public-api", action="store_true", help="note the moves for tools/public_api.py"
    )
    parser.add_argument("--list", action="store_true", help="only say what the table lacks")
    given = parser.parse_args()
    table = Table.read()
    try:
        if given.list:
            moves = Moves.plan(table)
            lines = [f"not in the table: {p}" for p in moves.unlisted] + [
                f"gone: {p}" for p in moves.gone
            ]
        elif given.public_api:
            lines = write_public_api()
        elif given.contract:
            lines = write_contract()
        elif given.tests:
            lines = move_tests(table)
        else:
            lines = move_modules(table)
    except Refused as refused:
        sys.exit(str(refused))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
