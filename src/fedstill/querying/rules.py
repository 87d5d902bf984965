"""Who asks for what: queries that are known before a run, or the rule by which clients raise them
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.records import SERVER
from fedstill.data.views import Arrival
from fedstill.methods.fit import FIT, Fit, Queries, anyone_asks, queries_of
from fedstill.querying.queries import (
    Asking,
    ClassesByClient,
    QueryTable,
    Standing,
    Why,
    check_queries,
    check_unseen,
    drawn,
    offers,
    reasons,
)
from fedstill.running.compatibility import PlannedRun, Rule, needs
from fedstill.running.world import RunWorld


def with_asking(settings: Settings, world: RunWorld, table: Callable[[], Tensor]) -> RunWorld:
    """The world with its queries, or with the rule by which clients raise them in the run.

    table: gives label counts (clients, C) of a simulation; (0, C) of real sites, which are unknown.
    It is called only where clients ask. Raises ConfigError for a query without an answer.
    """
    query = settings.table(QueryTable)
    if not query.asks:
        return world
    counts = table()
    asking = rule_of(settings, counts)
    if asking is None:
        written = _written(query.classes, counts, query.fewer_than)
        return world.extend(Queries(written))
    if _in_the_run(settings):
        return world.extend(Queries(raised=asking.draw), asking)
    return world.extend(Queries(drawn(asking, counts)))


def with_known_queries(world: RunWorld, by_client: Mapping[int, tuple[int, ...]]) -> RunWorld:
    """The world in which there are these queries, and clients raise none in the run."""
    extensions = {kind: record for kind, record in world.extensions.items() if kind is not Asking}
    return replace(world, extensions=extensions).extend(Queries(by_client))


def rule_of(settings: Settings, counts: Tensor) -> Asking | None:
    """The rule by which clients ask, given label counts (clients, C); None where no query is
    drawn.
    """
    table = settings.table(QueryTable)
    if table.draw == "none":
        return None
    seed = settings.seed
    if table.seed is not None:
        seed = table.seed
    return Asking(
        draw=table.draw,
        seed=seed,
        by=table.triggers,
        fewer_than=table.fewer_than,
        accuracy_under=table.accuracy_under or 0.0,
        needs=_written(table.needs or {}, counts, None),
        least=table.least,
        most=table.most,
        offered=offers(counts),
        discreet=settings.on_sites,
    )


def reasons_before(
    settings: Settings, world: RunWorld, table: Callable[[], Tensor]
) -> dict[int, dict[int, Why]]:
    """Why clients ask for what they ask, by client and class, of queries that are drawn before the
    run; else empty.
    """
    if settings.table(QueryTable).draw == "none" or world.get(Asking) is not None:
        return {}
    counts = table()
    asking = rule_of(settings, counts)
    assert asking is not None
    queries = queries_of(world)
    reasons_by_client = {}
    for client, query in queries.items():
        reasons_by_class = reasons(asking, client, Standing(counts[client]))
        reasons_by_client[client] = {label: reasons_by_class[label] for label in query}
    return reasons_by_client


def arrival_of(settings: Settings) -> Arrival | None:
    """How the data of clients grow with the rounds; None: all are there from the start."""
    table = settings.table(QueryTable)
    rounds = settings.rounds
    if table.again is None:
        return None
    at_first = 1 / rounds
    if table.data_at_first is not None:
        at_first = table.data_at_first
    return Arrival(table.again, at_first, rounds, settings.seed)


def _in_the_run(settings: Settings) -> bool:
    """Whether clients must raise their queries themselves: no one knows before what raises them."""
    query = settings.table(QueryTable)
    return "accuracy" in query.triggers or query.again is not None or settings.on_sites


def _written(
    lists: Mapping[str, Sequence[int]], counts: Tensor, fewer_than: int | None
) -> ClassesByClient:
    written = {int(client): classes for client, classes in lists.items()}
    if not len(counts):
        return check_unseen(written, counts.shape[1])
    return check_queries(written, counts, fewer_than)


# ---- what queries ask of a run, for the table in ``running/compatibility.py`` -------------------


def asks_in_the_run(run: PlannedRun) -> bool:
    """Whether clients raise their queries themselves, after they have trained alone."""
    return run.world.get(Asking) is not None


def asks_by_accuracy(run: PlannedRun) -> bool:
    """Whether a low accuracy on held-out data raises a query."""
    asking = run.world.get(Asking)
    return asking is not None and "accuracy" in asking.by


def asks_again_by_accuracy(run: PlannedRun) -> bool:
    """Whether accuracy is measured again after later stages."""
    return asks_by_accuracy(run) and run.settings.exchange_each_round


def missing_fit(run: PlannedRun) -> str:
    """No stage after which clients could ask."""
    if any(stage.name == FIT and stage.view == "private" for stage in run.stages):
        return ""
    return (
        f"{_trigger(run)}: clients ask after they have trained alone, and there is no stage 'fit'; "
        "set topology.first = 'fit', or choose a method on peer_to_peer (qkt, naive_kd, local_only)"
    )


def silent_fit(run: PlannedRun) -> str:
    """A method whose own stage ``fit`` does not ask."""
    fit = next(stage for stage in run.stages if stage.name == FIT)
    if isinstance(run.settings.schedule.actor(fit).work(fit), Fit):
        return ""
    return (
        f"{_trigger(run)}: clients of method {run.settings.named.method.name} do not ask in its "
        "stage 'fit'; its work must be fedstill.methods.fit.Fit, or derive from it"
    )


def no_held_out_data(run: PlannedRun) -> str:
    """No held-out data to measure the accuracy on."""
    if run.settings.plans[FIT].validation:
        return ""
    return (
        f"{_trigger(run)}: clients hold out no data to measure on; set plan.fit.validation, "
        "e.g. 0.1"
    )


def single_example(run: PlannedRun) -> str:
    """A client whose only example cannot be held out."""
    client = run.sites.smaller_than(2)
    if client is None or run.settings.on_sites:
        return ""
    return (
        f"{_trigger(run)}: client {client} has one example and cannot hold it out; split the data "
        "so that each has two"
    )


def other_held_out_data(run: PlannedRun) -> str:
    """A later stage that trains on what the stage ``fit`` holds out."""
    plans = run.settings.plans
    share = plans[FIT].validation
    trained = {
        stage.name
        for stage in run.stages
        if stage.view == "private" and SERVER not in stage.clients and stage.name in plans
    }
    for name in sorted(trained):
        if plans[name].validation != share:
            return (
                f"{_trigger(run)} with query.again: stage {name!r} trains on what the stage 'fit' "
                "holds out, on which the model is measured again later; set "
                f"plan.{name}.validation = {share}"
            )
    return ""


def missing_queries(run: PlannedRun) -> str:
    """No client that asks."""
    if anyone_asks(run.world):
        return ""
    return (
        f"method {run.method_name} needs queries: set query.draw = 'single', 'multi' or 'all', or "
        "write [query.classes]"
    )


def _trigger(run: PlannedRun) -> str:
    """The key that says what raises a query, for messages."""
    asking = run.world.get(Asking)
    assert asking is not None  # asks_in_the_run
    return f"query.by = {list(asking.by)}"


RULES: tuple[Rule[PlannedRun], ...] = (
    Rule(asks_in_the_run, missing_fit),
    Rule(asks_in_the_run, silent_fit),
    Rule(asks_by_accuracy, no_held_out_data, ConfigError),
    Rule(asks_by_accuracy, single_example, ConfigError),
    Rule(asks_again_by_accuracy, other_held_out_data, ConfigError),
    Rule(needs(Need.QUERIES), missing_queries),
)
"""What queries ask of a run."""
