"""The method of a config and its stages: the declarations of the method's class, the plans of its
stages (``[plan]``), and the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.config.experiment import Experiment
from fedstill.config.named_tables import Named, schema_of_name
from fedstill.config.overrides import overriding
from fedstill.config.tables import SITES
from fedstill.config.validation import (
    NOT_A_TABLE,
    Problem,
    WrongConfig,
    collected,
    keys_of,
    schema_of_record,
    unknown_name,
    validated,
    wrong_value,
)
from fedstill.continual.task_test import TEST_STAGES, RoundTests, TaskTests
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.checks import checked_return
from fedstill.core.errors import ConfigError, UnknownName, suggestion
from fedstill.core.extensions import StageProvider
from fedstill.core.fields import as_table, value_text
from fedstill.core.label_counts import CENSUS, CensusStages, needs_label_totals
from fedstill.core.method import Method
from fedstill.core.records import NO_TRAINING, Plan
from fedstill.core.rounds import Schedule
from fedstill.core.topology import Topology
from fedstill.core.user_modules import is_library_module
from fedstill.methods.fit import FIT, FITTING, FitStage
from fedstill.methods.ridge import RIDGE, RidgeStage

SHARED_STAGES = frozenset({FIT, RIDGE, CENSUS}) | TEST_STAGES
"""Stages that a method does not have to declare."""


def takes_census(method: Method, plans: Mapping[str, Plan]) -> bool:
    """Whether clients send their label counts, for the method or for class weights."""
    return Need.LABEL_COUNTS in method.requires() or needs_label_totals(plans)


def schedule_of(
    method: Method,
    topology: Topology,
    stream_kind: str,
    plans: Mapping[str, Plan],
    round_tests: RoundTests | None,
) -> Schedule:
    """A run's schedule: the stages of the topology, and those that the method, its plans, tasks,
    ``select_on`` and tests at real sites need.

    ``stream_kind``: the kind of ``[stream]``. ``round_tests``: the tests by real sites after
    rounds, if there are any.
    """
    providers: list[StageProvider] = [FitStage(), RidgeStage()]
    if stream_kind == SITES and not method.personal:
        providers.append(TaskTests(method))
    if round_tests is not None:
        providers.append(round_tests)
    if takes_census(method, plans):
        providers.append(CensusStages())
    return Schedule(method, topology, tuple(providers))


# The method, and the declarations of its class.


def check_method(label: str, method: Method, base: Path | None) -> None:
    """Raise ConfigError for declarations of a user's class that no run can use.

    ``label``: the method, for messages. ``base``: the folder that paths are relative to.
    """
    _check_types(label, method)
    _check_stage_names(label, method)
    _check_schedule(label, method, base)
    _check_plans(label, method)
    checked_return(method.requires(), Need, method.requires, "flags of fedstill.Need")


class Declaration(NamedTuple):
    """A class attribute that methods can declare."""

    value_type: type
    description: str
    """The type and an example, for messages."""


A_SET = Declaration(Set, "a frozenset of names, such as frozenset({'train'})")

DECLARATIONS: Mapping[str, Declaration] = {
    "stages": A_SET,
    "personal": A_SET,
    "labelled": A_SET,
    "reusable": A_SET,
    "plans": Declaration(Mapping, "a dict of stages to plans, such as {'train': Plan(epochs=1)}"),
    "schedule": Declaration(
        Mapping, "a dict of options of the topology, such as {'before': 'head'}"
    ),
}
"""What methods can declare, by the name of the attribute."""

DECLARED_BY_STAGE = ("plans", "personal", "labelled", "reusable")
"""The declarations that have names of stages."""


def _check_types(label: str, method: Method) -> None:
    """Raise ConfigError for a declaration of a wrong type. ``label``: the method, for messages."""
    for attribute, declaration in DECLARATIONS.items():
        value = getattr(method, attribute)
        if is_users_own(method, attribute) and not isinstance(value, declaration.value_type):
            raise ConfigError(
                f"{label}: {attribute} = {value_text(value)} must be {declaration.description}"
            )


def _check_stage_names(label: str, method: Method) -> None:
    """Raise UnknownName for a declaration about a stage that the method does not have."""
    stages = method.stages | SHARED_STAGES
    for attribute in DECLARED_BY_STAGE:
        if not is_users_own(method, attribute):
            continue
        unknown = [stage for stage in getattr(method, attribute) if stage not in stages]
        if unknown:
            raise UnknownName("stage", str(unknown[0]), stages, f"{label}, {attribute}")


def _check_schedule(label: str, method: Method, base: Path | None) -> None:
    """Raise UnknownName for an option that the method's topology does not have."""
    if not is_users_own(method, "schedule"):
        return
    options = keys_of(schema_of_name("topology", method.topology, base))
    unknown = sorted(method.schedule.keys() - {*options, TASK_END})
    if unknown:
        raise UnknownName(
            "option", unknown[0], options, f"{label}, schedule of topology {method.topology}"
        )


