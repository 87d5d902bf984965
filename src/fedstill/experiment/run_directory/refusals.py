"""Which clients were left out of a run, how often, and why the first: what must not stand in the
journal alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.records import SERVER


@dataclass(frozen=True)
class Refusals:
    """The replies of a run that were refused.

    ``refused``, ``accepted``: the events of clients whose reply was, in order. ``clients``: how
    many the run has.
    ``rounds``: how many rounds are done.
    """

    refused: Sequence[Mapping[str, Any]]
    accepted: Sequence[Mapping[str, Any]]
    clients: int
    rounds: int

    @staticmethod
    def of(events: Sequence[Mapping[str, Any]], clients: int, rounds: int) -> Refusals:
        """From a journal's events of clients."""
        refused = [e for e in events if "refused" in e]
        return Refusals(
            refused, [e for e in events if "refused" not in e and "idle" not in e], clients, rounds
        )

    @property
    def who(self) -> list[int]:
        """The clients that were refused at least once."""
        return sorted({e["client"] for e in self.refused})

    @property
    def said(self) -> str:
        """All of it in a sentence; empty where nothing was refused.

        >>> no = {"client": 1, "round": 1, "refused": "failed: OSError: gone"}
        >>> Refusals.of([no, {"client": 0, "round": 1}, {**no, "round": 2}], 6, 2).said
        '1 of 6 clients refused in every round, first: client 1 in round 1: failed: OSError: gone'
        >>> Refusals.of([no, {"client": 1, "round": 2}], 6, 2).said
        '1 of 2 replies refused, of 1 of 6 clients, in 1 of 2 rounds, first: client 1 in round 1: failed: OSError: gone'
        """  # noqa: E501
        if not self.refused:
            return ""
        first, rounds = self.refused[0], {e["round"] for e in self.refused if e["round"] > 0}
        who = f"{len(self.who)} of {self.clients} clients"
        if self._always(rounds):
            every = "in every round" if len(rounds) == self.rounds else "whenever they took part"
            how = f"{who} refused {every}"
        else:
            replies = f"{len(self.refused)} of {len(self.refused) + len(self.accepted)} replies"
            how = f"{replies} refused, of {who}, in {len(rounds)} of {self.rounds} rounds"
        name = "the server" if first["client"] == SERVER else f"client {first['client']}"
        when = (
            f"round {first['round']}"
            if first["round"]
            else f"the stage {first.get('name', 'census')!r} before round 1"
        )
        return f"{how}, first: {name} in {when}: {first['refused']}"

    @property
    def summary(self) -> dict[str, Any]:
        """The keys of a run's summary: how many replies, and of whom and why if there are any."""
        more = {"refused_clients": self.who, "refusals": self.said}
        return {"refused": len(self.refused), **(more if self.refused else {})}

    def _always(self, rounds: set[int]) -> bool:
        """Whether none of these clients ever gave a reply that was taken, in a run that has gone
        on.
        """
        return bool(rounds) and not {e["client"] for e in self.accepted if e["round"] > 0} & set(
            self.who
        )
