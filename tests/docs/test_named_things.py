"""What the documents name is there: files, folders, names in a file, modules of the reference, keys
of a config.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedstill import registry
from fedstill.experiment.config.experiment import KEYS
from fedstill.experiment.config.stream_table import StreamTable
from fedstill.experiment.config.tables import ClientsTable, DataTable, FlowerTable, QueryTable
from fedstill.records import Plan
from fedstill.wire.privacy import Privacy

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedstill"
PAGES = ["docs/tour.md", "docs/glossary.md", "docs/papers.md", "CONTRIBUTING.md"]
TABLES = {
    "data": DataTable,
    "clients": ClientsTable,
    "flower": FlowerTable,
    "query": QueryTable,
    "privacy": Privacy,
    "plan": Plan,
    "stream": StreamTable,
}


def text(page: str) -> str:
    return (ROOT / page).read_text()


def in_code(page: str) -> list[str]:
    """What stands in backticks on a page, blocks of code left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL))


def place(path: str) -> Path:
    """A path of a document: below the package, or else below the repository."""
    return PACKAGE / path if (PACKAGE / path).exists() else ROOT / path


def defined(tree: ast.AST) -> dict[str, ast.AST]:
    """What a module or a class defines: functions, classes, fields."""
    out: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            out[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            out[node.target.id] = node
    return out


@pytest.mark.parametrize("page", ["docs/results.md", "results/README.md"])
def test_configs_and_runs_that_commands_name_are_there(page: str) -> None:
    """A config is a file; a folder of runs is there, or packed, itself or one above it."""
    named = set(re.findall(r"(?<![\w/])results/[\w/-]+(?:\.toml)?", text(page)))
    assert len(named) > 1
    for path in sorted(named - {"results/NAME", "results/NAME.toml"}):
        packs = [ROOT / f"{folder}.runs.tar.xz" for folder in (path, *Path(path).parents)]
        assert (ROOT / path).exists() or any(pack.is_file() for pack in packs), path


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_a_page_names_are_there(page: str) -> None:
    paths = [
        p
        for p in in_code(page)
        if re.fullmatch(r"[\w./-]+(\.py|/)", p) and not p.startswith("site/")
    ]
    assert paths
    assert [p for p in paths if not place(p).exists()] == []


def test_each_row_of_a_walk_names_what_its_file_defines() -> None:
    rows = re.findall(
        r"^\|[^|]+\| `([\w.]+)` \| `([\w./]+\.py)` \|$", text("docs/tour.md"), re.MULTILINE
    )
    assert len(rows) > 40
    for name, path in rows:
        node: ast.AST = ast.parse(place(path).read_text())
        for part in name.split("."):
            assert part in defined(node), f"{path} does not define {name}"
            node = defined(node)[part]


def test_the_tour_names_every_folder_of_the_package() -> None:
    folders = {f"{p.parent.relative_to(PACKAGE)}/" for p in PACKAGE.rglob("__init__.py")} - {"./"}
    assert sorted(folders - set(in_code("docs/tour.md"))) == []


def test_the_tour_names_every_file_of_the_engines() -> None:
    files = {f"engines/{p.name}" for p in (PACKAGE / "engines").glob("*.py")} - {
        "engines/__init__.py"
    }
    assert sorted(files - set(in_code("docs/tour.md"))) == []


def test_what_the_reference_lists_can_be_imported() -> None:
    names = re.findall(r"^::: (\S+)$", text("docs/reference.md"), re.MULTILINE)
    assert len(names) == len(set(names)) > 60
    for name in names:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("kind", ["method", "measure", "partition", "topology", "model"])
def test_the_reference_lists_the_module_of_everything_that_a_config_can_name(kind: str) -> None:
    modules = {registry.lookup(kind, name).target.__module__ for name in registry.names(kind)}
    # other tests register toys
    ours = {f"::: {module}" for module in modules if module.startswith("fedstill.")}
    assert sorted(ours - set(text("docs/reference.md").splitlines())) == []


@pytest.mark.parametrize("key", KEYS)
def test_the_page_on_configurations_names_every_key(key: str) -> None:
    page = text("docs/configuration.md")
    assert f"| `{key}` |" in page or f"`[{key}]`" in page
    row = next((line for line in page.splitlines() if line.startswith(f"| `[{key}]`")), "")
    for inner in fields(TABLES[key]) if key in TABLES else ():
        described = f"`{inner.name}`" in row or f"| `{inner.name}` |" in page
        assert described, f"{key}.{inner.name} is not described"


def test_the_page_on_configurations_names_every_measure() -> None:
    page = text("docs/configuration.md")
    # what other tests registered
    named = [n for n in registry.names("measure") if not n.startswith("toy_")]
    assert [name for name in named if f"| `{name}` |" not in page] == []


def test_benchmarks_that_a_page_names_are_there() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "Makefile"]
    modules = {
        m for page in pages for m in re.findall(r"-m (benchmarks(?:\.\w+)+)", page.read_text())
    }
    assert len(modules) > 5
    places = {m: ROOT / m.replace(".", "/") for m in modules}
    assert [
        m for m, p in sorted(places.items()) if not (p.with_suffix(".py").exists() or p.is_dir())
    ] == []
