"""Compare the public names and their signatures with the snapshot of an earlier release.

Public is what the ``__init__`` of a package lists and what docs/reference.md describes. ``python
tools/public_api.py`` fails on a change that ``tools/public_api_changes.toml`` does not list with a
reason, and on an entry of that file that matches nothing. A name may have wildcards. Renames that
concern many signatures are listed once, as patterns that are applied to the snapshot. ``--write``
makes a new snapshot. The source is read, not imported (griffe).
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
    """One public name that is not what the snapshot has."""

    name: str
    kind: str
    detail: str


def main(arguments: Sequence[str]) -> int:
    """Print unlisted changes; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to read")
    parser.add_argument("--write", action="store_true", help="write a new snapshot")
    options = parser.parse_args(arguments)
    now = surface(options.root)
    if options.write:
        SNAPSHOT.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"{len(now)} public names written to {SNAPSHOT.name}")
        return 0
    snapshot: Surface = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    listed = tomllib.loads(CHANGES.read_text(encoding="utf-8"))
    moves = tomllib.loads(MOVES.read_text(encoding="utf-8"))
    before = moved(snapshot, new_homes(moves["modules"]))
    for rename in listed.get("rename", []):
        before = renamed(before, re.compile(rename["pattern"], re.MULTILINE), rename["new"])
    changes = sorted(compared(before, now))
    reasons = {
        (entry["name"], entry["kind"]): entry["reason"] for entry in listed.get("change", [])
    }
    return report(changes, reasons, len(now))


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
    # The package's own list is made when it is imported; its lazy imports are the same names.
    aliases = [member for member in module.members.values() if isinstance(member, griffe.Alias)]
    return sorted(alias.name for alias in aliases if alias.target_path.startswith("fedstill."))


def documented(item: griffe.Object | griffe.Alias) -> Surface:
    """What the reference says of a path: the public members of a module, or one thing."""
    if not item.is_module:
        return {item.path: described(item)}
    members = [m for m in item.members.values() if not m.is_alias and not m.name.startswith("_")]
    return {m.path: described(m) for m in members if m.docstring is not None}


def described(item: griffe.Object | griffe.Alias) -> str:
    """The signature of a function, the public members of a class, or the kind of anything else."""
    target = item.final_target if isinstance(item, griffe.Alias) else item
    if isinstance(target, griffe.Function):
        return signature(target)
    if isinstance(target, griffe.Class):
        return described_class(target)
    return target.kind.value


def signature(function: griffe.Function) -> str:
    """A function's parameters with their types and defaults, and what it returns."""
    parameters = []
    for parameter in function.parameters:
        text = f"{parameter.kind.value if parameter.kind else ''} {parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None:
            text += f" = {parameter.default}"
        parameters.append(text.strip())
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


def new_homes(moves: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The new dotted name of each module by its old one, from paths below the package."""
    return {dotted(old): dotted(new) for new, olds in moves.items() for old in olds}


def dotted(path: str) -> str:
    """A module's dotted name from its path below the package."""
    name = path.removesuffix(".py").removesuffix("/__init__").removesuffix("__init__")
    return ".".join(["fedstill", *name.split("/")]).rstrip(".")


def moved(names: Surface, modules: Mapping[str, str]) -> Surface:
    """Names with the paths that their modules have now."""
    result: Surface = {}
    for path, text in names.items():
        home, _, name = path.rpartition(".")
        result[f"{modules.get(home, home)}.{name}"] = text
    return result


def renamed(names: Surface, pattern: re.Pattern[str], new: str) -> Surface:
    """Names and signatures with a replacement for each match of a pattern."""
    return {pattern.sub(new, path): pattern.sub(new, text) for path, text in names.items()}


def compared(before: Surface, now: Surface) -> Iterator[Change]:
    """Names that are gone, new, or have another signature."""
    for name in before.keys() | now.keys():
        if name not in now:
            yield Change(name, "removed", "")
        elif name not in before:
            yield Change(name, "added", "")
        elif before[name] != now[name]:
            yield Change(name, "signature", difference(before[name], now[name]))


def difference(before: str, now: str) -> str:
    """The lines of two signatures that differ."""
    lines = difflib.ndiff(before.splitlines(), now.splitlines())
    return "".join(f"\n    {line}" for line in lines if line.startswith(("-", "+")))


def matching(change: Change, reasons: Mapping[tuple[str, str], str]) -> list[tuple[str, str]]:
    """The listed entries, by name and kind, that cover a change."""
    return [
        (name, kind)
        for name, kind in reasons
        if kind == change.kind and fnmatch.fnmatchcase(change.name, name)
    ]


def report(changes: Sequence[Change], reasons: Mapping[tuple[str, str], str], count: int) -> int:
    """Print what is not listed, and entries without effect; return 1 if there is either."""
    matched = {change: matching(change, reasons) for change in changes}
    unlisted = [change for change in changes if not matched[change]]
    unmatched = sorted(
        reasons.keys() - {entry for entries in matched.values() for entry in entries}
    )
    for change in unlisted:
        print(f"{change.kind}: {change.name}{change.detail}")
    for name, kind in unmatched:
        print(f"listed, but not {kind}: {name}")
    print(
        f"{count} public names: {len(unlisted)} unlisted changes, "
        f"{len(changes) - len(unlisted)} listed, {len(unmatched)} listed without effect"
    )
    return 1 if unlisted or unmatched else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
