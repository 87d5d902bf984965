"""A site's own data: they are read with the run's keys, checked against its facts, and divided into
tasks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.continual.task_test import TASK_TEST
from fedstill.core.errors import Refused
from fedstill.core.fields import nfc
from fedstill.core.files import digest, write_secret
from fedstill.core.records import Examples, Tensors
from fedstill.core.stream import Stream, tasks_of_times
from fedstill.core.user_modules import split_name
from fedstill.data.dataset import PLURALS, Dataset, examples_digest
from fedstill.data.sources import load_dataset
from fedstill.data.sources.folders import data_files
from fedstill.data.views import concatenated
from fedstill.flower.facts import Facts
from fedstill.flower.site_settings import Site
from fedstill.running.client_data import NOISE, ClientData, ExampleForm, public_copy, reading_like
from fedstill.running.compatibility import check_at_site
from fedstill.running.preparation import Prepared, run_metrics, site_views
from fedstill.running.setting_warnings import log_once
from fedstill.running.splitting import cut_into_tasks, stream_of
from fedstill.running.standardisation import (
    STANDARDISED,
    UNSCALED,
    Scaler,
    column_moments,
    unscaled,
)
from fedstill.running.world import RunWorld, with_extensions, with_start_model, world_of

# A site's own data in the form of the run: read with the run's keys, checked against its facts, and
# standardised with these facts.


@dataclass(frozen=True)
class OwnData:
    """A site's data: the data set, its scaled examples, and the public set.

    ``dataset``: the data set before scaling. ``scaler``: the scaler of its numbers.
    """

    dataset: Dataset
    train: Examples
    test: Examples
    public: Examples | None
    scaler: Scaler


def own_data(settings: Settings, facts: Facts, data: str, public: str, tokenizer: str) -> OwnData:
    """Read a site's data.

    data: the site's file or folder. public, tokenizer: its copies of the public set and the
    tokenizer file. Raises Refused if the kind, shape, columns, vocabulary or classes of examples
    differ from the run's, or if the copies differ from the server's.
    """
    form = form_of(settings, facts, tokenizer)
    dataset = read_in_form(settings, facts, data, form)
    scaler = scaler_of(settings, dataset, facts)
    if scaler.awaits_sums:
        # The sums omit missing values, so examples are not changed.
        return OwnData(dataset, dataset.train, dataset.test, public=None, scaler=scaler)
    return OwnData(
        dataset=dataset,
        train=scaler.transform(dataset.train),
        test=scaler.transform(dataset.test),
        public=public_of(settings, public, facts, form, scaler),
        scaler=scaler,
    )


def read_in_form(
    settings: Settings, facts: Facts, data: str, form: Mapping[str, Any], **options: Any
) -> Dataset:
    """Read a file or folder of a site in the run's form, with the labels that all sites share.

    options: further reading options. Raises Refused if the examples do not match the run.
    """
    reading = {**form, **settings.data.images, **options}
    if settings.data.label_column and form:
        reading["label_column"] = settings.data.label_column
    if split_name(data).is_code:
        # The site operator's own functions take no options.
        reading = {}
    own = load_dataset(data, **reading)
    for warning in own.about.warnings:
        log_once(f"data: {warning}")
    _check_form(own, facts)
    return replace(
        own,
        train=replace(own.train, labels=labels_of(own, own.train, facts)),
        test=replace(own.test, labels=labels_of(own, own.test, facts)),
    )


def form_of(settings: Settings, facts: Facts, tokenizer: str) -> dict[str, Any]:
    """The options for reading the site's own file: those of the run's ``[data]``, with the columns
    and names in the facts.
    """
    form = reading_like(settings.data, facts.about)
    if facts.kind == "text" and form["tokenizer"].endswith(".json"):
        form["tokenizer"] = _own_tokenizer(tokenizer, facts)
    return form


def _own_tokenizer(copy: str, facts: Facts) -> str:
    if not copy:
        raise Refused(
            "texts of this run need a tokenizer file: set tokenizer to your copy of it in this "
            "site's site.toml",
            "tokenizer",
        )
    try:
        same = digest(Path(copy).read_bytes()) == facts.tokenizer
    except OSError as error:
        raise Refused(
            f"this site's tokenizer cannot be read: {error.strerror}; correct it in site.toml",
            "tokenizer",
        ) from error
    if not same:
        raise Refused(
            "the tokenizer at this site differs from the server's: copy the server's file again",
            "tokenizer",
        )
    return copy


def _check_form(own: Dataset, facts: Facts) -> None:
    """Raise Refused if the kind, vocabulary or inputs of examples differ from the run's."""
    if own.about.kind != facts.kind:
        raise Refused(
            f"this site has {own.many}, but the run is on {PLURALS[facts.kind]}; correct data "
            "in its site.toml",
            "shape",
        )
    if own.vocabulary != facts.vocabulary:
        raise Refused(
            f"texts at this site have {own.vocabulary:,} token ids, not {facts.vocabulary:,}",
            "shape",
        )
    if facts.features and own.about.features != facts.features:
        absent = next(name for name in facts.features if name not in own.about.features)
        raise Refused(
            f"tables at this site have no input {absent!r}; correct its columns", "columns"
        )


