"""The runner: starts or resumes a run in its directory, and has it driven to its end."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.data.examples import Dataset
from fedstill.engines.flower.messages import require_flower
from fedstill.errors import ConfigError
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.of_data import refuse_other_data, with_data
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.settle import settle
from fedstill.experiment.on_flower.simulated import simulate
from fedstill.experiment.on_flower.submitted import elsewhere, refuse_calls, submit
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.progress import OnRound, Progress, Quiet
from fedstill.experiment.run_directory.begun import refuse_changed, refuse_lost, settings_of
from fedstill.experiment.run_directory.claim import HOLDER, locked, new_directory, refuse_used
from fedstill.experiment.run_directory.result import Result
from fedstill.experiment.run_directory.split_file import begun_split
from fedstill.experiment.running.begun_sums import begun_sums
from fedstill.experiment.running.cautions import say_cautions
from fedstill.experiment.running.driver import Driver
from fedstill.experiment.tracking.tracker import Track
from fedstill.experiment.tracking.tracking import behind, send_late, wanted
from fedstill.files import named_path, sweep, write_whole
from fedstill.keys import drawing_from, seed_for
from fedstill.records import SERVER

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    data: Dataset | None = None,
    watch: Progress | None = None,
    grid: Grid | None = None,
    debug: bool = False,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    track: Track = (),
) -> Result:
    """Run an experiment in a new directory (``out``, or one under ``runs/``) to its end.

    ``data``: a data set in memory, instead of the one that the config names. ``grid``: for
    ``engine = "flower"``, the Flower grid whose nodes are the clients; without one they work in
    this process. ``debug``: the first client that fails ends the run with ClientFailed, its own
    exception chained, whatever ``clients.failures`` says. ``overwrite``: what fedstill wrote in
    ``out`` before is deleted, when everything else has been checked.
    ``on_round``: called after every round with what the journal says of it; what it raises ends the
    run, and ``resume`` goes on with that round measured again. ``track``: trackers that are told of
    every round: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, or your own
    (``experiment.tracking.tracker.Tracker``); one that fails is a warning. Raises a ConfigError
    before anything is trained, RunExists for a directory that holds something, ClientFailed,
    TooFewReplies, Diverged or MethodFailed while it runs: then the directory keeps the last good
    state.
    """
    settings = settle(experiment if data is None else with_data(experiment, data))
    _refuse_debug(debug, settings)
    where = elsewhere(settings) if grid is None else ""
    if data is not None and where == "federation":
        raise ConfigError(
            "data in memory stay in this process: name data that the server has, or leave "
            "federation out"
        )
    if settings.engine == "flower":
        require_flower()  # before there is a directory
    if where == "federation":
        refuse_calls(on_round, track)
    trackers = wanted(track)
    prepared = prepare(settings, data)
    say_cautions(prepared)
    folder = new_directory(settings, named_path(out) if out else None, overwrite)
    if where == "ray":
        again = partial(
            run, experiment, folder, data, watch, debug=debug, on_round=on_round, track=track
        )
        return simulate(settings, data, folder, lambda ray: again(grid=ray))
    if where:
        return submit(settings, folder, False, watch or Quiet())
    with locked(folder):
        refuse_used(folder)
        sweep(folder)
        write_whole(folder / "config.toml", prepared.settings.toml.encode())
        driver = Driver(prepared, folder, watch or Quiet(), grid, debug, on_round, trackers)
        with closing(driver), drawing_from(seed_for(settings.seed, 0, 0, SERVER, "run")):
            return driver.go()


def resume(
    directory: Path | str,
    data: Dataset | None = None,
    watch: Progress | None = None,
    grid: Grid | None = None,
    debug: bool = False,
    on_round: OnRound | None = None,
    track: Track = (),
    **live: Any,
) -> Result:
    """Go on with a run from its last whole checkpoint, to the same bits; a finished run gives its
    result at once.

    ``debug``, ``on_round``, ``track``: as for ``run``; trackers with a name that the run had go on
    by themselves.
    ``live``: ``method``, ``model`` or ``partition``, the class, network or function that the run
    was given in Python, where another process began it. Raises CorruptFile if it is another one,
    and for a run whose checkpoints are gone.
    """
    folder = named_path(directory)
    refuse_changed(folder)
    settings = settings_of(folder, **live)
    refuse_lost(folder)
    if data is not None:
        refuse_other_data(data)
    _refuse_debug(debug, settings)
    if grid is None and elsewhere(settings) and not (folder / "summary.json").is_file():
        if elsewhere(settings) == "ray":
            again = partial(
                resume, folder, data, watch, debug=debug, on_round=on_round, track=track
            )
            return simulate(settings, data, folder, lambda ray: again(grid=ray))
        refuse_calls(on_round, track)
        return submit(settings, folder, True, watch or Quiet())
    trackers = wanted(track)
    # which one that was killed leaves
    done = (folder / "summary.json").is_file() and not (folder / HOLDER).exists()
    if done and not behind(folder, settings, trackers):
        return Result.of(folder)  # nothing is written, so that the folder may be read only
    with locked(folder):
        if (folder / "summary.json").is_file():
            result = Result.of(folder)
            send_late(folder, settings, trackers, result.summary)
            return result
        sweep(folder)
        prepared = prepare(settings, data, begun_split(folder), begun_sums(folder, settings))
        with closing(
            Driver(prepared, folder, watch or Quiet(), grid, debug, on_round, trackers)
        ) as driver:
            return driver.go()


def _refuse_debug(debug: bool, settings: Settings) -> None:
    if debug and settings.engine == "flower":
        raise ConfigError(
            "debug: clients on Flower keep their tracebacks; debug a run with engine = 'serial'"
        )
