"""The selection of a run's measures: their construction by name, the measured rounds, and the check
of their needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, FedstillError, UnknownName, on_one_line
from fedstill.core.records import SERVER, Stage, World
from fedstill.core.rounds import Schedule
from fedstill.measures.base import LOGITS, Measure, SendsLogits
from fedstill.methods.fit import anyone_asks
from fedstill.models import contract


def measures(names: Sequence[str]) -> dict[str, Measure]:
    """The measures with the given names. A measure from a user's file has the file's name.

    Raises ConfigError for objects that are not measures, and for duplicates.
    """
    by_name: dict[str, Measure] = {}
    for name in names:
        measure = _built(name)
        if not isinstance(measure, Measure):
            raise ConfigError(f"measure {name!r} is a {type(measure).__name__}, not a Measure")
        short = PurePath(name).name
        _check_definition(short, measure)
        if short in by_name:
            raise ConfigError(f"measure = [..., {short!r}] contains the same measure twice")
        by_name[short] = measure
    return by_name


def _built(name: str) -> object:
    """The object of a measure's name. Raises ConfigError if a user's class cannot be built."""
    entry = registry.lookup("measure", name)
    try:
        return entry.build()
    except FedstillError:
        raise
    except Exception as error:
        message = f"measure {name!r} cannot be built without arguments: {on_one_line(error)}"
        raise ConfigError(message) from error


def _check_definition(name: str, measure: Measure) -> None:
    """Raise ConfigError for a measure with unknown needs, or without a hook."""
    # A string would be a set of letters, each of them an unknown need.
    if isinstance(measure.needs, str):
        raise ConfigError(f"measure {name}: needs = {measure.needs!r} must be a frozenset of names")
    for need in sorted({*measure.needs} - NEEDS):
        raise UnknownName("name", need, NEEDS, f"measure {name}, needs")
    if type(measure).look is Measure.look and type(measure).at_client is Measure.at_client:
        raise ConfigError(f"measure {name} measures nothing: define look or at_client")


def measured_rounds(rounds: int, every: int) -> frozenset[int]:
    """The measured rounds: every ``every``-th round, and the last one.

    >>> sorted(measured_rounds(7, 3))
    [3, 6, 7]
    """
    return frozenset({*range(every, rounds + 1, every), rounds})


@dataclass(frozen=True)
class MeasuredRun:
    """The properties of a run that measures may need.

    method_name: the method, for messages. stages: the stages of the checked rounds, those of the
    last round at the end. simulated: whether clients' data are in this process. tested: whether
    there is a common test set. remembered: whether the client states are in this process. labelled:
    whether there are public data with labels.
    """

    schedule: Schedule
    method_name: str
    stages: Sequence[Stage]
    world: World
    simulated: bool = True
    tested: bool = True
    remembered: bool = True
    labelled: bool = True


def unsuited_measures(chosen: Mapping[str, Measure], run: MeasuredRun) -> str:
    """The reason why a measure cannot be used in a run, and what to do; empty if all can be
    used.
    """
    for name, measure in chosen.items():
        problem = _unmet_need(measure, run) or _never_measured(measure, run)
        if problem:
            return f"measure {name}: {problem}, or remove it from measure"
    return ""


def _unmet_need(measure: Measure, run: MeasuredRun) -> str:
    """The message about the first unmet need; empty if all needs are met. The checks of later needs
    may assume that earlier ones are met.
    """
    for need, check in _CHECKS.items():
        if need in measure.needs:
            problem = check(run)
            if problem:
                return problem
    return ""


def _never_measured(measure: Measure, run: MeasuredRun) -> str:
    if not measure.only_last:
        return ""
    last_round = run.stages[-1].round
    last_stages = [stage for stage in run.stages if stage.round == last_round]
    if looks_last(measure, last_stages, run.schedule, run.world) is not None:
        return ""
    return (
        f"it needs local models in the last round, but clients of method {run.method_name} send "
        "none; choose a method whose clients send models"
    )


def looks_last(
    measure: Measure, stages: Sequence[Stage], schedule: Schedule, world: World
) -> int | None:
    """The index of the stage after which a measure with ``only_last`` is computed; None if there is
    none.

    stages: the stages of the last round. It is the last stage or, with the need "local_models", the
    last stage in which clients send models.
    """
    for stage in reversed(stages):
        if "local_models" not in measure.needs or "params" in _sent(stage, schedule, world):
            return stage.index
    return None


def _sent(stage: Stage, schedule: Schedule, world: World) -> set[str]:
    """The groups that clients send in a stage."""
    client = stage.clients[0]
    if client == SERVER:
        return set()
    return set(schedule.actor(stage).expected_reply(client, stage, world))


def _sends_models(stage: Stage, run: MeasuredRun) -> bool:
    return "params" in _sent(stage, run.schedule, run.world)


def _holds_out(stage: Stage, world: World) -> bool:
    plan = world.plans.get(stage.name)
    return plan is not None and plan.validation > 0


def _trains(stage: Stage, world: World) -> bool:
    plan = world.plans.get(stage.name)
    return plan is not None and stage.view == "private" and bool(plan.epochs or plan.steps)


# ---- the needs of measures -----------------------------------------------------------------------

# The check of a need returns an empty string if the run meets it, and otherwise a message that says
# what is missing and what to do.


def _lacks_chain(run: MeasuredRun) -> str:
    if any(stage.sequential for stage in run.stages):
        return ""
    return "it needs a chain of clients; set topology.kind = 'sequential'"


def _lacks_models_side_by_side(run: MeasuredRun) -> str:
    parallel = [stage for stage in run.stages if len(stage.clients) > 1]
    if any(_sends_models(stage, run) for stage in parallel):
        return ""
    return (
        "it needs two clients that send models in one stage; set topology.kind = 'parallel' and "
        "topology.sampled to 2 or more"
    )


def _lacks_local_models(run: MeasuredRun) -> str:
    """Clients must send models of one architecture, which can be compared."""
    if not any(_sends_models(stage, run) for stage in run.stages):
        return (
            f"clients of method {run.method_name} send no models; choose a method whose clients "
            "send models"
        )
    world = run.world
    spec = world.model(SERVER)
    if any(world.model(client) != spec for client in range(world.clients)):
        return "it compares models, which must have the same architecture; remove clients.models"
    return ""


def _lacks_uploads(run: MeasuredRun) -> str:
    """Clients must send models, or logits of models whose client state is in this process."""
    groups: set[str] = set()
    for stage in run.stages:
        groups |= _sent(stage, run.schedule, run.world)
    if "params" in groups:
        return ""
    if LOGITS not in groups:
        alternatives = ""
        if groups:
            alternatives = f" but {', '.join(sorted(groups))}"
        return (
            f"clients of method {run.method_name} send neither models nor logits{alternatives}; "
            "choose a method whose clients send models or logits"
        )
    if not isinstance(run.schedule.method, SendsLogits):
        return (
            f"method {run.method_name} does not define which logits clients send; define "
            "sent_logits(logits)"
        )
    if not run.remembered:
        return (
            "with engine = 'flower' the server has no access to the models behind logits; choose "
            "another engine"
        )
    return ""


def _lacks_single_model(run: MeasuredRun) -> str:
    if not run.schedule.method.has_client_predictors:
        return ""
    return (
        f"it needs a single global model, but the server of method {run.method_name} has several; "
        "choose a method with one"
    )


def _lacks_global_model(run: MeasuredRun) -> str:
    several_models = _lacks_single_model(run)
    if several_models:
        return several_models
    if run.schedule.method.initial_state(run.world).params:
        return ""
    return (
        f"the server of method {run.method_name} has no model; choose a method whose server has one"
    )


def _lacks_features(run: MeasuredRun) -> str:
    spec = run.world.model(SERVER)
    if Need.FEATURES in contract.capabilities(spec):
        return ""
    return f"model {spec.label} has no features; it needs submodules body and head"


def _lacks_plane(run: MeasuredRun) -> str:
    """Features must be two-dimensional, so that they can be drawn."""
    spec = run.world.model(SERVER)
    width = contract.width(spec)
    if width == 2:
        return ""
    return f"model {spec.label} has {width} features instead of 2; set model.name = 'sphere_cnn'"


def _lacks_queries(run: MeasuredRun) -> str:
    if anyone_asks(run.world):
        return ""
    return (
        "it needs querying clients; set query.draw = 'single', 'multi' or 'all', or add a table "
        "[query.classes]"
    )


def _lacks_test(run: MeasuredRun) -> str:
    if run.tested:
        return ""
    return "it needs a common test set; set data.name, so that the server has one"


def _lacks_test_at_clients(run: MeasuredRun) -> str:
    if run.simulated:
        return ""
    return (
        "clients compute it on the common test set, which real sites do not have; remove "
        "flower.data = 'sites'"
    )


def _lacks_client_data(run: MeasuredRun) -> str:
    if run.simulated:
        return ""
    return (
        "it needs the clients' data, to which a server only has access in a simulation; remove "
        "flower.data = 'sites'"
    )


def _lacks_epochs(run: MeasuredRun) -> str:
    if any(_trains(stage, run.world) for stage in run.stages):
        return ""
    return "it needs clients that train on their own data; set plan.epochs to 1 or more"


def _lacks_held_out(run: MeasuredRun) -> str:
    """There must be labelled examples on which no client trains."""
    if run.labelled or any(_holds_out(stage, run.world) for stage in run.stages):
        return ""
    return (
        "it needs held-out examples or labelled public examples; set plan.validation = 0.2, or "
        "data.public_labels = true with public data"
    )


# In the order in which needs are checked: "plane" needs a model with a body, so "features" comes
# first.
_CHECKS: Mapping[str, Callable[[MeasuredRun], str]] = {
    "chain": _lacks_chain,
    "client_data": _lacks_client_data,
    "epochs": _lacks_epochs,
    "features": _lacks_features,
    "global_model": _lacks_global_model,
    "held_out": _lacks_held_out,
    "local_models": _lacks_local_models,
    "no_client_predictors": _lacks_single_model,
    "plane": _lacks_plane,
    "queries": _lacks_queries,
    "side_by_side": _lacks_models_side_by_side,
    "test": _lacks_test,
    "test_at_clients": _lacks_test_at_clients,
    "uploads": _lacks_uploads,
}

NEEDS = frozenset(_CHECKS)
"""The names that ``Measure.needs`` may contain."""