def scaler_of(settings: Settings, own: Dataset, facts: Facts) -> Scaler:
    """The scaler of this site's numbers, with the mean and standard deviation in the facts or, if
    the run is configured so, of the site's own data.

    Raises Refused if the request contradicts the run's configuration.
    """
    if facts.kind in ("image", "text"):
        return UNSCALED
    origin = settings.data.standardise or _default_origin(facts)
    if facts.origin != origin:
        raise Refused(
            f"the request has data.standardise = {facts.origin!r}, but the run's configuration "
            f"{origin!r}"
        )
    if facts.origin == "own":
        moments = column_moments(own.train.values, own.about.binary_features)
        return Scaler("own", moments.mean, moments.std)
    if facts.origin == "none":
        return unscaled(settings, own.train)
    if not facts.mean and facts.origin != "summed":
        raise Refused(
            f"the request has no mean and standard deviation to standardise {PLURALS[facts.kind]}"
        )
    return Scaler(facts.origin, facts.mean, facts.std)


def _default_origin(facts: Facts) -> str:
    """The default origin of the mean and standard deviation."""
    if facts.kind in STANDARDISED or facts.mean:
        return "declared"
    return "none"


def labels_of(own: Dataset, examples: Examples, facts: Facts) -> Tensor:
    """A site's labels as the ids that all sites share. They are mapped by class name. If the site
    only has numbers, and none of the run's classes is a number, they are used directly.

    Raises Refused for examples of another shape, or for an unknown class.
    """
    if tuple(examples.values.shape[1:]) != facts.shape:
        raise Refused(
            f"{PLURALS[facts.kind]} at this site have shape {tuple(examples.values.shape[1:])}, "
            f"not {facts.shape}",
            "shape",
        )
    listed = [nfc(name) for name in facts.classes]
    is_numbered = own.classes == tuple(str(i) for i in range(len(own.classes)))
    lists_numbers = any(name.isdecimal() for name in listed)
    if is_numbered and not lists_numbers and len(own.classes) <= len(listed):
        return examples.labels

    names = own.classes
    if is_numbered:
        names = _classes_with_examples(own)
    unknown = [name for name in names if name not in listed]
    if unknown:
        raise Refused(
            f"this site has a class {unknown[0]!r} that the server does not list", "classes"
        )
    ids = torch.full((len(own.classes),), -1)
    for name in names:
        ids[own.classes.index(name)] = listed.index(name)
    return ids[examples.labels]


def _classes_with_examples(own: Dataset) -> tuple[str, ...]:
    """The classes that a site has. Labels 1 and 2, for example, are numbered from 0, but the site
    has no class 0.
    """
    labels = torch.cat([own.train.labels, own.test.labels])
    return tuple(own.classes[label] for label in sorted(set(labels.tolist())))


def public_of(
    settings: Settings, copy: str, facts: Facts, form: Mapping[str, Any], scaler: Scaler
) -> Examples | None:
    """The public set at a site, read from its own copy; None if the run has no public set.

    form: the reading options for files without images. Raises Refused if there is no copy, or if it
    differs from the server's set in any example.
    """
    if not facts.public:
        return None
    if not facts.shape:
        raise Refused(f"the request's facts about data are malformed: shape {facts.shape}")
    like = ExampleForm(
        shape=facts.shape,
        classes=facts.classes,
        mean=facts.mean,
        std=facts.std,
        about=facts.about,
        reading=form,
    )
    public = public_copy(settings, copy, like)
    if public is None:
        raise Refused(
            "the run has a public set: set public to your copy of it in this site's site.toml",
            "public",
        )
    if settings.data.public_from != NOISE:
        public = scaler.transform(public)
    if examples_digest(public) != facts.public:
        raise Refused(
            "the public set at this site differs from the server's: copy the server's folder again",
            "public",
        )
    return public


