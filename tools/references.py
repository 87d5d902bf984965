"""Checks of references in the pages: links, anchors, files, names, settings, figures and pictures.

Each function returns one line for every wrong reference; ``tools.docs_check`` prints these lines.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedstill.benchmark.recipes import recipe_names
from fedstill.core import registry
from tools.documents import cells, documents
from tools.gallery import PAGE as GALLERY
from tools.gallery import PICTURES, PictureScene, scenes

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
PAPERS_WITH_ALL_RECIPES = ("SFedKD", "QKT")
"""Papers whose table has a row for each of their recipes."""

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
            target = page
            if path:
                target = page.parent / path
            if not target.exists():
                yield f"{name} links to {link}: there is no such file"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                yield f"{name} links to {link}: there is no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {anchor(heading) for heading in headings}


def anchor(heading: str) -> str:
    """The anchor of a heading: small letters, hyphens for spaces, no punctuation."""
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading)
    words = re.sub(r"[^\w\s-]", "", text.lower()).strip()
    return re.sub(r"[\s-]+", "-", words)


# Files and names


def place(path: str) -> Path:
    """A path that a page names: in the package, or else in the repository."""
    in_package = PACKAGE / path
    if in_package.exists():
        return in_package
    return ROOT / path


def missing_files() -> Iterator[str]:
    """Files, folders, configs, runs and programs that pages name and that do not exist."""
    yield from missing_paths()
    yield from missing_runs()
    yield from missing_programs()


def missing_paths() -> Iterator[str]:
    """Modules and folders that the pages on the code name and that do not exist."""
    for page in ("docs/tour.md", "docs/glossary.md", "docs/papers.md", "CONTRIBUTING.md"):
        for path in in_code(page):
            is_path = re.fullmatch(r"[\w./-]+(\.py|/)", path) and not path.startswith("site/")
            if is_path and not place(path).exists():
                yield f"{page}: no {path}"


def missing_runs() -> Iterator[str]:
    """Runs and configs that the pages of results name and that do not exist."""
    pages = sorted((ROOT / "docs" / "results").glob("*.md"))
    for page in [*pages, ROOT / "results" / "README.md"]:
        text = page.read_text(encoding="utf-8")
        paths = set(re.findall(r"(?<![\w/])results/[\w/-]+(?:\.toml)?", text))
        paths -= {"results/NAME", "results/NAME.toml"}
        for path in sorted(paths):
            if not has_runs(path):
                yield f"{page.relative_to(ROOT)}: no {path}, neither a file nor packed"


def missing_programs() -> Iterator[str]:
    """Programs of ``benchmarks`` and ``tools`` that pages name and that do not exist."""
    for page in [*documents(ROOT), ROOT / "Makefile"]:
        text = page.read_text(encoding="utf-8")
        modules = set(re.findall(r"-m ((?:benchmarks|tools)(?:\.\w+)+)", text))
        for name in sorted(modules):
            if not is_module(name):
                yield f"{page.relative_to(ROOT)}: no module {name}"


def has_runs(path: str) -> bool:
    """Whether a path exists, or is in a pack of runs."""
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
    row = re.compile(r"^\|[^|]+\| `([\w.]+)` \| `([\w./]+\.py)` \|$", re.MULTILINE)
    rows = row.findall(text_of("docs/tour.md"))
    if not rows:
        yield "no row of the form | step | `name` | `file.py` |"
    for name, path in rows:
        if place(path).exists() and not defines(place(path), name):
            yield f"{path} does not define {name}"
    packages = [path.parent for path in PACKAGE.rglob("*/__init__.py")]
    folders = {f"{package.relative_to(PACKAGE)}/" for package in packages}
    for folder in sorted(folders - set(in_code("docs/tour.md"))):
        yield f"the folder {folder} is not named"


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
    for name in repeated(names):
        yield f"{name} occurs twice"
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
    for module in sorted(registered_modules() - set(names)):
        yield f"{module} is not listed"


def repeated(names: list[str]) -> list[str]:
    """The names that occur more than once, sorted."""
    return [name for name, count in sorted(Counter(names).items()) if count > 1]


def registered_modules() -> set[str]:
    """The modules of everything that is registered and that the reference describes."""
    modules = set()
    for kind in KINDS:
        for name in registry.names(kind):
            modules.add(registry.lookup(kind, name).target.__module__)
    return modules


def missing_measures() -> Iterator[str]:
    """Measures that their page does not describe."""
    page = text_of("docs/measures.md")
    for name in registry.names("measure"):
        if f"| `{name}` |" not in page:
            yield f"the measure {name} has no row"


# Figures of papers


@dataclass(frozen=True)
class FigureRow:
    """A row of a paper's table in docs/papers.md: the cells on figures, recipes and sections."""

    figures: str
    recipes: str
    sections: str

    @property
    def figure_numbers(self) -> list[int]:
        """The numbers of the figures, such as 11 and 12 of ``11: accuracy; 12: forgetting``."""
        numbers: list[int] = []
        for part in self.figures.split("; "):
            match = re.match(r"(\d+(?:, \d+)*)(?:: |$)", part)
            if match:
                numbers += map(int, match[1].split(", "))
        return numbers

    @property
    def recipe_names(self) -> set[str]:
        """The recipes that draw the figures; empty for a diagram."""
        return set(re.findall(r"`([^`]+)`", self.recipes))


