"""A cache of replies that runs share. If clients train alone, the methods of a comparison reuse
their replies instead of training again.

A method declares the stages whose replies may be stored (``Method.reusable``). The state of the
client after the stage is stored with its reply. The key of a reply
is the hash of everything that the reply depends on: the client's data, model, payload and state,
the plan, the work and its fields, the keys of its random numbers (run seed, round, stage, client),
the test set if a measure used it, this library's source, torch and the kind of processor.
Therefore, a stored reply is bit-identical to a new one. A run that was killed also finds the
replies of clients that had finished.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fedstill.core import registry
from fedstill.core.codec import MAX_LOCAL_ENTRIES, decode, encoded_parts
from fedstill.core.errors import BadPayload, DiskFull
from fedstill.core.files import digest, read_file, remove, write_whole
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Examples,
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    View,
)
from fedstill.core.reports import METHOD_REPORT
from fedstill.core.user_code import is_identified
from fedstill.core.user_modules import class_identity, is_library_module, source_digest
from fedstill.data.dataset import examples_digest
from fedstill.engines.devices import card_named
from fedstill.engines.serial import ClientJob, SerialEngine
from fedstill.models.building import from_pairs

log = logging.getLogger("fedstill.reuse")

LOCK_DIGITS = 3
"""Keys with the same leading hexadecimal digits share a lock. This limits the number of lock files,
while processes rarely wait for each other.
"""

SHA_LENGTH = 64
"""The length of a SHA-256 in hexadecimal."""


@dataclass(frozen=True)
class CachedReply:
    """A client's reply, and its state after the stage."""

    reply: Reply
    client_state: Payload = NOTHING


@dataclass(frozen=True)
class StoredReplies:
    """A folder of replies (an ``engines.serial.ReplyCache``)."""

    folder: Path
    stages: frozenset[str]
    """The names of the stages whose replies may be stored."""
    max_bytes: int
    """The size of the folder above which the least recently used replies are deleted; 0: nothing
    is stored, and all replies are deleted.
    """

    def reply(self, engine: SerialEngine, job: ClientJob, make: Callable[[], Reply]) -> Reply:
        """The stored reply to a job, or the reply that ``make`` computes, which is then stored.

        A reply is not stored if it depends on code that its file does not identify.
        """

        def compute() -> CachedReply:
            return CachedReply(make(), engine.memory.held(job.client))

        inputs = inputs_of(engine, job)
        code = [type(inputs.work), *constructors(inputs.view.model).values()]
        if not all(map(is_identified, code)):
            return make()
        cached = self.entry(key_of(inputs), compute)
        engine.memory.hold(job.client, cached.client_state)
        return replace(cached.reply, round=job.stage.round, stage=job.stage.index)

    def entry(self, key: str, compute: Callable[[], CachedReply]) -> CachedReply:
        """The stored reply and state of a key, or new ones, which are then stored.

        If several processes need the same reply, one computes it and the others wait. If locks
        cannot be written to the folder, each process computes the reply, and a warning is printed
        once. A damaged file is logged and treated as missing. If a reply cannot be written, it is
        not stored. The times of a stored reply are 0, except ``seconds_reused``.
        """
        if not self.max_bytes:
            self._make_room()
            return compute()
        path = self.folder / f"{key}.reply"
        with self._lock(key):
            stored = _load(path)
            if stored is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return stored
            cached = compute()
            with contextlib.suppress(DiskFull, BadPayload):
                write_whole(path, _serialised(cached))
                self._make_room()
        return cached

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, if the folder is writable."""
        locks = self.folder / "locks"
        with contextlib.ExitStack() as stack:
            try:
                locks.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(locks / key[:LOCK_DIGITS]))
            except OSError as error:
                _warn_unwritable(self.folder, error.strerror or str(error))
            yield

    def _make_room(self) -> None:
        """Delete the least recently used replies until the rest fits."""
        files: list[_StoredFile] = []
        for path in self.folder.glob("*.reply"):
            with contextlib.suppress(OSError):  # another process may have deleted it
                status = path.stat()
                files.append(_StoredFile(status.st_mtime_ns, status.st_size, path))
        total = sum(file.size for file in files)
        for file in sorted(files):
            if total <= self.max_bytes:
                return
            with contextlib.suppress(DiskFull):
                remove(file.path)
            total -= file.size


@dataclass(frozen=True, order=True)
class _StoredFile:
    """The file of a reply. Files are ordered by their last use."""

    used_ns: int
    size: int
    path: Path


@functools.cache
def _warn_unwritable(folder: Path, reason: str) -> None:
    """Warn once per process that a folder is not writable."""
    log.warning("replies are not stored in %s for other runs: %s", folder, reason)


# The dependencies of a reply.


@dataclass(frozen=True)
class ReplyInputs:
    """Everything that a client's reply depends on, except the library and the processor.

    ``measured``: the common test set and the public set with its labels, if a hook measures the
    client in this stage.
    """

    work: ClientWork
    stage: Stage
    view: View
    plan: Plan | None
    seed: int
    payload: Payload
    client_state: Payload
    measured: tuple[Examples | None, ...]
    further: tuple[object, ...]


def inputs_of(engine: SerialEngine, job: ClientJob) -> ReplyInputs:
    """Collect the dependencies of a client's reply."""
    stage = job.stage
    further: list[object] = [
        engine.sites.inputs,
        torch.get_num_threads(),
        engine.precision,
        engine.teacher_precision,
        tuple(hook.cache_key(stage) for hook in engine.hooks),
    ]
    if engine.world.stream.tasks > 1:
        head = engine.head(stage, job.client)
        further.append(engine.world.stream.within(stage.round))
        trained_outputs: object = "all"
        if head is not None:
            trained_outputs = head.tolist()
        further.append(trained_outputs)
    measured: tuple[Examples | None, ...] = ()
    if any(hook.measures(stage) for hook in engine.hooks):
        measured = (engine.sites.common_test, engine.sites.public)
    return ReplyInputs(
        work=job.work,
        stage=stage,
        view=engine.sites.view(job.client, stage),
        plan=engine.world.plans.get(stage.name),
        seed=job.seed,
        payload=job.payload,
        client_state=engine.memory.load(job.client),
        measured=measured,
        further=tuple(further),
    )


