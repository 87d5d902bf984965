"""A run as one site has it ready: its own data, or in a trial its part of the run's, in the world
that all know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedstill.data.task_data import below
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.on_flower.facts import Facts
from fedstill.experiment.on_flower.own_data import own_data
from fedstill.experiment.on_flower.own_tasks import OwnTasks, own_tasks
from fedstill.experiment.on_flower.site_file import Site
from fedstill.experiment.preparing.prepared import Prepared, sites_of
from fedstill.experiment.preparing.private_training import refuse_unprivate
from fedstill.experiment.preparing.querying import with_asking
from fedstill.experiment.preparing.run_world import RunWorld, world_of
from fedstill.experiment.preparing.sharing import Shared
from fedstill.experiment.preparing.task_split import cut_of, stream_of
from fedstill.experiment.preparing.unmaskable import refuse_unmaskable
from fedstill.records import Examples
from fedstill.topology import TASK_TEST


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
    parts = {site.client: torch.arange(len(own.train))}
    shared = Shared(own.train, parts, own.public, own_tests={site.client: own.test})
    world = _world(settings, facts, own.public)
    sites = sites_of(settings, world, facts.inputs(settings), shared)
    return Ready(settings, Prepared(settings, own.read, world, sites, by=own.by))


def on_own_tasks(settings: Settings, facts: Facts, site: Site, round: int) -> Ready:
    """A run with tasks, ready on what a site has of them up to a round's."""
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    cut = cut_of(settings, nothing, len(facts.classes))
    assert cut is not None
    stream = stream_of(settings, cut, ())
    own = own_tasks(settings, facts, stream, stream.task(round, site.client), site)
    if own.read is None or own.by is None:
        return Ready(settings, None, own)
    had = _had(own.train, own.now, stream.kept)
    train = below(list(had.values()) or [own.read.train.take(torch.arange(0))])
    task = np.repeat(np.array([*had], dtype=np.int64), [len(examples) for examples in had.values()])
    parts = {site.client: torch.arange(len(train))}
    shared = Shared(train, parts, own.public, cut=replace(cut, task=task), tests_by_task=own.tests)
    world = replace(_world(settings, facts, own.public), stream=stream)
    sites = sites_of(settings, world, facts.inputs(settings), shared)
    return Ready(settings, Prepared(settings, own.read, world, sites, by=own.by), own)


def _had(train: Mapping[int, Examples], now: int, kept: bool) -> dict[int, Examples]:
    return {task: examples for task, examples in train.items() if task == now or kept}


def _world(settings: Settings, facts: Facts, public: Examples | None) -> RunWorld:
    classes = len(facts.classes)
    world = world_of(settings, facts.shape, classes, len(public) if public else 0, facts.vocabulary)
    world = with_asking(settings, world, lambda: torch.zeros(0, classes))
    refuse_unprivate(settings, world)  # a server that is hostile would not
    refuse_unmaskable(settings, world)
    return world
