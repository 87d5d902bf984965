"""Experiment trackers, which receive the numbers of each round; their errors do not stop a run."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, Interrupted, UnknownName, cut_reason
from fedstill.core.files import flat, in_shell, read_file, write_whole
from fedstill.core.process_settings import set_environment
from fedstill.running.journal import JOURNAL, VERSIONS, Event, read_journal
from fedstill.running.numbers import ROUND_AXES, LearningRates, Numbers, RunNumbers

log = logging.getLogger("fedstill.track")

# The protocol of trackers, and the records that they receive.


HowEnded = Literal["finished", "stopped", "failed"]
"""The way in which a run ended; stopped and failed runs can be resumed."""


@dataclass(frozen=True)
class AboutRun:
    """A description of a run: its directory, its name, the common name of all seeds, and its
    settings by dotted key.

    ``versions``: the versions of fedstill, torch, NumPy and Python.
    """

    folder: Path
    name: str
    shared_name: str
    seed: int
    settings: Mapping[str, Any]
    versions: Mapping[str, str]


class Tracker(Protocol):
    """Receives the numbers of a run. If a tracker raises an exception, the run prints a warning and
    continues without it.
    """

    def ready(self) -> None:
        """Called before training; raises ConfigError if the tracker cannot be used."""

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Called when the run starts or resumes. Returns the last round that the tracker already
        has, or -1; these rounds are not sent again.

        ``memo``: initially empty. Its content is stored in the run's directory, and is available
        when the run is resumed. ``last``: the last round that the tracker has accepted, or -1.
        """

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Called with the numbers of a finished round; round 0 is before training."""

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """Called when the run ends; ``summary`` is empty unless the run has finished."""


Track = str | Tracker | Sequence[str | Tracker]
"""The trackers of a run: names (``"mlflow"``, or several separated by commas), trackers of your
own, or a list of both.
"""


# MLflow: one MLflow run for each run, on the server or in the database of ``MLFLOW_TRACKING_URI``.


EXPERIMENT = "fedstill"
"""The default experiment; ``MLFLOW_EXPERIMENT_NAME`` overrides it."""

MOST_METRICS = 1000
MOST_PARAMS = 100
"""The largest number of metrics and parameters in a request."""

LONGEST_PARAM = 6000
"""The largest number of characters in the value of a parameter."""

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

MARK = "seconds"
"""A number that every round has. It is sent last, so it marks completely stored rounds."""


class MLflow:
    """Sends settings as parameters, the numbers of each round as metrics, and the location of the
    run as tags.
    """

    def ready(self) -> None:
        """Create the experiment if necessary; raises ConfigError if the extra is not installed."""
        self._experiment(_client())

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Start a run, or continue the run in the memo; MLflow reports its last stored round."""
        self._client = _client(memo.get("uri"))
        if "run" in memo:
            self._run = memo["run"]
            self._client.update_run(self._run, status="RUNNING")
            history = self._client.get_metric_history(self._run, MARK)
            return max((metric.step for metric in history), default=last)
        self._create(run, memo)
        self._send_settings(run.settings)
        return last

    def _create(self, run: AboutRun, memo: dict[str, str]) -> None:
        """Create a run and store its id in the memo."""
        place = str(run.folder.resolve())
        tags = {f"fedstill.version.{name}": version for name, version in run.versions.items()}
        tags |= {
            "fedstill.directory": place,
            "fedstill.seed": str(run.seed),
            "fedstill.runs": run.shared_name,
        }
        tags["mlflow.note.content"] = f"Run directory: {place}"
        experiment = self._experiment(self._client)
        created = self._client.create_run(experiment, run_name=run.name, tags=tags)
        self._run = created.info.run_id
        memo["run"] = self._run
        uri = self._client.tracking_uri
        if uri.startswith(("sqlite:", "file:")):
            # A server's address may contain a password, so it is read from the environment.
            memo["uri"] = uri

    def _send_settings(self, settings: Mapping[str, Any]) -> None:
        param = importlib.import_module("mlflow.entities").Param
        params = [param(_legal(key), str(v)[:LONGEST_PARAM]) for key, v in settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a round as metrics, with the round as the step."""
        metric = importlib.import_module("mlflow.entities").Metric
        milliseconds = int(1000 * time.time())
        ordered = sorted(numbers.items(), key=lambda item: item[0] == MARK)
        metrics = [metric(_legal(name), value, milliseconds, round) for name, value in ordered]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """Report the end of the run. Numbers of the summary become metrics, and texts tags."""
        entities = importlib.import_module("mlflow.entities")
        milliseconds = int(1000 * time.time())
        tags = []
        metrics = []
        for key, value in summary.items():
            if isinstance(value, str):
                tags.append(entities.RunTag(f"summary.{_legal(key)}", value))
            else:
                name = f"summary/{_legal(key)}"
                metrics.append(entities.Metric(name, value, milliseconds, 0))
        self._client.log_batch(self._run, metrics=metrics, tags=tags)
        self._client.set_terminated(self._run, STATUS[how])

    def _experiment(self, client: Any) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(client.create_experiment(name))


def _client(uri: str | None = None) -> Any:
    """MLflow's client. By default, a server that does not respond is tried only twice, instead of
    for minutes.
    """
    if "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ:
        set_environment({"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"})
    try:
        mlflow = importlib.import_module("mlflow")
    except ImportError as error:
        raise ConfigError("MLflow is not installed; run: pip install 'fedstill[mlflow]'") from error
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return mlflow.MlflowClient(tracking_uri=uri)


def _legal(name: str) -> str:
    """A name in which characters that MLflow rejects are replaced.

    >>> _legal("class_accuracy/t-shirt, top")
    'class_accuracy/t-shirt_ top'
    """
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)[:250]


# TensorBoard: event files in the run's directory, for ``tensorboard --logdir``.


class TensorBoard:
    """Writes event files to ``folder``; the default is ``tensorboard`` in the run's directory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def ready(self) -> None:
        """Raise ConfigError if the extra is not installed."""
        _writer_class()

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Open a new file, and write the settings as text. Later rounds in earlier files are
        superseded.
        """
        folder = self.folder or run.folder / "tensorboard"
        purge_step = None
        if last >= 0:
            purge_step = last + 1
        self._writer: Any = _writer_class()(str(folder), purge_step=purge_step)
        if last < 0:
            about = {"directory": run.folder.resolve(), **run.versions, **run.settings}
            self._writer.add_text(
                "settings", "\n".join(f"- {key}: {value}" for key, value in about.items()), 0
            )
        return last

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round to disk."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """Write the summary of a finished run as text, and close the file."""
        if summary:
            self._writer.add_text(
                "summary", "\n".join(f"- {key}: {value}" for key, value in summary.items()), 0
            )
        self._writer.close()


def _writer_class() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        message = "TensorBoard is not installed; run: pip install 'fedstill[tensorboard]'"
        raise ConfigError(message) from error


# Weights & Biases: one W&B run for each run. With ``WANDB_MODE=offline``, it is stored in files for
# ``wandb sync``.


PROJECT = "fedstill"
"""The default project; ``WANDB_PROJECT`` overrides it."""


class WandB:
    """Sends settings as the config, the numbers of each round as the history, and the summary."""

    def ready(self) -> None:
        """Raise ConfigError if the extra is not installed, or if runs should be uploaded without a
        login.
        """
        wandb = _wandb()
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError(
                "Weights & Biases is not logged in: run `wandb login`, or set WANDB_MODE=offline"
            )

    def begin(self, run: AboutRun, memo: dict[str, str], last: int) -> int:
        """Start a run, or continue the one in the memo."""
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
        """Send the numbers of a round, with the round as the step."""
        self._run.log(dict(numbers), step=round, commit=True)

    def end(self, how: HowEnded, summary: Mapping[str, float | str]) -> None:
        """Send the summary of a finished run, and report the end of the run."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=int(how != "finished"))


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "Weights & Biases is not installed; run: pip install 'fedstill[wandb]'"
        ) from error


