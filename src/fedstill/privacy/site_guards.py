"""Guards of a site's privacy, which do not trust the server: the site counts its own noise, and
none of its answers in secure sums reveals its model.

A site adds noise to one answer per stage, and records the cost of the answer before it sends it. It
refuses work that would exceed the epsilon of the config that it accepted.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fedstill.core.errors import BadPayload, Refused
from fedstill.core.extensions import SiteGuard, SiteNotebook, SiteRequest
from fedstill.core.files import counted, make_folder, write_secret
from fedstill.core.label_counts import CENSUS
from fedstill.core.method import ClientWork
from fedstill.core.records import Examples, Payload, Plan, Reply, Stage
from fedstill.data.dataset import examples_digest
from fedstill.privacy.masking import TIMES, Masking
from fedstill.privacy.noise import Privacy, rows_of
from fedstill.privacy.private_training import rate_and_steps, training_epsilon
from fedstill.privacy.protocol import (
    PREFIX,
    PUBLIC,
    SEALED,
    STEPS,
    UNREAD,
    Summand,
    as_bytes,
    as_tensor,
    asked_step,
    byte_tensor,
    byte_tensors,
    plain_payload,
)
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import SumsWork, sums_stage, sums_work

# ---- noise ---------------------------------------------------------------------------------------


NOISED = "noised"
"""The file in a client's folder with the stages that were answered with noise."""


def noise_guards(prepared: Prepared, notebook: SiteNotebook) -> tuple[SiteGuard, ...]:
    """The guards of a site's privacy, for the config that it accepted."""
    privacy = prepared.settings.package_table(Privacy)
    notes = NoiseNotes(notebook.folder)
    # A stage that was answered with noise stays closed, even for a new config without noise.
    guards: list[SiteGuard] = [OneNoisedAnswer(notes)]
    if privacy.protects_logits:
        guards.append(UploadGuard(prepared, notes))
    if privacy.trains:
        guards.append(TrainingGuard(prepared, notes))
    return tuple(guards)


@dataclass(frozen=True)
class NoiseNotes:
    """The stages that a client has answered with noise. The file remains after the replies have
    been deleted.

    It has one line per stage: ``stage:rows`` for logits, ``stage:steps:rate`` for training.
    """

    folder: Path

    def lines(self) -> list[str]:
        """The lines of the file."""
        path = self.folder / NOISED
        if not path.exists():
            return []
        return path.read_text(encoding="utf-8").split()

    def has(self, stage: Stage) -> bool:
        """Whether a stage was answered with noise."""
        return any(line.partition(":")[0] == _line_name(stage) for line in self.lines())

    def rows(self, unknown: int) -> int:
        """The number of noised rows that the client has sent.

        ``unknown``: the assumed number for a stage that is recorded without one.
        """
        total = 0
        for line in self.lines():
            _, _, rows = line.partition(":")
            total += int(rows or unknown)
        return total

    def steps(self, unknown: int) -> Counter[float]:
        """The number of noised training steps of the client, by the probability with which a step
        took an example.

        ``unknown``: the assumed number for a stage that is recorded without one. A stage that is
        recorded without its probability counts as if each step had taken all examples.
        """
        steps: Counter[float] = Counter()
        for line in self.lines():
            _, _, cost = line.partition(":")
            count, _, rate = cost.partition(":")
            steps[float(rate or 1)] += int(count or unknown)
        return steps

    def add_rows(self, stage: Stage, rows: int) -> None:
        """Record the noised rows of an answer, before it is sent."""
        self._add(stage, str(rows))

    def add_steps(self, stage: Stage, steps: int, rate: float) -> None:
        """Record the noised steps of an answer, before it is sent.

        ``rate``: the probability with which each step took an example.
        """
        self._add(stage, f"{steps}:{rate!r}")

    def _add(self, stage: Stage, cost: str) -> None:
        if self.has(stage):
            return
        lines = [*self.lines(), f"{_line_name(stage)}:{cost}"]
        text = "".join(f"{line}\n" for line in lines)
        write_secret(self.folder / NOISED, text.encode())


