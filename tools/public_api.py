"""Compare the public names and their signatures with the snapshot of an earlier release.

A name is public if the ``__init__`` of a package lists it, or if docs/reference.md describes it.
``python tools/public_api.py`` fails on a change that ``tools/public_api_changes.toml`` does not
list with a reason, and on an entry of that file that matches nothing. A name may have wildcards. A
rename that concerns many signatures is listed once, as a pattern that is applied to the snapshot.
``--write`` writes a new snapshot. The source is read with griffe, and not imported.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tools" / "public_api.json"
CHANGES = ROOT / "tools" / "public_api_changes.toml"
MOVES = ROOT / "tools" / "moves.toml"

LAZY = ("fedstill", "fedstill.losses")
"""Packages that import their public names when they are first used."""

Surface = dict[str, str]
"""Public names by the path under which a user has them, with their signatures."""


@dataclass(frozen=True, order=True)
class Change:
    """A public name that differs from the snapshot."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True, order=True)
class ListedChange:
    """An entry of public_api_changes.toml.

    ``name``: a shell pattern; an entry with ``*`` stands for many names.
    """

    name: str
    kind: str
    reason: str

    def covers(self, change: Change) -> bool:
        """Whether a change is one of those that this entry lists."""
        return change.kind == self.kind and fnmatch.fnmatchcase(change.name, self.name)


def main(arguments: Sequence[str]) -> int:
    """Print unlisted changes; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to read")
    parser.add_argument("--write", action="store_true", help="write a new snapshot")
    options = parser.parse_args(arguments)
    current = surface(options.root)
    if options.write:
        text = json.dumps(current, indent=1, sort_keys=True)
        SNAPSHOT.write_text(f"{text}\n", encoding="utf-8")
        print(f"{len(current)} public names written to {SNAPSHOT.name}")
        return 0
    snapshot: Surface = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    listed = tomllib.loads(CHANGES.read_text(encoding="utf-8"))
    moves = tomllib.loads(MOVES.read_text(encoding="utf-8"))
    released = moved(snapshot, new_modules(moves["modules"]))
    for rename in listed.get("rename", []):
        pattern = re.compile(rename["pattern"], re.MULTILINE)
        released = renamed(released, pattern, rename["new"])
    changes = sorted(compared(released, current))
    entries = [ListedChange(**entry) for entry in listed.get("change", [])]
    return report(changes, entries, len(current))


def surface(root: Path) -> Surface:
    """The public names of a source tree."""
    package = griffe.load("fedstill", search_paths=[root / "src"], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    names: Surface = {}
    for module in packages(package):
        for name in listed_names(module):
            names[f"{module.path}.{name}"] = described(module[name])
    page = (root / "docs" / "reference.md").read_text(encoding="utf-8")
    for path in re.findall(r"^::: fedstill\.(\S+)$", page, re.MULTILINE):
        names.update(documented(package[path]))
    return names


def packages(module: griffe.Module) -> Iterator[griffe.Module]:
    """A package and the packages in it."""
    yield module
    for member in module.modules.values():
        if isinstance(member, griffe.Module) and member.is_init_module:
            yield from packages(member)


def listed_names(module: griffe.Module) -> list[str]:
    """The names that a package offers: its ``__all__``, or what it imports as itself."""
    exported = {str(name) for name in module.exports or ()}
    if module.path not in LAZY:
        return sorted(exported)
    # These packages compute their list when they are imported. Lazy imports have the same names.
    aliases = [member for member in module.members.values() if isinstance(member, griffe.Alias)]
    return sorted(alias.name for alias in aliases if alias.target_path.startswith("fedstill."))


def documented(item: griffe.Object | griffe.Alias) -> Surface:
    """The names that the reference shows for a path: the public members of a module with their
    docstrings, or one class or function.
    """
    if not item.is_module:
        return {item.path: described(item)}
    names: Surface = {}
    for member in item.members.values():
        is_public = not member.is_alias and not member.name.startswith("_")
        if is_public and member.docstring is not None:
            names[member.path] = described(member)
    return names


def described(item: griffe.Object | griffe.Alias) -> str:
    """The signature of a function, the public members of a class, or the kind of anything else."""
    target = item
    if isinstance(item, griffe.Alias):
        target = item.final_target
    if isinstance(target, griffe.Function):
        return signature(target)
    if isinstance(target, griffe.Class):
        return described_class(target)
    return target.kind.value


def signature(function: griffe.Function) -> str:
    """A function's parameters with their types and defaults, and what it returns."""
    parameters = []
    for parameter in function.parameters:
        text = parameter.name
        if parameter.kind:
            text = f"{parameter.kind.value} {text}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None:
            text += f" = {parameter.default}"
        parameters.append(text)
    return f"({', '.join(parameters)}) -> {function.returns}"


def described_class(item: griffe.Class) -> str:
    """A class's bases, fields and public methods."""
    bases = ", ".join(str(base) for base in item.bases)
    lines = [f"class({bases})"]
    for name, member in item.members.items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, griffe.Function):
            lines.append(f"{name}{signature(member)}")
        elif isinstance(member, griffe.Attribute):
            lines.append(f"{name}: {member.annotation} = {member.value}")
    return "\n".join(lines)


def new_modules(moves: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The new dotted name of each module by its old one, from paths below the package."""
    names = {}
    for new_path, old_paths in moves.items():
        for old_path in old_paths:
            names[dotted(old_path)] = dotted(new_path)
    return names


def dotted(path: str) -> str:
    """A module's dotted name from its path below the package."""
    name = path.removesuffix(".py").removesuffix("/__init__").removesuffix("__init__")
    return ".".join(["fedstill", *name.split("/")]).rstrip(".")


def moved(names: Surface, modules: Mapping[str, str]) -> Surface:
    """Names with the paths that their modules have now."""
    result: Surface = {}
    for path, text in names.items():
        module, _, name = path.rpartition(".")
        new_module = modules.get(module, module)
        result[f"{new_module}.{name}"] = text
    return result


def renamed(names: Surface, pattern: re.Pattern[str], new: str) -> Surface:
    """Names and signatures with a replacement for each match of a pattern."""
    return {pattern.sub(new, path): pattern.sub(new, text) for path, text in names.items()}


def compared(released: Surface, current: Surface) -> Iterator[Change]:
    """Names that were removed or added, or that have another signature."""
    for name in released.keys() | current.keys():
        if name not in current:
            yield Change(name, "removed", "")
        elif name not in released:
            yield Change(name, "added", "")
        elif released[name] != current[name]:
            yield Change(name, "signature", difference(released[name], current[name]))


def difference(released: str, current: str) -> str:
    """The lines of two signatures that differ."""
    lines = difflib.ndiff(released.splitlines(), current.splitlines())
    return "".join(f"\n    {line}" for line in lines if line.startswith(("-", "+")))


def report(changes: Sequence[Change], entries: Sequence[ListedChange], count: int) -> int:
    """Print unlisted changes, and entries without effect; return 1 if there are any."""
    unlisted = [change for change in changes if not any(entry.covers(change) for entry in entries)]
    unmatched = [entry for entry in sorted(entries) if not any(map(entry.covers, changes))]
    for change in unlisted:
        print(f"{change.kind}: {change.name}{change.detail}")
    for entry in unmatched:
        print(f"listed, but not {entry.kind}: {entry.name}")
    listed = len(changes) - len(unlisted)
    print(
        f"{count} public names: {len(unlisted)} unlisted changes, {listed} listed, "
        f"{len(unmatched)} listed without effect"
    )
    return int(bool(unlisted or unmatched))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
