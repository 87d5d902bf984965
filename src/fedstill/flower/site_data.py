"""A site's own data: read by the run's keys, checked against its facts, cut into tasks."""

from __future__ import annotations

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
from fedstill.core.files import digest, write_secret
from fedstill.core.records import Examples
from fedstill.core.stream import Stream, tasks_of_times
from fedstill.data.dataset import PLURALS, Dataset, examples_digest, nfc
from fedstill.data.sources import load_dataset
from fedstill.data.views import concatenated
from fedstill.flower.facts import Facts
from fedstill.flower.site_settings import Site
from fedstill.running.cautions import log_once
from fedstill.running.client_data import NOISE, ClientData, ExampleForm, public_copy, reading_like
from fedstill.running.compatibility import check_at_site
from fedstill.running.preparation import Prepared, run_metrics, site_views
from fedstill.running.splitting import cut_into_tasks, stream_of
from fedstill.running.standardisation import (
    STANDARDISED,
    UNSCALED,
    Scaler,
    column_moments,
    unscaled,
)
from fedstill.running.world import RunWorld, extended, world_of

# A site's own data as the run has them: read by the run's keys, checked against its facts,
# standardised by these.


@dataclass(frozen=True)
class OwnData:
    """What a site has: the data set as it was read, its examples as the run has them, and the
    public set.

    ``scaler``: how numbers were scaled.
    """

    read: Dataset
    train: Examples
    test: Examples
    public: Examples | None
    scaler: Scaler


def own_data(settings: Settings, facts: Facts, data: str, public: str, tokenizer: str) -> OwnData:
    """A site's data, given the places of its own file or folder, its copy of the public set, and of
    the tokenizer.

    Raises Refused in one line for examples that are not of the kind, shape, columns, vocabulary or
    classes of the run, and for copies that are not the server's.
    """
    form = form_of(settings, facts, tokenizer)
    own = read_alike(settings, facts, data, form)
    scaler = scaler_of(settings, own, facts)
    if scaler.awaits_sums:  # the sums count what is known only, so examples stay as they are
        return OwnData(own, own.train, own.test, None, scaler)
    return OwnData(
        read=own,
        train=scaler.transform(own.train),
        test=scaler.transform(own.test),
        public=public_of(settings, public, facts, form, scaler),
        scaler=scaler,
    )


def read_alike(
    settings: Settings, facts: Facts, data: str, form: Mapping[str, Any], **more: Any
) -> Dataset:
    """A file or folder of a site as the run's form says, its labels as the ids that all sites
    share.

    more: further options of reading. Raises Refused for other examples than the run's.
    """
    label = (
        {"label_column": settings.data.label_column} if settings.data.label_column and form else {}
    )
    images = settings.data.images
    own = load_dataset(data, **({} if ".py:" in data else {**form, **label, **images, **more}))
    for caution in own.about.cautions:
        log_once(f"data: {caution}")
    _refuse_unlike(own, facts)
    train, test = (replace(e, labels=labels_of(own, e, facts)) for e in (own.train, own.test))
    return replace(own, train=train, test=test)


def form_of(settings: Settings, facts: Facts, tokenizer: str) -> dict[str, Any]:
    """How the site reads its own file: as the run's ``[data]`` says, with the columns and names of
    the facts.
    """
    form = reading_like(settings.data, facts.about)
    if facts.kind == "text" and form["tokenizer"].endswith(".json"):
        form["tokenizer"] = _own_tokenizer(tokenizer, facts)
    return form


def _own_tokenizer(copy: str, facts: Facts) -> str:
    if not copy:
        raise Refused(
            "texts of this run need a tokenizer's file: set tokenizer, your copy of it, in this "
            "site's site.toml"
        )
    try:
        same = digest(Path(copy).read_bytes()) == facts.tokenizer
    except OSError as error:
        raise Refused(
            f"this site's tokenizer cannot be read: {error.strerror}; correct it in site.toml"
        ) from error
    if not same:
        raise Refused(
            "the tokenizer at this site is not the server's: copy the server's file again"
        )
    return copy