def _line_name(stage: Stage) -> str:
    return f"{stage.round:07d}-{stage.index:07d}"


@dataclass(frozen=True)
class OneNoisedAnswer(SiteGuard):
    """Permits one noised answer per stage. The stored answer may be sent again, but no other."""

    notes: NoiseNotes

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        stage = request.stage
        if self.notes.has(stage):
            raise Refused(
                f"this site has answered round {stage.round}, stage {stage.name!r} with noise, and "
                "answers no other request for it, because two answers would reveal more than one",
                "noise",
            )


@dataclass(frozen=True)
class UploadGuard(SiteGuard):
    """Counts the rows of logits and sums that leave a site with noise."""

    prepared: Prepared
    notes: NoiseNotes

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        """Refuse rows that would exceed the run's budget, according to the site's records."""
        rows = self._expected_rows(request, work)
        if not rows:
            return
        total = self._rows_of_sums(request.stage) + self.notes.rows(unknown=rows) + rows
        if not self._privacy.allows(total):
            raise Refused(
                f"{counted(rows, 'more row')} of logits would cost this site more than "
                "privacy.epsilon allows it",
                "budget",
            )

    def check(self, request: SiteRequest, work: ClientWork, reply: Reply) -> None:
        """Refuse more rows than expected in this stage, because they were not counted."""
        expected = self._expected_rows(request, work)
        rows = rows_of(reply.content)
        if rows > expected:
            raise Refused(
                f"the request asks for {rows} rows of logits, where the run has {expected}",
                "budget",
            )

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        rows = rows_of(reply.content)
        if self.prepared.settings.on_sites and rows and not reply.failure:
            self.notes.add_rows(request.stage, rows)

    @property
    def _privacy(self) -> Privacy:
        return self.prepared.settings.package_table(Privacy)

    def _expected_rows(self, request: SiteRequest, work: ClientWork) -> int:
        """The number of noised rows that are expected in a stage."""
        if isinstance(work, SumsWork):
            return work.rows
        actor = self.prepared.settings.schedule.actor(request.stage)
        return rows_of(actor.expected_reply(request.client, request.stage, self.prepared.world))

    def _standardises(self, stage: Stage) -> bool:
        """Whether clients send the sums that standardise data in this stage."""
        return stage == sums_stage(self.prepared.world, self.prepared.settings.schedule)

    def _rows_of_sums(self, stage: Stage) -> int:
        """The noised rows of the sums that standardise the run's data.

        The site sent them under another run's identity, so its records of this run lack them.
        """
        prepared = self.prepared
        if prepared.scaler.origin != "summed" or self._standardises(stage):
            return 0
        about = prepared.sites.inputs.about
        return sums_work(prepared.settings, about, prepared.dataset.input_shape).rows


@dataclass(frozen=True)
class TrainingGuard(SiteGuard):
    """Counts the noised steps of a site's private training.

    Each step counts with its own sampling probability: if the data grow, later steps cost less, but
    earlier ones do not.
    """

    prepared: Prepared
    notes: NoiseNotes

    def admit(self, request: SiteRequest, work: ClientWork) -> None:
        """Refuse training that would exceed the run's budget, according to the site's records."""
        privacy = self.prepared.settings.package_table(Privacy)
        plan = self._plan(request.stage)
        if privacy.epsilon is None or plan is None:
            return
        examples = self.prepared.sites.training_size(request.client, request.stage.name)
        rate, steps = rate_and_steps(examples, plan)
        if not steps:
            return
        total = self.notes.steps(unknown=steps) + Counter({rate: steps})
        epsilon = training_epsilon(privacy.sigma, total, privacy.delta)
        if epsilon is None or epsilon > privacy.epsilon:
            raise Refused(
                f"{counted(steps, 'more step')} would cost this site more than privacy.epsilon "
                "allows it",
                "budget",
            )

    def leaving(self, request: SiteRequest, reply: Reply) -> None:
        plan = self._plan(request.stage)
        if plan is None or reply.failure or not self.prepared.settings.on_sites:
            return
        # A stored reply states its number of examples; the site may have more in the meantime.
        rate, steps = rate_and_steps(reply.examples, plan)
        if steps:
            self.notes.add_steps(request.stage, steps, rate)

    def _plan(self, stage: Stage) -> Plan | None:
        """The plan of a stage of private training; None for other stages."""
        if stage.view != "private":
            return None
        return self.prepared.settings.plans.get(stage.name)


