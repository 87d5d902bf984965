"""Where a run stands among the cells of a map: how uneven its clients are, how long each trains,
how many take part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.round_work import local_steps
from fedstill.experiment.run_directory.split_file import split_of_sites
from fedstill.labels import distance, proportions
from fedstill.records import SERVER


@dataclass(frozen=True)
class Setting:
    """Three numbers of a run with one round trip and no tasks.

    ``labels_apart``: the Jensen-Shannon divergence of a client's labels from those of all clients
    together, in nats (0 to 0.69), the mean over clients. ``steps_per_example``: the optimiser's
    steps of a client's round over its number of examples, the mean over clients. ``clients_share``:
    of all clients, those that take part in a round.
    """

    labels_apart: float
    steps_per_example: float
    clients_share: float


SETTING = tuple(f.name for f in fields(Setting))
"""The names of the three, in order."""


def setting_of(prepared: Prepared) -> Setting | None:
    """Where a run stands; None where it is another kind of run: a chain, tasks, public logits, data
    held elsewhere.
    """
    sites, world = prepared.sites, prepared.world
    acting = [
        s for s in prepared.settings.topology(1, world) if any(c != SERVER for c in s.clients)
    ]
    dealt = split_of_sites(sites) if sites.tasks is None and len(acting) == 1 else None
    if (
        dealt is None
        or acting[0].hop
        or acting[0].view == "public"
        or acting[0].name not in world.plans
    ):
        return None
    table = dealt.counts(len(prepared.dataset.classes)).table()
    table = table[table.sum(axis=1) > 0]
    if not len(table):
        return None
    sizes = [int(size) for size in table.sum(axis=1)]
    apart = distance(proportions(table), proportions(table.sum(axis=0)), "js")
    pace = [local_steps(prepared, acting[0], size) / size for size in sizes]
    return Setting(
        float(apart.mean()), float(np.mean(pace)), len(acting[0].clients) / world.clients
    )
