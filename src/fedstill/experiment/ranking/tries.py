"""What may be tried of a row: a few tables of its method's own fields and of two further keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.errors import ConfigError

MOST_TRIES = 5
"""How many configurations of each method may be tried, a newcomer's too."""

FREE = ("plan.lr", "stream.head")
"""What a try may set beside its method's own fields."""


def checked_tries(suite: str, row: str, tries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tries of a row with dotted keys; raises ConfigError for a key that is not free, and for
    too many or none.
    """
    if not 1 <= len(tries) <= MOST_TRIES:
        raise ConfigError(f"{row} has {len(tries)} tries; every method has 1 to {MOST_TRIES}")
    return [_dotted(suite, row, one) for one in tries]


def _dotted(suite: str, row: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """A try with dotted keys: a bare one is a field of the method."""
    keys = {key: key if "." in key else f"method.{key}" for key in one}
    strange = [
        key for key, whole in keys.items() if not whole.startswith("method.") and whole not in FREE
    ]
    if strange or "method.name" in keys.values():
        raise ConfigError(
            f"{suite}, {row}: a try sets fields of the method, {' and '.join(FREE)}, not "
            f"{(strange or ['name'])[0]!r}"
        )
    return {keys[key]: value for key, value in one.items()}
