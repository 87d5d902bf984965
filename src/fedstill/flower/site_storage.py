"""A client's desk: what it remembers and the replies it kept, on its own disk, each file whole or
not there at all, and for its owner alone to read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from fedstill.core.codec import OWN_ENTRIES, decode, encode
from fedstill.core.errors import BadPayload, CorruptFile, FedstillError
from fedstill.core.files import digest, make_folder, remove, sweep, write_secret
from fedstill.core.records import NOTHING, Payload, Stage
from fedstill.engines.client_memory import Version
from fedstill.flower.messages import Request, SiteReply

_GROUP = "up "
"""In a file of a reply, the names of the reply's groups begin with it."""

KEPT = 2
"""How many stages' memories and replies are kept, beside the memory that counts."""


@dataclass(frozen=True)
class Desk:
    """The files of one client in one run: ``FOLDER/RUN/clientN/``.

    For each stage done: the memory it left, ``clientN-roundR-stageS.safetensors``, if it left one;
    and then the reply, which is only written when the memory is safe. So a stage that was asked for
    twice is answered from its reply, and one that was cut short is done again from the memory that
    counts. Guards keep their notes in the same folder (``core.extensions.SiteGuard``).
    """

    folder: Path
    run: str
    client: int

    @property
    def place(self) -> Path:
        """Where this client's files of this run are."""
        return self.folder / self.run / f"client{self.client}"

    def remembered(self, version: Version | None) -> Payload:
        """What the client remembers in a version; raises CorruptFile if that file is gone or
        damaged.
        """
        if version is None:
            return NOTHING
        path = self.place / version[0]
        try:
            data = path.read_bytes()
            if digest(data) != version[1]:
                raise BadPayload("its SHA-256 is not the one that counts")
            return decode(data, entries=OWN_ENTRIES)
        except (OSError, BadPayload) as error:
            raise CorruptFile(
                f"the memory that counts, {version[0]}, cannot be used at this site: {error}"
            ) from error

    def kept(self, request: Request) -> SiteReply | None:
        """The answer already given to the same request, if it is still here and whole."""
        path = self.place / _reply(request.stage)
        try:
            stored = decode(path.read_bytes(), entries=OWN_ENTRIES)
            note = json.loads(str(stored["note"]))
            if note["request"] != request.digest():
                return None
            groups = {
                name.removeprefix(_GROUP): group
                for name, group in stored.items()
                if name.startswith(_GROUP)
            }
            answer = SiteReply.of(str(note["answer"]), Payload(groups))
            self.remembered(answer.memory)
        except (OSError, FedstillError, ValueError, KeyError, TypeError):
            return None
        return answer

    def keep(self, request: Request, answer: SiteReply, client_state: Payload) -> SiteReply:
        """Write the client's state, then the reply, then delete what is too old.

        Returns the answer with the version of the state.
        """
        make_folder(self.place)
        sweep(self.place)
        if client_state:
            data = encode(client_state)
            name = _memory(self.client, request.stage)
            write_secret(self.place / name, data)
            answer = replace(answer, memory=(name, digest(data)))
        note = json.dumps({"request": request.digest(), "answer": answer.header()})
        groups = {_GROUP + name: group for name, group in answer.content.items()}
        stored = Payload({"note": note, **groups})
        write_secret(self.place / _reply(request.stage), encode(stored))
        self._delete_old(request)
        return answer

    def _delete_old(self, request: Request) -> None:
        """Delete the files of old stages, but not the memories that the request names."""
        replies = sorted(self.place.glob("*.reply"))
        latest = {path.stem for path in replies[-KEPT:]}
        # A server that went back has just asked for an older stage.
        latest.add(_named(request.stage))

        named = set(request.named)
        if request.memory is not None:
            current, _ = request.memory
            named.add(current)
        for path in (*replies, *self.place.glob("*.safetensors")):
            if _stage_of(path) not in latest and path.name not in named:
                remove(path)


def _named(stage: Stage) -> str:
    return f"{stage.round:07d}-{stage.index:07d}"


def _reply(stage: Stage) -> str:
    return f"{_named(stage)}.reply"


def _memory(client: int, stage: Stage) -> str:
    return f"client{client}-round{stage.round}-stage{stage.index}.safetensors"


def _stage_of(path: Path) -> str:
    """The stage of a file, as its reply's name says it."""
    if path.suffix == ".reply":
        return path.stem
    _, round, stage = path.stem.split("-")
    return f"{int(round.removeprefix('round')):07d}-{int(stage.removeprefix('stage')):07d}"
