"""Runs that train together: several seeds of one experiment, each with an engine of its own, in threads of one process.

They go in step: whatever is done together begins when all have come, and one of them does it for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]
"""How far a run is: its round and the stage in it; (0, 0) for one that has not begun."""

Act = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""From what each brought to what each gets."""


@dataclass
class Company:
    """Runs in step, known by their numbers from 0; a run that has left is waited for no more."""

    members: int
    _turn: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def __post_init__(self) -> None:
        self._there = set(range(self.members))
        self._brought: dict[int, tuple[str, Any, Act]] = {}
        self._given: dict[int, Any] = {}

    def meet(self, member: int, what: str, value: Any, act: Act) -> Any:
        """What ``act`` gives this member, once all have brought a value for the same thing; all get its exception."""
        with self._turn:
            self._brought[member] = (what, value, act)
            self._go_on()
            while member not in self._given:
                self._turn.wait()
            result = self._given.pop(member)
        if isinstance(result, BaseException):
            raise result
        return result

    def leave(self, member: int) -> None:
        """Go on without this one."""
        with self._turn:
            self._there.discard(member)
            self._go_on()

    def _go_on(self) -> None:
        if not self._brought or set(self._brought) != self._there:
            return
        brought, self._brought = dict(sorted(self._brought.items())), {}
        whats, act = {what for what, _, _ in brought.values()}, next(iter(brought.values()))[2]
        try:
            if len(whats) > 1:
                raise RuntimeError(f"runs that train together are out of step: {', '.join(sorted(whats))}")
            self._given |= act({member: value for member, (_, value, _) in brought.items()})
        except Exception as error:
            self._given |= dict.fromkeys(brought, error)
        self._turn.notify_all()


@dataclass
class Seat:
    """One run's place in a company."""

    company: Company
    member: int
    left: bool = False

    def meet(self, what: str, value: Any, act: Act) -> Any:
        """What the members do together gives this one; see ``Company.meet``."""
        return self.company.meet(self.member, what, value, act)

    def leave(self) -> None:
        """Go on alone."""
        self.left = True
        self.company.leave(self.member)

    def stops(self, asked: bool) -> bool:
        """Whether to stop now: the same for all, as soon as one was asked to."""
        return bool(self.meet("stop", asked, lambda all_: dict.fromkeys(all_, any(all_.values()))))

    def start(self, kept: Sequence[Place], most: int) -> Place | None:
        """Where all begin, given the checkpoints that each has kept, oldest first: the farthest place all have been to.

        ``most``: checkpoints that a run keeps. None for a run that fell so far behind the others, by failing, that
        they have no checkpoint left from there: it goes on alone.
        """
        return self.meet("start", list(kept), lambda all_: _starts(all_, most))  # type: ignore[no-any-return]


def _starts(kept: Mapping[int, Sequence[Place]], most: int) -> dict[int, Place | None]:
    newest = {member: places[-1] if places else (0, 0) for member, places in kept.items()}
    first = max(newest, key=lambda member: newest[member])
    oldest = kept[first][0] if len(kept[first]) >= most else (0, 0)
    start = min(place for place in newest.values() if place >= oldest)
    return {member: start if place >= oldest else None for member, place in newest.items()}
