"""Comparisons: several runs at the same time, as many as fit on the machine. The same command
continues a comparison that was stopped.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Lock, Thread
from types import FrameType
from typing import Any, ClassVar

from fedstill.config.experiment import Experiment, check_is_experiment
from fedstill.config.named_tables import read_named, schema_of_name
from fedstill.config.overrides import Origin, check_set_once, overriding_fields
from fedstill.config.resolve import Parts, read_stream, resolve
from fedstill.config.settings import PEERS, Settings
from fedstill.config.validation import keys_of
from fedstill.core import registry
from fedstill.core.errors import ConfigError, CorruptFile, FedstillError, Interrupted, RunExists
from fedstill.core.fields import value_text
from fedstill.core.files import digest, open_to_read
from fedstill.core.user_modules import split_name
from fedstill.data.dataset import Dataset, examples_digest
from fedstill.engines.devices import VISIBLE_CARDS, check_machine
from fedstill.engines.hardware import WORKERS, cores
from fedstill.methods.fit import FIT
from fedstill.methods.ridge import RIDGE
from fedstill.running.client_data import NOISE, TRAIN, scale_data, split_data
from fedstill.running.directory import clear, locked
from fedstill.running.journal import (
    CONFIG,
    JOURNAL,
    STOP_REASON,
    check_journal,
    is_finished,
    read_journal,
    start_of_journal,
)
from fedstill.running.packs import pack_of
from fedstill.running.preparation import read_data, reading_options, with_pixels
from fedstill.running.recording import NoProgress
from fedstill.running.same_run import RunIdentity, why_not_same
from fedstill.running.trackers import ready_trackers

LONGEST_NAME = 255
"""The maximum length of a file name, in bytes."""

KEPT_OF_NAME = 150
"""The number of bytes that are kept of a longer name."""


@dataclass(frozen=True)
class Variant:
    """One run of a comparison: the varied values in words, its settings, its folder, and the run
    that it starts from.
    """

    label: str
    experiment: Experiment
    settings: Settings
    folder: Path
    after: Variant | None = None

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.settings.seed


def variants(
    experiment: Experiment,
    out: Path,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> list[Variant]:
    """The checked runs of a comparison: every method with every combination of the grid's values
    and every seed.

    Raises ConfigError for a grid without values, and for two runs that are the same.
    """
    check_is_experiment(experiment)
    grid = grid or {}
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Collection):
            raise ConfigError(
                f"the grid has {value_text(values)} for {key}, which is no list of values; write "
                f"{{{key!r}: [{value_text(values)}]}}"
            )
        if not len(values):
            raise ConfigError(f"the grid names no values of {key}, e.g. --grid {key}=0.1,1")
    runs = []
    of_methods = [experiment]
    if methods:
        of_methods = with_methods(experiment, methods)
    for of_method in of_methods:
        for combination in itertools.product(*grid.values()):
            setting = dict(zip(grid, combination, strict=True))
            chosen = of_method.with_values(setting, "--grid")
            with_seeds = [with_seed(chosen, seed) for seed in seeds]
            runs += [_variant(seeded_run, setting, out) for seeded_run in with_seeds or [chosen]]
    runs = _with_distinct_folders(_with_distinct_labels(runs), out)
    if len({v.folder for v in runs}) != len(runs):
        raise ConfigError(
            "two runs of this comparison are the same; name each method, value and seed once"
        )
    return runs


# The experiment with each method of a comparison. Methods may differ in topology, stages and number
# of rounds.


@dataclass(frozen=True)
class Shape:
    """The settings that an experiment's method decides: the fields of the topology, the stages
    that have plans, and the number of rounds if the method fixes it.
    """

    topology: frozenset[str]
    stages: frozenset[str]
    rounds: int | None

    @staticmethod
    def of(experiment: Experiment) -> Shape:
        """The shape of an experiment; raises ConfigError for a method or topology that cannot be
        read.
        """
        method = Parts(experiment).method
        table = experiment.table("topology")
        only_kind = {key: value for key, value in table.items() if key == "kind"}
        topology = read_named("topology", only_kind, experiment.base, method.topology)
        fields = keys_of(schema_of_name("topology", topology.name, experiment.base))
        added_stages = [table.get("first"), table.get("last")]
        return Shape(
            topology=frozenset({*fields, "kind", "clients"}),
            stages=frozenset({*method.plans, *(s for s in (FIT, RIDGE) if s in added_stages)}),
            rounds=_fixed_rounds(experiment, topology.name),
        )


def _fixed_rounds(experiment: Experiment, topology: str) -> int | None:
    """The number of rounds of a topology with one exchange; None if the number is free. It is also
    None for an invalid number, which is an error when the run's settings are resolved.
    """
    if topology != PEERS or not isinstance(experiment.rounds, int):
        return None
    tables = Parts(experiment).packages.values()
    if any(table.exchange_each_round for table in tables):
        return None
    _, stream = read_stream(experiment, experiment.rounds)
    return stream.tasks


def with_methods(experiment: Experiment, methods: Sequence[str]) -> list[Experiment]:
    """The experiment with each of the methods.

    A config may have values for one of the methods only: fields of its topology, and plans of its
    stages. They are left out for the others, unless they come from the command line. A method with
    one exchange has one round (with tasks, one for each task), whatever ``rounds`` is.
    """
    experiments = [experiment.with_values({"method": method}, "--methods") for method in methods]
    shapes = list(map(Shape.of, experiments))
    fields = {field for shape in shapes for field in shape.topology}
    stages = {stage for shape in shapes for stage in shape.stages}
    fields -= overriding_fields("topology", experiment.origins)
    stages -= overriding_fields("plan", experiment.origins)

    has_free_rounds = any(shape.rounds is None for shape in shapes)
    fitted = []
    for of_method, shape in zip(experiments, shapes, strict=True):
        topology = _without(of_method.table("topology"), fields - shape.topology)
        plan = _without(of_method.table("plan"), stages - shape.stages)
        rounds = experiment.rounds
        if shape.rounds is not None and has_free_rounds:
            rounds = shape.rounds
        fitted.append(replace(of_method, topology=topology, plan=plan, rounds=rounds))
    return fitted


def _without(table: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _variant(experiment: Experiment, setting: Mapping[str, Any], out: Path) -> Variant:
    settings = resolve(experiment, check_device=False)
    values = [f"{k}={v}" for k, v in setting.items()]
    label = " ".join([settings.named.method.label, *values])
    method = Path(split_name(settings.named.method.name).path).stem
    folder = _folder(out, [method, *values])
    return Variant(label, experiment, settings, _of_seed(folder, settings))


def _with_distinct_labels(runs: Sequence[Variant]) -> list[Variant]:
    """The runs. If methods of different files have one label, it names the whole path."""
    methods: dict[str, set[str]] = {}
    for run in runs:
        methods.setdefault(run.label, set()).add(run.settings.named.method.name)

    distinct = []
    for run in runs:
        method = run.settings.named.method
        if len(methods[run.label]) > 1:
            run = replace(run, label=run.label.replace(method.label, method.name, 1))
        distinct.append(run)
    return distinct


def _with_distinct_folders(runs: Sequence[Variant], out: Path) -> list[Variant]:
    """The runs. If runs with different labels would share a folder, its name is the whole label; if
    they would still share it, the label and its hash.
    """
    runs = _renamed(runs, lambda label: _folder(out, [label]))
    return _renamed(runs, lambda label: _folder(out, [label, digest(os.fsencode(label))[:12]]))


def _renamed(runs: Sequence[Variant], folder_of: Callable[[str], Path]) -> list[Variant]:
    """The runs, with new folders where runs with different labels share one.

    folder_of: the folder of a label without colons.
    """
    labels: dict[Path, set[str]] = {}
    for run in runs:
        labels.setdefault(run.folder, set()).add(run.label)

    renamed = []
    for run in runs:
        if len(labels[run.folder]) > 1:
            folder = folder_of(run.label.replace(":", "-").lstrip("/"))
            run = replace(run, folder=_of_seed(folder, run.settings))
        renamed.append(run)
    return renamed


def _folder(out: Path, words: Sequence[str]) -> Path:
    """A folder with these words as its name; a long name is cut and ends in a hash of it."""
    name = " ".join(words).replace("/", "-").replace(" ", "_")
    encoded = os.fsencode(name)
    if len(encoded) > LONGEST_NAME:
        beginning = encoded[:KEPT_OF_NAME].decode(errors="ignore")
        name = f"{beginning}-{digest(encoded)[:12]}"
    return out / name


def seeded(label: str, experiment: Experiment, seed: int, folder: Path) -> Variant:
    """One run of an experiment with a seed, in a folder of that seed; raises ConfigError if it
    cannot be run.

    The machine is checked when the run starts, because another machine may have finished it.
    """
    chosen = with_seed(experiment, seed)
    settings = resolve(chosen, check_device=False)
    return Variant(label, chosen, settings, _of_seed(folder, settings))


def with_starts(runs: Sequence[Variant]) -> list[Variant]:
    """The runs, each after the run that it starts from. Shared starts occur once."""
    by_folder: dict[Path, Variant] = {}
    for run in runs:
        if run.after is not None:
            by_folder.setdefault(run.after.folder, run.after)
        by_folder.setdefault(run.folder, run)
    return list(by_folder.values())


@contextmanager
def output_folder(out: Path | None, name: str) -> Iterator[Path]:
    """The output folder of a command: ``out``, or else a new folder ``runs/NAME-1``, 2, ….

    Commands that run at the same time get different new folders. A new folder is removed if nothing
    was written to it. Raises ConfigError if it cannot be created.
    """
    if out is not None:
        yield out
        return
    folder = _create_folder(Path("runs"), name)
    try:
        yield folder
    finally:
        with suppress(OSError):  # Only empty folders can be removed.
            folder.rmdir()
            folder.parent.rmdir()


def _create_folder(parent: Path, name: str) -> Path:
    """Create the first of NAME-1, NAME-2, … that neither exists nor has been packed."""
    number = 0
    try:
        while True:
            number += 1
            folder = parent / f"{name}-{number}"
            if folder.exists() or pack_of(folder).exists():
                continue
            # Another process may have created it in the meantime.
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise ConfigError(f"cannot make a folder in {parent}: {error.strerror}") from error


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with one of the seeds of a command; raises ConfigError if an option has set
    it.
    """
    check_set_once({"seed": seed}, experiment.origins, Origin("--seeds"))
    return replace(experiment, seed=seed)


