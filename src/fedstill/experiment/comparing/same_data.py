"""Whether data are still those with which finished runs began, where others are to be done beside
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.data.examples import Dataset, examples_digest
from fedstill.errors import ConfigError
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import how_read, read_data, with_pixels
from fedstill.experiment.preparing.public_data import NOISE, TRAIN
from fedstill.experiment.preparing.sharing import divided


class DataNow:
    """The data of runs that are left to do, as they are by now; each set is read once, when it is
    first asked for.
    """

    def __init__(self, left: Sequence[Settings]) -> None:
        self._named = {_name(settings) for settings in left}
        self._read: dict[str, tuple[Dataset, dict[str, str]]] = {}

    def differ(self, settings: Settings, start: Mapping[str, Any]) -> bool:
        """Whether a finished run has the same data set as one that is left, and began with other
        examples than it has now, as its event ``start`` says.

        Never of data that cannot be read, which the run that is left will say; nor where the event
        has no SHA-256 of
        examples: of real sites' own, of features that a backbone gives, and of runs of earlier
        versions.
        """
        began = start.get("examples_sha256")
        if not isinstance(began, Mapping) or _name(settings) not in self._named:
            return False
        try:
            return any(began.get(split) != now for split, now in self._seals(settings).items())
        except ConfigError:
            return False

    def _seals(self, settings: Settings) -> dict[str, str]:
        """The SHA-256 of examples by split; of public ones, too, where they come from other
        data.
        """
        if (name := _name(settings)) not in self._read:
            data = read_data(settings)
            splits = {"train": data.train, "test": data.test}
            self._read[name] = (
                data,
                {split: examples_digest(each) for split, each in splits.items()},
            )
        data, seals = self._read[name]
        if settings.data.public_from in (TRAIN, NOISE):
            return seals
        public = divided(settings, with_pixels(data, settings.data)).public
        return seals if public is None else {**seals, "public": examples_digest(public)}


def _name(settings: Settings) -> str:
    return repr((settings.data.name, how_read(settings)))
