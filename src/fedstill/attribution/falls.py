"""Moments at which a class fell, and what is known of one: of what the change consists, and who
contributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedstill.core.errors import ConfigError
from fedstill.methods.fit import FIT
from fedstill.running import journal as journals
from fedstill.running.directory import settings_of
from fedstill.running.journal import Look


@dataclass(frozen=True)
class Moment:
    """A class in a round: its accuracy before and after it."""

    round: int
    of: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """How far it moved; below 0 where it fell."""
        return self.after - self.before


def all_falls(events: Sequence[Mapping[str, Any]]) -> list[Moment]:
    """Every class in every round of a journal, where it was measured, from the deepest fall on;
    round 1 comes last.

    Before round 1 the model is untrained, and mostly answers with one class: what that one loses
    was never learned.
    """
    rows = [
        (e.get("round", 0), e["class_accuracy"])
        for e in events
        if e["event"] in ("initial", "round")
    ]
    every = [
        Moment(round, c, was, is_)
        for (_, before), (round, now) in pairwise(rows)
        for c, (was, is_) in enumerate(zip(before, now, strict=True))
        if was is not None and is_ is not None
    ]
    return sorted(every, key=lambda m: (m.round == 1, m.change, m.round, m.of))


def the_moment(folder: Path, of: int | None, round: int | None) -> Moment:
    """The deepest fall of a run, or of a class, or in a round. Raises ConfigError where there is
    none.
    """
    events = journals.read_journal(folder / "journal.jsonl")
    if any(event.get("client_predictors") for event in events):
        raise ConfigError(
            f"{folder} has several models at the server, and fedstill why explains the changes of "
            "one global model"
        )
    every = all_falls(events)
    if not every:
        peers = (
            "; what a client learned from its peers: --client 0"
            if FIT in settings_of(folder).plans
            else ""
        )
        raise ConfigError(
            f"{folder} has no round in which a global model's classes were measured{peers}"
        )
    fitting = [m for m in every if of in (None, m.of) and round in (None, m.round)]
    if not fitting:
        last = max(m.round for m in every)
        raise ConfigError(
            f"{folder} has measured no such class and round; it has rounds 1 to {last}"
        )
    return fitting[0]


def of_one_model(looks: Sequence[Look]) -> list[Look]:
    """Looks that show one change: the global model's where any does, else of each round those at
    the same clients.

    looks: a run's, or a round's, in the order of their stages. Left out are stages in which clients
    train models of their own beside the global one.
    """
    clients: dict[int, list[int]] = {}
    return [look for look in looks if look.get("model") != "own"] or [
        look
        for look in looks
        if look["clients"] == clients.setdefault(look["round"], look["clients"])
    ]


@dataclass(frozen=True)
class Told:
    """What is known of a class's change in a round.

    ``parts``: how far each part of the round moved it, by name, in order; they sum to the change on
    the examples that were looked at. ``clients``: each client's contribution in soft accuracy, with
    what it may be off by (``error``).
    ``nobody``: what the server changes in it when all clients are idle, by momentum for example.
    ``game``, ``rule``: how they were divided; empty where nobody was asked. ``drawn``: the class's
    share of the data of the round's clients over its share of what all clients have then; None
    where that is not known. ``had``: in a run with tasks, the task that each client was in, its
    examples of the class in it, and all of them.
    """

    moment: Moment
    parts: Mapping[str, float]
    clients: Mapping[int, float]
    error: float
    game: str
    rule: str
    drawn: float | None
    had: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    nobody: float = 0.0


def told_of(moment: Moment, looks: Sequence[Look]) -> Told | None:
    """What looks at a round's stages say of a class; None where there are none, or none asked about
    this class.
    """
    own = [look for look in of_one_model(looks) if look["round"] == moment.round]
    if not own:
        return None
    parts: dict[str, float] = {}
    for look in own:
        for name, change in look["parts"].items():
            parts[name] = parts.get(name, 0.0) + (change[moment.of] or 0.0)
    divided = [look for look in own if moment.of in look.get("classes", ())]
    asked = [look for look in own if "classes" in look]
    if asked and not divided:
        return None
    clients: dict[int, float] = {}
    error = nobody = 0.0
    for look in divided:
        at = look["classes"].index(moment.of)
        gap = look["gap"][at]
        nobody += look["nobody"][at] if "nobody" in look else 0.0
        error += gap if isinstance(gap, float) else max(gap)
        for client, value in zip(look["clients"], look["values"][at], strict=True):
            clients[client] = clients.get(client, 0.0) + value
    drawn = [look["drawn"][moment.of] for look in asked if "drawn" in look]
    had = {
        client: (task, counts[moment.of], sum(counts))
        for look in divided
        for client, task, counts in zip(
            look["clients"], look.get("tasks", ()), look.get("had", ()), strict=False
        )
    }
    first: Look = divided[0] if divided else {}
    shares = drawn[0] if drawn else None
    return Told(
        moment,
        parts,
        clients,
        error,
        first.get("game", ""),
        first.get("rule", ""),
        shares,
        had,
        nobody,
    )