def _of_seed(folder: Path, settings: Settings) -> Path:
    return folder / f"seed{settings.seed}"


# Stopping a comparison: the first Ctrl-C lets running stages end, the second ends at once; workers
# end with it.


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block Ctrl-C: processes that start in the block do not receive it until they unblock it. This
    process receives it after the block, unless it was blocked before.
    """
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


class StopSignals:
    """Handles Ctrl-C and SIGTERM: the first one stops the comparison and its workers after their
    stages, the second one ends the process at once.
    """

    def __init__(self, event: Event) -> None:
        self.event = event
        self.stop = False

    def __enter__(self) -> StopSignals:
        self._old = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        self.event.set()


class WorkerWatch(NoProgress):
    """The watch of a worker's run. It displays nothing, and stops the run after the stage in which
    a signal came or the comparison ended.
    """

    event: ClassVar[Event]
    working: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        self.signals = 0

    @classmethod
    def listen(cls, event: Event) -> None:
        """Also stop when this event is set, and end with the process that started the workers."""
        cls.event = event
        cls.idle()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        Thread(target=cls._end_with_parent, daemon=True).start()

    @staticmethod
    def idle() -> None:
        """Between runs, ignore Ctrl-C, and let SIGTERM end this process at once."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def _end_with_parent(cls) -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        with cls.working:
            os._exit(1)

    @contextmanager
    def handling_signals(self) -> Iterator[WorkerWatch]:
        """Handle signals during a run."""
        for number in SIGNALS:
            signal.signal(number, self.handle)
        try:
            with self.working:
                yield self
        finally:
            self.idle()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; the second one ends the process."""
        self.signals += 1
        if self.signals > 1:
            os._exit(1)

    def stop(self) -> bool:
        """Whether a signal came, here or in the process that started the comparison, or that
        process has ended.
        """
        if self.signals > 0 or self.event.is_set():
            return True
        parent = multiprocessing.parent_process()
        return parent is None or not parent.is_alive()


# Runs that are already in the folder of a comparison.


ORIGIN_CLEARED = "holds a run that started from one that is begun anew"


def clear_other_runs(variants: Sequence[Variant], overwrite: bool) -> None:
    """Delete other runs from the folders of variants; without ``overwrite``, raise RunExists for
    them.

    A run is another one if it has other settings, code or models (``same_run.why_not_same``), if
    the run that it starts from is started again, or if its data differ from those of the unfinished
    runs. variants: each after the one that it starts from.
    """
    cleared = set[Path]()
    for variant in variants:
        reason = why_not_same(variant.settings, variant.folder)
        if not reason and variant.after is not None and variant.after.folder in cleared:
            reason = ORIGIN_CLEARED
        if reason:
            _clear(variant, reason, overwrite)
            cleared.add(variant.folder)

    finished = [variant for variant in variants if is_finished(variant.folder)]
    unfinished = [variant for variant in variants if not is_finished(variant.folder)]
    data = CurrentData([variant.settings for variant in unfinished])
    for variant in finished:
        reason = ""
        if data.differ(variant.settings, start_of_journal(variant.folder)):
            reason = f"holds a run that began before data {variant.settings.data.name!r} changed"
        elif variant.after is not None and variant.after.folder in cleared:
            reason = ORIGIN_CLEARED
        if reason:
            _clear(variant, reason, overwrite)
            cleared.add(variant.folder)


def _clear(variant: Variant, reason: str, overwrite: bool) -> None:
    if not overwrite:
        raise RunExists(
            f"{variant.folder} {reason}; choose another --out, or start again with --overwrite"
        )
    with locked(variant.folder):
        clear(variant.folder)


class CurrentData:
    """The present data of unfinished runs.

    Each data set is read once, and only if a finished run uses it, too.
    """

    def __init__(self, unfinished: Sequence[Settings]) -> None:
        self._needed = {_data_key(settings) for settings in unfinished}
        self._read: dict[str, Dataset] = {}
        self._digests: dict[str, dict[str, str]] = {}

    def differ(self, settings: Settings, start: Mapping[str, Any]) -> bool:
        """Whether a finished run has the data set of an unfinished one but started with other
        examples, according to its event ``start``.

        False for data that cannot be read, which is an error of the unfinished run.
        """
        identity = RunIdentity.noted_in(start)
        if "examples_sha256" not in identity.data or _data_key(settings) not in self._needed:
            return False
        try:
            return identity.has_other_examples(self._digests_of(settings))
        except ConfigError:
            return False

    def _digests_of(self, settings: Settings) -> dict[str, str]:
        """The SHA-256 of examples by split; of public ones, too, where they come from other
        data.
        """
        key = _data_key(settings)
        if key not in self._read:
            data = read_data(settings)
            self._read[key] = data
            self._digests[key] = {
                "train": examples_digest(data.train),
                "test": examples_digest(data.test),
            }
        digests = dict(self._digests[key])
        if settings.data.public_from not in (TRAIN, NOISE):
            data = with_pixels(self._read[key], settings.data)
            public = scale_data(settings, data, split_data(settings, data)).public
            if public is not None:
                digests["public"] = examples_digest(public)
        return digests


def _data_key(settings: Settings) -> str:
    return repr((settings.data.name, reading_options(settings)))


# Carrying out runs, as many at once as fit on the machine.


POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """The progress of a run, and its error if it has failed.

    ``rounds``: the largest number of rounds. ``done``, ``accuracy``: the last finished round and
    its accuracy. ``stopped_early``: whether ``[stop]`` ended the run before its last round.
    ``problem``, ``trace``: the error and its traceback.
    """

    variant: Variant
    rounds: int
    done: int = 0
    accuracy: float | None = None
    stopped_early: bool = False
    state: str = "waiting"
    problem: str = ""
    trace: str = ""
    exit_code: int = 0
    _read: int = field(default=0, repr=False)

    @property
    def due(self) -> int:
        """The number of rounds of the run, as far as it is known."""
        if self.stopped_early:
            return self.done
        return self.rounds

    def follow(self) -> None:
        """Read the rounds that were added to the run's journal since the last call."""
        path = self.variant.folder / JOURNAL
        if self.state == "waiting" or not path.is_file():
            return
        size = path.stat().st_size
        if size == self._read:
            return
        if size < self._read:
            # A run that is resumed first cuts its journal.
            self._read = 0
        with open_to_read(path) as journal:
            journal.seek(self._read)
            lines, newline, _ = journal.read().rpartition(b"\n")
        self._read += len(lines) + len(newline)

        for line in lines.split(b"\n"):
            if not line.startswith(b'{"event":"round"'):
                continue
            # A damaged line is an error when the run is read or resumed.
            with suppress(ValueError, KeyError):
                event = json.loads(line)
                self.done = event["round"]
                self.accuracy = event["accuracy"]
                self.stopped_early = STOP_REASON in event


