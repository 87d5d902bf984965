"""TensorBoard: event files in the run's directory, which ``tensorboard --logdir`` shows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.errors import ConfigError
from fedstill.experiment.tracking.tracker import AboutRun, HowEnded


class TensorBoard:
    """Writes to ``folder``; unset, to ``tensorboard`` in the run's directory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def ready(self) -> None:
        """Raises ConfigError where the extra is not installed."""
        _writer_class()

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Open a new file; the settings are a text. What earlier files have after the last round
        does not count.
        """
        folder = self.folder or run.folder / "tensorboard"
        self._writer: Any = _writer_class()(str(folder), purge_step=last + 1 if last >= 0 else None)
        if last < 0:
            about = {"directory": run.folder.resolve(), **run.versions, **run.settings}
            self._writer.add_text(
                "settings", "\n".join(f"- {key}: {value}" for key, value in about.items()), 0
            )
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round, on disk."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """Close the file; a finished run's summary is a text."""
        if summary:
            self._writer.add_text(
                "summary", "\n".join(f"- {key}: {value}" for key, value in summary.items()), 0
            )
        self._writer.close()


def _writer_class() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        message = "TensorBoard is not installed; get it with: pip install 'fedstill[tensorboard]'"
        raise ConfigError(message) from error