# ---- secure sums ---------------------------------------------------------------------------------
#
# A site stores its state between steps on its disk, so a newly started process can handle any step.
# After a restart, the server may start the sum of a stage again, with another word and new secrets.
# But once shares are revealed, the site only repeats the sum with the same clients, because the
# difference of two sums would be a single model.


UNDER_WAY = "secure-sum"
"""The file in a client's folder about the current sum."""

REVEALED = "secure-sums"
"""The file in a client's folder with the clients of each sum whose shares were revealed."""

NONCE = "nonce"
"""The file in a client's folder with the random number that its training depends on."""

NONCE_BYTES = 32

RUNS_WITH_SUMS = "runs-with-sums.json"
"""The file in a site's memory folder with the SHA-256 of all data of each run with secure sums."""


def sum_guards(prepared: Prepared, notebook: SiteNotebook) -> tuple[SiteGuard, ...]:
    """The guard of a site's model, if the config that it accepted asks for secure sums."""
    settings = prepared.settings
    masking = Masking.of(settings.package_table(Privacy), settings.method)
    if masking is None:
        return ()
    runs = None
    if settings.on_sites:
        runs = RunsWithSums(notebook, prepared.dataset.train)
    standardising = sums_stage(prepared.world, settings.schedule)
    return (SiteSums(masking, standardising, SumNotes(notebook.folder), runs),)


@dataclass(frozen=True)
class RunsWithSums:
    """The runs with secure sums in which a real site took part.

    The difference of the sums of two runs, with and without a client, reveals that client's model.
    A site therefore takes part in only one run on the same data, unless its operator allows more.
    Its training also depends on a random number of its own, so that no other run gives the same
    model.
    """

    notebook: SiteNotebook
    train: Examples

    def check(self) -> None:
        """Raise Refused if a model of the same data was summed in another run."""
        if self.notebook.repeat_sums:
            return
        other_runs = self._runs()
        other_runs.pop(self.notebook.run, None)
        summed = {digest for digests in other_runs.values() for digest in digests}
        if summed and not self._digests.isdisjoint(summed):
            raise Refused(
                "this site has taken part in a secure sum of another run on the same data, and the "
                "difference of two sums could be its model; to take part again, set repeat_sums = "
                "true in its site.toml",
                "repeated",
            )

    def enter(self) -> None:
        """Record this run and its current data before a model is sent; raises Refused as ``check``
        does.
        """
        memory = self.notebook.memory
        make_folder(memory)
        with FileLock(memory / f".{RUNS_WITH_SUMS}.lock"):
            self.check()
            runs = self._runs()
            digests = runs.setdefault(self.notebook.run, [])
            # The data may have changed since an earlier sum of this run.
            new = self._digests.difference(digests)
            if new:
                digests += sorted(new)
                write_secret(memory / RUNS_WITH_SUMS, json.dumps(runs).encode())

    def nonce(self) -> bytes:
        """The site's random number in this run. It is stored, so that a resumed run has the same
        bits.
        """
        path = self.notebook.folder / NONCE
        if not path.is_file():
            make_folder(self.notebook.folder)
            write_secret(path, secrets.token_bytes(NONCE_BYTES))
        return path.read_bytes()

    @cached_property
    def _digests(self) -> set[str]:
        """The digests of the current data: of the examples as this run reads them, and of the
        site's files, so that other columns or another order of classes are not other data.
        """
        return {examples_digest(self.train), *self.notebook.data_digests()}

    def _runs(self) -> dict[str, list[str]]:
        """The digests of the data of each run, by the run's identity."""
        path = self.notebook.memory / RUNS_WITH_SUMS
        if not path.is_file():
            return {}
        runs: dict[str, str | list[str]] = json.loads(path.read_text(encoding="utf-8"))
        digests_of_runs: dict[str, list[str]] = {}
        for run, digests in runs.items():
            if isinstance(digests, str):
                # Earlier versions recorded one digest per run.
                digests = [digests]
            digests_of_runs[run] = digests
        return digests_of_runs


