"""Weights & Biases: a run of its for each of ours; with ``WANDB_MODE=offline``, in files for
``wandb sync``.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from typing import Any

from fedstill.errors import ConfigError
from fedstill.experiment.tracking.tracker import AboutRun, HowEnded

PROJECT = "fedstill"
"""The project, unless ``WANDB_PROJECT`` says another."""


class WandB:
    """Sends settings as the config, the numbers of each round as its history, and the summary."""

    def ready(self) -> None:
        """Raises ConfigError where the extra is not installed, or nobody is logged in and runs are
        to be sent.
        """
        wandb = _wandb()
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError(
                "Weights & Biases knows no account here: run `wandb login`, or set "
                "WANDB_MODE=offline"
            )

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Begin a run, or go on with the one of the memo."""
        wandb = _wandb()
        about = {"directory": str(run.folder.resolve()), "versions": dict(run.versions)}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=memo.setdefault("run", uuid.uuid4().hex[:12]),
            name=run.name,
            group=run.shared_name,
            config={**run.settings, "fedstill": about},
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        return max(last, int(self._run.step) - 1)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round, with the round as their step."""
        self._run.log(dict(numbers), step=round, commit=True)

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """The summary of a finished run; and how the run ended."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0 if how == "finished" else 1)


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "Weights & Biases is not installed; get it with: pip install 'fedstill[wandb]'"
        ) from error
