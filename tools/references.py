"""What pages refer to: links, anchors, files, names, settings, figures and pictures.

Each function returns one line for every reference that is wrong; ``tools.docs_check`` prints them.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedstill.benchmark.recipes import recipe_names
from fedstill.core import registry
from tools.documents import cells, documents
from tools.gallery import PAGE as GALLERY
from tools.gallery import PICTURES, scenes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedstill"
REPORT = PACKAGE / "report"
KINDS = ("method", "measure", "partition", "topology", "model")
FIGURES = {"FedNTD": 21, "FedADKD": 7, "SFedKD": 7, "HiPer-FedKD": 3, "QKT": 7}
"""The number of figures of each paper."""

RECIPE_FOLDERS = {
    "FedNTD": "fedntd",
    "FedADKD": "fedadkd",
    "SFedKD": "sfedkd",
    "HiPer-FedKD": "hiper",
    "QKT": "qkt",
}
LARGEST_PICTURE = 60_000
"""Bytes."""

CODE_BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def text_of(path: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def in_code(page: str) -> list[str]:
    """The texts in backticks on a page, without blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL))


# Links


def broken_links() -> Iterator[str]:
    """Links of all pages that lead to no file, or to no heading of the file."""
    return broken_links_below(ROOT)


def broken_links_below(root: Path) -> Iterator[str]:
    """Links of the documents of a repository that lead to no file, or to no heading of the file."""
    for page in documents(root):
        name = page.relative_to(root)
        text = CODE_BLOCK.sub("", "\n".join(cell.text for cell in cells(page)))
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                yield f"{name} links to {link}: there is no such file"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                yield f"{name} links to {link}: there is no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: small letters, hyphens for spaces, no other signs."""
    headings = re.findall(
        r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {anchor(heading) for heading in headings}


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    words = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", words.lower()).strip())


# Files and names


def place(path: str) -> Path:
    """A path that a page names: below the package, or else below the repository."""
    return PACKAGE / path if (PACKAGE / path).exists() else ROOT / path


def missing_files() -> Iterator[str]:
    """Files, folders, configs, runs and benchmarks that pages name and that are missing."""
    for page in ("docs/tour.md", "docs/glossary.md", "docs/papers.md", "CONTRIBUTING.md"):
        paths = [path for path in in_code(page) if re.fullmatch(r"[\w./-]+(\.py|/)", path)]
        yield from (
            f"{page}: no {path}"
            for path in paths
            if not path.startswith("site/") and not place(path).exists()
        )
    results = [
        path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "results").glob("*.md")
    ]
    for page in (*sorted(results), "results/README.md"):
        named = set(re.findall(r"(?<![\w/])results/[\w/-]+(?:\.toml)?", text_of(page)))
        named -= {"results/NAME", "results/NAME.toml"}
        yield from (
            f"{page}: no {path}, neither a file nor packed"
            for path in sorted(named)
            if not has_runs(path)
        )
    for path in [*documents(ROOT), ROOT / "Makefile"]:
        modules = set(
            re.findall(r"-m ((?:benchmarks|tools)(?:\.\w+)+)", path.read_text(encoding="utf-8"))
        )
        yield from (
            f"{path.relative_to(ROOT)}: no module {name}"
            for name in sorted(modules)
            if not is_module(name)
        )


def has_runs(path: str) -> bool:
    """Whether a path is there, or it or a folder above it is packed."""
    packs = [ROOT / f"{folder}.runs.tar.xz" for folder in (path, *Path(path).parents)]
    return (ROOT / path).exists() or any(pack.is_file() for pack in packs)


def is_module(name: str) -> bool:
    """Whether a module or package of this repository has this name."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def wrong_walks() -> Iterator[str]:
    """Rows of the tour whose name is not defined in their file, and folders of the package that it
    does not name.
    """
    rows = re.findall(
        r"^\|[^|]+\| `([\w.]+)` \| `([\w./]+\.py)` \|$", text_of("docs/tour.md"), re.MULTILINE
    )
    if not rows:
        yield "no row of the form | step | `name` | `file.py` |"
    for name, path in rows:
        if place(path).exists() and not defines(place(path), name):
            yield f"{path} does not define {name}"
    folders = {f"{init.parent.relative_to(PACKAGE)}/" for init in PACKAGE.rglob("__init__.py")} - {
        "./"
    }
    yield from (
        f"the folder {folder} is not named"
        for folder in sorted(folders - set(in_code("docs/tour.md")))
    )


def defines(path: Path, name: str) -> bool:
    """Whether a module defines a name, such as ``Class.method``."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        if part not in definitions(node):
            return False
        node = definitions(node)[part]
    return True


def definitions(tree: ast.AST) -> dict[str, ast.AST]:
    """The functions, classes and annotated fields of a module or a class."""
    names: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


# Names that a config can have


def wrong_modules() -> Iterator[str]:
    """Names of the reference that cannot be imported or occur twice, and modules that it lacks."""
    names = re.findall(r"^::: (\S+)$", text_of("docs/reference.md"), re.MULTILINE)
    yield from (f"{name} occurs twice" for name in sorted(set(names)) if names.count(name) > 1)
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
    registered = {
        registry.lookup(kind, name).target.__module__
        for kind in KINDS
        for name in registry.names(kind)
    }
    yield from (f"{module} is not listed" for module in sorted(registered - set(names)))


def missing_measures() -> Iterator[str]:
    """Measures that their page does not describe."""
    page = text_of("docs/measures.md")
    yield from (
        f"the measure {name} has no row"
        for name in registry.names("measure")
        if f"| `{name}` |" not in page
    )


# Figures of papers