@dataclass(frozen=True)
class SumUnderWay:
    """The state of a sum that a site stores between two steps.

    ``identity``: round, stage and word. ``summand``: the client's state in the sum
    (``Summand.note``). ``masked``: the digest of the request whose model was masked; empty if no
    model was masked.
    """

    identity: list[Any]
    summand: str
    masked: str


@dataclass(frozen=True)
class SumNotes:
    """A site's records of secure sums, in two files of the client's folder."""

    folder: Path

    def under_way(self, stage: Stage, word: str) -> SumUnderWay | None:
        """The stored state of a sum; None if it is not the current sum."""
        fields = self._read(UNDER_WAY)
        if fields.get("of") != _identity(stage, word):
            return None
        return SumUnderWay(
            identity=fields["of"], summand=fields["note"], masked=str(fields.get("asked", ""))
        )

    def keep(self, note: SumUnderWay) -> None:
        """Store the state of a sum, and replace the previous one."""
        self._write(UNDER_WAY, {"of": note.identity, "note": note.summand, "asked": note.masked})

    def left(self, stage: Stage) -> list[int] | None:
        """The clients in the sum when shares were revealed; None if none were revealed."""
        clients: list[int] | None = self._read(REVEALED).get(_entry_name(stage))
        return clients

    def note_left(self, stage: Stage, clients: list[int]) -> None:
        """Record the clients in the sum, before shares of a stage are sent."""
        self._write(REVEALED, {**self._read(REVEALED), _entry_name(stage): clients})

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        make_folder(self.folder)
        write_secret(self.folder / name, json.dumps(fields).encode())


def _identity(stage: Stage, word: str) -> list[Any]:
    return [stage.round, stage.index, word]


def _entry_name(stage: Stage) -> str:
    return f"{stage.round}-{stage.index}"


@dataclass(frozen=True)
class SiteSums(SiteGuard):
    """Answers the steps of secure sums, and no other request for a model.

    ``standardising``: the stage of the sums that standardise data. ``runs``: a real site's runs
    with secure sums; None in a trial.
    """

    masking: Masking
    standardising: Stage
    notes: SumNotes
    runs: RunsWithSums | None = None

    def work_seed(self, seed: int) -> int:
        """A seed that also depends on the site's random number; in a trial, the seed itself."""
        if self.runs is None:
            return seed
        drawn = hashlib.sha256(self.runs.nonce() + str(seed).encode()).digest()
        # In [0, 2**63), as the seeds of core.keys.
        return int.from_bytes(drawn[:8], "big") >> 1

    def answer(self, request: SiteRequest, respond: Callable[[Payload], Reply]) -> Reply:
        """The answer to a step. Raises Refused for any other request."""
        if not self._is_summed(request.stage):
            return respond(request.payload)

        step, word = asked_step(request.payload)
        if step not in STEPS or not word.isalnum():
            raise Refused(
                "the models of this run are summed securely: this site answers only the steps of "
                "the secure sum",
                "sum",
            )
        if self.runs is not None:
            self.runs.check()
        answer = self._answer(request, step, word)
        match step:
            case "keys":
                return answer.keys()
            case "shares":
                return answer.shares()
            case "vector":
                if self.runs is not None:
                    self.runs.enter()
                return answer.vector(respond)
            case _:
                return answer.revealed()

    def _is_summed(self, stage: Stage) -> bool:
        """Whether the answers of a stage are models. Label counts and the sums that standardise
        data are sent unmasked.
        """
        return stage.name != CENSUS and stage != self.standardising

    def _answer(self, request: SiteRequest, step: str, word: str) -> SumAnswer:
        """The answers of this client in the sum with this word. A new word in the first step starts
        another sum.
        """
        stage = request.stage
        sum = self.masking.new_sum(stage, stage.clients, word)
        note = self.notes.under_way(stage, word)
        if note is not None:
            summand = Summand.from_note(sum, request.client, note.summand)
            masked = note.masked
        elif step == "keys":
            summand = Summand(sum, request.client)
            masked = ""
        else:
            raise Refused(
                "this step belongs to another secure sum than the one in which this site "
                "takes part",
                "sum",
            )
        return SumAnswer(
            masking=self.masking,
            notes=self.notes,
            request=request,
            summand=summand,
            masked=masked,
        )