# The numbers of each round, read from the events of a journal.


GATHERED = frozenset({"initial", "round", "client", "measure"})
"""The events that contain a round's numbers."""


@dataclass(frozen=True)
class FinishedRound:
    """The numbers of a finished round by name; round 0 is before training."""

    round: int
    numbers: dict[str, float]


class RoundNumbers:
    """Reads the events of a journal in order, and returns the numbers of a round after its last
    event.

    These are the numbers of the whole federation in ``fedstill.load_runs``, by metric. The accuracy
    of a class is called ``class_accuracy/NAME``. Numbers of further models are prefixed with the
    name of the model, for example ``client 3/accuracy``. settings: the run's settings by dotted
    key, which determine the learning rates.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._learning_rates = LearningRates({})
        self._classes: list[str] = []
        self._events: list[Event] = []

    def finished_round(self, event: Event) -> FinishedRound | None:
        """Read an event; return the numbers of a round if the event is its last one."""
        kind = event["event"]
        if kind == "start":
            self._classes = event["classes"]
            self._learning_rates = LearningRates.of(self._settings, event)
        if kind in GATHERED:
            self._events.append(event)
        if kind not in ("initial", "round"):
            return None
        number = event.get("round", 0)
        clients = [event for event in self._events if event["event"] == "client"]
        run_numbers = RunNumbers.of(self._events, len(self._classes))
        run_numbers.add(self._learning_rates.numbers(clients))
        numbers: dict[str, float] = {}
        for column in run_numbers.columns():
            numbers.update(self._scalars(column, number))
        self._events = []
        return FinishedRound(number, numbers)

    def _scalars(self, column: Numbers, number: int) -> Iterator[tuple[str, float]]:
        """The names and values that trackers receive for one metric in a round."""
        name = column.metric.removeprefix("others/")
        axes = column.coordinates.keys()
        of_classes = name.endswith("class_accuracy") and axes == {"round", "class"}
        if axes != ROUND_AXES and not of_classes:
            return
        for index in np.flatnonzero(column.coordinates["round"] == number):
            full_name = name
            if of_classes:
                full_name = f"{name}/{self._classes[column.coordinates['class'][index]]}"
            yield full_name, float(column.values[index])


# The trackers of a run. They receive every event of its journal. Their errors become warnings.


TRACKERS: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
"""The built-in trackers by name."""

MEMO = "trackers.json"
"""The file in a run's directory with the last round and the memo of each tracker."""

