"""Announcements of replayed rounds, which most tests ignore."""

from __future__ import annotations


def no_announcement(round: int, last: int) -> None:
    """Announce nothing."""
