"""Checkpoints: everything that a run needs to continue after a stage, written atomically.

``checkpoints/objects/`` holds one file for each group of the state, named by its SHA-256, so that
unchanged groups are not written again. A checkpoint is a manifest that lists objects and memory
files; ``LATEST`` names the newest manifest. Objects and memory files are on disk before the
manifest and ``LATEST`` get their names. Old files are deleted last.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.config.settings import Settings
from fedstill.core.codec import MAX_LOCAL_ENTRIES, decode, encoded_parts
from fedstill.core.errors import BadPayload, ConfigError, CorruptFile
from fedstill.core.extensions import Event, Fields, StageKeeper, StageResult
from fedstill.core.files import (
    Content,
    digest,
    make_real_folder,
    read_file,
    remove_files,
    write_together,
)
from fedstill.core.records import NOTHING, SERVER, ModelSpec, Payload, Stage, State
from fedstill.engines.serial import Memory, Version
from fedstill.running.journal import JOURNAL, JournalMark, read_journal

log = logging.getLogger("fedstill.checkpoint")

TENSORS = ".safetensors"
"""The suffix of files with tensors."""

CHECKPOINTS_KEPT = 3
"""The number of checkpoints that are kept."""


@dataclass(frozen=True, order=True)
class Position:
    """The position of a checkpoint in a run: before a stage of a round."""

    round: int
    stage: int


@dataclass(frozen=True)
class Restored:
    """The content of a checkpoint: the state, the files of client states (name and SHA-256 by
    client), and the position in the journal.
    """

    state: State
    state_files: dict[int, tuple[str, str]]
    journal: JournalMark


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, all with the same configuration.

    ``config``: the SHA-256 of the configuration. ``memory_folder``: the folder of client states; if
    given, these files are verified too. ``every``: in addition to the last checkpoints, one
    checkpoint is kept after every so many rounds; 0: none. Callers of ``save`` can name further
    rounds to keep, such as the best one so far.
    """

    folder: Path
    config: str
    memory_folder: Path | None = None
    every: int = 0
    # objects that were verified or written by this process
    _sound: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def objects(self) -> Path:
        """The folder of the groups of states."""
        return self.folder / "objects"

    def save(
        self,
        state: State,
        state_files: dict[int, tuple[str, str]],
        journal: JournalMark,
        beside: Callable[[], object] | None = None,
        *,
        rounds: Collection[int] = (),
    ) -> list[str]:
        """Write a checkpoint; return the names of all client states that checkpoints still need.

        ``beside``: waits for other files that must be durable before the checkpoint; it runs at the
        same time. ``rounds``: further rounds of which the last checkpoint is kept.
        """
        make_real_folder(self.folder)
        make_real_folder(self.objects)
        groups: dict[str, str] = {}
        write_together(self._files(state, state_files, journal, groups), beside=beside)
        self._sound.update(groups.values())
        return self.prune(state, rounds)

    def latest(self) -> Restored | None:
        """The newest intact checkpoint, or None if there are no checkpoints.

        Damaged checkpoints are skipped with a warning. Raises CorruptFile if all are damaged.
        """
        problems = []
        for name in self._names():
            try:
                return self._load(name)
            except CorruptFile as error:
                log.warning("skipped a checkpoint: %s", error)
                problems.append(str(error))
        if problems:
            raise CorruptFile(f"all checkpoints in {self.folder} are damaged: {problems[0]}")
        return None

    def before(self, round: int) -> Restored | None:
        """The last intact checkpoint at or before the start of a round; None if there is none."""
        for name in self._names():
            if name <= _name(round, 0):
                with suppress(CorruptFile):
                    return self._load(name)
        return None

    def positions(self) -> list[Position]:
        """The positions of the kept checkpoints, oldest first."""
        return [_position(name) for name in reversed(self._names())]

    def at(self, position: Position) -> Restored:
        """The checkpoint at a position; raises CorruptFile if it is missing or damaged."""
        return self._load(_name(position.round, position.stage))

    def _names(self) -> list[str]:
        """The names of checkpoints from newest to oldest, starting with the one in ``LATEST``;
        later ones are incomplete.
        """
        names = sorted((p.name for p in self.folder.glob("*.json")), reverse=True)
        try:
            newest = read_file(self.folder / "LATEST").decode().strip()
        except (OSError, UnicodeDecodeError):
            return names
        return [n for n in names if n <= newest] or names

    def _files(
        self,
        state: State,
        state_files: dict[int, tuple[str, str]],
        journal: JournalMark,
        groups: dict[str, str],
    ) -> Iterator[tuple[Path, Content]]:
        """The files of a checkpoint: new objects, the manifest that lists all of them, and
        ``LATEST``.

        The names of the objects are stored in ``groups``.
        """
        extra = {f"extra {k}": Payload({k: state.extra[k]}) for k in state.extra}
        for group, payload in {"params": Payload(params=state.params), **extra}.items():
            data = encoded_parts(payload)
            name = digest(*data)
            path = self._object_path(name)
            is_repeated = name in groups.values()
            groups[group] = name
            if not is_repeated and (name not in self._sound or not path.exists()):
                yield path, data
        model = None
        if state.model:
            model = state.model.to_dict()
        manifest = {
            "round": state.round,
            "stage": state.stage,
            "model": model,
            "groups": groups,
            "memory": {str(c): list(state_files[c]) for c in sorted(state_files)},
            "journal": journal,
            "config": self.config,
        }
        body = json.dumps(manifest).encode()
        name = _name(state.round, state.stage)
        yield (
            self.folder / name,
            json.dumps({"sha256": digest(body), "manifest": manifest}).encode(),
        )
        yield self.folder / "LATEST", name.encode()

    def _object_path(self, name: str) -> Path:
        return self.objects / f"{name}.safetensors"

    def _load(self, name: str) -> Restored:
        manifest = self._manifest(name)
        path = self.folder / name
        try:
            if manifest["config"] != self.config:
                raise CorruptFile(f"{path} belongs to another configuration")
            if name != _name(manifest["round"], manifest["stage"]):
                raise CorruptFile(
                    f"{path} is of round {manifest['round']}, stage {manifest['stage']}: it was "
                    "moved"
                )
            return self._restored(manifest)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFile(
                f"{path} has a format that this version cannot read: {type(error).__name__} {error}"
            ) from error

    def _restored(self, manifest: dict[str, Any]) -> Restored:
        groups: dict[str, Any] = {}
        for key, sha in manifest["groups"].items():
            (groups[key],) = self._group(sha).values()
        model = None
        if manifest["model"]:
            model = ModelSpec.from_dict(manifest["model"])
        extra = Payload({k.removeprefix("extra "): g for k, g in groups.items() if k != "params"})
        state = State(
            params=groups["params"],
            extra=extra,
            round=manifest["round"],
            stage=manifest["stage"],
            model=model,
        )
        state_files = {int(c): (file, sha) for c, (file, sha) in manifest["memory"].items()}
        if self.memory_folder is not None:
            for file, sha in state_files.values():
                read_verified(self.memory_folder / file, sha)
        return Restored(state, state_files, JournalMark(*manifest["journal"]))

    def _manifest(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            stored = json.loads(read_file(path))
            manifest: dict[str, Any] = stored["manifest"]
            if digest(json.dumps(manifest).encode()) != stored["sha256"]:
                raise ValueError("its SHA-256 does not match")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptFile(f"{path} is damaged: {error}") from error
        return manifest

    def _group(self, sha: str) -> Payload:
        group = read_payload(self._object_path(sha), sha)
        self._sound.add(sha)
        return group

    def prune(self, state: State, rounds: Collection[int] = ()) -> list[str]:
        """Delete files that no kept checkpoint needs; return the client states that are needed.

        The last three checkpoints up to a state are kept, and those of ``every`` and ``rounds``.
        """
        newest = _name(state.round, state.stage)
        names = sorted(p.name for p in self.folder.glob("*.json") if p.name <= newest)
        needed: set[str] = set()
        needed_states: set[str] = set()
        retained = {*names[-CHECKPOINTS_KEPT:], *self._retained(names, rounds)}
        for name in sorted(retained):
            with suppress(CorruptFile):
                manifest = self._manifest(name)
                needed.update(manifest["groups"].values())
                needed_states.update(file for file, _ in manifest["memory"].values())
        old = set(names) - retained
        remove_files(self.folder, old.__contains__)

        def is_unneeded(name: str) -> bool:
            return name.endswith(TENSORS) and name.removesuffix(TENSORS) not in needed

        for name in remove_files(self.objects, is_unneeded):
            self._sound.discard(name.removesuffix(TENSORS))
        return sorted(needed_states)

    def _retained(self, names: Sequence[str], rounds: Collection[int]) -> list[str]:
        """The last checkpoints of the rounds that ``every`` and ``rounds`` select."""
        by_round = {_position(name).round: name for name in names}
        regular = [round for round in by_round if self.every and round % self.every == 0]
        return [name for round, name in by_round.items() if round in {*regular, *rounds}]


def _name(round: int, stage: int) -> str:
    return f"{round:07d}-{stage:07d}.json"


def _position(name: str) -> Position:
    """The position that a checkpoint's name contains."""
    round, _, stage = name.removesuffix(".json").partition("-")
    return Position(int(round), int(stage))


def read_verified(path: Path, sha: str) -> bytes:
    """Read a file; raises CorruptFile if it does not have this SHA-256."""
    try:
        data = read_file(path)
    except OSError as error:
        raise CorruptFile(f"{path} is damaged: {error.strerror}") from error
    if digest(data) != sha:
        raise CorruptFile(f"{path} is damaged: its SHA-256 does not match")
    return data


def read_payload(path: Path, sha: str) -> Payload:
    """Read a payload; raises CorruptFile if the file does not have this SHA-256."""
    try:
        return decode(read_verified(path, sha), entries=MAX_LOCAL_ENTRIES)
    except BadPayload as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error


# Client states, in one file for each client and stage.


class StoredMemory(Memory):
    """The client states in a folder; only files in ``index`` are valid."""

    def __init__(self, folder: Path, index: Mapping[int, Version] | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.index.update(index or {})

    def in_process(self) -> Memory:
        return Memory({client: self.load(client) for client in self.index})

    def load(self, client: int) -> Payload:
        """The state of a client, initially empty. Raises CorruptFile if its file has changed."""
        if client not in self.index:
            return NOTHING
        name, sha = self.index[client]
        path = self.folder / name
        try:
            data = read_file(path)
            if digest(data) != sha:
                raise BadPayload("its SHA-256 does not match")
            return decode(data, entries=MAX_LOCAL_ENTRIES)
        except (OSError, BadPayload) as error:
            raise CorruptFile(
                f"{path}, the memory of client {client}, cannot be used: {error}"
            ) from error

    def forget(self, client: int) -> None:
        self.index.pop(client, None)

    def write(self, stage: Stage, states: Mapping[int, Payload]) -> None:
        if not states:
            return
        make_real_folder(self.folder)
        versions: dict[int, Version] = {}

        def files() -> Iterator[tuple[Path, Content]]:
            # One client at a time, because the encoded states of all may not fit into memory.
            for client, state in states.items():
                data = encoded_parts(state)
                name = _file_name(client, stage.round, stage.index)
                versions[client] = (name, digest(*data))
                yield self.folder / name, data

        write_together(files())
        self.index.update(versions)

    def prune(self, names: Collection[str]) -> None:
        super().prune(names)
        remove_files(self.folder, lambda name: name.endswith(TENSORS) and name not in names)


# Kept updates (``keep_updates``): the content of every accepted reply.


UPDATES = "updates"
"""The folder of kept updates in a run directory."""

UPDATE_SHA256 = "update_sha256"
"""The field of a client's event with the SHA-256 of the kept update."""

_FILE_NAME = re.compile(r"client(?P<client>\d+)-round(?P<round>\d+)-stage(?P<stage>\d+)")


def update_keepers(settings: Settings, folder: Path | None) -> tuple[StageKeeper, ...]:
    """The keepers that write updates to the run directory; empty unless ``keep_updates`` is set."""
    if folder is None or not settings.keep_updates:
        return ()
    return (UpdateKeeper(folder / UPDATES),)


@dataclass(frozen=True)
class UpdateKeeper:
    """Stores the content of replies (a ``core.extensions.StageKeeper``)."""

    folder: Path

    def keep(self, result: StageResult) -> dict[int, Fields]:
        """Write the accepted replies of a stage; return their SHA-256 for the events of clients."""
        replies = [reply for reply in result.accepted if reply.client != SERVER]
        fields: dict[int, Fields] = {}

        def files() -> Iterator[tuple[Path, Content]]:
            for reply in replies:
                data = encoded_parts(reply.content)
                fields[reply.client] = {UPDATE_SHA256: digest(*data)}
                yield _path(self.folder, result.stage.round, result.stage.index, reply.client), data

        if replies:
            make_real_folder(self.folder)
            write_together(files())
        return fields

    def cut(self, round: int, stage: int) -> None:
        """Delete the updates of this stage and all later stages."""

        def is_late(name: str) -> bool:
            parts = _FILE_NAME.fullmatch(name.removesuffix(TENSORS))
            if parts is None or not name.endswith(TENSORS):
                return False
            return (int(parts["round"]), int(parts["stage"])) >= (round, stage)

        remove_files(self.folder, is_late)


@dataclass(frozen=True)
class KeptUpdate:
    """A kept reply.

    ``stage``: the index of its stage in the round; ``stage_name``: the name of that stage.
    ``examples``: the number of training examples that the client reported.
    """

    round: int
    stage: int
    stage_name: str
    client: int
    examples: int
    path: Path
    sha256: str

    def content(self) -> Payload:
        """The content of the reply; raises CorruptFile if the file has changed."""
        return read_payload(self.path, self.sha256)


def kept_updates(folder: Path) -> list[KeptUpdate]:
    """The kept updates of a run, in the order of the journal: by round, stage and client.

    Raises ConfigError if the run keeps no updates.
    """
    updates = folder / UPDATES
    if not updates.is_dir():
        raise ConfigError(f"{folder} has no kept updates; run it again with keep_updates = true")
    events = read_journal(folder / JOURNAL)
    return [_kept_update(updates, event) for event in events if UPDATE_SHA256 in event]


def _kept_update(updates: Path, event: Event) -> KeptUpdate:
    """The kept update that a client's event describes."""
    return KeptUpdate(
        round=event["round"],
        stage=event["stage"],
        stage_name=event["name"],
        client=event["client"],
        examples=event["examples"],
        path=update_file(updates, event),
        sha256=event[UPDATE_SHA256],
    )


def update_file(folder: Path, event: Event) -> Path:
    """The file of the kept update that a client's event describes."""
    return _path(folder, event["round"], event["stage"], event["client"])


def _path(folder: Path, round: int, stage: int, client: int) -> Path:
    return folder / _file_name(client, round, stage)


def _file_name(client: int, round: int, stage: int) -> str:
    return f"client{client}-round{round}-stage{stage}.safetensors"
