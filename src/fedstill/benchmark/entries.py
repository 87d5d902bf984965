"""Entries of the ranking: a method's runs in one suite as a folder of small files, written and
read.

```
NAME/
  entry.toml            suite and version, method, fields chosen and the scores they were chosen by, software, digests
  METHOD.py             where the method is not in the package
  COLUMN/seedN/         config.toml, journal.jsonl, split.safetensors and summary.json of each run
```

An entry from elsewhere is data: it is read with limits, and nothing in it is executed here.
"""  # noqa: E501

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.benchmark.scoring import Ended
from fedstill.benchmark.suites import Choice, Suite, Try, read_choice, slug
from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.core.files import digest, make_folder, parse_toml, read_toml, write_whole
from fedstill.running.compare import Variant
from fedstill.running.directory import readable
from fedstill.running.journal import CONFIG_SEAL, without_times
from fedstill.running.same_run import processor, software
from fedstill.running.split_file import SPLIT

ENTRY = "entry.toml"
RUN_FILES = ("config.toml", "journal.jsonl", "summary.json", SPLIT)

LARGEST = 32 << 20
"""Bytes of the largest file that an entry may hold."""

MOST_FILES = 1000
"""How many files an entry may hold."""

STRANGE = re.compile(r"[<>|`\\\x00-\x1f\x7f]")
"""Signs that mean something in a table or a page, in names that are shown there."""

CPU = "seconds_cpu"
"""The one time that an entry keeps: what the processor spent."""


@dataclass(frozen=True)
class Entered:
    """A method's runs in one suite. ``file``: its own file's name; empty for a method of the
    package.

    ``fields``: what was chosen over the suite's settings, by dotted key. ``tries``, ``choice``: of
    what, and by which scores; empty and None for a reference. ``made``: software, processor,
    threads. ``diverged``: by ``COLUMN/seedN``, why. ``digests``: SHA-256 by path of all files but
    entry.toml. ``topology``: of a method with a file, what its topology has beside the suite's.
    """

    folder: Path
    suite: str
    version: int
    row: str
    method: str
    fields: Mapping[str, Any]
    tries: Sequence[Try]
    choice: Choice | None
    made: Mapping[str, Any]
    digests: Mapping[str, str]
    file: str = ""
    diverged: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, Any] = field(default_factory=dict)

    def run(self, column: str, seed: int) -> Path:
        """The folder of one run."""
        return self.folder / run_place(column, seed)

    @property
    def sha(self) -> str:
        """What tells it from another entry of the same row: the beginning of entry.toml's
        SHA-256.
        """
        return digest((self.folder / ENTRY).read_bytes())[:16]

    @property
    def told(self) -> dict[str, Any]:
        """What entry.toml says."""
        choice = (
            {}
            if self.choice is None
            else {"tries": [dict(t) for t in self.tries], **self.choice.table}
        )
        return {
            "suite": self.suite,
            "version": self.version,
            "row": self.row,
            "method": self.method,
            **({"file": self.file} if self.file else {}),
            "fields": dict(self.fields),
            **({"choice": choice} if choice else {}),
            "made": dict(self.made),
            **({"diverged": dict(self.diverged)} if self.diverged else {}),
            **({"topology": dict(self.topology)} if self.topology else {}),
            "digests": dict(sorted(self.digests.items())),
        }


def run_place(column: str, seed: int) -> str:
    """Where in an entry a run of a column and a seed is."""
    return f"{slug(column)}/seed{seed}"


