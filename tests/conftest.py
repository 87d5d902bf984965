"""Settings of the whole suite: one torch thread, no network, a separate cache, and the order of
the tests.

The environment variable ``FEDSTILL_TEST_THREADS`` sets another number of torch threads
(``make grid``). Temporary folders are in memory if there is enough space, because every checkpoint
waits for the disk several times.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import shutil
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from blocking.sitecustomize import VARIABLE, block

MEMORY = Path("/dev/shm")
"""A file system in memory."""

NEEDED_BYTES = 2 << 30
"""The free space that the file system in memory must have. The suite writes a fifth of it."""

FOLDERS_OF_RUNS = (
    "methods",
    "running",
    "measures",
    "attribution",
    "benchmark",
    "export",
    "config",
    "querying",
    "engines",
    "docs",
    "cli",
    "report",
    "benchmarks",
    "flower",
    "privacy",
    "unlearning",
)
"""Folders of tests that train. They run after the tests of formulas and files."""

LONGEST_FILES = (
    "test_documents.py",
    "test_every_method.py",
    "test_recorded.py",
    "test_every_kind.py",
    "test_vectorised.py",
    "test_recipes.py",
    "test_cross.py",
    "test_no_waiting.py",
    "test_flower_site_tasks.py",
    "test_measures.py",
    "test_tutorials.py",
    "test_secure_sums.py",
    "test_load_model_of_kinds.py",
    "test_why.py",
)
"""Files that run first among those that train, so that no worker is busy with one of them after the
others have finished.
"""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

if MEMORY.is_dir():
    has_space = shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    if has_space and os.access(MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--block PACKAGE``, which runs the tests as if an outer package were not installed."""
    parser.addoption("--block", metavar="PACKAGE", help="run without this package of fedstill")


def _blocked_package() -> str:
    """The package of ``--block``. Workers of pytest-xdist read it from the environment."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--block", default=os.environ.get(VARIABLE, ""))
    options, _ = parser.parse_known_args()
    return str(options.block)


BLOCKED = _blocked_package()
if BLOCKED:
    # At import, because the conftest.py files of folders import fedstill.
    block(BLOCKED)
    os.environ[VARIABLE] = BLOCKED
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent / "blocking"), os.environ.get("PYTHONPATH", "")]
    )


ROOT = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Ignore the folder of the blocked package. pytest does not call the hooks of this file for
    folders outside of tests/.
    """
    if BLOCKED:
        ignored = config.option.ignore or []
        config.option.ignore = [*ignored, str(ROOT / "src" / "fedstill" / BLOCKED)]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the tests of the blocked package, and files that need it."""
    if not BLOCKED:
        return None
    if collection_path == ROOT / "tests" / BLOCKED or collection_path in _files_that_need_package():
        return True
    return None


@functools.cache
def _files_that_need_package() -> frozenset[Path]:
    """The tests, tools and benchmarks that import the blocked package, directly or through each
    other.
    """
    folders = [ROOT / "tests", ROOT / "tools", ROOT / "benchmarks"]
    files = {path: path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")}
    imports = rf"^(from|import) fedstill\.{BLOCKED}\b|^from fedstill import .*\b{BLOCKED}\b"
    found = {path for path, text in files.items() if re.search(imports, text, re.MULTILINE)}
    while True:
        names = {path.stem for path in found if path.stem != "__init__"}
        importers = {path for path, text in files.items() if not names.isdisjoint(_imported(text))}
        if importers <= found:
            return frozenset(found)
        found |= importers


def _imported(text: str) -> set[str]:
    """The modules of this repository that a file imports at its top, by name."""
    lines = re.findall(r"^(?:from|import) (?!fedstill\b)(.*)", text, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(lines)))


def _deselect_marked_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are marked as users of the blocked package."""
    deselected = []
    selected = []
    for item in items:
        packages = [name for mark in item.iter_markers("uses") for name in mark.args]
        if item.get_closest_marker("needs_flower") is not None:
            packages.append("flower")
        if BLOCKED in packages:
            deselected.append(item)
        else:
            selected.append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=deselected)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests: the fast ones come first, so that most errors are reported within seconds."""
    if BLOCKED:
        _deselect_marked_tests(config, items)
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> tuple[bool, int]:
    """The sort key of a test: whether it trains, and the place of its file in ``LONGEST_FILES``."""
    trains = False
    if item.path.is_relative_to(ROOT / "tests"):
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        trains = folder in FOLDERS_OF_RUNS
    place = len(LONGEST_FILES)
    if item.path.name in LONGEST_FILES:
        place = LONGEST_FILES.index(item.path.name)
    return trains, place


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test as an expected failure if it failed because the blocked package is missing."""
    report = yield
    if BLOCKED and report.failed and call.excinfo is not None:
        command_names_package = f"fedstill.{BLOCKED}" in report.capstderr
        if command_names_package or _names_missing_package(call.excinfo.value):
            report.outcome = "skipped"
            report.wasxfail = f"uses fedstill.{BLOCKED}"
    return report


def _names_missing_package(error: BaseException) -> bool:
    """Whether the message of an error, or of one of its causes, names the blocked package as
    missing.
    """
    from fedstill import manifest

    (package,) = [package for package in manifest.PACKAGES if package.name == BLOCKED]
    tables = "|".join(part.name for part in package.config_tables)
    measures = "|".join(part.name for part in package.measures)
    mentions = rf"fedstill\.{BLOCKED}\b"
    if tables:
        mentions += rf"|unexpected keyword argument '({tables})'"
    if measures:
        mentions += rf"|unknown measure '({measures})'"
    cause: BaseException | None = error
    while cause is not None:
        if re.search(mentions, str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without Python's garbage collector. Tests and imported modules are needed
    until the end, and searching them for garbage takes a third of the collection's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Exclude tests and modules from garbage collection while tests run, which saves an eighth of
    the suite's time.
    """
    import hypothesis  # noqa: F401  # its import needs the collector's list of objects

    gc.freeze()
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of Flower where it is not installed."""
    if item.get_closest_marker("needs_flower") is not None and find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install 'fedstill[flower]', as make test does")


def _set_up_torch() -> None:
    """Set the number of torch threads, and refuse operations whose results vary."""
    # Lazy, because the process that distributes tests to workers does not need torch.
    import torch

    import toys

    torch.set_num_threads(toys.THREADS)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True, scope="session")
def _torch_for_module_fixtures() -> None:
    _set_up_torch()


@pytest.fixture(autouse=True)
def _torch_for_each_test() -> None:
    """Set up torch again, in case another test has changed its settings."""
    _set_up_torch()


@pytest.fixture
def with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pooled engine use threads for the small networks of tests, too. By default, it does
    not, and such tests take two thirds of the time.
    """
    monkeypatch.setattr("fedstill.engines.pooled.LIGHT_FLOPS", 0.0)


@pytest.fixture(autouse=True)
def _default_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands print with the same width on every machine."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _common_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let all workers use one new cache, so that data are decoded and packed runs are unpacked only
    once.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    os.environ.setdefault("FEDSTILL_CACHE", str(cache))
    os.environ.setdefault("FEDSTILL_STATE", str(folder / "state"))
