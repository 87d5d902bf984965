"""Checks the commands on all pages and in all tutorials, without training.

A command of ``fedstill`` is parsed as ``fedstill`` parses it, and its config, overrides, methods,
grid, recipe, cells and suite are resolved. For programs of the repository and for ``make``, options
and targets must exist.

Tests and ``tools.results_page`` execute many of these commands. This check finds faults in the
remaining ones: removed options, misspelt keys, overrides without effect.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError, MissingArgumentError

from fedstill.benchmark.commands import recipe_changes, suites_of
from fedstill.benchmark.recipes import load_recipe
from fedstill.cli import app
from fedstill.cli.app import experiment_of
from fedstill.config.experiment import load
from fedstill.config.overrides import parse_grid, with_working_directory_paths
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import FedstillError
from fedstill.running.compare import variants
from fedstill.running.tuning import Dimension, parse_space
from tools.documents import cells, documents
from tools.references import ROOT

BLOCK = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^ *```', re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(fedstill [^`]+)`")
NAMED_IN_COMMENT = re.compile(r"# (\S+\.toml)\n")
ASSIGNMENT = re.compile(r"""([A-Z]+)=(["'])(.*)\2$""")
LOOP = re.compile(r"for (\w+) in (\S+)")
PROGRAM = re.compile(r"(?:\w+=\S+ )*python -m ((?:benchmarks|tools)\.[\w.]+)(.*)")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
RULE = re.compile(r"^[a-z][a-z -]*:", re.MULTILINE)
TARGET = re.compile(r"make ([a-z][a-z-]*)")
PLACEHOLDER = re.compile(r"[A-Z]+|\.\.\.")
"""A placeholder for a name that the reader chooses."""

FRONT_PAGE = "docs/start.md"
"""The page that shows ``my.toml``, which other pages take."""

FRONT_CONFIG = "my.toml"
CHANGELOG = "CHANGELOG.md"
README = "README.md"
"""The page that shows the same config without a title, as GitHub has none."""

WITH_PACKAGES = ("docs/add_a_client_hook.md", "docs/add_an_observer.md")
"""Pages that add a package to fedstill. Their configs resolve with it alone, and a test follows
them.
"""

FEWEST = 200
"""With fewer commands, the format of the pages has probably changed."""


@dataclass(frozen=True)
class Command:
    """A command of a page: its words after ``fedstill``.

    ``in_sentence``: whether it is part of a sentence, and may be incomplete.
    """

    page: str
    words: tuple[str, ...]
    in_sentence: bool

    @property
    def text(self) -> str:
        """As it is typed."""
        return shlex.join(["fedstill", *self.words])


@dataclass(frozen=True)
class Block:
    """A block of code of a page: its language and its title, both empty if it has none."""

    language: str
    title: str
    text: str

    @property
    def file(self) -> str:
        """The name of the file that it shows; empty if it shows none."""
        comment = NAMED_IN_COMMENT.match(self.text)
        if comment and not self.title:
            return comment[1]
        return self.title


@dataclass(frozen=True)
class Page:
    """A page's text in Markdown, by its path in the repository."""

    path: str
    text: str

    @property
    def blocks(self) -> list[Block]:
        """The blocks of code."""
        return [
            Block(language, title, text) for _, language, title, text in BLOCK.findall(self.text)
        ]

    @property
    def files(self) -> dict[str, str]:
        """The files that the page shows, by name."""
        files = {block.file: block.text for block in self.blocks if block.file}
        if self.path == README:
            files[FRONT_CONFIG] = next(b.text for b in self.blocks if b.language == "toml")
        return files

    @property
    def lines(self) -> list[str]:
        """The lines of all blocks that are no files."""
        texts = [_expanded(block.text) for block in self.blocks if not block.title]
        return [line.strip().removeprefix("$ ") for text in texts for line in text.splitlines()]

    def commands(self) -> Iterator[Command]:
        """The commands of the page."""
        for line in self.lines:
            if line.startswith("fedstill "):
                words = shlex.split(line, comments=True)
                yield Command(self.path, tuple(words[1:]), in_sentence=False)
        for text in INLINE.findall(BLOCK.sub("", self.text)):
            yield Command(self.path, tuple(shlex.split(text)[1:]), in_sentence=True)


def _expanded(block: str) -> str:
    """A block of commands with each on one line, and with the first value of each variable."""
    text = block.replace("\\\n", " ")
    for line in text.splitlines():
        assignment = ASSIGNMENT.match(line)
        loop = LOOP.match(line)
        if assignment:
            value = assignment[3].replace('"', '\\"')  # it stands in double quotes, if it has some
            text = text.replace(f"${assignment[1]}", value)
        if loop:
            text = text.replace(f"${loop[1]}", loop[2])
    return text


def all_pages() -> list[Page]:
    """All documents but the changelog, which may name commands that no longer exist."""
    pages = []
    for path in documents(ROOT):
        if path.name != CHANGELOG:
            text = "\n\n".join(cell.text for cell in cells(path))
            pages.append(Page(path.relative_to(ROOT).as_posix(), text))
    return pages


def wrong_commands() -> Iterator[str]:
    """Commands that fedstill would refuse, and those that name something that does not exist."""
    pages = all_pages()
    front = next(page for page in pages if page.path == FRONT_PAGE)
    count = 0
    for page in pages:
        commands = list(page.commands())
        count += len(commands)
        yield from problems(page, {**front.files, **page.files}, commands)
        yield from program_problems(page)
    if count < FEWEST:
        yield f"only {count} commands were found: has the form of the pages changed?"


def problems(page: Page, files: Mapping[str, str], commands: Iterable[Command]) -> Iterator[str]:
    """What is wrong with commands of a page, which are read in a folder with the page's files."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("results").symlink_to(ROOT / "results")
        for name, text in files.items():
            if not name.startswith(("src/", "tests/")):
                Path(name).write_text(text, encoding="utf-8")
        for command in dict.fromkeys(commands):
            problem = problem_of(command)
            # A page may show an error that its command ends with.
            if problem and problem.replace(f"{Path.cwd()}/", "") not in page.text:
                yield f"{page.path}: {command.text}: {problem}"


def problem_of(command: Command) -> str:
    """Why a command cannot run; empty if it can, or if only its data would show the problem."""
    try:
        function, bound, _ = app.parse_args(
            list(command.words), exit_on_error=False, print_error=False
        )
    except MissingArgumentError as error:
        # A sentence may leave out arguments.
        if command.in_sentence:
            return unknown_option(command.words)
        return str(error)
    except CycloptsError as error:
        return str(error)
    check = CHECKS.get(function.__name__)
    is_part = command.in_sentence and len(command.words) == 1
    if check is None or is_part or has_placeholder(command.words):
        return ""
    if command.page in WITH_PACKAGES:
        return ""
    try:
        check(**bound.arguments)
    except FedstillError as error:
        return error.in_shell
    return ""


def program_problems(page: Page) -> Iterator[str]:
    """Options that the repository's programs do not have, and targets that the Makefile lacks."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"[a-z-]+", "".join(RULE.findall(makefile))))
    for line in page.lines:
        target = TARGET.match(line)
        if target and target[1] not in targets:
            yield f"{page.path}: the Makefile has no target {target[1]}"
        program = PROGRAM.match(line)
        if not program:
            continue
        source = source_of(program[1])
        for option in OPTION.findall(program[2].partition("#")[0]):
            # An option may be made of a parameter's name.
            if not re.search(rf"\b{option[2:].replace('-', '[-_]')}\b", source):
                yield f"{page.path}: python -m {program[1]} has no option {option}"


def source_of(module: str) -> str:
    """The source of a module of the repository, or of all modules of a package."""
    folder = ROOT / module.replace(".", "/")
    file = folder.with_suffix(".py")
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


def has_placeholder(words: Sequence[str]) -> bool:
    """Whether some words are placeholders for names that the reader chooses.

    >>> has_placeholder(["run", "OLD/config.toml"]), has_placeholder(["run", "my.toml"])
    (True, False)
    """
    parts = "/".join(words).split("/")
    return any(PLACEHOLDER.fullmatch(part) for part in parts)


def unknown_option(words: Sequence[str]) -> str:
    """The first option that a command does not have; empty if it has all."""
    command = app[words[0]]
    if command.default_command is None:  # a group of commands, such as deploy
        command = command[words[1]]
    names = set[str]()
    for argument in command.assemble_argument_collection():
        names.update(argument.names)
    unknown = [word for word in words if word.startswith("-") and word not in names]
    if not unknown:
        return ""
    return f"{words[0]} has no option {unknown[0]}"


# What the commands name, resolved without training.


def check_run(config: Path | None = None, **options: Any) -> None:
    """Resolve the settings of ``run`` and ``explain``."""
    experiment = experiment_of(
        config, options.get("set_", ()), options.get("engine"), options.get("federation")
    )
    resolve(experiment, check_device=False)


def check_compare(config: Path | None = None, **options: Any) -> None:
    """Resolve all runs of a comparison."""
    experiment = load(config, options.get("set_", ()))
    methods = with_working_directory_paths(options.get("methods", ()), experiment.base)
    grid = parse_grid(options.get("grid", ()))
    variants(experiment, Path("out"), methods, options.get("seeds", ()), grid)


def check_tune(config: Path | None = None, **options: Any) -> None:
    """Resolve a run at one point of the search."""
    experiment = load(config, options.get("set_", ()))
    values = {d.key: _some_value(d) for d in parse_space(options.get("space", ()))}
    resolve(experiment.with_values(values, "--space"), check_device=False)


def _some_value(dimension: Dimension) -> Any:
    if dimension.choices:
        return dimension.choices[0]
    if dimension.is_whole:
        return int(dimension.low)
    return dimension.low


def check_reproduce(recipe: str = "", **options: Any) -> None:
    """Resolve the first run of each cell of a paper's table."""
    if not recipe:
        return
    table = load_recipe(recipe)
    changes = recipe_changes(
        table, options.get("set_", ()), options.get("rounds"), options.get("data", "")
    )
    table.variants(table.cells(options.get("cells", ())), (1,), changes, Path("out"))


def check_suite(tier: str = "digits", track: str = "", **options: Any) -> None:
    """Find the suites of a command of the ranking, and its rows."""
    for suite in suites_of(tier, track):
        suite.find_rows(options.get("methods", ()))


def check_list(kind: str | None = None, name: str | None = None) -> None:
    """Find the thing that ``list`` shows."""
    if kind and name:
        registry.lookup(kind, name)


CHECKS: Mapping[str, Callable[..., None]] = {
    "run_command": check_run,
    "explain_command": check_run,
    "compare_command": check_compare,
    "tune_command": check_tune,
    "reproduce": check_reproduce,
    "rank_run": check_suite,
    "rank_choose": check_suite,
    "list_command": check_list,
}
"""By the name of a command's function."""
