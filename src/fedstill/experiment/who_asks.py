"""What a run's clients will ask for, as far as it is known before: shown by
``fedstill explain``.
"""

from __future__ import annotations

from fedstill.data.arrival import Arrival
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.preparing.querying import reasons_before
from fedstill.queries import because

WORDS = {
    "lack": "of which they have fewer than {few} examples",
    "accuracy": "on which their model's accuracy is under {under}",
    "need": "that they say they will need",
}
AMOUNTS = {"single": "one class", "multi": "several classes", "all": "all classes"}

MOST_ASKERS = 40
"""Of more clients that ask, the others are only counted."""


def who_asks(prepared: Prepared) -> tuple[str, list[tuple[str, str, str]]]:
    """When and by what queries are raised, as a sentence; client, classes and why of those that are
    known by now.
    """
    world, sites, table = prepared.world, prepared.sites, prepared.settings.query
    if world.asking is not None:
        by = " or ".join(WORDS[trigger] for trigger in world.asking.by)
        said = (
            "Clients raise their queries in the run, after the stage 'fit', for "
            f"{AMOUNTS[world.asking.draw]} {by}."
        )
        said = said.format(few=table.fewer_than, under=f"{table.accuracy_under or 0:g}")
        return said + (f" {_growing(sites.arrival)}" if sites.arrival else ""), []
    why, names = (
        reasons_before(prepared.settings, world, sites.all_counts),
        prepared.dataset.classes,
    )
    rows = []
    for client, query in sorted(world.queries.items())[:MOST_ASKERS]:
        told = (
            "; ".join(f"{names[c]}: {because(why[client][c])}" for c in query)
            if why
            else "written in the config"
        )
        rows.append((f"{client}", ", ".join(names[c] for c in query), told))
    more = len(world.queries) - len(rows)
    return f"and {more} more clients" if more else "", rows


def _growing(arrival: Arrival) -> str:
    first = f"{100 * arrival.share(1):.0f} %"
    return (
        f"They ask in each round: in round 1 with {first} of their data, in round {arrival.rounds} "
        "with all of them."
    )