def rounds_of(folder: Path) -> int:
    """How many rounds a run of an entry was to have, as its config says; raises CorruptFile."""
    try:
        return _rounds_in((folder / "config.toml").read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{folder / 'config.toml'} cannot be read: {error}") from error


@lru_cache(64)
def _rounds_in(config: bytes) -> int:
    return int(parse_toml(config)["rounds"])


def write_entry(
    suite: Suite, row: str, runs: Sequence[Ended], folder: Path, own: Path | None = None
) -> Entered:
    """Write the entry of a row from its finished runs; ``own``: the method's file, where it is not
    in the package.

    An entry of the same row is replaced. Raises RunExists for a folder that holds anything else.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ENTRY).is_file():
        raise RunExists(f"{folder} holds something that is no entry; choose another --out")
    files: dict[str, bytes] = {} if own is None else {own.name: own.read_bytes()}
    diverged: dict[str, str] = {}
    for one in runs:
        place = place_of(one.run)
        files |= {f"{place}/{name}": data for name, data in _kept(one.run.folder)}
        diverged |= {place: one.diverged} if one.diverged else {}
    made = {**software(), "processor": processor(), "threads": 1}
    entry = Entered(
        folder=folder,
        suite=suite.name,
        version=suite.version,
        row=row,
        method=suite.method(row)["name"] if own is None else own.name,
        fields=suite.settings_chosen(row),
        tries=suite.tries_of(row) if row in suite.tries else (),
        choice=suite.chosen.get(row),
        made={**made, CPU: round(sum(o.score.seconds_cpu for o in runs), 3)},
        digests={path: digest(data) for path, data in files.items()},
        file="" if own is None else own.name,
        diverged=diverged,
        topology={} if own is None else suite.own_topology(row),
    )
    for path, data in files.items():
        make_folder((folder / path).parent)
        write_whole(folder / path, data)
    write_whole(folder / ENTRY, tomli_w.dumps(entry.told).encode())
    return entry


def column_of(run: Variant) -> str:
    """The column of a run, whose label is ``ROW | COLUMN``."""
    return run.label.rpartition(" | ")[2]


def place_of(run: Variant) -> str:
    """Where in an entry a run is."""
    return run_place(column_of(run), run.seed)


def _kept(folder: Path) -> Iterator[tuple[str, bytes]]:
    """A run's files as an entry holds them: without times other than the processor's."""
    config = (folder / "config.toml").read_bytes()
    yield "config.toml", (kept := portable(config.decode()).encode())
    yield SPLIT, (folder / SPLIT).read_bytes()
    journal = (
        (folder / "journal.jsonl")
        .read_bytes()
        .replace(digest(config).encode(), digest(kept).encode(), 1)
    )
    events = [bare(json.loads(line)) for line in journal.split(b"\n")[:-1]]
    yield (
        "journal.jsonl",
        b"".join(json.dumps(e, separators=(",", ":")).encode() + b"\n" for e in events),
    )
    if (summary := folder / "summary.json").is_file():
        yield "summary.json", json.dumps(bare(json.loads(summary.read_bytes())), indent=1).encode()


def portable(config: str) -> str:
    """A config's text with paths below the folder that this process was started in relative to it.

    A suite of one's own may name code and data beside it; an entry is checked where that folder has
    another place.
    """
    return config.replace(json.dumps(str(Path.cwd()))[:-1] + "/", '"')


def bare(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event or a summary without times other than the processor's."""
    return {
        **without_times(event),
        **{key: event[key] for key in (CPU, CONFIG_SEAL) if key in event},
    }


def read_entry(folder: Path) -> Entered:
    """An entry from its folder, or from a pack that holds it; raises CorruptFile naming what is
    wrong with it.
    """
    place = readable(folder)
    if not (place / ENTRY).is_file():
        raise CorruptFile(f"{folder} is no entry: there is no {ENTRY} in it")
    refuse_strange(place)
    try:
        tree = read_toml(place / ENTRY)
        tries = [dict(values) for values in tree.get("choice", {}).get("tries", [])]
        choice = read_choice(str(folder), tree["choice"], len(tries)) if "choice" in tree else None
        if (own := str(tree.get("file", ""))) and not (
            own.endswith(".py") and (place / Path(own).name).is_file()
        ):
            raise ValueError(f"its file {own!r} is not in it")
        words = {key: _of(tree, key, str) for key in ("suite", "row", "method")}
        if strange := [
            v for v in (*words.values(), *tree["made"].values()) if STRANGE.search(str(v))
        ]:
            raise ValueError(f"{strange[0]!r} contains a character that tables cannot show")
        tables = {key: _of(tree, key, dict) for key in ("fields", "made", "digests")}
        return Entered(
            place,
            version=_of(tree, "version", int),
            tries=tries,
            choice=choice,
            file=Path(own).name,
            diverged={str(k): str(v) for k, v in tree.get("diverged", {}).items()},
            topology=_of({"topology": {}, **tree}, "topology", dict),
            **words,
            **tables,
        )
    except (
        ConfigError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CorruptFile(f"{folder / ENTRY} cannot be read: {error}") from error


def refuse_strange(folder: Path) -> None:
    """Raises CorruptFile for links, too many or too large files, and files that no entry has."""
    paths = list(folder.rglob("*"))
    if len(paths) > MOST_FILES:
        raise CorruptFile(f"{folder} holds {len(paths)} files; an entry has {MOST_FILES} at most")
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CorruptFile(f"{folder}: {name} is a link; an entry holds plain files")
        if path.is_file() and path.stat().st_size > LARGEST:
            raise CorruptFile(f"{folder}: {name} is larger than {LARGEST >> 20} MB")
        known = (
            path.name in RUN_FILES or name == ENTRY or ("/" not in name and path.suffix == ".py")
        )
        if path.is_file() and not known:
            raise CorruptFile(f"{folder}: {name} is no file of an entry")


def entries_below(folder: Path) -> list[Path]:
    """The entries in a folder or in those below it, packs of them too, in order."""
    there = readable(folder)
    below = [p.parent for p in sorted(there.rglob(ENTRY))]
    packs = [readable(p) for p in sorted(there.glob("*.runs.tar.xz"))] if there.is_dir() else []
    return below + [p.parent for pack in packs for p in sorted(pack.rglob(ENTRY))]


def _of(tree: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(tree[key]) is not kind:
        raise ValueError(f"{key} is a {type(tree[key]).__name__}, not a {kind.__name__}")
    return tree[key]