def _refuse_unlike(own: Dataset, facts: Facts) -> None:
    """Raise Refused for examples of another kind, vocabulary or inputs than the run's."""
    many = PLURALS[facts.kind]
    if own.about.kind != facts.kind:
        raise Refused(
            f"this site has {own.many}, and the run is about {many}; correct data in its site.toml"
        )
    if own.vocabulary != facts.vocabulary:
        raise Refused(
            f"texts at this site have {own.vocabulary:,} token ids, not {facts.vocabulary:,}"
        )
    if facts.features and own.about.features != facts.features:
        theirs = next(name for name in facts.features if name not in own.about.features)
        raise Refused(f"tables at this site have no input {theirs!r}; correct its columns")


def scaler_of(settings: Settings, own: Dataset, facts: Facts) -> Scaler:
    """The scaler of this site's numbers: with the facts' mean and spread, or its own where the run
    says so.

    Raises Refused where the request says otherwise than the run's configuration.
    """
    if facts.kind in ("image", "text"):
        return UNSCALED
    asked = settings.data.standardise or (
        "declared" if facts.kind in STANDARDISED or facts.mean else "none"
    )
    if facts.origin != asked:
        raise Refused(
            f"the request has data.standardise = {facts.origin!r}, and the run's configuration "
            f"{asked!r}"
        )
    if facts.origin == "own":
        mine = column_moments(own.train.values, own.about.binary_features)
        return Scaler("own", mine.mean, mine.std)
    if facts.origin == "none":
        return unscaled(settings, own.train)
    if not facts.mean and facts.origin != "summed":
        raise Refused(
            f"the request has no mean and spread, by which {PLURALS[facts.kind]} are standardised"
        )
    return Scaler(facts.origin, facts.mean, facts.std)


def labels_of(own: Dataset, examples: Examples, facts: Facts) -> Tensor:
    """A site's labels as the ids that all sites share: by class name, or as they are where the site
    has numbers only.

    Raises Refused for examples of another shape, or a class that the others don't know.
    """
    if tuple(examples.values.shape[1:]) != facts.shape:
        raise Refused(
            f"{PLURALS[facts.kind]} at this site have shape {tuple(examples.values.shape[1:])}, "
            f"not {facts.shape}"
        )
    numbered = own.classes == tuple(str(i) for i in range(len(own.classes)))
    if numbered and len(own.classes) <= len(facts.classes):
        return examples.labels
    listed = [nfc(name) for name in facts.classes]
    unknown = [name for name in own.classes if name not in listed]
    if unknown:
        raise Refused(f"this site has a class {unknown[0]!r} that the server does not list")
    ids = torch.tensor([listed.index(name) for name in own.classes], dtype=torch.int64)
    return ids[examples.labels]


def public_of(
    settings: Settings, copy: str, facts: Facts, form: Mapping[str, Any], scaler: Scaler
) -> Examples | None:
    """The public set at a site, read from its own copy; None in a run that has none.

    form: how the site reads files that hold no images. Raises Refused if there is no copy here, or
    it is not the server's set, example by example.
    """
    if not facts.public:
        return None
    if not facts.shape:
        raise Refused(f"the request's facts about data are malformed: shape {facts.shape}")
    like = ExampleForm(
        shape=facts.shape,
        classes=len(facts.classes),
        mean=facts.mean,
        std=facts.std,
        about=facts.about,
        reading=form,
    )
    public = public_copy(settings, copy, like)
    if public is None:
        raise Refused(
            "the run has a public set: set public, your copy of it, in this site's site.toml"
        )
    if settings.data.public_from != NOISE:
        public = scaler.transform(public)
    if examples_digest(public) != facts.public:
        raise Refused(
            "the public set at this site is not the server's: copy the server's folder again"
        )
    return public


# A site's own data of a run with tasks: by folder, or cut by a time column; their SHA-256 is noted
# when first used.


NOTES = "tasks"
"""The file beside a client's memory with a line for each task: its number, and the SHA-256 of its
data, or -.
"""