def wrong_figures() -> Iterator[str]:
    """What is wrong with the tables of docs/papers.md on where each figure of a paper is."""
    recipes = set(recipe_names())
    titles = section_titles()
    for paper in FIGURES:
        rows = figure_rows(paper)
        numbers = sorted(number for cell, _, _ in rows for number in figure_numbers(cell))
        if numbers != list(range(1, FIGURES[paper] + 1)):
            yield f"{paper}: the rows have figures {numbers}, not 1 to {FIGURES[paper]} once each"
        for _, recipe_cell, sections in rows:
            named = set(re.findall(r"`([^`]+)`", recipe_cell))
            yield from (f"{paper}: there is no recipe {name}" for name in sorted(named - recipes))
            folder = f"{RECIPE_FOLDERS[paper]}/"
            yield from (
                f"{paper}: {name} is of another paper"
                for name in named
                if not name.startswith(folder)
            )
            known = titles if named else {"diagram", "diagrams"}
            yield from (
                f"{paper}: there is no section {section}"
                for section in unknown_sections(sections, known)
            )
    for paper in ("SFedKD", "QKT"):
        named = {
            name for _, cell, _ in figure_rows(paper) for name in re.findall(r"`([^`]+)`", cell)
        }
        expected = {name for name in recipes if name.startswith(f"{RECIPE_FOLDERS[paper]}/figure")}
        yield from (f"{paper}: the recipe {name} has no row" for name in sorted(expected - named))


def figure_rows(paper: str) -> list[list[str]]:
    """The rows of a paper's table: figures, recipes, sections of the report."""
    _, heading, remainder = text_of("docs/papers.md").partition(
        f"\n| {paper} | recipe | section of the report |\n"
    )
    if not heading:
        return []
    rows = remainder.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def figure_numbers(cell: str) -> list[int]:
    """The numbers of the figures that a cell is about: ``11: this; 12: that``."""
    heads = [re.match(r"(\d+(?:, \d+)*)(?:: |$)", part) for part in cell.split("; ")]
    return [int(number) for head in heads if head for number in head[1].split(", ")]


def section_titles() -> set[str]:
    """The titles of the report's sections, in small letters."""
    return {title.lower() for title in report_sections().values()}


def unknown_sections(cell: str, titles: Iterable[str]) -> list[str]:
    """The sections of a cell that are no title, nor a title with a picture of it after a comma."""
    starts = tuple(f"{title}, " for title in titles)
    return [
        section
        for section in cell.split("; ")
        if section not in titles and not section.startswith(starts)
    ]


# The gallery


def wrong_pictures() -> Iterator[str]:
    """Sections of the report that the gallery lacks, other than they are, or without their
    pictures.
    """
    page = GALLERY.read_text(encoding="utf-8")
    sections = report_sections()
    pictured = [name for kind, name, _ in scenes(page) if kind == "picture"]
    headed = re.findall(
        r"^### (.*)\n\n(.+)\n\n!\[.*\]\(images/gallery/(\w+)-light", page, re.MULTILINE
    )
    titles = {name: title.replace("’", "'") for title, _, name in headed}
    yield from (
        f"the section {name!r} is not shown once" for name in sections if pictured.count(name) != 1
    )
    yield from (
        f"{name!r} is no section of the report" for name in pictured if name not in sections
    )
    yield from (
        f"{name!r} is headed {titles.get(name)!r}, not {sections[name]!r}"
        for name in sections
        if titles.get(name) != sections[name]
    )
    yield from (
        f"the text of {name!r} does not ask a question"
        for _, text, name in headed
        if not text.endswith("?")
    )
    for name in sections:
        for theme in ("light", "dark"):
            picture = PICTURES / f"{name}-{theme}.png"
            if not picture.is_file() or not 1000 < picture.stat().st_size < LARGEST_PICTURE:
                yield f"{picture.name}: missing, empty, or larger than {LARGEST_PICTURE // 1000} kB"
    for picture in PICTURES.glob("*.png"):
        if picture.stem.rpartition("-")[0] not in sections:
            yield f"{picture.name} belongs to no section"


def report_sections() -> dict[str, str]:
    """{name: title} of all sections that the report's code can write."""
    sections: dict[str, str] = {}
    for path in (*REPORT.glob("*.py"), *PACKAGE.glob("*/report.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                sections |= section_of(node, node.func.id)
    return sections


def section_of(call: ast.Call, function: str) -> dict[str, str]:
    """{name: title} of a call that makes a section; empty for any other."""
    if function != "Section":
        return {}
    name, title, *_ = call.args
    if not isinstance(name, ast.Constant) or not isinstance(title, ast.Constant):
        return {}
    return {str(name.value): str(title.value)}


# The site


def wrong_menu() -> Iterator[str]:
    """Pages that the site's menu lacks, entries without a page, and a script from the network."""
    site = text_of("mkdocs.yml")
    listed = re.findall(r": ([\w/]+\.(?:md|ipynb))$", site, re.MULTILINE)
    folder = ROOT / "docs"
    existing = [path for pattern in ("*.md", "*.ipynb") for path in folder.rglob(pattern)]
    names = {path.relative_to(folder).as_posix() for path in existing}
    yield from (
        f"{name} is not in the menu once" for name in sorted(names) if listed.count(name) != 1
    )
    yield from (f"the menu has {name}, which is no page" for name in sorted(set(listed) - names))
    # The theme's plugin takes a script that is named here in the place of one from the network.
    script = re.search(r"polyfills: \[(.*?iframe-worker.*?)\]", site)
    if script is None or "window.Worker" not in (folder / script[1]).read_text(encoding="utf-8"):
        yield "polyfills names no script of ours for iframe-worker"