def carry_out_runs(
    runs: Sequence[Variant],
    jobs: int,
    watch: Callable[[Sequence[Outcome]], None],
    *,
    cards: Sequence[str] = (),
    debug: bool = False,
    overwrite: bool = False,
    track: Sequence[str] = (),
) -> list[Outcome]:
    """Carry out all runs: continue those that were stopped, and skip those that are finished.

    A run that starts from the model of another run waits for it. ``watch`` is called a few times a
    second. If a run fails, the others continue; if its process is killed, they stop. The first
    Ctrl-C lets running stages end and starts nothing new; the second one ends at once. ``cards``:
    the CUDA card of each of the ``jobs``, as in ``Slots``; each run sees only that of its process.
    ``debug``: as for ``run``. ``track``: trackers by name for every run; finished runs are sent to
    those that lack them.

    Raises ConfigError if this machine lacks something that an unfinished run needs, and RunExists
    for a folder that holds another run. With ``overwrite``, the other run is deleted, and a damaged
    run starts again.
    """
    outcomes = [Outcome(run, run.settings.rounds) for run in with_starts(runs)]
    for outcome in outcomes:
        _check_machine(outcome.variant)
    clear_other_runs([outcome.variant for outcome in outcomes], overwrite)
    ready_trackers(track)
    if not track:
        _mark_finished(outcomes)
    waiting = [outcome for outcome in outcomes if outcome.state == "waiting"]
    if not waiting:
        watch(outcomes)
        return outcomes

    with (
        StopSignals(multiprocessing.get_context("spawn").Event()) as signals,
        _workers(jobs, cards, signals) as pools,
    ):
        job_of = partial(_job, debug=debug, overwrite=overwrite, track=track)
        queue = _Queue(outcomes, waiting, pools, job_of)
        is_killed = False
        while queue.waiting or queue.running:
            is_ending = signals.stop or is_killed
            if not is_ending:
                queue.start_ready(jobs)
            if is_ending and not queue.running:
                break
            is_killed |= queue.collect(signals)
            for outcome in outcomes:
                outcome.follow()
            watch(outcomes)
    return outcomes


