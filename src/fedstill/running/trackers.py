"""Trackers: their protocol, and TensorBoard, MLflow and Weights & Biases by it."""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fedstill.core.errors import ConfigError
from fedstill.core.process_settings import set_environment

# What a tracker is told of a run, and by which calls: one protocol for all of them.


HowEnded = Literal["finished", "stopped", "failed"]
"""How a run ended: stopped runs, and failed ones, may go on later."""


@dataclass(frozen=True)
class AboutRun:
    """What a run is: its directory, its name, the name it shares with its other seeds, its settings
    by dotted key.

    ``versions``: of fedstill, torch, NumPy and Python.
    """

    folder: Path
    name: str
    shared_name: str
    seed: int
    settings: Mapping[str, Any]
    versions: Mapping[str, str]


class Tracker(Protocol):
    """Takes what a run says. Whatever it raises is one warning: the run goes on without it."""

    def ready(self) -> None:
        """Called before anything is trained; raises ConfigError if the tracker cannot work here."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """The run begins, or goes on; the last round that the tracker has, or -1: it is sent none
        of these again.

        ``memo``: empty at first. What the tracker puts there is kept in the run's directory, and is
        there when the run goes on. ``last``: the last round that it took before, -1 if none.
        """

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round that is done; round 0 is before training."""

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """The run ended; ``summary`` is empty unless it is finished."""


Track = str | Tracker | Sequence[str | Tracker]
"""Which trackers: names (``"mlflow"``, or several with commas), trackers of your own, or a list of
both.
"""


# MLflow: a run of its for each of ours, on the server or in the database that
# ``MLFLOW_TRACKING_URI`` names.


EXPERIMENT = "fedstill"
"""The experiment, unless ``MLFLOW_EXPERIMENT_NAME`` says another."""

MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000
"""What one request may hold, and a parameter's text."""

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

MARK = "seconds"
"""The number that every round has, and that is sent last: a round with it is there whole."""


class MLflow:
    """Sends settings as parameters, the numbers of each round as metrics, and where the run is as
    tags.
    """

    def ready(self) -> None:
        """Make the experiment, if it is not there; raises ConfigError where the extra is not
        installed.
        """
        self._experiment(_client())

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Begin a run, or go on with the one of the memo; the last round is asked of MLflow
        itself.
        """
        self._client = _client(memo.get("uri"))
        if "run" in memo:
            self._run = memo["run"]
            self._client.update_run(self._run, status="RUNNING")
            return max(
                (m.step for m in self._client.get_metric_history(self._run, MARK)), default=last
            )
        place = str(run.folder.resolve())
        tags = {f"fedstill.version.{name}": version for name, version in run.versions.items()}
        tags |= {
            "fedstill.directory": place,
            "fedstill.seed": str(run.seed),
            "fedstill.runs": run.shared_name,
        }
        tags["mlflow.note.content"] = f"The run's directory: {place}"
        made = self._client.create_run(self._experiment(self._client), run_name=run.name, tags=tags)
        self._run = memo["run"] = made.info.run_id
        if (uri := self._client.tracking_uri).startswith(("sqlite:", "file:")):
            # a server's address is taken from the environment: it may hold a password
            memo["uri"] = uri
        param = importlib.import_module("mlflow.entities").Param
        params = [
            param(_legal(key), str(value)[:LONGEST_PARAM]) for key, value in run.settings.items()
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a round as metrics, with the round as their step."""
        metric, now = importlib.import_module("mlflow.entities").Metric, int(1000 * time.time())
        ordered = sorted(numbers.items(), key=lambda each: each[0] == MARK)
        every = [metric(_legal(name), value, now, round) for name, value in ordered]
        for first in range(0, len(every), MOST_METRICS):
            self._client.log_batch(self._run, metrics=every[first : first + MOST_METRICS])

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """Say how the run ended; the numbers of a finished run's summary are metrics, its words are
        tags.
        """
        metric, tag = (
            getattr(importlib.import_module("mlflow.entities"), name)
            for name in ("Metric", "RunTag")
        )
        now = int(1000 * time.time())
        words = [tag(f"summary.{_legal(k)}", v) for k, v in summary.items() if isinstance(v, str)]
        numbers = [
            metric(f"summary/{_legal(k)}", v, now, 0)
            for k, v in summary.items()
            if isinstance(v, (int, float))
        ]
        self._client.log_batch(self._run, metrics=numbers, tags=words)
        self._client.set_terminated(self._run, STATUS[how])

    def _experiment(self, client: Any) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        there = client.get_experiment_by_name(name)
        return str(there.experiment_id if there else client.create_experiment(name))


def _client(uri: str | None = None) -> Any:
    """MLflow's client; a server that does not answer is tried twice, not for minutes, if nothing
    else is said.
    """
    if "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ:
        set_environment({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"})
    try:
        mlflow = importlib.import_module("mlflow")
    except ImportError as error:
        raise ConfigError(
            "MLflow is not installed; get it with: pip install 'fedstill[mlflow]'"
        ) from error
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return mlflow.MlflowClient(tracking_uri=uri)


def _legal(name: str) -> str:
    """A name of letters, digits and what else MLflow allows.

    >>> _legal("class_accuracy/t-shirt, top")
    'class_accuracy/t-shirt_ top'
    """
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)[:250]


# TensorBoard: event files in the run's directory, which ``tensorboard --logdir`` shows.


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


# Weights & Biases: a run of its for each of ours; with ``WANDB_MODE=offline``, in files for ``wandb
# sync``.


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
