"""Who asks for what: queries that are known before a run, or the rule by which clients raise them
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.records import SERVER, Stage
from fedstill.data.arrival import Arrival
from fedstill.data.views import SiteViews
from fedstill.methods.fit import FIT, Fit
from fedstill.querying.queries import (
    Asking,
    Queries,
    Standing,
    Why,
    check_queries,
    check_unseen,
    drawn,
    offers,
    reasons,
)
from fedstill.running.world import RunWorld


def with_asking(settings: Settings, world: RunWorld, table: Callable[[], Tensor]) -> RunWorld:
    """The world with its queries, or with the rule by which clients raise them in the run.

    table: gives label counts (clients, C) of a simulation; (0, C) of real sites, which are unknown.
    It is called only where clients ask. Raises ConfigError for a query without an answer.
    """
    if settings.query.draw == "none" and not settings.query.classes:
        return world
    counts = table()
    asking = rule_of(settings, counts)
    if asking is None:
        return replace(
            world, queries=_written(settings.query.classes, counts, settings.query.fewer_than)
        )
    return (
        replace(world, asking=asking)
        if _in_the_run(settings)
        else replace(world, queries=drawn(asking, counts))
    )


def rule_of(settings: Settings, counts: Tensor) -> Asking | None:
    """The rule by which clients ask, given label counts (clients, C); None where no query is
    drawn.
    """
    table = settings.query
    if table.draw == "none":
        return None
    return Asking(
        table.draw,
        settings.seed if table.seed is None else table.seed,
        table.triggers,
        table.fewer_than,
        table.accuracy_under or 0.0,
        _written(table.needs or {}, counts, None),
        table.least,
        table.most,
        offers(counts),
        discreet=settings.on_sites,
    )


def reasons_before(
    settings: Settings, world: RunWorld, table: Callable[[], Tensor]
) -> dict[int, dict[int, Why]]:
    """Why clients ask for what they ask, by client and class, of queries that are drawn before the
    run; else empty.
    """
    if settings.query.draw == "none" or world.asking is not None:
        return {}
    asking = rule_of(settings, counts := table())
    assert asking is not None
    known = {c: reasons(asking, c, Standing(counts[c])) for c in world.queries}
    return {c: {q: known[c][q] for q in query} for c, query in world.queries.items()}


def arrival_of(settings: Settings) -> Arrival | None:
    """How the data of clients grow with the rounds; None: all are there from the start."""
    table, rounds = settings.query, settings.rounds
    if table.again is None:
        return None
    at_first = 1 / rounds if table.data_at_first is None else table.data_at_first
    return Arrival(table.again, at_first, rounds, settings.seed)


def refuse_unraised(
    settings: Settings, world: RunWorld, sites: SiteViews, schedule: Sequence[Stage]
) -> None:
    """Raises IncompatibleMethod or ConfigError where clients could not raise their queries in the
    stages of a run.
    """
    if world.asking is None:
        return
    plans, what = settings.plans, f"query.by = {list(world.asking.by)}"
    if not any(stage.name == FIT and stage.view == "private" for stage in schedule):
        raise IncompatibleMethod(
            f"{what}: clients ask after they have trained alone, and there is no stage 'fit'; set "
            "topology.first = "
            "'fit', or choose a method on peer_to_peer (qkt, naive_kd, local_only)"
        )
    fit = next(stage for stage in schedule if stage.name == FIT)
    if not isinstance(settings.schedule.actor(fit).work(fit), Fit):
        raise IncompatibleMethod(
            f"{what}: clients of method {settings.named.method.name} do not ask in its stage "
            "'fit'; its work must be "
            "fedstill.methods.fit.Fit, or derive from it"
        )
    if "accuracy" not in world.asking.by:
        return
    held = plans[FIT].validation
    if not held:
        raise ConfigError(
            f"{what}: clients hold out no data to measure on; set plan.fit.validation, e.g. 0.1"
        )
    lone = sites.smaller_than(2)
    if lone is not None and not settings.on_sites:
        raise ConfigError(
            f"{what}: client {lone} has one example and cannot hold it out; split the data so that "
            "each has two"
        )
    later = sorted(
        {
            s.name
            for s in schedule
            if s.view == "private" and SERVER not in s.clients and s.name in plans
        }
    )
    other = next((n for n in later if plans[n].validation != held), "")
    if settings.query.again and other:
        raise ConfigError(
            f"{what} with query.again: stage {other!r} trains on what the stage 'fit' holds out, "
            "on which the model is "
            f"measured again later; set plan.{other}.validation = {held}"
        )


def _in_the_run(settings: Settings) -> bool:
    """Whether clients must raise their queries themselves: no one knows before what raises them."""
    return (
        "accuracy" in settings.query.triggers
        or settings.query.again is not None
        or settings.on_sites
    )


def _written(lists: Mapping[str, Sequence[int]], counts: Tensor, fewer_than: int | None) -> Queries:
    written = {int(client): classes for client, classes in lists.items()}
    return (
        check_queries(written, counts, fewer_than)
        if len(counts)
        else check_unseen(written, counts.shape[1])
    )
