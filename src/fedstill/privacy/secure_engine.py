"""Secure sums at the server: engines that only reveal the sum of the clients' models.

``MaskedEngine`` masks, sums and unmasks the replies of an engine in this process. ``RemoteSums``
executes the four steps of the protocol with clients in other processes, so that no message contains
a single unmasked model.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core import trees
from fedstill.core.errors import BadPayload, FedstillError, TooFewReplies
from fedstill.core.extensions import Engine, Event, Exchanges, Fields, Observer, StageResult
from fedstill.core.files import write_whole
from fedstill.core.method import ClientWork
from fedstill.core.records import NOTHING, SERVER, Payload, Reply, Stage, Tensors
from fedstill.core.reports import METHOD_REPORT
from fedstill.core.screen import stage_mismatch
from fedstill.privacy.masking import TIMES, Masking
from fedstill.privacy.noise import Privacy
from fedstill.privacy.protocol import (
    KEY,
    PREFIX,
    PUBLIC,
    SEALED,
    SEED,
    UNREAD,
    Masks,
    Sum,
    Summand,
    as_bytes,
    byte_tensors,
    check_public_key,
    question,
    unmasked,
)

BYTES_OF_ENTRY = 8
"""The bytes of an entry of a masked vector."""


@dataclass(frozen=True)
class MaskedBytes(Observer):
    """Counts the bytes of masked models, without keys and shares."""

    def client_fields(self, event: Event, result: StageResult) -> Fields:
        """``bytes_up`` of an accepted reply: the size of the masked vector that the client sent."""
        if "bytes_up" not in event:
            return {}
        content = result.contents[event["client"]]
        if "params" not in content:
            return {"bytes_up": content.nbytes}
        entries = sum(entry.numel() for entry in content.params.values())
        return {"bytes_up": BYTES_OF_ENTRY * (entries + 1)}


def with_masking(engine: Engine, settings: Settings, folder: Path | None = None) -> Engine:
    """The engine of a run, with secure sums if the config asks for them.

    ``folder``: the run's directory.
    """
    masking = Masking.of(settings.package_table(Privacy), settings.method)
    if masking is None:
        return engine
    if isinstance(engine, Exchanges):
        return RemoteSums(engine, masking, folder)
    return MaskedEngine(engine, masking)


# ---- in one process ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedEngine:
    """An engine that only reveals the sum of the clients' models.

    Every accepted reply contains the mean model, no number of examples, and no report except the
    seconds. A linear aggregate of these replies equals the aggregate of the clients' models.
    """

    engine: Engine
    masking: Masking

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients in the sum; all of them fail if too few are in it."""
        replies = self.engine.run(work, stage, payloads, seed)
        if not is_summed(stage, payloads):
            return replies
        status = {reply.client: reply for reply in replies}
        return or_all_failed(status, lambda: self._summed(stage, payloads, status))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep the states of clients."""
        self.engine.commit(stage, clients)

    def _summed(
        self, stage: Stage, payloads: Mapping[int, Payload], status: dict[int, Reply]
    ) -> list[Reply]:
        """The replies with the mean of the sum. Replies in ``status`` that cannot be summed become
        failures.
        """
        sum = self.masking.new_sum(stage, sorted(payloads))
        start = common_start(payloads)
        clients = {client: Summand(sum, client) for client in sum.clients}
        keys = {client: summand.public for client, summand in clients.items()}
        shares = {client: summand.shares(keys) for client, summand in clients.items()}

        masked: dict[int, Masks] = {}
        for client, reply in status.items():
            if reply.failure:
                continue
            try:
                vector = self.masking.vector(sum, reply, payloads[client])
                masked[client] = clients[client].masked(vector, sealed_for(client, shares))
            except BadPayload as error:
                status[client] = as_failed(reply, str(error))
        check_enough(sum, masked, status)

        revealed = {client: clients[client].revealed(masked) for client in masked}
        total = unmasked(sum, keys, shares, masked, revealed)
        report, content = self.masking.mean(sum, total, start)
        return [known(reply, content, report) for reply in status.values()]


# ---- clients elsewhere ---------------------------------------------------------------------------


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RemoteSums:
    """An engine whose clients are in other processes; it only reveals the sum of their models.

    ``folder``: the run's directory, where ``same_clients`` notes the clients in each sum.
    """

    engine: Exchanges
    masking: Masking
    folder: Path | None = None

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of the clients in the sum; all of them fail if too few are in it."""
        if not is_summed(stage, payloads):
            return self.engine.run(work, stage, payloads, seed)
        status = {client: _unknown(client, stage) for client in stage.clients if client in payloads}
        return or_all_failed(status, lambda: self._summed(stage, payloads, status))

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Make the states of these clients after the stage valid."""
        self.engine.commit(stage, clients)

    def _summed(
        self, stage: Stage, payloads: Mapping[int, Payload], status: dict[int, Reply]
    ) -> list[Reply]:
        """The replies with the mean of the sum. ``status`` gets the reasons why clients are not in
        the sum.

        If most clients cannot read the shares of a client, the sum starts again without it.
        """
        while True:
            word = secrets.token_hex(8)
            sum = self.masking.new_sum(stage, stage.clients, word)
            failed = {client: reply for client, reply in status.items() if reply.failure}
            attempt = _Attempt(
                engine=self.engine,
                masking=self.masking,
                folder=self.folder,
                stage=stage,
                payloads=payloads,
                status=status,
                sum=sum,
            )
            try:
                return attempt.replies()
            except _UnreadableShares as error:
                # Clients that only dropped out of this attempt may take part in the next one.
                status.update({client: _unknown(client, stage) for client in status})
                status.update(failed)
                status[error.sender] = as_failed(
                    status[error.sender], "most clients cannot read the shares that it sent"
                )


@dataclass(frozen=True)
class _Attempt:
    """One attempt at the sum of a stage, with the clients that have not failed.

    ``status``: a reply without content for each client of the stage, with the time of its work, and
    the reason why it is not in the sum.
    """

    engine: Exchanges
    masking: Masking
    folder: Path | None
    stage: Stage
    payloads: Mapping[int, Payload]
    status: dict[int, Reply]
    sum: Sum

    def replies(self) -> list[Reply]:
        """The replies with the mean of the sum; raises _UnreadableShares."""
        start = common_start(self.payloads)
        keys = self._keys()
        shares = self._shares(keys)
        masked = self._masked(start, shares)
        if self.folder is not None:
            masked = same_clients(self.folder, self.stage, self.sum, masked, self.status)
        revealed = self._revealed(shares, masked)

        total = unmasked(self.sum, keys, shares, masked, revealed)
        report, content = self.masking.mean(self.sum, total, start)
        return [known(reply, content, report) for reply in self.status.values()]

    def _keys(self) -> dict[int, bytes]:
        """The clients' keys."""
        question_for_all = self._question("keys")
        questions = {
            client: question_for_all for client, reply in self.status.items() if not reply.failure
        }
        keys = self._asked(questions, read_keys, self.status)
        keys = self._unique(keys)
        check_enough(self.sum, keys, self.status, "sent keys")
        return keys

    def _unique(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """The keys without duplicates: clients with equal keys drop out."""
        counts = Counter(keys.values())
        unique = {}
        for client, client_keys in keys.items():
            if counts[client_keys] == 1:
                unique[client] = client_keys
            else:
                self._drop(client, "its keys are those of another client")
        return unique

    def _shares(self, keys: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        """The clients' encrypted shares, by sender and receiver."""
        question_for_all = self._question("shares", keys=byte_tensors(keys))
        questions = dict.fromkeys(keys, question_for_all)
        shares = self._asked(questions, shares_reader(keys), self.status)
        check_enough(self.sum, shares, self.status, "sent shares")
        return shares

    def _masked(
        self, start: Tensors, shares: Mapping[int, Mapping[int, bytes]]
    ) -> dict[int, Masks]:
        """The masked vectors. In this step, clients do the work of the stage."""
        questions = {}
        for client in shares:
            sealed = byte_tensors(sealed_for(client, shares))
            step = self._question("vector", sealed=sealed)
            questions[client] = Payload({**self.payloads[client], **step})
        answers = self._asked(
            questions, vector_reader(start, shares), self.status, leaves_memory=True
        )
        masked = self._read_by_most(answers)
        check_enough(self.sum, masked, self.status)
        return masked

    def _read_by_most(self, answers: Mapping[int, Masks | list[int]]) -> dict[int, Masks]:
        """The masked vectors. A client that cannot read another client's shares drops out.

        Raises _UnreadableShares for shares that most clients cannot read.
        """
        masked: dict[int, Masks] = {}
        unread: dict[int, list[int]] = {}
        for client, answer in answers.items():
            if isinstance(answer, list):
                unread[client] = answer
            else:
                masked[client] = answer

        counts = Counter(chain.from_iterable(unread.values()))
        for sender, count in counts.most_common(1):
            readers = len(answers.keys() - {sender})
            if 2 * count > readers:
                raise _UnreadableShares(sender)
        for client, senders in unread.items():
            self._drop(client, f"it cannot read the shares that client {senders[0]} sent it")
        return masked

    def _revealed(
        self, shares: Collection[int], masked: Collection[int]
    ) -> dict[int, dict[int, bytes]]:
        """The shares that clients reveal, by sender and owner of the secret."""
        question_for_all = self._question("revealed", left=torch.tensor(sorted(masked)))
        questions = dict.fromkeys(masked, question_for_all)
        # A client that drops out here stays in the sum, because its vector has arrived.
        status = {client: replace(self.status[client], failure="") for client in masked}
        revealed = self._asked(questions, revealed_reader(shares, masked), status)
        check_enough(self.sum, revealed, status, "revealed shares")
        return revealed

    def _question(self, step: str, **groups: Any) -> Payload:
        return question(step, self.sum.word, **groups)

    def _drop(self, client: int, reason: str) -> None:
        self.status[client] = as_failed(self.status[client], reason)

    def _asked(
        self,
        questions: Mapping[int, Payload],
        read: Callable[[Payload], Answer],
        status: dict[int, Reply],
        *,
        leaves_memory: bool = False,
    ) -> dict[int, Answer]:
        """The clients' answers in a step, by client.

        ``status`` gets the current status of each client, and the reason why it dropped out.
        """
        replies = self.engine.exchange(self.stage, questions, remember=leaves_memory)
        answers: dict[int, Answer] = {}
        for reply in replies:
            if not reply.failure:
                try:
                    _check_stage(reply, self.stage)
                    answers[reply.client] = read(reply.content)
                except BadPayload as error:
                    reply = as_failed(reply, f"in a step of the secure sum: {error}")
            if reply.client in status:
                status[reply.client] = replace(
                    reply, content=NOTHING, round=self.stage.round, stage=self.stage.index
                )
        return answers


class _UnreadableShares(Exception):
    """Most clients cannot read the shares that ``sender`` sent."""

    def __init__(self, sender: int) -> None:
        super().__init__(sender)
        self.sender = sender


def _unknown(client: int, stage: Stage) -> Reply:
    """The initial status of a client."""
    return Reply(client=client, content=NOTHING, examples=0, round=stage.round, stage=stage.index)


def _check_stage(reply: Reply, stage: Stage) -> None:
    """Raise BadPayload for a reply to another stage."""
    reason = stage_mismatch(reply, stage)
    if reason:
        raise BadPayload(reason)


# Readers of the clients' answers to each step. They raise BadPayload for an invalid answer.


def read_keys(content: Payload) -> bytes:
    """A client's keys."""
    keys = as_bytes({"0": content.tensor(f"{PREFIX}keys")}, PUBLIC)[0]
    if len(keys) != PUBLIC:
        raise BadPayload(f"its keys are not {PUBLIC} bytes")
    for key in (keys[:KEY], keys[KEY : 2 * KEY]):
        check_public_key(key)
    return keys


def shares_reader(clients: Collection[int]) -> Callable[[Payload], dict[int, bytes]]:
    """Return a reader of encrypted shares, one for each of the clients."""

    def read(content: Payload) -> dict[int, bytes]:
        shares = as_bytes(content.tensors(f"{PREFIX}shares"), SEALED)
        if shares.keys() != set(clients):
            raise BadPayload("its shares are not for the clients with keys")
        return shares

    return read


def vector_reader(
    model: Tensors, senders: Collection[int]
) -> Callable[[Payload], Masks | list[int]]:
    """Return a reader of the masked vector of a model, or of the clients with unreadable shares.

    ``senders``: the clients that sent shares.
    """
    length = sum(entry.numel() for entry in model.values()) + 1

    def read(content: Payload) -> Masks | list[int]:
        if set(content) == {UNREAD}:
            return _clients_in(content.tensor(UNREAD), senders)
        vector = content.tensor(f"{PREFIX}vector")
        if vector.dtype != torch.int64 or vector.shape != (length,) or len(content) != 1:
            raise BadPayload(f"it sent something else than a masked vector of {length} numbers")
        return np.asarray(vector.numpy().view(np.uint64))

    return read


def _clients_in(numbers: Tensor, senders: Collection[int]) -> list[int]:
    """The clients whose shares cannot be read."""
    is_list = numbers.dtype == torch.int64 and numbers.ndim == 1
    if not is_list or not 0 < len(numbers) <= len(senders):
        raise BadPayload("it does not say whose shares it cannot read")
    clients = sorted(set(numbers.tolist()))
    if not set(clients) <= set(senders):
        raise BadPayload("it cannot read shares of clients that sent none")
    return clients


def revealed_reader(
    senders: Collection[int], masked: Collection[int]
) -> Callable[[Payload], dict[int, bytes]]:
    """Return a reader of revealed shares: of the seeds of ``masked`` clients, and of other
    clients' keys.

    ``senders``: the clients that sent shares.
    """

    def read(content: Payload) -> dict[int, bytes]:
        shares = as_bytes(content.tensors(f"{PREFIX}revealed"), KEY)
        if not shares.keys() <= set(senders):
            raise BadPayload("it revealed shares of clients that have none")
        for client, share in shares.items():
            length = KEY
            if client in masked:
                length = SEED
            if len(share) != length:
                raise BadPayload("it revealed what is no share")
        return shares

    return read


# The clients in each sum. They are noted in the run's directory before the server requests shares.
#
# After sites have revealed shares, they only repeat the sum of this stage with the same clients
# (``site_guards``). If a run stops before the next checkpoint, a resume must therefore use the same
# clients.


NOTE = "sum-left.json"
"""The file in a run's directory: the clients in the sum, by stage."""

NOTED_STAGES = 8
"""The number of stages in the note. A resume continues from one of the last checkpoints."""


def same_clients(
    folder: Path,
    stage: Stage,
    sum: Sum,
    masked: Mapping[int, Masks],
    status: dict[int, Reply],
) -> dict[int, Masks]:
    """The vectors of the clients in the note for a stage. Without a note, all clients are noted.

    ``status`` gets the reason why other clients are not in the sum. Raises TooFewReplies if a
    client in the note did not answer.
    """
    path = folder / NOTE
    stages: dict[str, list[int]] = {}
    if path.is_file():
        stages = json.loads(path.read_text(encoding="utf-8"))

    name = f"{stage.round}-{stage.index}"
    noted = stages.get(name)
    if noted is None:
        latest = [*stages.items(), (name, sorted(masked))][-NOTED_STAGES:]
        write_whole(path, json.dumps(dict(latest)).encode())
        return dict(masked)

    away = sorted(set(noted) - masked.keys())
    if away:
        raise TooFewReplies(
            f"{sum.name}: clients already revealed shares for this sum, and repeat that only if "
            f"the same clients take part: {', '.join(map(str, noted))}; client {away[0]}: "
            f"{status[away[0]].failure}; resume when it is back"
        )
    for client in masked.keys() - set(noted):
        status[client] = as_failed(
            status[client], "was not left when shares were revealed, before the run stopped"
        )
    return {client: masked[client] for client in noted}


# ---- what both have in common --------------------------------------------------------------------


def is_summed(stage: Stage, payloads: Mapping[int, Payload]) -> bool:
    """Whether the replies of a stage are summed: clients received a model."""
    is_of_clients = SERVER not in stage.clients
    return is_of_clients and any("params" in payload for payload in payloads.values())


def common_start(payloads: Mapping[int, Payload]) -> Tensors:
    """The model that all clients of a stage received; raises BadPayload if models differ."""
    first, *others = (payload.params for payload in payloads.values())
    if not all(model is first or trees.same_bits(model, first) for model in others):
        raise BadPayload(
            "a secure sum is of changes to one model, and clients were sent different ones"
        )
    return first


def sealed_for(client: int, shares: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
    """The encrypted shares for a client, by sender."""
    return {sender: shares_of_sender[client] for sender, shares_of_sender in shares.items()}


def known(reply: Reply, content: Payload, report: Mapping[str, object]) -> Reply:
    """The reply of a client in the sum, as the server knows it; a failed reply is unchanged."""
    if reply.failure:
        return reply
    times = {name: value for name, value in reply.metrics.items() if name in TIMES}
    return replace(
        reply, content=content, examples=0, metrics={**times, METHOD_REPORT: dict(report)}
    )


def as_failed(reply: Reply, reason: str) -> Reply:
    """The reply of a client that dropped out of a sum."""
    return replace(reply, content=NOTHING, examples=0, metrics={}, failure=reason)


def check_enough(
    sum: Sum,
    clients: Collection[int],
    status: Mapping[int, Reply],
    action: str = "sent masked vectors",
) -> None:
    """Raise TooFewReplies if too few clients did an action; the message has the first failure."""
    try:
        sum.check_clients(clients, action)
    except FedstillError as error:
        failures = (
            f"; client {reply.client}: {reply.failure}"
            for reply in status.values()
            if reply.failure
        )
        raise type(error)(f"{error}{next(failures, '')}") from error


def or_all_failed(status: Mapping[int, Reply], summed: Callable[[], list[Reply]]) -> list[Reply]:
    """The replies with the mean of a sum; if the sum fails, a failure for every client, beginning
    with the clients that did not fail themselves.

    The replies contain no content of a single client.
    """
    try:
        return summed()
    except FedstillError as error:
        reason = f"no secure sum: {error}"
        failures = [as_failed(reply, reply.failure or reason) for reply in status.values()]
        return sorted(failures, key=lambda reply: reply.failure != reason)
