"""What the sums of real sites came to when a run began, as its journal says."""

from __future__ import annotations

from pathlib import Path

from fedstill.errors import CorruptFile
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.moments import Moments
from fedstill.experiment.run_directory.journal import read_journal


def begun_sums(folder: Path, settings: Settings) -> Moments | None:
    """The mean and spread by which a run's examples have been standardised; None where sites have
    sent no sums (yet).

    Raises CorruptFile for a first event that does not have them.
    """
    journal = folder / "journal.jsonl"
    if settings.data.standardise != "summed" or not settings.on_sites or not journal.is_file():
        return None
    first = read_journal(journal, 1)
    try:
        mean, std = (
            (tuple(map(float, first[0]["inputs"][key])) for key in ("mean", "std"))
            if first
            else ((), ())
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{journal}: the start event's inputs are malformed: {error}") from error
    return Moments(mean, std) if mean else None
