"""Replies kept for other runs: what clients train alone is trained once and serves every method of
a comparison.

A method names the stages whose replies may be kept (``Method.reusable``). A reply is kept under the
hash of all that it depends on: the client's data, its model, what it was sent and remembers, the
plan, the work and its fields, the seeds' place (run seed, round, stage, client), the test set if it
was measured, this library's source, torch and the kind of processor. So the bits are those of
training again, and a killed run has kept the clients that had finished.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fedstill.core import registry
from fedstill.core.codec import OWN_ENTRIES, decode, encode
from fedstill.core.errors import BadPayload, DiskFull
from fedstill.core.files import digest, write_whole
from fedstill.core.records import Payload, Reply, Stage
from fedstill.core.reports import OWN
from fedstill.core.user_modules import files_of
from fedstill.data.dataset import examples_digest
from fedstill.engines.precision import card_named
from fedstill.engines.serial import ReplyInputs

log = logging.getLogger("fedstill.reuse")

LOCKED_BY = 3
"""Keys that begin with the same so many hexadecimal digits have one lock: few files, and seldom two
that wait.
"""


@dataclass(frozen=True)
class KeptReplies:
    """A folder of replies, the names of the stages whose replies may be kept there, and how many
    bytes they may take.

    Where they take more, those that were not used for longest are deleted.
    """

    folder: Path
    stages: frozenset[str]
    most: int

    def key(self, inputs: ReplyInputs) -> str:
        """The key of a client's reply, as hexadecimal."""
        work, stage, view, payload = inputs.work, inputs.stage, inputs.view, inputs.payload
        fields_of_work: dict[str, str] = {}
        if is_dataclass(work):
            fields_of_work = {f.name: repr(getattr(work, f.name)) for f in fields(work)}
        device = view.data.values.device
        known = {
            "stage": [stage.round, stage.index, stage.name, stage.view, view.client, inputs.seed],
            "work": [class_identity(type(work)), fields_of_work],
            "model": [repr(view.model), _source(registry.lookup("model", view.model.name).target)],
            "plan": asdict(inputs.plan) if inputs.plan else None,
            "machine": [
                torch.__version__,
                platform.machine(),
                torch.backends.cpu.get_cpu_capability(),
                _library(),
            ],
            "device": str(device)
            + (f" {card_named(device.type)}" if device.type == "cuda" else ""),
            "further": [str(value) for value in inputs.further],
        }
        key = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
        key.update(encode(payload))
        key.update(encode(inputs.client_state))
        for examples in (view.data, view.validation, view.public, view.test, inputs.test):
            key.update(b"none" if examples is None else examples_digest(examples).encode())
        return key.hexdigest()

    def reply(self, key: str, stage: Stage, make: Callable[[], Reply]) -> Reply:
        """The reply kept under a key, or the one that ``make`` gives, kept from now on.

        Of several processes that want it one makes it and the others wait; in a folder where no
        lock can be written each makes it, and one warning says so. A damaged file counts as missing
        and is logged; a reply that cannot be written is not kept. Times of a reply that was not
        made now are 0, except ``seconds_reused``.
        """
        path, locks = self.folder / f"{key}.reply", self.folder / "locks"
        with contextlib.ExitStack() as locked:
            try:
                locks.mkdir(parents=True, exist_ok=True)
                locked.enter_context(FileLock(locks / key[:LOCKED_BY]))
            except OSError as error:
                _tell_of(self.folder, error.strerror or str(error))
            kept = _read(path)
            if kept is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return replace(kept, round=stage.round, stage=stage.index)
            made = make()
            with contextlib.suppress(DiskFull, BadPayload):
                write_whole(path, _sealed(made))
                self._make_room()
        return made

    def _make_room(self) -> None:
        """Delete what was not used for longest until the rest is small enough."""
        files = []
        for path in self.folder.glob("*.reply"):
            with contextlib.suppress(OSError):  # another process may have deleted it
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


@functools.cache
def _tell_of(folder: Path, why: str) -> None:
    """Warn, once in a process, of a folder in which nothing can be written."""
    log.warning("replies are not kept in %s for other runs: %s", folder, why)


def class_identity(thing: Any) -> list[str]:
    """A class by name, and by the SHA-256 of its file where that is not the library's."""
    return [f"{thing.__module__}.{thing.__qualname__}", _source(thing)]


def _is_own(thing: Any) -> bool:
    return str(thing.__module__).startswith("fedstill.")


def _source(thing: Any) -> str:
    """The SHA-256 of a user's file that defines a thing, with what it imports from its folder; the
    library's own files are hashed together.
    """
    if _is_own(thing):
        return ""
    try:
        return digest(
            b"".join(path.read_bytes() for path in files_of(Path(inspect.getfile(thing))))
        )
    except (TypeError, OSError):
        return ""


@functools.cache
def _library() -> str:
    """The SHA-256 of the library's source."""
    root = Path(__file__).parents[1]
    files = sorted(p for p in root.rglob("*.py"))
    return digest(
        "".join(f"{p.relative_to(root)} {digest(p.read_bytes())}\n" for p in files).encode()
    )


def _sealed(reply: Reply) -> bytes:
    """A reply as bytes that begin with their SHA-256."""
    rest = json.dumps(
        {"client": reply.client, "examples": reply.examples, "metrics": dict(reply.metrics)}
    )
    data = encode(Payload({**{f"up {k}": v for k, v in reply.content.items()}, "rest": rest}))
    return digest(data).encode() + data


def _read(path: Path) -> Reply | None:
    try:
        sealed = path.read_bytes()
    except OSError:
        return None
    seal, data = sealed[:64], sealed[64:]
    try:
        if digest(data).encode() != seal:
            raise BadPayload("its SHA-256 is not the one noted")
        payload = decode(data, entries=OWN_ENTRIES)
        rest = json.loads(str(payload["rest"]))
        content = Payload({k.removeprefix("up "): v for k, v in payload.items() if k != "rest"})
        return Reply(rest["client"], content, rest["examples"], _not_now(rest["metrics"]))
    except (BadPayload, ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s, a reply kept from another run, is damaged and is computed again: %s", path, error
        )
        return None


def _not_now(metrics: Mapping[str, Any]) -> dict[str, Any]:
    own = {OWN: _without_time(metrics[OWN])} if OWN in metrics else {}
    return {**_without_time(metrics), **own, "seconds_reused": metrics.get("seconds", 0.0)}


def _without_time(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: 0.0 if k.startswith("seconds") else v for k, v in fields.items()}