# A site's own data for a run with tasks, given as folders or divided by a time column. Their
# SHA-256 is stored at their first use.


NOTES = "tasks"
"""The file in a client's folder with a line for each task: its number, and the SHA-256 of its data,
or ``NO_DATA``.
"""

NO_DATA = "-"


@dataclass(frozen=True)
class OwnTasks:
    """A site's data for the tasks of ``stream`` up to the task ``current``.

    Tasks are counted from 0. ``dataset``: the data set of the first task with data, before scaling.
    ``train``, ``tests``: the examples of each task that has any. ``sums``: the SHA-256 of each
    task's data, empty for a task without data. ``scaler``, ``public``: as in ``OwnData``.
    """

    stream: Stream
    current: int
    sums: Mapping[int, str]
    train: Mapping[int, Examples]
    tests: Mapping[int, Examples]
    dataset: Dataset | None = None
    scaler: Scaler | None = None
    public: Examples | None = None

    def check_unchanged(self, place: Path) -> None:
        """Raise Refused for data that have changed since their first use, whose SHA-256 is stored
        in a client's folder.
        """
        path = place / NOTES
        noted: dict[str, str] = {}
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            noted = dict(line.split() for line in lines)
        for task, sha in self.sums.items():
            current = sha or NO_DATA
            first = noted.setdefault(str(task + 1), current)
            if first != current:
                change = "has other data than"
                if first == NO_DATA:
                    change = "has data now, but had none"
                raise Refused(
                    f"task {task + 1} at this site {change} when this run first used it: restore "
                    "the data, or start a new run",
                    "tasks",
                )
        text = "".join(f"{number} {noted[number]}\n" for number in sorted(noted, key=int))
        write_secret(path, text.encode())


def own_tasks(
    settings: Settings, facts: Facts, stream: Stream, current: int, site: Site
) -> OwnTasks:
    """A site's data for the tasks up to ``current``; empty if this is -1 because the site has not
    joined yet.

    Raises Refused for data that do not match the tasks of the run, and like ``own_data``.
    """
    if not (site.tasks or site.time_column):
        raise Refused(
            "this run has tasks: set tasks = 'folders', or time_column, in this site's site.toml",
            "tasks",
        )
    if current < 0:
        return OwnTasks(stream, current, sums={}, train={}, tests={})
    form = form_of(settings, facts, site.tokenizer)
    datasets = _datasets_by_task(settings, facts, site, form, tasks=stream.tasks, current=current)
    sums = dict.fromkeys(range(current + 1), "")
    for task, dataset in datasets.items():
        sums[task] = _digest(dataset)
    if not datasets:
        return OwnTasks(stream, current, sums=sums, train={}, tests={})

    first = datasets[min(datasets)]
    scaler = scaler_of(settings, first, facts)
    public = None
    train = {task: dataset.train for task, dataset in datasets.items()}
    tests = {task: dataset.test for task, dataset in datasets.items()}
    if scaler.awaits_sums:
        # The sums omit missing values, so examples are not changed.
        tests = {}
    else:
        train = {task: scaler.transform(examples) for task, examples in train.items()}
        tests = {task: scaler.transform(examples) for task, examples in tests.items()}
        public = public_of(settings, site.public, facts, form, scaler)
    return OwnTasks(
        stream=stream,
        current=current,
        sums=sums,
        train=_with_examples(train),
        tests=_with_examples(tests),
        dataset=first,
        scaler=scaler,
        public=public,
    )


def _datasets_by_task(
    settings: Settings,
    facts: Facts,
    site: Site,
    form: Mapping[str, object],
    *,
    tasks: int,
    current: int,
) -> dict[int, Dataset]:
    """The data sets of the tasks up to ``current``, from folders or by a time column."""
    if not site.tasks:
        return _cut(settings, facts, site, form, current)
    places = task_folders(Path(site.data), tasks)
    return {
        task: read_in_form(settings, facts, str(place), form)
        for task, place in places.items()
        if task <= current
    }


