"""Which options of ``fedstill why`` go together: it answers four questions."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.errors import ConfigError

GOES_WITH = {
    "--client": {"--round"},
    "--without": {"--class", "--round", "--from", "--rounds", "--once"},
    "--draws": {"--class", "--round"},
    "": {"--class", "--round", "--worst", "--exact", "--game", "--open"},
}
"""Which options say more of a question; the empty one is the plain command."""


def refuse_strays(given: Sequence[str]) -> None:
    """Raise ConfigError where an option does not go with what is asked.

    >>> refuse_strays(["--class", "--worst"])
    """
    asked = next((question for question in GOES_WITH if question in given), "")
    misfits = [name for name in given if name != asked and name not in GOES_WITH[asked]]
    if misfits and not asked:
        raise ConfigError(
            f"{' and '.join(misfits)}: name the client to leave out as well, with --without"
        )
    if misfits:
        raise ConfigError(f"{misfits[0]} does not go with {asked}")
