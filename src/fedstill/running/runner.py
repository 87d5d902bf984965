"""The runner: starts or resumes a run in its directory, and has it driven to its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.config.data_table import DEFAULT_MODELS
from fedstill.config.experiment import Experiment, check_is_experiment
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.config.validation import wrong_value
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.fields import value_text
from fedstill.core.files import named_path, sweep
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.process_settings import process_settings
from fedstill.core.records import SERVER
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_python
from fedstill.data.sources.in_memory import is_by_client
from fedstill.running.directory import (
    HOLDER_FILE,
    check_used,
    locked,
    new_directory,
    settings_of,
    trust_run,
    write_config,
)
from fedstill.running.driver import Driver, remote_engine, server_location
from fedstill.running.journal import STOP_REASON, check_checkpoints, check_config, is_finished
from fedstill.running.preparation import prepare, prepare_again, reading_options
from fedstill.running.recording import OnRound, Progress, Quiet
from fedstill.running.result import Result
from fedstill.running.setting_warnings import log_warnings
from fedstill.running.trackers import Track, behind, ready_trackers, send_late

if TYPE_CHECKING:
    from flwr.serverapp import Grid


log = logging.getLogger("fedstill.resume")
log_of_runs = logging.getLogger("fedstill.run")

# An experiment on data in memory. The data determine the model, the clients and the split, unless
# the experiment sets them.


OWNER = "client"
"""The name of the column of owners in data that combine the data sets of clients."""


UNNAMED = "data"
"""The name of data in memory, unless the experiment sets one."""


def dataset_of(experiment: Experiment, data: object) -> Dataset:
    """Data in memory as a data set, read as the experiment's ``[data]`` says.

    Raises ConfigError for objects that are no data, and for a column of owners in data by client,
    and DataError as ``from_python`` does.
    """
    if isinstance(data, Dataset):
        return data
    check_is_experiment(experiment)
    # The config of a run on such data has the column that with_data sets.
    column = experiment.table("partition").get("column", OWNER)
    if is_by_client(data) and column != OWNER:
        raise wrong_value(
            "partition.column",
            f"= {value_text(column)}, but the keys of data are the clients",
            "remove it",
        )
    name = experiment.table("data").get("name", UNNAMED)
    return read_in_memory(resolve(experiment.with_values({"data.name": name}, "Python")), data)


def read_in_memory(settings: Settings, data: object) -> Dataset:
    """Data in memory as a data set, read as the settings of a run say."""
    if isinstance(data, Dataset):
        return data
    options = reading_options(settings)
    del options["folder"]
    if is_by_client(data):
        options.pop("owner", None)  # with_data has set a column for the run's config
    return from_python(settings.data.name, data, **options)


def with_data(experiment: Experiment, data: Dataset) -> Experiment:
    """The experiment with the data's name; if unset, a model for their kind, and their owners as
    clients.
    """
    check_is_experiment(experiment)
    values: dict[str, Any] = {"data.name": data.name}
    if data.about.kind != "image" and "name" not in experiment.table("model"):
        values["model.name"] = DEFAULT_MODELS[data.about.kind]
    if data.about.owners and "kind" not in experiment.table("partition"):
        values["partition.kind"] = "column"
        values["partition.column"] = OWNER
        if data.test.owners is not None:
            values["partition.own_test"] = "column"
        if "clients" not in experiment.table("topology"):
            values["topology.clients"] = len(data.about.owners)
    return experiment.with_values(values, "Python")


# Running and resuming an experiment.


_drawing = threading.RLock()
"""Held by the thread that prepares and drives a run, as runs seed torch's global generator, which
all threads share.
"""


@contextmanager
def _one_run_at_a_time() -> Iterator[None]:
    """Wait until no other thread of this process prepares or drives a run."""
    if not _drawing.acquire(blocking=False):
        log_of_runs.warning(
            "another thread of this process is executing a run, and this run waits for it; "
            "fedstill.compare executes runs at the same time, in processes"
        )
        _drawing.acquire()
    try:
        yield
    finally:
        _drawing.release()


@process_settings()
def run(  # noqa: PLR0913 - the options of the command run
    experiment: Experiment,
    out: Path | str | None = None,
    data: object = None,
    *,
    watch: Progress | None = None,
    grid: Grid | None = None,
    debug: bool = False,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    track: Track = (),
) -> Result:
    """Run an experiment in a new directory (``out``, or one under ``runs/``) to its end.

    ``data``: a data set in memory, instead of the one that the config names; or other data that
    ``from_python`` takes, which are read with the options in ``[data]``. ``grid``: for ``engine =
    "flower"``, the Flower grid whose nodes are the clients; without one, clients work in this
    process. ``debug``: the first failing client ends the run with ClientFailed, chained to its own
    exception, regardless of ``clients.failures``. ``overwrite``: delete the files of an earlier run
    in ``out`` after all other checks have passed.
    ``on_round``: called after every round with its event in the journal. An exception in it ends
    the run; ``resume`` continues and measures that round again. ``track``: trackers that receive
    every round: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, or your own
    (``running.trackers.Tracker``). A failing tracker causes a warning. Raises ConfigError before
    training, RunExists if the directory is not empty, and ClientFailed, TooFewReplies, Diverged or
    MethodFailed during the run. The directory then keeps the last good state.
    """
    dataset = None
    configured = experiment
    if data is not None:
        dataset = dataset_of(experiment, data)
        configured = with_data(experiment, dataset)
    settings = resolve(configured)
    for table in settings.packages.values():
        table.check_new_run()
    _check_debug(debug, settings)
    location = "here"
    if grid is None:
        location = server_location(settings)
    remote = remote_engine(settings)
    if remote is not None:
        remote.require()  # before there is a directory
    if location == "federation":
        _check_in_federation(data, on_round, track)
    trackers = ready_trackers(track)
    with _one_run_at_a_time():
        prepared = prepare(settings, dataset)
        log_warnings(prepared)
    requested_folder = None
    if out:
        requested_folder = named_path(out)
    folder = new_directory(settings, requested_folder, overwrite)
    if remote is not None and location == "ray":
        again = partial(
            run,
            experiment,
            folder,
            dataset,
            watch=watch,
            debug=debug,
            on_round=on_round,
            track=track,
        )
        return remote.simulate(settings, dataset, folder, lambda ray: again(grid=ray))
    if remote is not None and location == "federation":
        return remote.submit(settings, folder, False, watch or Quiet())
    with _one_run_at_a_time(), locked(folder):
        check_used(folder)
        sweep(folder)
        write_config(folder, prepared.settings)
        driver = Driver(prepared, folder, watch or Quiet(), grid, debug, on_round, trackers)
        with closing(driver), drawing_from(seed_for(settings.seed, 0, 0, SERVER, "run")):
            return driver.go()


@process_settings()
def resume(
    directory: Path | str,
    data: object = None,
    *,
    watch: Progress | None = None,
    grid: Grid | None = None,
    debug: bool = False,
    on_round: OnRound | None = None,
    track: Track = (),
    trust_code: bool = False,
    **live: Any,
) -> Result:
    """Continue a run from its last complete checkpoint, with bit-identical results. A finished run
    returns its result at once.

    ``data``, ``debug``, ``on_round``, ``track``: as for ``run``; the run's built-in trackers
    continue without being named.
    ``trust_code``: whether to trust the code that the run names, if the run was not made by this
    user on this machine; without it, such code raises UntrustedCode.
    ``live``: ``method``, ``model`` or ``partition``, the class, network or function that the run
    was given in Python, where another process began it. Raises CorruptFile if it is another one,
    and for a run whose checkpoints are gone.
    """
    folder = named_path(directory)
    check_config(folder)
    if trust_code:
        trust_run(folder)
    settings = settings_of(folder, **live)
    check_checkpoints(folder)
    dataset = None
    if data is not None:
        dataset = read_in_memory(settings, data)
    _check_debug(debug, settings)
    location = server_location(settings)
    remote = remote_engine(settings)
    unfinished = not is_finished(folder)
    if remote is not None and grid is None and unfinished:
        if location == "ray":
            again = partial(
                resume, folder, dataset, watch=watch, debug=debug, on_round=on_round, track=track
            )
            return remote.simulate(settings, dataset, folder, lambda ray: again(grid=ray))
        if location == "federation":
            _check_in_federation(data, on_round, track)
            return remote.submit(settings, folder, True, watch or Quiet())
    trackers = ready_trackers(track)
    # A killed process leaves this file behind.
    is_complete = is_finished(folder) and not (folder / HOLDER_FILE).exists()
    if is_complete and not behind(folder, settings, trackers):
        result = Result.of(folder)  # nothing is written, so that the folder may be read only
        _say_if_stopped_early(result)
        return result
    with _one_run_at_a_time(), locked(folder):
        if is_finished(folder):
            result = Result.of(folder)
            send_late(folder, settings, trackers, result.summary)
            return result
        sweep(folder)
        try:
            prepared = prepare_again(settings, folder, dataset)
        except UnknownName as error:
            if error.name != settings.data.name:
                raise
            raise ConfigError(
                f"{error}; if the run was given its data in Python, pass them again: "
                f"fedstill.resume({str(folder)!r}, data=...)"
            ) from error
        with closing(
            Driver(prepared, folder, watch or Quiet(), grid, debug, on_round, trackers)
        ) as driver:
            return driver.go()


def _say_if_stopped_early(result: Result) -> None:
    summary = result.summary
    if STOP_REASON in summary:
        log.warning(
            "%s stopped early in round %d of %d, and does not go on: %s",
            result.directory,
            summary["stopped_in_round"],
            summary["rounds"],
            summary[STOP_REASON],
        )


def _check_in_federation(data: object, on_round: OnRound | None, track: Track) -> None:
    """Raise ConfigError for data, callbacks and trackers of this process: the runs of a federation
    are in another one.
    """
    if data is not None:
        raise ConfigError(
            "data in memory stay in this process: name data that the server has, or leave "
            "federation out"
        )
    for subject, argument in (("on_round is", on_round), ("trackers are", track)):
        if argument:
            raise ConfigError(
                f"{subject} called in the process of the run, but a federation's run is in another "
                "process"
            )


def _check_debug(debug: bool, settings: Settings) -> None:
    if debug and settings.engine == "flower":
        raise ConfigError(
            "debug: clients on Flower keep their tracebacks; debug a run with engine = 'serial'"
        )