def task_folders(data: Path, tasks: int) -> dict[int, Path]:
    """The non-empty folders task1, task2, … of a site, by task from 0. An empty folder denotes a
    task without data.

    Raises Refused for a folder that does not belong to a task of the run, and for missing folders
    before the last one.
    """
    if not data.is_dir():
        raise Refused(
            f"tasks = 'folders' needs a folder, but {data} is not a folder; correct data in this "
            "site's site.toml",
            "tasks",
        )
    entries = {path.name: path for path in sorted(_visible(data))}
    numbers = {f"task{task + 1}": task for task in range(tasks)}
    strange = [name for name in entries if name not in numbers]
    if strange:
        problem = "no task"
        if re.fullmatch(r"task\d+", strange[0]):
            problem = "not a task of this run"
        raise Refused(
            f"{data / strange[0]} is {problem}, whose tasks are task1 to task{tasks}; move it "
            "elsewhere",
            "tasks",
        )
    if not entries:
        raise Refused(
            f"{data} has no folder task1, task2, …; correct data in this site's site.toml",
            "tasks",
        )
    last = max(numbers[name] for name in entries)
    absent = [name for name, task in numbers.items() if task < last and name not in entries]
    if absent:
        raise Refused(
            f"{data} has task{last + 1}, but no {absent[0]}: if this site has no data for it, make "
            f"an empty folder {absent[0]}",
            "tasks",
        )
    places = {numbers[name]: path for name, path in entries.items()}
    return {task: path for task, path in places.items() if not path.is_dir() or _visible(path)}


def data_digests(site: Site) -> list[str]:
    """The SHA-256 of a site's data, regardless of how a config reads them: one for each task with
    data if the site has folders of tasks, otherwise one.

    It covers the names, sizes and contents of all files, or only the name of a data set that has
    one. The list is empty for a function, which may return other data each time.
    """
    if not site.data or split_name(site.data).is_code:
        return []
    place = Path(site.data)
    if not place.exists():
        return [digest(site.data.encode())]
    if not site.tasks:
        return [_files_digest(place)]
    folders = [folder for folder in sorted(_visible(place)) if folder.is_dir()]
    return [_files_digest(folder) for folder in folders if _visible(folder)]


def _files_digest(place: Path) -> str:
    """The SHA-256 of the names, sizes and contents of the files in a folder, or of one file."""
    files = [place]
    folder = place.parent
    if place.is_dir():
        files = data_files(place)
        folder = place
    lines = []
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(folder).as_posix()
        lines.append(json.dumps([name, path.stat().st_size, content]))
    return digest("\n".join(lines).encode())


def _visible(folder: Path) -> list[Path]:
    """The entries of a folder, without hidden ones."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _cut(
    settings: Settings, facts: Facts, site: Site, form: Mapping[str, object], current: int
) -> dict[int, Dataset]:
    """The tasks up to ``current``, from data with a time column, divided at the run's dates."""
    column = site.time_column
    data = site.data
    cuts = settings.named.stream.values["cuts"]
    if len(cuts) != settings.stream.tasks - 1:
        raise Refused(
            "this site's data are divided by time_column, but the run's stream.cuts has no dates "
            "for it",
            "tasks",
        )
    own = read_in_form(settings, facts, data, form, owner=column, cuts=cuts)
    if own.train.owners is None or own.test.owners is None:
        raise Refused(
            f"{data} has no column {column!r}, because images in folders and arrays have no "
            "columns; set tasks = 'folders', and make a folder for each task",
            "tasks",
        )
    tasks_of_values = torch.tensor(
        tasks_of_times(Path(data).name, column, own.about.owners, cuts), dtype=torch.int64
    )
    train_tasks = tasks_of_values[own.train.owners]
    test_tasks = tasks_of_values[own.test.owners]
    datasets = {}
    for task in range(current + 1):
        train = own.train.take((train_tasks == task).nonzero().flatten())
        test = own.test.take((test_tasks == task).nonzero().flatten())
        if len(train) or len(test):
            datasets[task] = replace(
                own, train=replace(train, owners=None), test=replace(test, owners=None)
            )
    return datasets


