"""Runs read from their directories, finished or not, and groups of runs that differ in the seed."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from fedstill import manifest
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import flat, read_toml
from fedstill.core.registry import short_name
from fedstill.data.client_split import LabelCounts
from fedstill.running import journal as journals
from fedstill.running.journal import (
    CONFIG,
    JOURNAL,
    STOP_REASON,
    SUMMARY,
    Event,
    check_config,
    check_journal,
    events_by_name,
    first_event,
    with_later_looks,
)
from fedstill.running.numbers import LearningRates, Numbers, RunNumbers
from fedstill.running.packs import folder_of, packs_below, readable
from fedstill.running.split_file import label_counts_of, networks_of, read_split

if TYPE_CHECKING:
    from fedstill.running.selection import BestRound


# The runs from whose models a run started


def start_run(directory: Path) -> Path | None:
    """The directory of the run from whose model the run in ``directory`` started.

    None if it started from no model, or from a file that is in no run's directory.
    """
    source = read_toml(directory / CONFIG).get("start_from", "")
    if not source:
        return None
    path = Path(source).resolve()
    if path.is_file():
        path = path.parent
    if not _has_events(path):
        return None
    return path


def lineage(directory: Path) -> list[Path]:
    """A run's directory, that of the run from whose model it started, and so on.

    The list is empty if there is no run in ``directory``.
    """
    folders: list[Path] = []
    folder: Path | None = directory
    if not _has_events(directory):
        return folders
    while folder is not None and folder not in folders:
        folders.append(folder)
        folder = start_run(folder)
    return folders


def contributed(directory: Path, client: int) -> bool:
    """Whether a client of a federation contributed to the model of a run: it took part in
    this run, or in one from whose model the run started. False if there is no run.
    """
    return any(_took_part(folder, client) for folder in lineage(directory))


def runs_of_client(directories: Iterable[Path], client: int) -> list[Path]:
    """The runs to which a client of a federation contributed: those in ``directories``, and
    those from whose models they started, which come first.
    """
    found: dict[Path, None] = {}
    for directory in directories:
        earliest_first = reversed(lineage(directory.resolve()))
        found |= dict.fromkeys(folder for folder in earliest_first if contributed(folder, client))
    return list(found)


def _has_events(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and (directory / JOURNAL).is_file()


def _took_part(directory: Path, client: int) -> bool:
    """Whether a client took part in a run over a federation.

    Clients of a simulation have numbers, too, but they are no sites.
    """
    if not read_toml(directory / CONFIG).get("flower", {}).get("federation"):
        return False
    events = journals.read_journal(directory / JOURNAL)
    return any(event["event"] == "client" and event["client"] == client for event in events)


@dataclass(frozen=True)
class Run:
    """One run, read from its directory."""

    folder: Path
    settings: Mapping[str, Any]
    """Every resolved value, by dotted key."""
    start: Event
    """The event ``start``; empty if the run has not written it."""
    initial: Event
    """The event ``initial``; empty if the run has not written it."""
    rounds: Sequence[Event]
    clients: Sequence[Event]
    finished: bool
    last_written: float
    """The time of the last write to the journal, in seconds since 1970."""
    measures: Sequence[Event] = ()
    resumed: Sequence[Event] = ()
    """Resumes with other versions of the software."""
    label_counts: LabelCounts = field(default_factory=lambda: LabelCounts.of_table([], 0))
    """Examples of each class, (C,) per client; empty if the label counts are unknown."""
    networks: Sequence[str] = ()
    """The name of each client's network; empty if all clients have the server's network."""
    task_ends: Sequence[Event] = ()
    display_path: Path = Path()
    """The path that a user knows: ``folder``, or the path below the name of a pack."""

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.settings.get("seed", 0))

    @property
    def planned_rounds(self) -> int:
        """The number of rounds in its settings."""
        return int(self.settings.get("rounds", 0))

    @property
    def classes(self) -> list[str]:
        """The names of the classes; empty for a run that has not started."""
        return [str(name) for name in self.start.get("classes", [])]

    @property
    def client_names(self) -> list[str]:
        """The names of the clients in the data; empty if they have no names."""
        return [str(name) for name in self.start.get("client_names", ())]

    @property
    def stop_reason(self) -> str:
        """The reason why the run stopped before its last planned round; empty if it did not."""
        if not self.rounds:
            return ""
        return str(self.rounds[-1].get(STOP_REASON, ""))

    @property
    def best(self) -> BestRound | None:
        """The best round, or None if the run did not compare its rounds."""
        from fedstill.running.selection import best_round  # lazy, because few readers need it

        return best_round(self.start, self.numbers)

    def versions(self, name: str) -> list[str]:
        """The versions of one of ``VERSIONS`` that the run used, in the order of use."""
        events = [self.start, *(event["versions"] for event in self.resumed)]
        return [str(event[name]) for event in events if name in event]

    def curve(self, key: str) -> dict[int, float]:
        """A metric by round; round 0 is before training.

        ``key``: a metric, or ``measure/key/key`` for a number that a measure recorded after stages;
        the value of a round is the mean over its stages. A number that a measure computes from the
        clients' reports is a metric without the name of the measure.
        """
        return self.numbers.by_round(key)

    @functools.cached_property
    def numbers(self) -> RunNumbers:
        """The run's numbers by metric: those of the journal, and two that are derived from it.

        These are the learning rates and, if clients have no personal models, the
        ``personal_accuracy`` of the global model.
        """
        numbers = RunNumbers(
            {
                "start": _if_any(self.start),
                "initial": _if_any(self.initial),
                "round": self.rounds,
                "client": self.clients,
                "measure": self.measures,
                "task": self.task_ends,
            }
        )
        numbers.add(LearningRates.of(self.settings, self.start).numbers(self.clients))
        if not self.has_personal_models:
            numbers.add([_personal_accuracy(numbers.class_accuracy, self.label_counts)])
        return numbers

    @property
    def has_personal_models(self) -> bool:
        """Whether clients have personal models that were evaluated."""
        return any("personal_clients" in event for event in self.rounds)


def _if_any(event: Event) -> list[Event]:
    """A list with the event, or without any if the run has not written it."""
    if not event:
        return []
    return [event]


def _personal_accuracy(
    class_accuracy: Mapping[int, Sequence[float | None]], label_counts: LabelCounts
) -> Numbers:
    """The global model's accuracy by round, on test data with the clients' class shares.

    Empty if the label counts are unknown.
    """
    if not len(label_counts):
        class_accuracy = {}
    # Most rounds test the same classes, and a mean over many clients takes long.
    mean_shares = functools.cache(lambda mask: label_counts.mean_shares(np.array(mask)))
    means = []
    for accuracies in class_accuracy.values():
        is_tested = tuple(value is not None for value in accuracies)
        pairs = zip(mean_shares(is_tested), accuracies, strict=True)
        weighted = [float(share) * value for share, value in pairs if value is not None]
        means.append(sum(weighted))
    rounds = np.array(list(class_accuracy), np.int64)
    return Numbers("personal_accuracy", np.array(means, np.float64), {"round": rounds})


@dataclass(frozen=True)
class RunFolder:
    """The folder to read a run from, and the path that a user knows (see ``Run``)."""

    path: Path
    display_path: Path


def run_folders(directories: Iterable[Path]) -> list[RunFolder]:
    """The folders of all runs in or below the directories and packs, without repetition.

    Raises ConfigError for a directory without runs.
    """
    folders: dict[Path, RunFolder] = {}
    for requested in directories:
        directory = readable(requested)
        if not directory.is_dir():
            raise ConfigError(
                f"there is no directory {directory}; name directories of runs, e.g. runs/"
            )
        below = list(_run_folders_below(directory, folder_of(requested)))
        below.sort(key=lambda folder: natural(folder.path))
        if not below:
            raise ConfigError(
                f"{directory} contains no run: no folder in it has both {CONFIG} and {JOURNAL}; "
                "name directories of runs, e.g. runs/"
            )
        folders.update({folder.path.resolve(): folder for folder in below})
    if not folders:
        raise ConfigError("no directory of runs was named, e.g. runs/")
    return list(folders.values())


def find(directories: Sequence[Path]) -> list[Run]:
    """Read all runs in or below the directories, without repetition.

    Raises ConfigError for a directory without runs, CorruptFile for a run that cannot be read.
    """
    return [read_run(folder.path, folder.display_path) for folder in run_folders(directories)]


def read_run(folder: Path, display_path: Path | None = None) -> Run:
    """Read a run from its directory.

    Raises CorruptFile, which names the file and the line, if a file is damaged.
    """
    check_config(folder)
    path = folder / JOURNAL
    events = journals.read_journal(path)
    check_journal(folder, events)
    by_name = events_by_name(events)
    start = first_event(by_name, "start")
    split = read_split(folder, start)
    return Run(
        folder=folder,
        settings=_settings(folder / CONFIG),
        start=start,
        initial=first_event(by_name, "initial"),
        rounds=by_name.get("round", []),
        clients=by_name.get("client", []),
        finished=journals.is_finished(folder),
        last_written=path.stat().st_mtime,
        measures=with_later_looks(
            folder, by_name.get("measure", []), len(start.get("classes", ()))
        ),
        resumed=by_name.get("resumed", []),
        label_counts=label_counts_of(split, start),
        networks=networks_of(split, start),
        task_ends=by_name.get("task", []),
        display_path=display_path or folder,
    )


def natural(folder: Path) -> list[tuple[str, float, str]]:
    """A key that sorts folders as people do: run10 comes after run9.

    >>> sorted([Path("beta10.0"), Path("beta9.0")], key=natural)[0].name
    'beta9.0'
    """
    pieces = re.split(r"(\d+)", str(folder))
    return [
        (text, int(number or 0), number)
        for text, number in zip_longest(pieces[::2], pieces[1::2], fillvalue="")
    ]


def _run_folders_below(directory: Path, display_path: Path) -> Iterator[RunFolder]:
    """The folders of runs, and their names below ``display_path``.

    Hidden folders are skipped, since they may contain a pack that is half unpacked.
    """
    for config in directory.rglob(CONFIG):
        relative = config.parent.relative_to(directory)
        is_hidden = any(name.startswith(".") for name in relative.parts)
        has_run = any((config.parent / name).is_file() for name in (JOURNAL, SUMMARY))
        if has_run and not is_hidden:
            yield RunFolder(config.parent, display_path / relative)
    for packed in packs_below(directory):
        folder_path = display_path / folder_of(packed).relative_to(directory)
        yield from _run_folders_below(readable(packed), folder_path)


def _settings(path: Path) -> dict[str, Any]:
    """Read the settings by dotted key; raises CorruptFile if the file is no config of a run."""
    try:
        settings = flat(read_toml(path))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    for key in ("seed", "rounds"):
        if type(settings.get(key)) is not int:
            raise CorruptFile(
                f"{path} is not the config of a run: {key} = {settings.get(key)!r} is not a whole "
                "number"
            )
    return settings


# Groups: runs that differ only in their seed. A label has the settings in which groups differ.


UNSET = "–"
"""The text for a setting that a group does not have."""


@dataclass(frozen=True)
class Spread:
    """A mean over runs and their sample standard deviation, 0 for a single run."""

    mean: float
    std: float
    runs: int

    def mean_text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Format the mean."""
        return f"{scale * self.mean:.{digits}f}"

    def deviation_text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Format the standard deviation; empty for a single run."""
        if self.runs == 1:
            return ""
        return f"{scale * self.std:.{digits}f}"

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Format as mean ± spread, or as the mean alone if there is only one run.

        >>> spread([0.1, 0.3]).text(100), spread([0.5]).text()
        ('20.00 ± 14.14', '0.50')
        """
        mean = self.mean_text(scale, digits)
        deviation = self.deviation_text(scale, digits)
        if not deviation:
            return mean
        return f"{mean} ± {deviation}"


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation, or None if there are no values."""
    if not values:
        return None
    deviation = 0.0
    if len(values) > 1:
        deviation = statistics.stdev(values)
    return Spread(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    """The settings in which the group differs from other groups."""
    runs: Sequence[Run]
    """The runs, sorted by seed."""
    repeats: Sequence[Run] = ()
    """Further runs of the same seeds, which are left out: they are no new evidence."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that all runs share, by dotted key."""
        return settings_but_seed(self.runs[0].settings, self.runs[0].start)

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    @property
    def started(self) -> list[Run]:
        """The runs with at least one finished round."""
        return [run for run in self.runs if run.rounds]

    @property
    def run_count_text(self) -> str:
        """The number of runs with results: "3", or "2 of 3" if one has no complete round."""
        started = len(self.started)
        if started == len(self.runs):
            return str(started)
        return f"{started} of {len(self.runs)}"

    @property
    def has_personal_models(self) -> bool:
        """Whether clients have personal models that were evaluated."""
        return any(run.has_personal_models for run in self.runs)

    @property
    def finished(self) -> bool:
        """Whether all runs are finished."""
        return all(run.finished for run in self.runs)

    @property
    def display(self) -> str:
        """The label, marked if the group is unfinished."""
        if self.finished:
            return self.label
        return f"{self.label} (unfinished)"

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return next((run.classes for run in self.runs if run.classes), [])

    def values(self, key: str) -> list[float]:
        """A metric of all runs that have it; ``key`` as in a run's summary."""
        summaries = [run.numbers.summary for run in self.started]
        return [summary[key] for summary in summaries if key in summary]

    def mean_spread(self, key: str) -> Spread | None:
        """The spread of a metric over seeds, or None if no run has it."""
        return spread(self.values(key))