Named = dict[str, Tracker]
"""Trackers by name; a tracker of your own has the name of its class."""


def ready_trackers(track: Track) -> Named:
    """The trackers in ``track``, ready for a run.

    Raises UnknownName, or ConfigError if a tracker cannot be used, or two have the same name.
    """
    trackers: Named = {}
    for name, tracker in _named_trackers(track):
        if name in trackers:
            raise ConfigError(
                f"track: two trackers have the name {name}; give each of them a class of its own"
            )
        tracker.ready()
        trackers[name] = tracker
    return trackers


def _named_trackers(track: Track) -> Iterator[tuple[str, Tracker]]:
    """Pairs of a name and a tracker."""
    if isinstance(track, str):
        for name in filter(None, map(str.strip, track.split(","))):
            if name not in TRACKERS:
                raise UnknownName("tracker", name, TRACKERS)
            yield name, TRACKERS[name]()
        return
    if isinstance(track, Iterable):
        for entry in track:
            yield from _named_trackers(entry)
        return

    methods = ("ready", "begin", "log", "end")
    if isinstance(track, type) or not all(hasattr(track, name) for name in methods):
        raise ConfigError(
            f"track: {track!r} is neither a name ({', '.join(TRACKERS)}) nor has ready, begin, log "
            "and end"
        )
    yield type(track).__name__, track


def behind(folder: Path, settings: Settings, trackers: Named) -> bool:
    """Whether a finished run still has to be sent to one of its trackers, or to one of
    ``trackers``.
    """
    return Tracking(folder, settings, trackers).behind


def send_late(
    folder: Path, settings: Settings, trackers: Named, summary: Mapping[str, Any]
) -> None:
    """Send missing rounds to the trackers of a finished run and to ``trackers``."""
    tracking = Tracking(folder, settings, trackers)
    if tracking.behind:
        with tracking:
            for event in read_journal(folder / JOURNAL):
                tracking.on_event(event)
            tracking.finished(summary)