@dataclass(frozen=True)
class OwnTasks:
    """What a site has of the tasks of ``stream`` up to ``now``, from 0, as the run has it.

    ``read``: what was read of the first task with data. ``train``, ``tests``: by task, from 0,
    those with examples.
    ``sums``: the SHA-256 of each task's data, empty for one without. ``scaler``, ``public``: as in
    ``OwnData``.
    """

    stream: Stream
    now: int
    sums: Mapping[int, str]
    train: Mapping[int, Examples]
    tests: Mapping[int, Examples]
    read: Dataset | None = None
    scaler: Scaler | None = None
    public: Examples | None = None

    def note(self, place: Path) -> None:
        """Note what is used for the first time in a client's folder; raises Refused for data that
        have changed.
        """
        path = place / NOTES
        noted = (
            dict(line.split() for line in path.read_text(encoding="utf-8").splitlines())
            if path.is_file()
            else {}
        )
        for task, sha in self.sums.items():
            before = noted.setdefault(str(task + 1), sha or "-")
            if before != (sha or "-"):
                what = "has data now, and had none" if before == "-" else "has other data than"
                raise Refused(
                    f"task {task + 1} at this site {what} when this run first used it: put them "
                    "back as they were, or "
                    "start a new run"
                )
        lines = [
            f"{task} {sha}\n" for task, sha in sorted(noted.items(), key=lambda both: int(both[0]))
        ]
        write_secret(path, "".join(lines).encode())


def own_tasks(settings: Settings, facts: Facts, stream: Stream, now: int, site: Site) -> OwnTasks:
    """A site's data of the tasks up to ``now``, from 0; -1: it has not joined, and nothing is read.

    Raises Refused in one line for data that are no tasks of the run, and for what ``own_data``
    refuses.
    """
    if not (site.tasks or site.time_column):
        raise Refused(
            "this run has tasks: set tasks = 'folders', or time_column, in this site's site.toml"
        )
    if now < 0:
        return OwnTasks(stream, now, {}, {}, {})
    form = form_of(settings, facts, site.tokenizer)
    if site.tasks:
        places = task_folders(Path(site.data), stream.tasks)
        read = {
            t: read_alike(settings, facts, str(places[t]), form)
            for t in range(now + 1)
            if t in places
        }
    else:
        read = _cut(settings, facts, site, form, now)
    sums = {t: _sum(read[t]) if t in read else "" for t in range(now + 1)}
    if not read:
        return OwnTasks(stream, now, sums, {}, {})
    first = read[min(read)]
    scaler = scaler_of(settings, first, facts)
    public = None
    train, tests = (
        {t: getattr(own, split) for t, own in read.items()} for split in ("train", "test")
    )
    if scaler.awaits_sums:  # the sums count what is known only, so examples stay as they are
        tests = {}
    else:
        train = {task: scaler.transform(examples) for task, examples in train.items()}
        tests = {task: scaler.transform(examples) for task, examples in tests.items()}
        public = public_of(settings, site.public, facts, form, scaler)
    return OwnTasks(stream, now, sums, _some(train), _some(tests), first, scaler, public)


def task_folders(data: Path, tasks: int) -> dict[int, Path]:
    """The folders task1, task2, … of a site that hold something, by task from 0; an empty one has
    nothing on purpose.

    Raises Refused for a folder that is none of the run's tasks, and where one is left out before
    another.
    """
    if not data.is_dir():
        raise Refused(
            f"tasks = 'folders' needs a folder, and {data} is none; correct data in this site's "
            "site.toml"
        )
    there = {path.name: path for path in sorted(data.iterdir()) if not path.name.startswith(".")}
    names = {f"task{t + 1}": t for t in range(tasks)}
    if strange := [name for name in there if name not in names]:
        what = (
            "a task that this run does not have"
            if re.fullmatch(r"task\d+", strange[0])
            else "no task"
        )
        raise Refused(
            f"{data / strange[0]} is {what}: its tasks are task1 to task{tasks}; move it elsewhere"
        )
    if not there:
        raise Refused(
            f"{data} has no folder task1, task2, …; correct data in this site's site.toml"
        )
    last = max(names[name] for name in there)
    if absent := [name for name, t in names.items() if t < last and name not in there]:
        raise Refused(
            f"{data} has task{last + 1}, and no {absent[0]}: make an empty folder {absent[0]} if "
            "there is nothing in it"
        )
    full = {names[name]: path for name, path in there.items()}
    return {t: path for t, path in full.items() if not path.is_dir() or any(_seen(path))}