def groups(directories: Sequence[Path]) -> list[Group]:
    """Read the runs in or below the directories, and group them in the order of the folders."""
    return group(find(directories))


def group(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ in their seed only."""
    return [_group(members.label, members.runs) for members in label_runs(runs)]


class Configured(Protocol):
    """The properties of a run that determine its group: settings by dotted key, and first event."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def start(self) -> Event: ...


R = TypeVar("R", bound=Configured)


@dataclass(frozen=True)
class LabelledRuns(Generic[R]):
    """Runs that differ in their seed only, with a label that distinguishes them from other runs."""

    label: str
    runs: Sequence[R]


def settings_but_seed(settings: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """What runs that differ in their seed only have in common, by dotted key.

    settings: all values of a config. start: the run's event ``start``, for the digests of the
    user's files. Of a run that another one starts from, only what runs of several seeds share.
    """
    shared = {key: value for key, value in settings.items() if key != "seed"}
    if shared.pop("engine_reason", ""):
        # The choice of auto depends on a run's clients, and so on the seed.
        shared["engine"] = "auto"
    sources = start.get("sources")
    if not isinstance(sources, Mapping):
        sources = {}
    for path, sha in sorted(sources.items()):
        # Files of one name in several folders have one key, with the digests of all of them.
        key = f"sources.{PurePath(path).name}"
        shared[key] = f"{shared.get(key, '')} {str(sha)[:12]}".lstrip()
    if "start_from" in shared:
        shared["start_from"] = _without_seed(str(shared["start_from"]))
    return shared


def _without_seed(source: str) -> str:
    """The path of a run to its model, without the file and the folder of its seed."""
    parts = [
        part
        for part in PurePath(source).parts
        if part != "model.safetensors" and not re.fullmatch(r"seed\d+", part)
    ]
    if parts:
        return PurePath(*parts).as_posix()
    return source


def _shared_settings(run: Configured) -> dict[str, Any]:
    """The settings that runs of one group share."""
    return settings_but_seed(run.settings, run.start)


def label_runs(runs: Sequence[R]) -> list[LabelledRuns[R]]:
    """Group and label runs that differ in their seed only."""
    by_settings: dict[str, list[R]] = {}
    for run in runs:
        shared = _with_whole_numbers(_shared_settings(run))
        settings = json.dumps(shared, sort_keys=True, default=str)
        by_settings.setdefault(settings, []).append(run)
    lists = list(by_settings.values())
    labels = group_labels([_shared_settings(members[0]) for members in lists])
    return [LabelledRuns(label, members) for label, members in zip(labels, lists, strict=True)]


def _with_whole_numbers(value: Any) -> Any:
    """A value whose floats that are whole are integers: a config may have either.

    >>> _with_whole_numbers({"plan.train.class_weights": [1.0, 2, 0.5]})
    {'plan.train.class_weights': [1, 2, 0.5]}
    """
    if isinstance(value, Mapping):
        return {key: _with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(_with_whole_numbers, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ.

    >>> differing([{"rounds": 5, "method.beta": 1}, {"rounds": 5}])
    ['method.beta']
    """
    keys = dict.fromkeys(chain.from_iterable(settings))
    return [key for key in keys if _differs(key, settings)]


def _differs(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    first = settings[0].get(key, UNSET)
    return any(values.get(key, UNSET) != first for values in settings)


def value_text(value: Any) -> str:
    """A value of a config as a text, close to its form in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def method_of(settings: Mapping[str, Any]) -> str:
    """A method's name, without the folder of its file."""
    return short_name(str(settings.get("method.name", "unnamed")))


def _group(label: str, members: Sequence[Run]) -> Group:
    """Choose the most complete run of each seed; the first one found if two are equal."""
    run_of_seed: dict[int, Run] = {}
    for run in members:
        rival = run_of_seed.get(run.seed)
        if rival is None or _progress(run) > _progress(rival):
            run_of_seed[run.seed] = run
    runs = [run_of_seed[seed] for seed in sorted(run_of_seed)]
    repeats = [run for run in members if run is not run_of_seed[run.seed]]
    return Group(label, runs, repeats)


def _progress(run: Run) -> tuple[bool, int]:
    """A key by which the more complete of two runs is the larger one."""
    return run.finished, len(run.rounds)


def group_labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels that distinguish groups of runs by their settings.

    A label is the name of the method, the name of its variant (such as a strategy of unlearning),
    and the settings in which groups with these names differ.

    >>> fedavg = {"method.name": "fedavg", "rounds": 5}
    >>> group_labels([fedavg, {**fedavg, "rounds": 9}, {"method.name": "fedntd", "rounds": 5}])
    ['fedavg, rounds=5', 'fedavg, rounds=9', 'fedntd']
    """
    by_names: dict[str, list[Mapping[str, Any]]] = {}
    for values in settings:
        by_names.setdefault(_names_in_label(values), []).append(values)
    titles_by_names = {names: _key_titles(namesakes) for names, namesakes in by_names.items()}

    labels = []
    for values in settings:
        names = _names_in_label(values)
        titles = titles_by_names[names]
        parts = [f"{title}={value_text(values.get(key, UNSET))}" for key, title in titles.items()]
        labels.append(", ".join([names, *parts]))
    return labels


def _names_in_label(settings: Mapping[str, Any]) -> str:
    """The names of a method and of its variants, with commas between them."""
    variants = [str(settings[key]) for key in manifest.label_keys() if key in settings]
    return ", ".join([method_of(settings), *variants])


def _key_titles(settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The keys whose values differ, with a short title of each."""
    keys = differing(settings)
    return {key: _short_key(key, keys) for key in keys}


def _short_key(key: str, keys: Sequence[str]) -> str:
    """The last part of a key, or the whole key if the last part is ambiguous."""
    last = key.rpartition(".")[2]
    if last == "name":
        return key
    last_parts = [differing_key.rpartition(".")[2] for differing_key in keys]
    if last_parts.count(last) > 1:
        return key
    return last