def _digest(dataset: Dataset) -> str:
    digests = f"{examples_digest(dataset.train)} {examples_digest(dataset.test)}"
    return digest(digests.encode())


def _with_examples(by_task: Mapping[int, Examples]) -> dict[int, Examples]:
    return {task: examples for task, examples in by_task.items() if len(examples)}


# Runs that a site has prepared, on its own data or, in a trial, on its part of the run's data


@dataclass(frozen=True)
class SiteRun:
    """A run that a site has prepared.

    ``prepared``: the prepared run; None if the site has no data yet. ``tasks``: the data of tasks,
    if the run has tasks.
    """

    settings: Settings
    prepared: Prepared | None
    tasks: OwnTasks | None = None

    def has_data_of(self, round: int, client: int) -> bool:
        """Whether the run contains the data of the client's task in a round."""
        return self.tasks is None or self.tasks.current == self.tasks.stream.task(round, client)

    def prepared_for(self, stage: str) -> Prepared | None:
        """The prepared run for a stage; None if the site is idle because it has no data for it."""
        if self.tasks is None:
            return self.prepared
        has_data = self.tasks.current in self.tasks.train
        if stage == TASK_TEST:
            has_data = bool(self.tasks.tests)
        if not has_data:
            return None
        return self.prepared


def prepare_own_data(settings: Settings, facts: Facts, site: Site, start: Tensors) -> SiteRun:
    """Prepare a run without tasks on a site's own data.

    start: the model that the run starts from; empty for random weights.
    """
    own = own_data(settings, facts, site.data, site.public, site.tokenizer)
    tests: dict[int, Examples] = {}
    if site.evaluate:
        tests[site.client] = own.test
    data = ClientData(train=own.train, split=None, public=own.public, client_tests=tests)
    world = _world(settings, facts, own.public, start)
    prepared = _prepared(settings, facts, own.dataset, own.scaler, data=data, world=world)
    return SiteRun(settings, prepared)


def prepare_own_tasks(
    settings: Settings, facts: Facts, site: Site, round: int, start: Tensors
) -> SiteRun:
    """Prepare a run with tasks on a site's data for the tasks up to the task of a round.

    start: as in ``prepare_own_data``.
    """
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    cut = cut_into_tasks(settings, nothing, len(facts.classes))
    assert cut is not None
    stream = stream_of(settings, cut, None)
    own = own_tasks(settings, facts, stream, stream.task(round, site.client), site)
    if own.dataset is None or own.scaler is None:
        return SiteRun(settings, None, own)
    by_task = {
        task: examples
        for task, examples in own.train.items()
        if task == own.current or stream.keeps_data
    }
    no_examples = own.dataset.train.take(torch.arange(0))
    train = concatenated(list(by_task.values()) or [no_examples])
    sizes = [len(examples) for examples in by_task.values()]
    task_of_example = np.repeat(np.array([*by_task], dtype=np.int64), sizes)
    task_tests: Mapping[int, Examples] = {}
    if site.evaluate:
        task_tests = own.tests
    data = ClientData(
        train=train,
        split=None,
        public=own.public,
        tasks=replace(cut, task=task_of_example),
        task_tests=task_tests,
    )
    world = replace(_world(settings, facts, own.public, start), stream=stream)
    prepared = _prepared(settings, facts, own.dataset, own.scaler, data=data, world=world)
    return SiteRun(settings, prepared, own)


def _prepared(
    settings: Settings,
    facts: Facts,
    dataset: Dataset,
    scaler: Scaler,
    *,
    data: ClientData,
    world: RunWorld,
) -> Prepared:
    """The run on a site's data; ``dataset``: before scaling. Raises ConfigError for data that the
    run cannot use.
    """
    sites = site_views(settings, world, facts.inputs(settings), data)
    check_at_site(settings, world, sites)
    return Prepared(
        settings=settings,
        dataset=dataset,
        world=world,
        sites=sites,
        scaler=scaler,
        metrics=run_metrics(settings, facts.classes),
    )


def _world(settings: Settings, facts: Facts, public: Examples | None, start: Tensors) -> RunWorld:
    classes = len(facts.classes)
    world = world_of(settings, facts.shape, classes, len(public or ()), facts.vocabulary)
    world = with_start_model(settings, world, start)
    return with_extensions(settings, world, lambda: torch.zeros(0, classes))
