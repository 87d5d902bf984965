"""What the standard streams do with characters that their encoding lacks, as Latin-1 lacks the en
dash.
"""

from __future__ import annotations

import codecs
import io
import sys

NEAR = {
    "–": "-",
    "—": "-",
    "−": "-",
    "…": ".",
    "→": ">",
    "Δ": "d",
    "±": "~",
    "×": "x",
    "░": ".",
    "▒": ":",
    "▓": "+",
    "█": "#",
}
"""One character for each that tables and pictures have, so that columns stay where they are."""

NAME = "fedstill.near"


def print_what_is_near() -> None:
    """From now on, standard output and error print something near a character that their encoding
    lacks, or ``?``.
    """
    codecs.register_error(NAME, _near)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)


def _near(error: UnicodeError) -> tuple[str, int]:
    """What a codec prints in the place of what it cannot encode, and where it goes on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(NEAR.get(c, "?") for c in error.object[error.start : error.end]), error.end
