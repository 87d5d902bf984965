"""Entries of the ranking: the runs of one method in one suite, as a folder of small files.

```
NAME/
  entry.toml            suite and version, method, chosen fields and their scores, software, digests
  METHOD.py             for a method that is not in the package
  COLUMN/seedN/         config.toml, journal.jsonl, split.safetensors and summary.json of each run
```

An entry from elsewhere is untrusted data: its size is limited, and nothing here executes it. The
checks in this module find mistakes, and establish which runs of which method an entry claims. Only
a replay (``benchmark/replays.py``) shows that a run took place.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.benchmark.scoring import ScoredRun, read_events, score_of
from fedstill.benchmark.suites import (
    TEST_SEEDS,
    Choice,
    Suite,
    Try,
    check_printable,
    load_suite,
    read_choice,
    slug,
)
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, RunExists, on_one_line
from fedstill.core.files import (
    digest,
    flat,
    make_folder,
    parse_toml,
    read_file,
    read_toml,
    replaced_folder,
    write_whole,
)
from fedstill.core.registry import names as registered_names
from fedstill.core.user_modules import code_named_by, split_name, trust_code_of, trust_content
from fedstill.running.compare import Variant
from fedstill.running.journal import CONFIG, CONFIG_SHA256, JOURNAL, SUMMARY, Event, without_times
from fedstill.running.packs import packs_below, readable
from fedstill.running.result import summary_from_journal
from fedstill.running.same_run import processor, software
from fedstill.running.split_file import SPLIT

ENTRY_FILE = "entry.toml"
RUN_FILES = (CONFIG, JOURNAL, SUMMARY, SPLIT)

MAX_FILE_BYTES = 32 << 20
"""The size of the largest file that an entry may contain."""

MAX_FILES = 1000
"""The maximum number of files and folders in an entry."""

MALFORMED_FILE_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
)
"""The errors that malformed files cause."""

CPU = "seconds_cpu"
"""The only time that an entry keeps: processor seconds."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The runs of a method in one suite.

    ``fields``: the chosen configuration, by dotted key. ``tries`` and ``choice``: all
    configurations that were tried, and their scores; empty and None for a bound.
    ``made_with``: software, processor and threads. ``digests``: the SHA-256 of all files but
    entry.toml, by path. ``diverged``: the reasons of runs that diverged, by ``COLUMN/seedN``.
    ``method_file``: the name of the method's file; empty for a method of the package. ``topology``:
    the options that such a method adds to the suite's topology.
    """

    folder: Path
    suite: str
    version: int
    row: str
    method: str
    fields: Mapping[str, Any]
    tries: Sequence[Try]
    choice: Choice | None
    made_with: Mapping[str, Any]
    digests: Mapping[str, str]
    method_file: str = ""
    diverged: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, Any] = field(default_factory=dict)

    def run_folder(self, column: str, seed: int) -> Path:
        """The folder of one run."""
        return self.folder / run_path(column, seed)

    @property
    def sha(self) -> str:
        """The beginning of the SHA-256 of entry.toml, which distinguishes entries of the same
        row.
        """
        return digest(read_file(self.folder / ENTRY_FILE))[:16]

    @property
    def table(self) -> dict[str, Any]:
        """The contents of entry.toml; optional tables are left out if they are empty."""
        choice: dict[str, Any] = {}
        if self.choice is not None:
            choice = {"tries": [dict(values) for values in self.tries], **self.choice.table}
        table = {
            "suite": self.suite,
            "version": self.version,
            "row": self.row,
            "method": self.method,
            "file": self.method_file,
            "fields": dict(self.fields),
            "choice": choice,
            "made": dict(self.made_with),
            "diverged": dict(self.diverged),
            "topology": dict(self.topology),
            "digests": dict(sorted(self.digests.items())),
        }
        optional = ("file", "choice", "diverged", "topology")
        return {key: value for key, value in table.items() if value or key not in optional}


def run_path(column: str, seed: int) -> str:
    """The path of a run within an entry."""
    return f"{slug(column)}/seed{seed}"


def column_of(run: Variant) -> str:
    """The column of a run, from its label ``ROW | COLUMN``; only the column may contain a bar."""
    return run.label.partition(" | ")[2]


def path_of(run: Variant) -> str:
    """The path of a run within its entry."""
    return run_path(column_of(run), run.seed)


def planned_rounds(folder: Path) -> int:
    """The number of rounds in a run's config, of an entry. Raises CorruptFile."""
    path = folder / CONFIG
    try:
        return _rounds_in(read_file(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"cannot read {path}: {error}") from error


@lru_cache(64)
def _rounds_in(config: bytes) -> int:
    return int(parse_toml(config)["rounds"])


# ---- writing entries -----------------------------------------------------------------------------


def write_entry(
    suite: Suite,
    row: str,
    runs: Sequence[ScoredRun],
    folder: Path,
    method_file: Path | None = None,
) -> Entry:
    """Write the entry of a row from its finished runs; an earlier entry in the folder is replaced.

    ``method_file``: the file of a method that is not in the package. Raises RunExists for a folder
    that contains anything but an entry.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ENTRY_FILE).is_file():
        raise RunExists(f"{folder} contains something that is not an entry; choose another --out")

    files: dict[str, bytes] = {}
    for run in runs:
        for name, data in _run_files(run.variant.folder):
            files[f"{path_of(run.variant)}/{name}"] = data
    method = suite.method_of(row)["name"]
    file_name = ""
    topology: Mapping[str, Any] = {}
    if method_file is not None:
        method = file_name = method_file.name
        files[file_name] = read_file(method_file)
        topology = suite.added_topology(row)
    tries: Sequence[Try] = ()
    if row in suite.tries:
        tries = suite.tries_of(row)
    seconds = round(sum(run.score.seconds_cpu for run in runs), 3)

    entry = Entry(
        folder=folder,
        suite=suite.name,
        version=suite.version,
        row=row,
        method=method,
        fields=suite.chosen_fields(row),
        tries=tries,
        choice=suite.choices.get(row),
        made_with={**software(), "processor": processor(), "threads": 1, CPU: seconds},
        digests={path: digest(data) for path, data in files.items()},
        method_file=file_name,
        diverged={path_of(run.variant): run.diverged for run in runs if run.diverged},
        topology=topology,
    )
    make_folder(folder.parent)
    with replaced_folder(folder) as new_folder:
        _write_files(new_folder, files, entry)
    return entry


def _write_files(folder: Path, files: Mapping[str, bytes], entry: Entry) -> None:
    for path, data in files.items():
        make_folder((folder / path).parent)
        write_whole(folder / path, data)
    table = tomli_w.dumps(entry.table).encode()
    write_whole(folder / ENTRY_FILE, table)
    trust_content(table)


@contextmanager
def code_of_entry(folder: Path) -> Iterator[None]:
    """Within it, code that an entry names is imported only if the user trusts it."""
    path = folder / ENTRY_FILE
    with code_named_by(path, read_file(path)):
        yield


def trust_entry(folder: Path) -> None:
    """Trust all code that an entry names."""
    trust_code_of(read_file(folder / ENTRY_FILE))


def _run_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The name and contents of each file of a run, as an entry keeps them."""
    config = read_file(folder / CONFIG)
    entered_config = with_relative_paths(config.decode()).encode()
    yield CONFIG, entered_config
    yield SPLIT, read_file(folder / SPLIT)

    # The journal names the digest of its config.
    journal = read_file(folder / JOURNAL)
    journal = journal.replace(digest(config).encode(), digest(entered_config).encode(), 1)
    lines = []
    for line in journal.split(b"\n")[:-1]:
        event = without_wall_times(json.loads(line))
        lines.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    yield JOURNAL, b"".join(lines)

    summary = folder / SUMMARY
    if summary.is_file():
        numbers = without_wall_times(json.loads(read_file(summary)))
        yield SUMMARY, json.dumps(numbers, indent=1).encode()


def with_relative_paths(config: str) -> str:
    """A config's text in which paths below the working directory are relative to it.

    A user's suite may name code and data next to it; whoever checks an entry has them elsewhere.
    """
    return config.replace(json.dumps(str(Path.cwd()))[:-1] + "/", '"')


def without_wall_times(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event or a summary without times, except processor seconds."""
    kept = {key: event[key] for key in (CPU, CONFIG_SHA256) if key in event}
    return {**without_times(event), **kept}


# ---- reading entries -----------------------------------------------------------------------------


def read_entry(folder: Path) -> Entry:
    """An entry from its folder, or from a pack that contains it. Raises CorruptFile."""
    place = readable(folder)
    if not (place / ENTRY_FILE).is_file():
        raise CorruptFile(f"{folder} is not an entry: it has no {ENTRY_FILE}")
    check_file_names(place)
    try:
        return _parse_entry(place, read_toml(place / ENTRY_FILE))
    except (ConfigError, *MALFORMED_FILE_ERRORS) as error:
        raise CorruptFile(f"cannot read {folder / ENTRY_FILE}: {error}") from error


def _parse_entry(folder: Path, tree: Mapping[str, Any]) -> Entry:
    tries: list[dict[str, Any]] = []
    choice = None
    if "choice" in tree:
        tries = [dict(values) for values in tree["choice"].get("tries", [])]
        choice = read_choice(str(folder), tree["choice"], len(tries))

    method_file = str(tree.get("file", ""))
    if method_file:
        is_there = (folder / Path(method_file).name).is_file()
        if not method_file.endswith(".py") or not is_there:
            raise ValueError(f"its method's file {method_file!r} is missing")

    entry = Entry(
        folder=folder,
        suite=_typed(tree, "suite", str),
        version=_typed(tree, "version", int),
        row=_typed(tree, "row", str),
        method=_typed(tree, "method", str),
        fields=_typed(tree, "fields", dict),
        tries=tries,
        choice=choice,
        made_with=_typed(tree, "made", dict),
        digests=_typed(tree, "digests", dict),
        method_file=Path(method_file).name,
        diverged={str(path): str(reason) for path, reason in tree.get("diverged", {}).items()},
        topology=_typed({"topology": {}, **tree}, "topology", dict),
    )
    for text in (entry.suite, entry.row, entry.method, *entry.made_with.values()):
        check_printable(str(text))
    return entry


def _typed(tree: Mapping[str, Any], key: str, expected: type) -> Any:
    value = tree[key]
    if type(value) is not expected:
        raise ValueError(f"{key} is a {type(value).__name__}, not a {expected.__name__}")
    return value


def check_file_names(folder: Path) -> None:
    """Raise CorruptFile for links, too many or too large files, and files of unknown names."""
    paths = list(folder.rglob("*"))
    if len(paths) > MAX_FILES:
        raise CorruptFile(f"{folder} contains {len(paths)} files; an entry has {MAX_FILES} at most")
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CorruptFile(f"{folder}: {name} is a link; an entry contains plain files only")
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise CorruptFile(f"{folder}: {name} is larger than {MAX_FILE_BYTES >> 20} MB")
        is_method_file = "/" not in name and path.suffix == ".py"
        is_known = path.name in RUN_FILES or name == ENTRY_FILE or is_method_file
        if path.is_file() and not is_known:
            raise CorruptFile(f"{folder}: {name} is not a file of an entry")


def find_entries(folder: Path) -> list[Path]:
    """The folders of all entries in a folder and below it, in order.

    Those in packs come last; a pack that is unpacked beside it is not read again.
    """
    place = readable(folder)
    folders = [place]
    if place.is_dir():
        folders += [readable(pack) for pack in packs_below(place) if pack.parent == place]
    entries: list[Path] = []
    for unpacked in folders:
        entries += [path.parent for path in sorted(unpacked.rglob(ENTRY_FILE))]
    return entries


# ---- checks that execute nothing -----------------------------------------------------------------

SUM_TOLERANCE = 1e-9
"""Sums of the same numbers in different orders differ by less than this."""


def suite_of(entry: Entry, method_file: Path | None = None) -> Suite:
    """The suite of an entry, with a row for a new method.

    ``method_file``: the copy of the method's file to execute; by default, FedAvg stands in for the
    method. Raises ConfigError for another version of the suite, or another method.
    """
    suite = load_suite(entry.suite)
    if entry.version != suite.version:
        raise ConfigError(
            f"{ENTRY_FILE} belongs to version {entry.version} of {suite.name}; this fedstill has "
            f"version {suite.version}"
        )
    if entry.row in suite.recipe.rows:
        method = suite.method_of(entry.row)["name"]
        if entry.method_file or entry.method != method:
            raise ConfigError(f"{ENTRY_FILE}: in {suite.name}, {entry.row} is the method {method}")
        return suite
    method = entry.method
    if entry.method_file:
        method = str(method_file or "fedavg")
    elif method not in registered_names("method"):
        raise ConfigError(
            f"{ENTRY_FILE}: {method!r} is not a method of the package, and the entry has no file "
            "for it"
        )
    return suite.with_row(entry.row, method, entry.tries, entry.topology)


def passed_checks(entry: Entry) -> Iterator[str]:
    """The description of each check that an entry passes.

    Raises ConfigError or CorruptFile for the first problem.
    """
    suite = suite_of(entry)
    yield "suite and version"
    _check_files(entry, suite)
    yield "all seeds and columns, and no other files"
    _check_choice(entry, suite)
    yield "fields follow from the scores of the tries"

    fields = dict(entry.fields)
    if entry.method_file:
        # FedAvg stands in for the method and has none of its fields.
        fields = {key: fields[key] for key in fields if not key.startswith("method.")}
    cells = [(entry.row, column) for column in suite.columns_of(entry.row)]
    for run in suite.recipe.variants(cells, TEST_SEEDS, fields, Path()):
        try:
            _check_run(entry, run)
        except FedstillError as error:
            raise CorruptFile(f"{path_of(run)}: {error}") from error
        except MALFORMED_FILE_ERRORS as error:
            raise CorruptFile(f"cannot read {path_of(run)}: {on_one_line(error)}") from error
    yield "settings, journals and summaries of all runs"


def check_entry(entry: Entry) -> None:
    """Raise ConfigError or CorruptFile for the first problem of an entry."""
    for _ in passed_checks(entry):
        pass


def _check_files(entry: Entry, suite: Suite) -> None:
    """Check that all files of all runs are there, and no others, each with the entry's digest."""
    expected = _expected_files(entry, suite)
    paths = [path for path in entry.folder.rglob("*") if path.is_file()]
    names = [path.relative_to(entry.folder).as_posix() for path in paths if path.name != ENTRY_FILE]
    digests = {name: digest(read_file(entry.folder / name)) for name in names}
    missing = sorted(expected - digests.keys())
    if missing:
        raise CorruptFile(f"{missing[0]} is missing ({len(missing)} files in all)")
    extra = sorted(digests.keys() - expected)
    if extra:
        raise CorruptFile(f"{extra[0]} belongs to no run of the suite")
    for name in sorted(digests.keys() | entry.digests.keys()):
        if digests.get(name) != entry.digests.get(name):
            raise CorruptFile(f"{name} has changed since it was entered: its SHA-256 differs")


def _expected_files(entry: Entry, suite: Suite) -> set[str]:
    expected = set()
    for column in suite.columns_of(entry.row):
        for seed in TEST_SEEDS:
            expected |= {f"{run_path(column, seed)}/{name}" for name in RUN_FILES}
    # A run that diverged has no summary.
    expected -= {f"{path}/summary.json" for path in entry.diverged}
    if entry.method_file:
        expected.add(entry.method_file)
    return expected


def _check_choice(entry: Entry, suite: Suite) -> None:
    """Check that the fields are those of the best try, and that a bound has none.

    The scores of a new method cannot be checked here.
    """
    if entry.row not in suite.tries:
        if entry.fields:
            raise CorruptFile(f"{entry.row} is a bound and must not set {next(iter(entry.fields))}")
        return
    if entry.choice is None or entry.tries not in suite.possible_tries(entry.row):
        raise CorruptFile(f"its tries are not those of {suite.name}")
    best = entry.choice.best_try
    best_fields = entry.tries[best]
    if entry.fields != best_fields:
        raise CorruptFile(
            f"its fields are {dict(entry.fields)}, but try {best + 1} is the best: {best_fields}"
        )
    if suite.choices.get(entry.row, entry.choice) != entry.choice:
        raise CorruptFile("its scores are not those that ship with the suite")


def _check_run(entry: Entry, run: Variant) -> None:
    """Check a run's settings, its journal, its split, and that its summary follows from these."""
    path = path_of(run)
    folder = entry.folder / path
    _check_settings(entry, run, read_file(folder / CONFIG).decode())

    events = read_events(folder / JOURNAL)
    _check_journal(events, run.settings.rounds, diverged=path in entry.diverged)
    score = score_of(folder, run.settings.rounds)
    if not (0 <= score.accuracy <= 1 and 0 <= score.learned <= 1):
        raise CorruptFile(f"journal.jsonl: accuracy {score.accuracy}, learned {score.learned}")
    if events[0]["split"]["sha256"] != digest(read_file(folder / SPLIT)):
        raise CorruptFile(f"{SPLIT} is not the split that journal.jsonl names")

    if path not in entry.diverged:
        summary = json.loads(read_file(folder / SUMMARY).decode())
        _check_summary(summary, summary_from_journal(events))


def _check_settings(entry: Entry, run: Variant, config: str) -> None:
    """Check that a run's config has the suite's settings."""
    if entry.method_file:
        check_settings_of_new_method(config, run, entry.method_file, entry.fields)
        return
    expected = flat(tomllib.loads(with_relative_paths(run.settings.toml)))
    _compare_settings(flat(tomllib.loads(config)), expected)


def check_settings_of_new_method(
    config: str, run: Variant, method_file: str, fields: Mapping[str, Any]
) -> None:
    """Check the config of a method with a file, without executing the file. Raises CorruptFile.

    ``run``: the same run with FedAvg in the method's place. Only the file defines which fields and
    stages the method has. So of its fields only the chosen ones in ``fields`` are checked, and the
    plan of every stage must be that of FedAvg's only stage.
    """
    found = flat(tomllib.loads(config))
    method_fields = {key: fields[key] for key in fields if key.startswith("method.")}
    method_fields["method.name"] = method_file
    found["method.name"] = Path(split_name(found["method.name"]).path).name
    found = {
        key: value
        for key, value in found.items()
        if key in method_fields or not key.startswith("method.")
    }

    expected = {**flat(tomllib.loads(with_relative_paths(run.settings.toml))), **method_fields}
    plan = {key: value for key, value in expected.items() if key.startswith("plan.train.")}
    for key in found:
        if key.startswith("plan."):
            expected[key] = plan.get(re.sub(r"^plan\.[^.]+", "plan.train", key))
    _compare_settings(found, expected)


def _compare_settings(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for key, value in found.items():
        # A replay shows whether an engine gave the same results.
        if key not in ("engine", "engine_reason") and expected.get(key) != value:
            raise CorruptFile(
                f"config.toml has {key} = {value!r}, and the suite has {expected.get(key)!r}"
            )


def _check_journal(events: Sequence[Event], planned: int, *, diverged: bool) -> None:
    """Check that all rounds are there; a run that diverged must end within a round."""
    rounds = [event["round"] for event in events if event["event"] == "round"]
    client_rounds = [event["round"] for event in events if event["event"] == "client"]
    is_complete = len(rounds) == planned
    if diverged:
        is_complete = len(rounds) < planned and client_rounds[-1:] == [len(rounds) + 1]
    if not is_complete or rounds != list(range(1, len(rounds) + 1)):
        raise CorruptFile(
            f"journal.jsonl has {len(rounds)} of {planned} rounds; each must be there once, in "
            "order"
        )


def _check_summary(summary: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Check that a summary is the one that follows from the journal."""
    for key, value in derived.items():
        found = summary.get(key)
        is_same = found == value
        if isinstance(found, float) and isinstance(value, float):
            is_same = math.isclose(found, value, rel_tol=SUM_TOLERANCE, abs_tol=SUM_TOLERANCE)
        if not is_same:
            raise CorruptFile(f"summary.json has {key} = {found!r}, and its journal {value!r}")