def _seen(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _cut(
    settings: Settings, facts: Facts, site: Site, form: Mapping[str, object], now: int
) -> dict[int, Dataset]:
    """The tasks up to ``now`` of data with a time column, as the run's dates cut it."""
    column, data, cuts = site.time_column, site.data, settings.named.stream.values["cuts"]
    if len(cuts) != settings.stream.tasks - 1:
        raise Refused(
            "this site's data are cut by time_column, and the run's stream.cuts has no dates for it"
        )
    own = read_alike(settings, facts, data, form, owner=column, cuts=cuts)
    if own.train.owners is None or own.test.owners is None:
        raise Refused(
            f"{data} has no column {column!r}, as images in folders and arrays have none; set "
            "tasks = 'folders', and "
            "make a folder for each task"
        )
    of_value = torch.tensor(
        tasks_of_times(Path(data).name, column, own.about.owners, cuts), dtype=torch.int64
    )
    splits = (own.train, own.test)
    task_of = [of_value[examples.owners] for examples in splits]
    cut = {}
    for task in range(now + 1):
        train, test = (
            e.take((of == task).nonzero().flatten()) for e, of in zip(splits, task_of, strict=True)
        )
        if len(train) or len(test):
            cut[task] = replace(
                own, train=replace(train, owners=None), test=replace(test, owners=None)
            )
    return cut


def _sum(read: Dataset) -> str:
    return digest(f"{examples_digest(read.train)} {examples_digest(read.test)}".encode())


def _some(each: Mapping[int, Examples]) -> dict[int, Examples]:
    return {task: examples for task, examples in each.items() if len(examples)}


# A run as one site has it ready: its own data, or in a trial its part of the run's, in the world
# that all know.


@dataclass(frozen=True)
class Ready:
    """A run that a site has ready; ``prepared``: None where it has no data yet. ``tasks``: in a run
    with tasks.
    """

    settings: Settings
    prepared: Prepared | None
    tasks: OwnTasks | None = None

    def serves(self, round: int, client: int) -> bool:
        """Whether it holds the data of the client's task in a round."""
        return self.tasks is None or self.tasks.now == self.tasks.stream.task(round, client)

    def works(self, stage: str) -> Prepared | None:
        """What a stage is done with; None where the site has no data for it: it is then idle."""
        if self.tasks is None:
            return self.prepared
        there = self.tasks.tests if stage == TASK_TEST else self.tasks.now in self.tasks.train
        return self.prepared if there else None


def on_own_data(settings: Settings, facts: Facts, site: Site) -> Ready:
    """A run without tasks, ready on a site's own data."""
    own = own_data(settings, facts, site.data, site.public, site.tokenizer)
    data = ClientData(
        train=own.train, split=None, public=own.public, client_tests={site.client: own.test}
    )
    world = _world(settings, facts, own.public)
    sites = site_views(settings, world, facts.inputs(settings), data)
    check_at_site(settings, world, sites)
    prepared = Prepared(
        settings=settings,
        dataset=own.read,
        world=world,
        sites=sites,
        scaler=own.scaler,
        metrics=run_metrics(settings, facts.classes),
    )
    return Ready(settings, prepared)


def on_own_tasks(settings: Settings, facts: Facts, site: Site, round: int) -> Ready:
    """A run with tasks, ready on what a site has of them up to a round's."""
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    cut = cut_into_tasks(settings, nothing, len(facts.classes))
    assert cut is not None
    stream = stream_of(settings, cut, None)
    own = own_tasks(settings, facts, stream, stream.task(round, site.client), site)
    if own.read is None or own.scaler is None:
        return Ready(settings, None, own)
    had = _had(own.train, own.now, stream.kept)
    train = concatenated(list(had.values()) or [own.read.train.take(torch.arange(0))])
    task = np.repeat(np.array([*had], dtype=np.int64), [len(examples) for examples in had.values()])
    data = ClientData(
        train=train,
        split=None,
        public=own.public,
        tasks=replace(cut, task=task),
        task_tests=own.tests,
    )
    world = replace(_world(settings, facts, own.public), stream=stream)
    sites = site_views(settings, world, facts.inputs(settings), data)
    check_at_site(settings, world, sites)
    prepared = Prepared(
        settings=settings,
        dataset=own.read,
        world=world,
        sites=sites,
        scaler=own.scaler,
        metrics=run_metrics(settings, facts.classes),
    )
    return Ready(settings, prepared, own)


def _had(train: Mapping[int, Examples], now: int, kept: bool) -> dict[int, Examples]:
    return {task: examples for task, examples in train.items() if task == now or kept}


def _world(settings: Settings, facts: Facts, public: Examples | None) -> RunWorld:
    classes = len(facts.classes)
    world = world_of(settings, facts.shape, classes, len(public) if public else 0, facts.vocabulary)
    return extended(settings, world, lambda: torch.zeros(0, classes))
