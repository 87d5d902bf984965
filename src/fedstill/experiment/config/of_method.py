"""The method of an experiment: found, built, and what it declares checked against the names that
there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from fedstill.anywhere import ANYWHERE
from fedstill.errors import ConfigError, UnknownName
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.named_tables import Named, fields_of, read_named
from fedstill.fields import shown
from fedstill.method import Method
from fedstill.models.additions import ADDED
from fedstill.records import Plan

OF_NETWORKS = {"same_shapes", "same_features", "features", "head", "etf", "levels", "pair", "slim"}
NAMES: Mapping[str, Collection[str]] = {
    "needs": OF_NETWORKS | {"public_data", "label_counts", "queries"},
    "permits": {"linear_fold", "central_noise", "robust_fold", "private_training", "noisy_logits"},
    "adds": ADDED.keys(),
}
"""What a method may need, permit and add."""

OF_STAGES = ("plans", "personal", "labelled", "reusable")
"""What a method says by stage."""


def read_method(experiment: Experiment) -> tuple[Named, Method]:
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
    return named, built


def _check_declared(what: str, method: Method, base: Path | None) -> None:
    """Raise ConfigError where a user's class declares what is of another type, or names what there
    is not.
    """
    for name, (kind, how) in _TYPES.items():
        if is_users_own(method, name) and not isinstance(value := getattr(method, name), kind):
            raise ConfigError(f"{what}: {name} = {shown(value)} must be {how}")
    stages = method.stages | ANYWHERE.keys()
    for name, known in [*NAMES.items(), *((name, stages) for name in OF_STAGES)]:
        for each in getattr(method, name) if is_users_own(method, name) else ():
            if each not in known:
                raise UnknownName(
                    "stage" if name in OF_STAGES else "name", str(each), known, f"{what}, {name}"
                )
    if is_users_own(method, "schedule"):
        _, options = fields_of("topology", method.topology, base)
        for key in sorted(method.schedule.keys() - options.keys() - {"task_end"}):
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
    "needs": (Set, "a frozenset of names, such as frozenset({'features'})"),
    "permits": (Set, "a frozenset of names, such as frozenset({'linear_fold'})"),
    "personal": _A_SET,
    "labelled": _A_SET,
    "reusable": _A_SET,
    "adds": (tuple, "a tuple of names, such as ('own_head',)"),
    "plans": (Mapping, "a dict of stages to plans, such as {'train': Plan(epochs=1)}"),
    "schedule": (Mapping, "a dict of options of the topology, such as {'before': 'head'}"),
}
"""What each declaration must be: its type, and in words."""
