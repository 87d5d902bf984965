"""The queries of a run: known before the run, or raised by clients in the run by a rule."""

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
    ClassesByClient,
    ClientKnowledge,
    QueryRule,
    QueryTable,
    Why,
    check_queries,
    check_unseen,
    drawn,
    offers,
    reasons,
)
from fedstill.running.compatibility import PlannedRun, Rule, needs
from fedstill.running.world import RunWorld


def with_queries(settings: Settings, world: RunWorld, table: Callable[[], Tensor]) -> RunWorld:
    """The world with its queries, or with the rule by which clients raise them in the run.

    table: returns the label counts, (clients, C) in a simulation and (0, C) for real sites, whose
    counts are unknown. It is called only if the config has queries. Raises ConfigError for a query
    that no client can answer.
    """
    query = settings.package_table(QueryTable)
    if not query.asks:
        return world
    counts = table()
    rule = rule_of(settings, counts)
    if rule is None:
        written = _written(query.classes, counts, query.fewer_than)
        return world.extend(Queries(written))
    if _in_the_run(settings):
        return world.extend(Queries(raised=rule.draw), rule)
    return world.extend(Queries(drawn(rule, counts)))


def with_known_queries(world: RunWorld, by_client: Mapping[int, tuple[int, ...]]) -> RunWorld:
    """The world with these queries, and without a rule."""
    extensions = {
        kind: record for kind, record in world.extensions.items() if kind is not QueryRule
    }
    return replace(world, extensions=extensions).extend(Queries(by_client))


def rule_of(settings: Settings, counts: Tensor) -> QueryRule | None:
    """The rule of a config, given label counts (clients, C); None if queries are not drawn."""
    table = settings.package_table(QueryTable)
    if table.draw == "none":
        return None
    seed = settings.seed
    if table.seed is not None:
        seed = table.seed
    return QueryRule(
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
    """The reasons for queries that were drawn before the run, by client and class; empty for other
    queries.
    """
    if settings.package_table(QueryTable).draw == "none" or world.get(QueryRule) is not None:
        return {}
    counts = table()
    rule = rule_of(settings, counts)
    assert rule is not None
    queries = queries_of(world)
    reasons_by_client = {}
    for client, query in queries.items():
        reasons_by_class = reasons(rule, client, ClientKnowledge(counts[client]))
        reasons_by_client[client] = {label: reasons_by_class[label] for label in query}
    return reasons_by_client


def arrival_of(settings: Settings) -> Arrival | None:
    """How the data of clients grow with the rounds; None if they do not grow."""
    table = settings.package_table(QueryTable)
    rounds = settings.rounds
    if table.again is None:
        return None
    at_first = 1 / rounds
    if table.data_at_first is not None:
        at_first = table.data_at_first
    return Arrival(table.again, at_first, rounds, settings.seed)


def _in_the_run(settings: Settings) -> bool:
    """Whether clients raise their queries in the run, because they depend on more than known label
    counts.
    """
    query = settings.package_table(QueryTable)
    return "accuracy" in query.triggers or query.again is not None or settings.on_sites


def _written(
    lists: Mapping[str, Sequence[int]], counts: Tensor, fewer_than: int | None
) -> ClassesByClient:
    written = {int(client): classes for client, classes in lists.items()}
    if not len(counts):
        return check_unseen(written, counts.shape[1])
    return check_queries(written, counts, fewer_than)


# ---- rules of compatibility ----------------------------------------------------------------------


def asks_in_the_run(run: PlannedRun) -> bool:
    """Whether clients raise their queries in the run, after local training."""
    return run.world.get(QueryRule) is not None


def asks_by_accuracy(run: PlannedRun) -> bool:
    """Whether a low accuracy on held-out examples raises a query."""
    rule = run.world.get(QueryRule)
    return rule is not None and "accuracy" in rule.by


def asks_again_by_accuracy(run: PlannedRun) -> bool:
    """Whether accuracy on held-out examples also raises queries in later rounds."""
    return asks_by_accuracy(run) and run.settings.exchange_each_round


def missing_fit(run: PlannedRun) -> str:
    """There is no stage ``fit``, after which clients raise queries."""
    if any(stage.name == FIT and stage.view == "private" for stage in run.stages):
        return ""
    return (
        f"{_trigger(run)}: clients raise queries after local training, but there is no stage "
        "'fit'; set topology.first = 'fit', or choose a method with topology peer_to_peer (qkt, "
        "naive_kd, local_only)"
    )


def silent_fit(run: PlannedRun) -> str:
    """The method has its own stage ``fit``, which raises no queries."""
    fit = next(stage for stage in run.stages if stage.name == FIT)
    if isinstance(run.settings.schedule.actor(fit).work(fit), Fit):
        return ""
    return (
        f"{_trigger(run)}: clients of method {run.settings.named.method.name} raise no queries in "
        "its stage 'fit'; its work must be fedstill.methods.fit.Fit or a subclass"
    )


def no_held_out_data(run: PlannedRun) -> str:
    """Clients hold out no examples on which accuracy could be measured."""
    if run.settings.plans[FIT].validation:
        return ""
    return (
        f"{_trigger(run)}: clients hold out no examples to evaluate their models on; set "
        "plan.fit.validation, e.g. 0.1"
    )


def single_example(run: PlannedRun) -> str:
    """A client has a single example, which it cannot hold out."""
    client = run.sites.first_client_below(2)
    if client is None or run.settings.on_sites:
        return ""
    return (
        f"{_trigger(run)}: client {client} has a single example and cannot hold it out; change the "
        "split so that each client has at least two"
    )


def other_held_out_data(run: PlannedRun) -> str:
    """A later stage trains on examples that the stage ``fit`` holds out."""
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
                f"{_trigger(run)} with query.again: stage {name!r} would train on examples that "
                "the stage 'fit' holds out for later evaluations; set "
                f"plan.{name}.validation = {share}"
            )
    return ""


def missing_queries(run: PlannedRun) -> str:
    """The method needs queries, but there are none."""
    if anyone_asks(run.world):
        return ""
    table = run.settings.package_table(QueryTable)
    if table.draw != "none":
        return (
            f"method {run.method_name} needs queries, but with query.by = {list(table.triggers)} "
            "no class is eligible for any client; raise query.fewer_than, or add a reason to "
            "query.by"
        )
    return (
        f"method {run.method_name} needs queries: set query.draw = 'single', 'multi' or 'all', or "
        "add [query.classes]"
    )


def _trigger(run: PlannedRun) -> str:
    """The config key of the triggers, for messages."""
    rule = run.world.get(QueryRule)
    assert rule is not None  # asks_in_the_run
    return f"query.by = {list(rule.by)}"


RULES: tuple[Rule[PlannedRun], ...] = (
    Rule(asks_in_the_run, missing_fit),
    Rule(asks_in_the_run, silent_fit),
    Rule(asks_by_accuracy, no_held_out_data, ConfigError),
    Rule(asks_by_accuracy, single_example, ConfigError),
    Rule(asks_again_by_accuracy, other_held_out_data, ConfigError),
    Rule(needs(Need.QUERIES), missing_queries),
)
"""The rules for queries: which runs they are compatible with."""
