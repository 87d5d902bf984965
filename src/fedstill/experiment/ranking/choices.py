"""What was chosen for each row of a suite: the scores of all tries on the seeds of choosing, and
the best of them.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.errors import ConfigError
from fedstill.experiment.comparing.recipes import RANKING
from fedstill.files import make_folder, write_whole

TIE = 0.002
"""Scores that are nearer than this are alike: then fewer bytes win, and of these the try that
stands first.
"""


@dataclass(frozen=True)
class Choice:
    """The scores of a row's tries, one by seed each, and the bytes that a run of each sends.

    A run that diverged scores 0, as no accuracy is below it.
    """

    scores: tuple[tuple[float, ...], ...]
    sent: tuple[int, ...]

    @property
    def best(self) -> int:
        """The number of the try that is chosen, counted from 0: the best mean; of those alike, the
        fewest bytes.
        """
        means = [statistics.fmean(own) for own in self.scores]
        alike = [i for i, mean in enumerate(means) if mean >= max(means) - TIE]
        return min(alike, key=lambda i: (self.sent[i], -means[i], i))

    @property
    def table(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {"scores": [list(own) for own in self.scores], "sent": list(self.sent)}


def read_choice(where: str, table: Any, tries: int) -> Choice:
    """A choice from its table; raises ConfigError unless it has as many scores as there are
    tries.
    """
    try:
        scores = tuple(tuple(float(v) for v in own) for own in table["scores"])
        sent = tuple(int(v) for v in table["sent"])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{where}: the scores of its tries cannot be read: {error}") from error
    if (
        (len(scores), len(sent)) != (tries, tries)
        or len({len(own) for own in scores}) != 1
        or not scores[0]
    ):
        raise ConfigError(f"{where}: it has scores of {len(scores)} tries, and there are {tries}")
    return Choice(scores, sent)


def chosen_from(suite: str, version: int, tries: Mapping[str, Sequence[Any]]) -> dict[str, Choice]:
    """What ships with a suite, by row; nothing where nothing was chosen. Raises ConfigError for
    another version's.
    """
    file = resources.files("fedstill.recipes") / RANKING / "chosen" / f"{suite}.toml"
    if not file.is_file():
        return {}
    tree = tomllib.loads(file.read_text(encoding="utf-8"))
    if tree.pop("version", None) != version:
        raise ConfigError(f"recipes/rank/chosen/{suite}.toml is of another version than the suite")
    return {
        row: read_choice(f"{suite}, {row}", table, len(tries[row]))
        for row, table in tree.items()
        if row in tries
    }


def write_choices(
    path: Path, version: int, chosen: Mapping[str, Choice], shown: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write choices to a file, with the fields that each comes to for people to read."""
    tree = {row: {"fields": dict(shown[row]), **choice.table} for row, choice in chosen.items()}
    head = (
        "# Made by `fedstill rank choose`: by row, the score of each try on each seed of choosing, "
        "and bytes sent.\n"
    )
    make_folder(path.parent)
    write_whole(path, (head + tomli_w.dumps({"version": version, **tree})).encode())