@dataclass(frozen=True)
class SumAnswer:
    """The answers of a client in a sum. Each answer is recorded before it is sent.

    ``masked``: the digest of the request whose model was masked in this sum; empty if no model was
    masked.
    """

    masking: Masking
    notes: SumNotes
    request: SiteRequest
    summand: Summand
    masked: str

    def keys(self) -> Reply:
        """Step 1: the client's keys."""
        keys = byte_tensor(self.summand.public)
        self._note(self.masked)
        return self._reply("keys", keys)

    def shares(self) -> Reply:
        """Step 2: shares of the client's secrets, encrypted for each client."""
        keys = as_bytes(self.request.payload.tensors(f"{PREFIX}keys"), PUBLIC)
        shares = byte_tensors(self.summand.shares(keys))
        self._note(self.masked)
        return self._reply("shares", shares)

    def vector(self, respond: Callable[[Payload], Reply]) -> Reply:
        """Step 3: the work of the stage and its masked model, or the clients with unreadable
        shares.
        """
        payload = plain_payload(self.request.payload)
        digest = self.request.with_payload(payload).digest()
        if self.masked not in ("", digest):
            raise Refused(
                "this site has masked another answer in this sum, and a mask hides only one model",
                "sum",
            )
        received = as_bytes(self.request.payload.tensors(f"{PREFIX}sealed"), SEALED)
        unread = self.summand.unread(received)
        if unread:
            return self._reply(UNREAD.removeprefix(PREFIX), torch.tensor(unread))

        reply = respond(payload)
        if reply.failure:
            return reply
        try:
            vector = self.masking.vector(self.summand.sum, reply, payload)
        except BadPayload as error:
            raise Refused(str(error), "range") from error
        masked = self.summand.masked(vector, received)
        self._note(digest)
        times = {name: value for name, value in reply.metrics.items() if name in TIMES}
        return replace(self._reply("vector", as_tensor(masked)), metrics=times)

    def revealed(self) -> Reply:
        """Step 4: shares of the secrets that remove the masks from the sum."""
        stage = self.request.stage
        numbers = self.request.payload.tensor(f"{PREFIX}left").tolist()
        left = sorted(int(number) for number in numbers)
        if self.notes.left(stage) not in (None, left):
            raise Refused(
                f"this site has revealed shares for round {stage.round}, stage {stage.name!r}, "
                "with other clients in the sum; two sums would reveal a single model",
                "sum",
            )
        shares = byte_tensors(self.summand.revealed(left))
        self.notes.note_left(stage, left)
        self._note(self.masked)
        return self._reply("revealed", shares)

    def _note(self, masked: str) -> None:
        sum = self.summand.sum
        identity = _identity(self.request.stage, sum.word)
        self.notes.keep(SumUnderWay(identity, self.summand.note(), masked))

    def _reply(self, name: str, group: Any) -> Reply:
        stage = self.request.stage
        content = Payload({PREFIX + name: group})
        return Reply(
            client=self.request.client,
            content=content,
            examples=0,
            round=stage.round,
            stage=stage.index,
        )
