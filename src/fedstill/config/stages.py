"""The method of a config and its stages: what it declares, how its stages train (``[plan]``), and
the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.config.experiment import Experiment
from fedstill.config.named_tables import Named, model_of_name, read_named
from fedstill.config.tables import SITES
from fedstill.config.validation import (
    NO_EFFECT,
    NOT_A_TABLE,
    UNKNOWN_NAME,
    Problem,
    WrongConfig,
    contradiction,
    keys_of,
    model_of_record,
    validated,
)
from fedstill.continual.task_test import (
    TEST_STAGES,
    HeldOutTestStage,
    TaskTests,
)
from fedstill.core.capabilities import Need
from fedstill.core.census import CENSUS, CensusStages
from fedstill.core.class_weights import are_overall
from fedstill.core.errors import ConfigError, UnknownName, suggestion
from fedstill.core.extensions import StageProvider
from fedstill.core.fields import as_table, shown
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.rounds import Schedule
from fedstill.core.topology import Topology
from fedstill.core.user_code import returned
from fedstill.methods.fit import FIT, FITTING, FitStage
from fedstill.methods.ridge import NO_TRAINING, RIDGE, RidgeStage

SHARED_STAGES = frozenset({FIT, RIDGE, CENSUS}) | TEST_STAGES
"""Stages that a method need not know itself."""


def takes_census(method: Method, plans: Mapping[str, Plan]) -> bool:
    """Whether clients send their label counts: for the method, or for class weights."""
    return Need.LABEL_COUNTS in method.requires() or are_overall(plans)


def schedule_of(
    method: Method,
    topology: Topology,
    stream_kind: str,
    plans: Mapping[str, Plan],
    *,
    sites_test_rounds: bool = False,
) -> Schedule:
    """A run's schedule: the topology's stages, and those that method, plans, tasks and
    ``select_on`` ask for.

    ``sites_test_rounds``: whether real sites test the global model after every round.
    """
    providers: list[StageProvider] = [FitStage(), RidgeStage()]
    if stream_kind == SITES and not method.personal:
        providers.append(TaskTests())
    if sites_test_rounds:
        providers.append(HeldOutTestStage())
    if takes_census(method, plans):
        providers.append(CensusStages())
    return Schedule(method, topology, tuple(providers))


OF_STAGES = ("plans", "personal", "labelled", "reusable")
"""What a method says by stage."""


class ReadMethod(NamedTuple):
    """A method, and the table that names it."""

    named: Named
    built: Method


def read_method(experiment: Experiment) -> ReadMethod:
    """The method and the table that names it; raises ConfigError for what a user's class declares
    and there is not.
    """
    named = read_named("method", experiment.table("method"), experiment.base)
    built = named.build()
    if not isinstance(built, Method):
        raise ConfigError(
            f"method.name = {named.entry.name!r} is a {type(built).__name__}, not a fedstill.Method"
        )
    what = f"method {named.label}"
    _check_declared(what, built, experiment.base)
    returned(built.requires(), Need, built.requires, "flags of fedstill.Need")
    return ReadMethod(named, built)


def _check_declared(what: str, method: Method, base: Path | None) -> None:
    """Raise ConfigError where a user's class declares what is of another type, or names what there
    is not.
    """
    for name, (kind, how) in _TYPES.items():
        if is_users_own(method, name) and not isinstance(value := getattr(method, name), kind):
            raise ConfigError(f"{what}: {name} = {shown(value)} must be {how}")
    stages = method.stages | SHARED_STAGES
    for name in OF_STAGES:
        if not is_users_own(method, name):
            continue
        for stage in getattr(method, name):
            if stage not in stages:
                raise UnknownName("stage", str(stage), stages, f"{what}, {name}")
    if is_users_own(method, "schedule"):
        options = keys_of(model_of_name("topology", method.topology, base))
        for key in sorted(method.schedule.keys() - {*options, "task_end"}):
            raise UnknownName(
                "option", key, options, f"{what}, schedule of topology {method.topology}"
            )
    for stage, plan in method.plans.items():
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"{what}: plans[{stage!r}] = {shown(plan)} must be a Plan, such as Plan(epochs=1)"
            )
    if not method.stages & method.plans.keys():
        some = f"{{{min(method.stages, default='train')!r}: Plan(epochs=1)}}"
        todo = f"give it one, such as plans = {some}; Plan(epochs=0) trains nothing"
        raise ConfigError(f"{what}: none of its stages has a plan: {todo}")


def is_users_own(method: Method, name: str) -> bool:
    """Whether an attribute of a method is defined in a user's class, and not in one of the
    library's.
    """
    owner = next(kind for kind in type(method).__mro__ if name in vars(kind))
    return owner.__module__.partition(".")[0] != "fedstill"


_A_SET = (Set, "a frozenset of names, such as frozenset({'train'})")
_TYPES: Mapping[str, tuple[Any, str]] = {
    "stages": _A_SET,
    "personal": _A_SET,
    "labelled": _A_SET,
    "reusable": _A_SET,
    "plans": (Mapping, "a dict of stages to plans, such as {'train': Plan(epochs=1)}"),
    "schedule": (Mapping, "a dict of options of the topology, such as {'before': 'head'}"),
}
"""What each declaration must be: its type, and in words."""


# The table ``[plan]``.


PLAN = model_of_record(Plan)
"""The model of a plan."""


@dataclass(frozen=True)
class PlanTable:
    """``[plan]``, its values checked. ``common``: of all stages; ``stages``: of each."""

    common: Mapping[str, Any]
    stages: Mapping[str, Mapping[str, Any]]

    def applied(self, defaults: Mapping[str, Plan], rounds: int) -> dict[str, Plan]:
        """The plan of each stage: its default, with the values of all stages and its own.

        Raises WrongConfig for stages that there are not, and values that exclude each other.
        """
        for stage in self.stages:
            if stage not in defaults:
                problem = Problem(
                    code=UNKNOWN_NAME,
                    key=f"plan.{stage}",
                    reason=f"unknown stage {stage!r}",
                    hint=suggestion(stage, defaults),
                )
                raise WrongConfig([problem])
        return {stage: self._plan(default, stage, rounds) for stage, default in defaults.items()}

    def _plan(self, default: Plan, stage: str, rounds: int) -> Plan:
        values = {**self.common, **self.stages.get(stage, {})}
        plan = Plan(**{**as_table(default), **values})
        key = f"plan.{stage}"
        if plan.lr_warmup >= rounds:
            raise contradiction(
                f"{key}.lr_warmup",
                f"= {plan.lr_warmup} must be below the rounds of the run, {rounds}",
            )
        if plan.lr_schedule == "step" and plan.lr_decay == 1:
            raise contradiction(
                f"{key}.lr_schedule",
                "= 'step' needs lr_decay below 1: what each step multiplies the rate by",
            )
        if plan.lr_schedule != "cosine":
            return plan
        plan = replace(plan, lr_rounds=plan.lr_rounds or rounds)
        if plan.lr_rounds <= plan.lr_warmup:
            raise contradiction(
                f"{key}.lr_rounds", f"= {plan.lr_rounds} must be above lr_warmup = {plan.lr_warmup}"
            )
        return plan


def read_plans(experiment: Experiment, method: Method) -> PlanTable:
    """The table ``[plan]`` of a config. Raises WrongConfig for values that are wrong, and for an
    override that changes nothing.
    """
    table = experiment.table("plan")
    known = {*method.plans, FIT, RIDGE}
    stages = {
        name: value for name, value in table.items() if name in known or isinstance(value, Mapping)
    }
    common = {key: value for key, value in table.items() if key not in stages}
    checked = {}
    problems: list[Problem] = []
    for stage, value in {"": common, **stages}.items():
        try:
            checked[stage] = _legal(stage, value)
        except WrongConfig as error:
            problems += error.problems
    if problems:
        raise WrongConfig(problems)
    plans = PlanTable(checked.pop(""), checked)
    _refuse_without_effect(plans, method, experiment)
    return plans


def _legal(stage: str, values: Any) -> dict[str, Any]:
    """The values of a stage, or of all stages (no name), without defaults; raises WrongConfig."""
    key = f"plan.{stage}".removesuffix(".")
    if not isinstance(values, Mapping):
        problem = Problem(
            code=NOT_A_TABLE,
            key=key,
            reason=f"= {shown(values)} must be a table",
            hint=f"write the keys of the stage below [{key}]",
        )
        raise WrongConfig([problem])
    legal = validated(PLAN, values, key)
    return {name: legal[name] for name in values}


def _refuse_without_effect(plans: PlanTable, method: Method, experiment: Experiment) -> None:
    """Raise WrongConfig for a key of all stages that an override sets, and that each stage sets."""
    for key in plans.common:
        is_override = not experiment.origins.get(f"plan.{key}", "file").startswith("file")
        stages = list(dict.fromkeys([*method.plans, *plans.stages]))
        has_effect = any(key not in plans.stages.get(stage, {}) for stage in stages)
        if not is_override or has_effect:
            continue
        keys = " and ".join(f"plan.{stage}.{key}" for stage in stages)
        problem = Problem(
            code=NO_EFFECT,
            key=f"plan.{key}",
            reason="changes nothing, for each stage has its own",
            hint=f"set {keys}",
        )
        raise WrongConfig([problem])


def held_out_share(plans: Mapping[str, Plan]) -> float:
    """The share of its data that a client holds out in every stage in which it trains.

    The examples of a smaller share are among those of a larger one.
    """
    shares = [plan.validation for plan in plans.values() if plan.epochs or plan.steps]
    return min(shares, default=0.0)


def own_plans(method: Method, topology: Named) -> dict[str, Plan]:
    """The plans of a method's stages, and of the stages that its topology adds."""
    plans = dict(method.plans)
    if topology.values.get("first") == FIT:
        plans = {FIT: FITTING, **plans}
    if topology.values.get("last") == RIDGE:
        plans[RIDGE] = NO_TRAINING
    return plans
