"""MLflow: a run of its for each of ours, on the server or in the database that
``MLFLOW_TRACKING_URI`` names.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from fedstill.errors import ConfigError
from fedstill.experiment.tracking.tracker import AboutRun, HowEnded

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
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
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