def _check_plans(label: str, method: Method) -> None:
    """Raise ConfigError for a value that is not a Plan, and for a method without any plan."""
    for stage, plan in method.plans.items():
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"{label}: plans[{stage!r}] = {value_text(plan)} must be a Plan, such as "
                "Plan(epochs=1)"
            )
    if method.stages & method.plans.keys():
        return
    stage = min(method.stages, default="train")
    raise ConfigError(
        f"{label}: none of its stages has a plan: give it one, such as plans = "
        f"{{{stage!r}: Plan(epochs=1)}}; Plan(epochs=0) trains nothing"
    )


def is_users_own(method: Method, attribute: str) -> bool:
    """Whether an attribute of a method is defined in a user's class, not in a class of the
    library's.
    """
    owner = next(cls for cls in type(method).__mro__ if attribute in vars(cls))
    return not is_library_module(owner.__module__)


TASK_END = "task_end"
"""The option of topologies that names the stage at a task's end."""


def topology_defaults(method: Method) -> dict[str, Mapping[str, Any]]:
    """The defaults of topologies' options in a run of a method, by topology.

    The options in the method's ``schedule`` are those of its own topology. The stage at a task's
    end belongs to the method, so it is also the default of all other topologies.
    """
    for_all = {key: value for key, value in method.schedule.items() if key == TASK_END}
    defaults: dict[str, Mapping[str, Any]] = dict.fromkeys(registry.names("topology"), for_all)
    defaults[method.topology] = method.schedule
    return defaults


# The table ``[plan]``.


PLAN_SCHEMA = schema_of_record(Plan)


@dataclass(frozen=True)
class PlanTable:
    """``[plan]``, with checked values and without defaults."""

    common: Mapping[str, Any]
    """The values for all stages."""
    stages: Mapping[str, Mapping[str, Any]]
    """The values for single stages, by stage."""

    def resolved(self, defaults: Mapping[str, Plan], rounds: int) -> dict[str, Plan]:
        """The plan of each stage: its default, with the values for all stages and for this one.

        ``rounds``: the rounds that a learning rate's schedule has. Raises WrongConfig for stages
        that do not exist, and for values that exclude each other.
        """
        unknown = [stage for stage in self.stages if stage not in defaults]
        if unknown:
            stage = unknown[0]
            raise unknown_name(f"plan.{stage}", "stage", stage, suggestion(stage, defaults))
        return {stage: self._plan(default, stage, rounds) for stage, default in defaults.items()}

    def _plan(self, default: Plan, stage: str, rounds: int) -> Plan:
        """The plan of a stage. A cosine schedule without a length gets that of the run."""
        plan = Plan(**{**as_table(default), **self.common, **self.stages.get(stage, {})})
        key = f"plan.{stage}"
        if plan.lr_warmup >= rounds:
            raise wrong_value(
                f"{key}.lr_warmup",
                f"= {plan.lr_warmup} must be below the rounds of the run, {rounds}",
            )
        if plan.lr_schedule == "step" and plan.lr_decay == 1:
            raise wrong_value(
                f"{key}.lr_schedule",
                "= 'step' needs lr_decay below 1: what each step multiplies the rate by",
            )
        if plan.lr_schedule != "step" and plan.lr_step not in (1, default.lr_step):
            raise wrong_value(
                f"{key}.lr_step",
                f"= {plan.lr_step} needs lr_schedule = 'step'",
                "set it, or leave lr_step out",
            )
        if plan.lr_schedule != "cosine":
            return plan
        plan = replace(plan, lr_rounds=plan.lr_rounds or rounds)
        if plan.lr_rounds <= plan.lr_warmup:
            raise wrong_value(
                f"{key}.lr_rounds", f"= {plan.lr_rounds} must be above lr_warmup = {plan.lr_warmup}"
            )
        return plan


