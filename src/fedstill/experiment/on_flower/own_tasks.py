"""A site's own data of a run with tasks: by folder, or cut by a time column; their SHA-256 is noted
when first used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedstill.data.examples import Dataset, examples_digest
from fedstill.data.time_cuts import tasks_of_times
from fedstill.errors import Refused
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.on_flower.facts import Facts
from fedstill.experiment.on_flower.own_data import form_of, public_of, read_alike, standard_of
from fedstill.experiment.on_flower.site_file import Site
from fedstill.experiment.preparing.standardising import Standard
from fedstill.files import digest, write_secret
from fedstill.records import Examples
from fedstill.stream import Stream

NOTES = "tasks"
"""The file beside a client's memory with a line for each task: its number, and the SHA-256 of its
data, or -.
"""


@dataclass(frozen=True)
class OwnTasks:
    """What a site has of the tasks of ``stream`` up to ``now``, from 0, as the run has it.

    ``read``: what was read of the first task with data. ``train``, ``tests``: by task, from 0,
    those with examples.
    ``sums``: the SHA-256 of each task's data, empty for one without. ``by``, ``public``: as in
    ``OwnData``.
    """

    stream: Stream
    now: int
    sums: Mapping[int, str]
    train: Mapping[int, Examples]
    tests: Mapping[int, Examples]
    read: Dataset | None = None
    by: Standard | None = None
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
    by, public = standard_of(settings, first, facts), None
    train, tests = (
        {t: getattr(own, split) for t, own in read.items()} for split in ("train", "test")
    )
    if by.origin == "summed" and not by.mean:  # the sums come first, and count what is known only
        tests = {}
    else:
        train, tests = ({t: by.of(own) for t, own in each.items()} for each in (train, tests))
        public = public_of(settings, site.public, facts, form, by)
    return OwnTasks(stream, now, sums, _some(train), _some(tests), first, by, public)


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