def key_of(inputs: ReplyInputs) -> str:
    """The SHA-256 of everything that a reply depends on, in hexadecimal."""
    view = inputs.view
    plan: dict[str, Any] | None = None
    if inputs.plan is not None:
        plan = asdict(inputs.plan)
    identity = {
        "stage": _stage_identity(inputs),
        "work": _work_identity(inputs.work),
        "model": _model_identity(view.model),
        "plan": plan,
        "machine": _machine_identity(),
        "device": _device_identity(view.data.values.device),
        "further": [str(value) for value in inputs.further],
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for payload in (inputs.payload, inputs.client_state):
        for part in encoded_parts(payload):
            key.update(part)
    for examples in (view.data, view.validation, view.public, view.test, *inputs.measured):
        data = "none"
        if examples is not None:
            data = examples_digest(examples)
        key.update(data.encode())
    return key.hexdigest()


def _stage_identity(inputs: ReplyInputs) -> list[Any]:
    """The stage, the client and the seed, which determine all random numbers."""
    stage = inputs.stage
    return [stage.round, stage.index, stage.name, stage.view, inputs.view.client, inputs.seed]


def _work_identity(work: ClientWork) -> list[Any]:
    """The work's class and its hyper-parameters."""
    values: Mapping[str, Any] = vars(work)
    if is_dataclass(work):
        values = {field.name: getattr(work, field.name) for field in fields(work)}
    return [class_identity(type(work)), {name: _identity(value) for name, value in values.items()}]


def _identity(value: object) -> str:
    """A text that identifies a value. The ``repr`` of tensors and payloads is incomplete."""
    if isinstance(value, torch.Tensor):
        return digest(*encoded_parts(Payload(value=value)))
    if isinstance(value, Mapping):
        return repr({str(key): _identity(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return repr([_identity(item) for item in value])
    return repr(value)


def _model_identity(model: ModelSpec) -> list[str]:
    """The network's spec, and the files of users' networks."""
    return [repr(model), *map(source_digest, constructors(model).values())]


def constructors(model: ModelSpec) -> dict[str, Any]:
    """The constructors of a network and of the networks that it is made of, by name."""
    target = registry.lookup("model", model.name).target
    by_name = {model.name: target}
    if not is_library_module(str(target.__module__)):
        return by_name
    fields = {key: from_pairs(value) for key, value in model.fields}
    pair = [fields[key] for key in ("own", "shared") if key in fields]
    for name in (*_wrapped_names(fields), *pair):
        by_name[name] = registry.lookup("model", name).target
    return by_name


def _wrapped_names(fields: Mapping[str, Any]) -> Iterator[str]:
    """The names under ``of`` in the fields of a network, and in tables in them."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _wrapped_names(value)
        elif key == "of":
            yield str(value)


def _machine_identity() -> list[str]:
    """Everything that affects rounding besides the config: torch, the processor and our code."""
    return [
        torch.__version__,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        _library_digest(),
    ]


def _device_identity(device: torch.device) -> str:
    if device.type == "cuda":
        # Without the number of the GPU, because GPUs of the same type compute the same bits.
        return f"{device.type} {card_named(str(device))}"
    return str(device)


@functools.cache
def _library_digest() -> str:
    """The SHA-256 of the library's source."""
    root = Path(__file__).parents[1]
    lines = [f"{path.relative_to(root)} {digest(read_file(path))}\n" for path in _sources(root)]
    return digest("".join(lines).encode())


def _sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


# A reply as bytes.


def _serialised(cached: CachedReply) -> list[bytes | memoryview]:
    """A reply and a state as bytes in several parts, which begin with their SHA-256."""
    reply = cached.reply
    fields = {"client": reply.client, "examples": reply.examples, "metrics": dict(reply.metrics)}
    content = {f"up {name}": group for name, group in reply.content.items()}
    state = {f"state {name}": group for name, group in cached.client_state.items()}
    parts = encoded_parts(Payload({**content, **state, "rest": json.dumps(fields)}))
    return [digest(*parts).encode(), *parts]


def _load(path: Path) -> CachedReply | None:
    """The reply and the state in a file; None if the file is missing or damaged."""
    try:
        serialised = read_file(path)
    except OSError:
        return None
    try:
        return _deserialised(serialised)
    except (BadPayload, ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s, a stored reply of another run, is damaged and is computed again: %s", path, error
        )
        return None


def _deserialised(serialised: bytes) -> CachedReply:
    sha = serialised[:SHA_LENGTH]
    data = memoryview(serialised)[SHA_LENGTH:]
    if digest(data).encode() != sha:
        raise BadPayload("its SHA-256 does not match")
    payload = decode(data, entries=MAX_LOCAL_ENTRIES)
    fields = json.loads(str(payload["rest"]))
    reply = Reply(
        client=fields["client"],
        content=_groups_with(payload, "up "),
        examples=fields["examples"],
        metrics=_with_zero_times(fields["metrics"]),
    )
    return CachedReply(reply, _groups_with(payload, "state "))


def _groups_with(payload: Payload, prefix: str) -> Payload:
    """The groups whose names begin with a prefix, without it."""
    names = [name for name in payload if name.startswith(prefix)]
    return Payload({name.removeprefix(prefix): payload[name] for name in names})


def _with_zero_times(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a reused reply."""
    zeroed = _without_time(metrics)
    if METHOD_REPORT in metrics:
        zeroed[METHOD_REPORT] = _without_time(metrics[METHOD_REPORT])
    zeroed["seconds_reused"] = metrics.get("seconds", 0.0)
    return zeroed


def _without_time(fields: Mapping[str, Any]) -> dict[str, Any]:
    times = [name for name in fields if name.startswith("seconds")]
    return {**fields, **dict.fromkeys(times, 0.0)}