@dataclass
class _Queue:
    """The runs of a comparison that are not finished, and the pools that execute them.

    ``job_of``: the job of a variant, given the number of runs that share the cores.
    """

    outcomes: Sequence[Outcome]
    waiting: list[Outcome]
    pools: Sequence[_Pool]
    job_of: Callable[[Variant, int], Callable[[], RunEnd]]
    running: dict[Future[RunEnd], _Started] = field(default_factory=dict)

    def start_ready(self, jobs: int) -> None:
        """Start runs that wait for no other run, as long as a pool is free."""
        while True:
            ready = _next(self.waiting, self.outcomes)
            pool = _free_pool(self.pools)
            if ready is None or pool is None:
                return
            self.waiting.remove(ready)
            ready.state = "running"
            parallel_runs = min(jobs, 1 + len(self.running) + len(self.waiting))
            job = self.job_of(ready.variant, parallel_runs)
            self.running[pool.submit(job)] = _Started(ready, pool)

    def collect(self, signals: StopSignals) -> bool:
        """Note the ends of runs, for which this waits a short time; return whether a process was
        killed.
        """
        is_killed = False
        finished, _ = wait(self.running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in finished:
            is_killed |= isinstance(future.exception(), BrokenProcessPool)
            started = self.running.pop(future)
            started.pool.running -= 1
            _finish(started.outcome, future, is_stopping=signals.stop)
        return is_killed


def _job(
    variant: Variant, parallel_runs: int, *, debug: bool, overwrite: bool, track: Sequence[str]
) -> Callable[[], RunEnd]:
    """The job that starts or resumes a run beside others, with its share of the cores."""
    share = max(1, cores() // parallel_runs)
    return partial(
        _run_or_resume,
        variant.experiment,
        variant.folder,
        workers=os.environ.get(WORKERS) or str(share),
        debug=debug,
        overwrite=overwrite,
        track=track,
    )


IMPORTED_ONCE = ("fedstill.running.runner", "numpy.random")
"""Modules that every run imports, besides those of the registry. Worker processes are forked from a
process that has imported them.
"""


@dataclass
class _Pool:
    """A pool that executes up to ``size`` runs in parallel.

    ``card``: the only CUDA card that its processes see, by its name in ``CUDA_VISIBLE_DEVICES``;
    empty if they see those of this process. ``running``: the number of runs in progress.
    """

    executor: ProcessPoolExecutor
    size: int
    card: str = ""
    running: int = 0

    def submit(self, job: Callable[[], RunEnd]) -> Future[RunEnd]:
        """Carry out a run; its process starts now if there is none yet."""
        self.running += 1
        if not self.card:
            return self._future(job)
        # A new process has this environment from its first instruction on, before it imports torch.
        with _visible_card(self.card), signals_blocked():
            return self._future(job)

    def _future(self, job: Callable[[], RunEnd]) -> Future[RunEnd]:
        """The future of a run; if an idle process of the pool was killed, it has this error."""
        try:
            return self.executor.submit(job)
        except BrokenProcessPool as error:
            failed: Future[RunEnd] = Future()
            failed.set_exception(error)
            return failed


@dataclass(frozen=True)
class _Started:
    """A run in progress, and its pool."""

    outcome: Outcome
    pool: _Pool


@contextmanager
def _visible_card(name: str) -> Iterator[None]:
    """Processes that start in the block see one CUDA card."""
    earlier = os.environ.get(VISIBLE_CARDS)
    os.environ[VISIBLE_CARDS] = name
    try:
        yield
    finally:
        del os.environ[VISIBLE_CARDS]
        if earlier is not None:
            os.environ[VISIBLE_CARDS] = earlier


def _free_pool(pools: Sequence[_Pool]) -> _Pool | None:
    """The pool with the fewest runs of those that can carry out another one; None if all are
    full.
    """
    free = [pool for pool in pools if pool.running < pool.size]
    return min(free, key=lambda pool: pool.running, default=None)


@contextmanager
def _workers(jobs: int, cards: Sequence[str], signals: StopSignals) -> Iterator[list[_Pool]]:
    """Processes that carry runs out: one pool, or one for each card. They end with the block, and
    are not waited for if it is left at once.
    """
    resource_tracker.ensure_running()  # it would unblock signals
    if cards:
        pools = _pools_of_cards(cards, signals)
    else:
        pools = [_Pool(_forking_executor(jobs, signals), jobs)]
    try:
        yield pools
    except KeyboardInterrupt:
        for pool in pools:
            pool.executor.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        _shut_down(pools)
        raise
    _shut_down(pools)


def _forking_executor(jobs: int, signals: StopSignals) -> ProcessPoolExecutor:
    """Processes that are forked from one that has imported what runs need."""
    context = multiprocessing.get_context("forkserver")
    registering = [module for kind in registry.HOMES for module in registry.modules_of(kind)]
    context.set_forkserver_preload([*IMPORTED_ONCE, *registering])
    with signals_blocked():
        forkserver.ensure_running()
    return ProcessPoolExecutor(jobs, context, WorkerWatch.listen, (signals.event,))


def _pools_of_cards(cards: Sequence[str], signals: StopSignals) -> list[_Pool]:
    """A pool for each card, with a process for each of its slots.

    The processes are new ones, because a forked process would see the cards of its parent.
    """
    context = multiprocessing.get_context("spawn")
    pools = []
    for card, slots in Counter(cards).items():
        executor = ProcessPoolExecutor(slots, context, WorkerWatch.listen, (signals.event,))
        pools.append(_Pool(executor, slots, card))
    return pools


def _shut_down(pools: Sequence[_Pool]) -> None:
    for pool in pools:
        pool.executor.shutdown()


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: its exit code, what went wrong, and the traceback."""

    exit_code: int
    problem: str = ""
    trace: str = ""


DONE = RunEnd(0)
STOPPED = RunEnd(1, "stopped")
KILLED = RunEnd(
    1,
    "this or another worker process was killed, perhaps because memory ran out; repeat the command "
    "with the same --out to continue, with fewer --jobs if necessary",
)


def _check_machine(run: Variant) -> None:
    """Raise ConfigError if this machine lacks something that an unfinished run needs."""
    try:
        check_machine(run.settings.precisions, run.settings.device)
    except ConfigError:
        if not _is_up_to_date(run):
            raise


def _is_up_to_date(run: Variant) -> bool:
    """Whether a run is finished with its settings, and so is the run that it starts from."""
    if not _is_complete(run.folder) or why_not_same(run.settings, run.folder):
        return False
    return run.after is None or _is_up_to_date(run.after)


def _is_complete(folder: Path) -> bool:
    """Whether a run is finished and its journal is complete. A resume reports what is missing."""
    try:
        check_journal(folder, read_journal(folder / JOURNAL))
    except CorruptFile:
        return False
    return is_finished(folder)


def _mark_finished(outcomes: Sequence[Outcome]) -> None:
    """Mark the finished runs, with their last round and its accuracy."""
    for outcome in outcomes:
        if _is_complete(outcome.variant.folder):
            outcome.state = "finished"
            outcome.follow()


def _next(waiting: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Outcome | None:
    """The first run that does not wait for another run; None if all do."""
    unfinished = {o.variant.folder for o in outcomes if o.state in ("waiting", "running")}
    for outcome in waiting:
        start = outcome.variant.after
        if start is None or start.folder not in unfinished:
            return outcome
    return None


def _run_or_resume(
    experiment: Experiment,
    folder: Path,
    *,
    workers: str,
    debug: bool,
    overwrite: bool,
    track: Sequence[str],
) -> RunEnd:
    """Start or resume one run. With ``overwrite``, a damaged run starts again."""
    from fedstill.running import runner

    os.environ[WORKERS] = workers
    try:
        with WorkerWatch().handling_signals() as watch:
            if watch.stop():
                return STOPPED
            if (folder / CONFIG).is_file():
                try:
                    runner.resume(folder, watch=watch, debug=debug, track=track)
                    return DONE
                except CorruptFile:
                    if not overwrite:
                        raise
            runner.run(
                experiment, folder, watch=watch, debug=debug, overwrite=overwrite, track=track
            )
    except Exception as error:
        return _end_by(error)
    return DONE


def _end_by(error: BaseException) -> RunEnd:
    """The end of a run by an exception."""
    if isinstance(error, Interrupted):
        return STOPPED
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, FedstillError):
        return RunEnd(error.exit_code, error.in_shell, trace)
    return RunEnd(1, f"{type(error).__name__}: {error}", trace)


def _finish(outcome: Outcome, future: Future[RunEnd], *, is_stopping: bool) -> None:
    """Note how a run ended; ``is_stopping``: whether all runs are to stop."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        end = KILLED
        if is_stopping:
            end = STOPPED
    elif error is not None:
        end = _end_by(error)
    else:
        end = future.result()

    if end == STOPPED:
        outcome.state = "stopped"
        return
    outcome.exit_code = end.exit_code
    outcome.problem = end.problem
    outcome.trace = end.trace
    outcome.state = "finished"
    if outcome.exit_code:
        outcome.state = "failed"