def wrong_figures() -> Iterator[str]:
    """Faults in the tables of docs/papers.md on the figures of papers."""
    recipes = set(recipe_names())
    titles = section_titles()
    for paper in FIGURES:
        for fault in wrong_figures_of(paper, recipes, titles):
            yield f"{paper}: {fault}"


def wrong_figures_of(paper: str, recipes: set[str], titles: set[str]) -> Iterator[str]:
    """Faults in the table of a paper."""
    rows = figure_rows(paper)
    numbers: list[int] = []
    for row in rows:
        numbers += row.figure_numbers
    if sorted(numbers) != list(range(1, FIGURES[paper] + 1)):
        yield f"the rows have figures {sorted(numbers)}, not 1 to {FIGURES[paper]} once each"
    yield from wrong_recipes(paper, rows, recipes)
    for row in rows:
        sections = {"diagram", "diagrams"}
        if row.recipe_names:
            sections = titles
        for section in unknown_sections(row.sections, sections):
            yield f"there is no section {section}"


def wrong_recipes(paper: str, rows: Iterable[FigureRow], recipes: set[str]) -> Iterator[str]:
    """Recipes in the table of a paper that do not exist or belong elsewhere, and missing ones."""
    listed_recipes = set[str]()
    for row in rows:
        listed_recipes |= row.recipe_names
    folder = f"{RECIPE_FOLDERS[paper]}/"
    for name in sorted(listed_recipes - recipes):
        yield f"there is no recipe {name}"
    for name in sorted(listed_recipes):
        if not name.startswith(folder):
            yield f"{name} is of another paper"
    if paper in PAPERS_WITH_ALL_RECIPES:
        expected = {name for name in recipes if name.startswith(f"{folder}figure")}
        for name in sorted(expected - listed_recipes):
            yield f"the recipe {name} has no row"


def figure_rows(paper: str) -> list[FigureRow]:
    """The rows of a paper's table."""
    head = f"\n| {paper} | recipe | section of the report |\n"
    text = text_of("docs/papers.md").partition(head)[2]
    rows = []
    for line in text.partition("\n\n")[0].splitlines()[1:]:
        figures, recipes, sections = line.strip("|").split("|")
        rows.append(FigureRow(figures.strip(), recipes.strip(), sections.strip()))
    return rows


def section_titles() -> set[str]:
    """The titles of the report's sections, in small letters."""
    return {title.lower() for title in report_sections().values()}


def unknown_sections(cell: str, titles: Iterable[str]) -> list[str]:
    """The sections of a cell that do not exist. A picture of the section may follow a comma."""
    beginnings = tuple(f"{title}, " for title in titles)
    sections = [section for section in cell.split("; ") if section not in titles]
    return [section for section in sections if not section.startswith(beginnings)]


# The gallery


def wrong_pictures() -> Iterator[str]:
    """Faults in the gallery: sections of the report that it lacks, with another title, or without
    pictures.
    """
    page = GALLERY.read_text(encoding="utf-8")
    sections = report_sections()
    yield from wrong_headings(page, sections)
    shown = [scene.name for scene in scenes(page) if isinstance(scene, PictureScene)]
    for name in sections:
        if shown.count(name) != 1:
            yield f"the section {name!r} is not shown once"
    for name in shown:
        if name not in sections:
            yield f"{name!r} is no section of the report"
    yield from wrong_picture_files(sections)


def wrong_headings(page: str, sections: Mapping[str, str]) -> Iterator[str]:
    """Sections of the gallery with another title than in the report, or without a question."""
    section = re.compile(r"^### (.*)\n\n(.+)\n\n!\[.*\]\(images/gallery/(\w+)-light", re.MULTILINE)
    titles = {}
    for title, text, name in section.findall(page):
        titles[name] = title.replace("’", "'")
        if not text.endswith("?"):
            yield f"the text of {name!r} does not ask a question"
    for name, title in sections.items():
        if titles.get(name) != title:
            yield f"{name!r} is headed {titles.get(name)!r}, not {title!r}"


def wrong_picture_files(sections: Mapping[str, str]) -> Iterator[str]:
    """Pictures of the gallery that are missing, too large, or not used."""
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
    menu = re.findall(r": ([\w/]+\.(?:md|ipynb))$", site, re.MULTILINE)
    folder = ROOT / "docs"
    pages = [*folder.rglob("*.md"), *folder.rglob("*.ipynb")]
    names = {page.relative_to(folder).as_posix() for page in pages}
    for name in sorted(names):
        if menu.count(name) != 1:
            yield f"{name} is not in the menu once"
    for name in sorted(set(menu) - names):
        yield f"the menu has {name}, which is no page"
    # The theme's plugin takes a script that is named here in the place of one from the network.
    script = re.search(r"polyfills: \[(.*?iframe-worker.*?)\]", site)
    if script is None or "window.Worker" not in (folder / script[1]).read_text(encoding="utf-8"):
        yield "polyfills names no script of ours for iframe-worker"