def read_plans(experiment: Experiment, method: Method) -> PlanTable:
    """The table ``[plan]`` of a config. Raises WrongConfig for wrong values, and for an override
    that changes nothing.
    """
    table = experiment.table("plan")
    stage_names = {*method.plans, FIT, RIDGE}
    # A table is that of a stage, even if no stage has its name: messages are then about the stage.
    stage_tables = {
        key: value
        for key, value in table.items()
        if key in stage_names or isinstance(value, Mapping)
    }
    common_values = {key: value for key, value in table.items() if key not in stage_tables}

    problems: list[Problem] = []
    common: dict[str, Any] = {}
    with collected(problems):
        common = _checked_values(common_values, "plan")
    stages = {}
    for stage, values in stage_tables.items():
        with collected(problems):
            stages[stage] = _checked_values(values, f"plan.{stage}")
    if problems:
        raise WrongConfig(problems)

    plans = PlanTable(common, stages)
    _check_have_effect(plans, method, experiment)
    return plans


def _checked_values(values: Any, key: str) -> dict[str, Any]:
    """The values of a plan's table, without defaults. ``key``: the dotted key of the table. Raises
    WrongConfig.
    """
    if not isinstance(values, Mapping):
        raise wrong_value(
            key,
            f"= {value_text(values)} must be a table",
            f"write the keys of the stage below [{key}]",
            code=NOT_A_TABLE,
        )
    all_values = validated(PLAN_SCHEMA, values, key)
    return {name: all_values[name] for name in values}


def _check_have_effect(plans: PlanTable, method: Method, experiment: Experiment) -> None:
    """Raise WrongConfig for an override of all stages whose key every stage sets for itself."""
    overrides = overriding(experiment.origins)
    stages = list(dict.fromkeys([*method.plans, *plans.stages]))
    for key in plans.common:
        has_effect = any(key not in plans.stages.get(stage, {}) for stage in stages)
        if has_effect or f"plan.{key}" not in overrides:
            continue
        keys = " and ".join(f"plan.{stage}.{key}" for stage in stages)
        raise wrong_value(
            f"plan.{key}", "has no effect, because every stage sets its own", f"set {keys}"
        )


def held_out_share(plans: Mapping[str, Plan]) -> float:
    """The share of its data that a client holds out in every stage in which it trains.

    The examples of a smaller share are among those of a larger one.
    """
    shares = [plan.validation for plan in plans.values() if plan.epochs or plan.steps]
    return min(shares, default=0.0)


def default_plans(method: Method, topology: Named) -> dict[str, Plan]:
    """The default plans of a run's stages: those of the method, and of the stages that its topology
    adds before the first round or after the last one.
    """
    plans = dict(method.plans)
    if topology.values.get("first") == FIT:
        plans = {FIT: FITTING, **plans}
    if topology.values.get("last") == RIDGE:
        plans[RIDGE] = NO_TRAINING
    return plans
