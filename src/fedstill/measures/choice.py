"""Which measures a run has, whether they can look at what it does, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.records import SERVER, Stage, World
from fedstill.core.rounds import Schedule
from fedstill.measures.base import LOGITS, Measure, SaysLogits
from fedstill.methods.fit import anyone_asks
from fedstill.models import contract

NEEDS = frozenset(
    {
        "chain",
        "side_by_side",
        "test",
        "global_model",
        "no_client_predictors",
        "local_models",
        "uploads",
        "features",
        "plane",
        "queries",
    }
    | {"client_data", "test_at_clients", "epochs", "held_out"}
)
"""What a measure may need."""


def measures(names: Sequence[str]) -> dict[str, Measure]:
    """The measures of these names; one from a user's file is called by the file's name.

    Raises ConfigError for something that is not a measure, or that is named twice.
    """
    by_name: dict[str, Measure] = {}
    for name in names:
        measure = registry.lookup("measure", name).build()
        if not isinstance(measure, Measure):
            raise ConfigError(f"measure {name!r} is a {type(measure).__name__}, not a Measure")
        short = PurePath(name).name
        if isinstance(measure.needs, str):
            raise ConfigError(
                f"measure {short}: needs = {measure.needs!r} must be a frozenset of names"
            )
        for need in sorted({*measure.needs} - NEEDS):
            raise UnknownName("name", need, NEEDS, f"measure {short}, needs")
        if type(measure).look is Measure.look and type(measure).at_client is Measure.at_client:
            raise ConfigError(f"measure {short} measures nothing: give it look or at_client")
        if short in by_name:
            raise ConfigError(f"measure = [..., {short!r}] names the same measure twice")
        by_name[short] = measure
    return by_name


def measured_rounds(rounds: int, every: int) -> frozenset[int]:
    """The rounds in which measures look: every so many, and the last.

    >>> sorted(measured_rounds(7, 3))
    [3, 6, 7]
    """
    return frozenset({*range(every, rounds + 1, every), rounds})


@dataclass(frozen=True)
class MeasuredRun:
    """What measures have to fit: the schedule and some of its stages, the world, and whether
    clients' and test data are here.

    ``remembered``: whether what clients remember is in this process, too. ``labelled``: whether
    there are public data with labels.
    """

    schedule: Schedule
    name: str
    stages: Sequence[Stage]
    world: World
    simulated: bool = True
    tested: bool = True
    remembered: bool = True
    labelled: bool = True


def unsuited_measures(chosen: Mapping[str, Measure], setting: MeasuredRun) -> str:
    """Names the first measure that needs what the method, model or setting lacks, and says what to
    do; empty if all fit.
    """
    for name, measure in chosen.items():
        problem = _unmet_need(measure, setting) or _never_looks(measure, setting)
        if problem:
            return f"measure {name}: {problem}, or leave it out of measure"
    return ""


def _unmet_need(measure: Measure, setting: MeasuredRun) -> str:
    """What the first need that is not met lacks; later needs may presuppose it."""
    for need in sorted(measure.needs):
        problem = _lacks(need, setting)
        if problem:
            return problem
    return ""


def _lacks(need: str, setting: MeasuredRun) -> str:
    world = setting.world
    spec = world.model(SERVER)
    has_several_models = setting.schedule.method.has_client_predictors
    if need == "queries" and not anyone_asks(world):
        return (
            "it looks at a client that asked; set query.draw = 'single', 'multi' or 'all', or "
            "write [query.classes]"
        )
    if need == "chain" and not any(stage.sequential for stage in setting.stages):
        return "it looks at clients one after another; set topology.kind = 'sequential'"
    if need == "side_by_side" and not any(
        len(s.clients) > 1 and _sends_models(s, setting) for s in setting.stages
    ):
        return (
            "no two clients send models in one stage; set topology.kind = 'parallel' and "
            "topology.sampled above 1"
        )
    if need in ("global_model", "no_client_predictors") and has_several_models:
        return (
            f"it looks at one global model, and the server of method {setting.name} has several; "
            "choose a method with one"
        )
    if need == "global_model" and not setting.schedule.method.initial_state(world).params:
        return (
            f"the server of method {setting.name} has no model of its own; choose a method whose "
            "server has one"
        )
    if need == "local_models":
        if not any(_sends_models(stage, setting) for stage in setting.stages):
            return (
                f"clients of method {setting.name} send no models; choose a method whose clients do"
            )
        if any(world.model(c) != spec for c in range(world.clients)):
            return "models must be one architecture to be compared; leave clients.models out"
    if need == "uploads":
        return _no_uploads(setting)
    if need == "features" and Need.FEATURES not in contract.capabilities(spec):
        return f"model {spec.label} has no features; give it submodules body and head"
    if need == "plane" and (width := contract.width(spec)) != 2:
        return f"model {spec.label} has {width} features and not 2; set model.name = 'sphere_cnn'"
    if need == "test" and not setting.tested:
        return "it needs a common test set, and there is none; give the server one with data.name"
    if need == "test_at_clients" and not setting.simulated:
        return (
            "clients measure it on the common test set, which real sites lack; leave flower.data = "
            "'sites' out"
        )
    if need == "epochs" and not any(_trains(stage, world) for stage in setting.stages):
        return "no client trains on its own data here; set plan.epochs above 0"
    if (
        need == "held_out"
        and not setting.labelled
        and not any(_holds_out(stage, world) for stage in setting.stages)
    ):
        todo = "set plan.validation = 0.2, or data.public_labels = true with public data"
        return (
            "clients hold no examples out, and no public examples have labels, so it would say "
            f"nothing; {todo}"
        )
    if need == "client_data" and not setting.simulated:
        return (
            "it looks at clients' data, which a server sees in a simulation only; leave "
            "flower.data = 'sites' out"
        )
    return ""


def _never_looks(measure: Measure, setting: MeasuredRun) -> str:
    ends = [stage for stage in setting.stages if stage.round == setting.stages[-1].round]
    if (
        not measure.only_last
        or looks_last(measure, ends, setting.schedule, setting.world) is not None
    ):
        return ""
    name = setting.name
    return (
        f"it looks in the last round, where clients of method {name} send no models; choose a "
        "method whose clients do"
    )


def looks_last(
    measure: Measure, stages: Sequence[Stage], schedule: Schedule, world: World
) -> int | None:
    """In which of the last round's stages a measure with ``only_last`` looks; None if there is
    nothing to see in any.

    That is the last stage; with the need "local_models", the last in which clients send models.
    """
    for stage in reversed(stages):
        if "local_models" not in measure.needs or "params" in _sent(stage, schedule, world):
            return stage.index
    return None


def _no_uploads(setting: MeasuredRun) -> str:
    groups: set[str] = set()
    for stage in setting.stages:
        groups |= _sent(stage, setting.schedule, setting.world)
    if "params" in groups:
        return ""
    if LOGITS not in groups:
        alternatives = ""
        if groups:
            alternatives = f" but {', '.join(sorted(groups))}"
        return (
            f"clients of method {setting.name} send neither models nor logits{alternatives}; "
            "choose a method whose clients do"
        )
    if not isinstance(setting.schedule.method, SaysLogits):
        return (
            f"method {setting.name} does not define how clients turn logits into what they send; "
            "give it sent_logits(logits)"
        )
    if not setting.remembered:
        return "with engine = 'flower' it does not see models behind logits; choose another"
    return ""


def _sent(stage: Stage, schedule: Schedule, world: World) -> set[str]:
    """The groups that clients send in a stage."""
    client = stage.clients[0]
    if client == SERVER:
        return set()
    return set(schedule.actor(stage).expected_reply(client, stage, world))


def _sends_models(stage: Stage, setting: MeasuredRun) -> bool:
    return "params" in _sent(stage, setting.schedule, setting.world)


def _holds_out(stage: Stage, world: World) -> bool:
    plan = world.plans.get(stage.name)
    return plan is not None and plan.validation > 0


def _trains(stage: Stage, world: World) -> bool:
    plan = world.plans.get(stage.name)
    return plan is not None and stage.view == "private" and bool(plan.epochs or plan.steps)