class Tracking:
    """The trackers of a run: ``trackers``, and those from before the run was stopped.

    As a context manager, it reports the end of the run to the trackers, even after an exception.
    """

    def __init__(self, folder: Path, settings: Settings, trackers: Named) -> None:
        self.folder = folder
        self.settings = settings
        self._memos = _read(folder / MEMO)
        earlier = {name: TRACKERS[name]() for name in self._memos if name in TRACKERS}
        self._trackers: Named = {**earlier, **trackers}
        self._active: Named = {}
        self._numbers = RoundNumbers(flat(settings.tree))
        self._summary: Mapping[str, Any] = {}

    def on_event(self, event: Event) -> None:
        """Read an event of the journal, and send a round's numbers after its last event."""
        if not self._trackers:
            return
        if event["event"] == "start":
            self._begin(event)
        finished = self._numbers.finished_round(event)
        if finished is None:
            return
        for name, tracker in list(self._active.items()):
            memo = self._memos[name]
            if finished.round <= memo["round"]:
                continue
            with self._errors_as_warnings(name, f"round {finished.round}"):
                tracker.log(finished.round, finished.numbers)
                memo["round"] = finished.round
                self._write()

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Mark the run as finished."""
        self._summary = summary

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        status = _status(kind)
        summary: dict[str, float | str] = {}
        if status == "finished":
            values = self._summary.items()
            summary = {key: v for key, v in values if isinstance(v, (int, float, str))}
        for name, tracker in list(self._active.items()):
            with self._errors_as_warnings(name, "the run's end"):
                tracker.end(status, summary)
                self._memos[name]["how"] = status
        if self._active:
            self._write()

    @property
    def behind(self) -> bool:
        """Whether a tracker has not yet received the end of the finished run."""
        return any(self._memos.get(name, {}).get("how") != "finished" for name in self._trackers)

    def _begin(self, start: Event) -> None:
        run = self._about_run(start)
        for name, tracker in self._trackers.items():
            memo = self._memos.setdefault(name, {"round": -1, "memo": {}})
            with self._errors_as_warnings(name, "the run's beginning"):
                last_round = tracker.begin(run, memo["memo"], memo["round"])
                memo["round"] = max(memo["round"], last_round)
                memo["how"] = "running"
                self._active[name] = tracker
        self._write()

    def _about_run(self, start: Event) -> AboutRun:
        folder = self.folder.resolve()  # the name of "." is empty
        name = folder.name
        shared_name = self.settings.named.method.label
        if name == f"seed{self.settings.seed}":
            # In a comparison, all seeds of a group are in one folder.
            shared_name = folder.parent.name
            name = f"{shared_name}, seed {self.settings.seed}"
        return AboutRun(
            folder=self.folder,
            name=name,
            shared_name=shared_name,
            seed=self.settings.seed,
            settings=flat(self.settings.tree),
            versions={key: str(start[key]) for key in VERSIONS if key in start},
        )

    def _write(self) -> None:
        write_whole(self.folder / MEMO, json.dumps(self._memos, indent=2).encode())

    @contextmanager
    def _errors_as_warnings(self, name: str, content: str) -> Iterator[None]:
        """A context that turns an error of a tracker into a warning, and then stops the tracker.

        content: a description of the data that is sent.
        """
        try:
            yield
        except Exception as error:
            self._active.pop(name, None)
            reason = cut_reason(f"{type(error).__name__}: {error}")
            command = f"`fedstill resume {in_shell(self.folder)}`"
            if name not in TRACKERS:
                command = f"fedstill.resume({str(self.folder)!r}, track=...) with the same tracker"
            todo = f"the run continues without it; {command} sends missing rounds"
            log.warning("%s did not accept %s (%s): %s", name, content, reason, todo)


def _status(error: type[BaseException] | None) -> HowEnded:
    """The status of a run that ended with this error, or without an error."""
    if error is None:
        return "finished"
    if issubclass(error, (Interrupted, KeyboardInterrupt)):
        return "stopped"
    return "failed"


def _read(path: Path) -> dict[str, Any]:
    """The memos of all trackers. Without a readable file, there are no memos, and everything is
    sent again.
    """
    try:
        memos = json.loads(read_file(path))
        return {
            str(n): {"round": int(m["round"]), "memo": dict(m["memo"]), "how": m.get("how")}
            for n, m in memos.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): everything is sent to trackers again", path, error)
        return {}
