"""What holds for the whole suite: one torch thread, clients side by side, no network, a cache of
its own.

``FEDSTILL_TEST_THREADS`` in the environment is another number of torch threads (``make grid``).
Temporary folders are in memory where there is room: every checkpoint waits for its disk several
times.
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

MEMORY, ROOM = Path("/dev/shm"), 2 << 30
"""A file system in memory, and the bytes that it must have to spare: the suite writes a fifth of
that.
"""

WHOLE_RUNS = (
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
"""Folders of tests that train, after all that check a formula or a file."""
LONGEST = (
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
"""The first among those: no worker should be left with one of them when the others are done."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--block PACKAGE``: run the tests as if one outer package were not there."""
    parser.addoption("--block", metavar="PACKAGE", help="run without this package of fedstill")


def _blocked_package() -> str:
    """The package of ``--block``; workers of pytest-xdist have it from the environment."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--block", default=os.environ.get(VARIABLE, ""))
    options, _ = parser.parse_known_args()
    return str(options.block)


BLOCKED = _blocked_package()
if BLOCKED:  # here, since the conftest.py files of folders import fedstill
    block(BLOCKED)
    os.environ[VARIABLE] = BLOCKED
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent / "blocking"), os.environ.get("PYTHONPATH", "")]
    )


ROOT = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the blocked package: hooks of this file are not asked about other folders."""
    if BLOCKED:
        ignored = config.option.ignore or []
        config.option.ignore = [*ignored, str(ROOT / "src" / "fedstill" / BLOCKED)]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of the blocked package, and files that need it."""
    if not BLOCKED:
        return None
    is_left_out = collection_path == ROOT / "tests" / BLOCKED or collection_path in _users()
    return is_left_out or None


@functools.cache
def _users() -> frozenset[Path]:
    """The tests and tools that import the blocked package, or others of them that do."""
    folders = [ROOT / "tests", ROOT / "tools", ROOT / "benchmarks"]
    files = {path: path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")}
    imports = rf"^(from|import) fedstill\.{BLOCKED}\b|^from fedstill import .*\b{BLOCKED}\b"
    users = {path for path, text in files.items() if re.search(imports, text, re.MULTILINE)}
    while True:
        names = {path.stem for path in users if path.stem != "__init__"}
        further = {path for path, text in files.items() if not names.isdisjoint(_imported(text))}
        if further <= users:
            return frozenset(users)
        users |= further


def _imported(text: str) -> set[str]:
    """The names of modules of this repository that a file imports at its top."""
    lines = re.findall(r"^(?:from|import) (?!fedstill\b)(.*)", text, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(lines)))


def _leave_out_users(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are marked as users of the blocked package."""
    users = []
    others = []
    for item in items:
        packages = [name for mark in item.iter_markers("uses") for name in mark.args]
        if item.get_closest_marker("needs_flower") is not None:
            packages.append("flower")
        if BLOCKED in packages:
            users.append(item)
        else:
            others.append(item)
    items[:] = others
    config.hook.pytest_deselected(items=users)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is fast comes first, so that what is wrong is mostly said within seconds."""
    tests = Path(__file__).parent
    if BLOCKED:
        _leave_out_users(config, items)

    def rank(item: pytest.Item) -> tuple[bool, int]:
        runs = (
            item.path.is_relative_to(tests) and item.path.relative_to(tests).parts[0] in WHOLE_RUNS
        )
        name = item.path.name
        return runs, LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that asks for the blocked package and is told that it is missing is an expected
    failure.
    """
    report = yield
    if BLOCKED and report.failed and call.excinfo is not None:
        of_a_command = f"fedstill.{BLOCKED}" in report.capstderr
        if of_a_command or _is_missed(call.excinfo.value):
            report.outcome = "skipped"
            report.wasxfail = f"uses fedstill.{BLOCKED}"
    return report


def _is_missed(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that the blocked package is missing."""
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
    """Tests and imported modules stay until the end: to search them for garbage meanwhile takes a
    third of the collection's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """While tests run, and in pytest's own search at the end, the collector does not search the
    tests and modules for garbage either: that takes an eighth of the suite's time.
    """
    import hypothesis  # noqa: F401  # it asks the collector about objects when it is imported

    gc.freeze()
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of Flower where it is not installed."""
    if item.get_closest_marker("needs_flower") is not None and find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install 'fedstill[flower]', as make test does")


def reproducible() -> None:
    import torch  # not by the process that only hands tests out

    import toys

    torch.set_num_threads(toys.THREADS)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True, scope="session")
def _from_the_start() -> None:
    reproducible()


@pytest.fixture(autouse=True)
def _whatever_was_set_before() -> None:
    reproducible()


@pytest.fixture
def with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pooled engine's threads, however small the networks of the tests are: they take half as
    long again.
    """
    monkeypatch.setattr("fedstill.engines.pooled.LIGHT_FLOPS", 0.0)


@pytest.fixture(autouse=True)
def _no_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command prints is as wide here as on every other machine."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Workers share one cache, so that data are decoded and packed runs are unpacked once for all
    of them.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    os.environ.setdefault("FEDSTILL_CACHE", str(cache))
    os.environ.setdefault("FEDSTILL_STATE", str(folder / "state"))
