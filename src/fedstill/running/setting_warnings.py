"""Warnings about the settings and data of a run that is valid but may disappoint.

A run logs them when it begins, and ``fedstill explain`` prints them. Settings that are errors are
in ``running/compatibility.py``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedstill.config.settings import Settings
from fedstill.config.stages import default_plans
from fedstill.core.checks import in_hook
from fedstill.core.files import shortened_list
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.data.dataset import Dataset
from fedstill.metrics.classification import ACCURACY
from fedstill.running.client_data import NOISE, TRAIN
from fedstill.running.evaluation import tests_by_class
from fedstill.running.network_checks import network_warnings
from fedstill.running.preparation import Prepared

log = logging.getLogger("fedstill.run")

TOO_FAST = 10
"""A learning rate is doubtful at this multiple of the method's own, if the optimiser is not SGD:
``[plan]`` reaches every stage, one that has Adam too.
"""

DEFAULT_PLAN = Plan()

RULES_WITH_SHARE = ("trimmed_mean", "krum")
"""The robust means that use the share of suspected clients."""

MOST_NAMED = 5
"""The most classes that are named in one sentence."""


def setting_warnings(prepared: Prepared) -> Iterator[str]:
    """Warnings about settings without effect, odd networks, doubtful plans, and classes that
    cannot be learned or tested.

    The data of real sites are unknown here and cause no warnings. ``Prepared.notes`` lists the
    data that were left out.
    """
    settings = prepared.settings
    world = prepared.world
    with in_hook(settings.method, "setting_warnings", "before round 1"):
        warning = settings.method.setting_warnings(world)
    if warning:
        yield f"method {settings.named.method.label}: {warning}"
    yield from _ineffective_share(settings.method)
    for spec in dict.fromkeys((world.server_model, *world.client_models)):
        yield from network_warnings(spec, prepared.sites)
    for stage, plan in world.plans.items():
        yield from _plan_warnings(stage, plan, settings)
    defaults = default_plans(settings.method, settings.named.topology)
    yield from ineffective_plan_keys(world.plans, defaults)
    if settings.on_sites:
        return
    yield from _ineffective_data_keys(prepared)
    yield from _missing_class_warnings(prepared.dataset)
    yield from _name_warnings(prepared)
    yield from _test_set_warnings(prepared)
    warning = frequent_class_warning(
        settings,
        prepared.dataset.classes,
        tests_by_class(prepared.sites, prepared.world.classes),
    )
    if warning:
        yield warning


FREQUENT = 0.8
"""From this share of the test examples on, a class is so frequent that accuracy says little."""


def frequent_class_warning(
    settings: Settings, classes: Sequence[str], test_counts: Sequence[int]
) -> str:
    """A warning about a class so frequent that accuracy says little; empty without one, and for a
    run that another metric ranks.

    test_counts: test examples by class (C,).
    """
    total = sum(test_counts)
    if not total or settings.rank_by != ACCURACY:
        return ""
    largest = max(test_counts)
    if largest < FREQUENT * total:
        return ""
    share = largest / total
    frequent = classes[list(test_counts).index(largest)]
    return (
        f"data: {100 * share:.1f} % of the test examples are of class {frequent!r}, "
        "so accuracy says little: a model that always predicts it reaches as much; set "
        'metrics = ["balanced_accuracy", "auc"] and rank_by = "balanced_accuracy"'
    )


def log_warnings(prepared: Prepared) -> None:
    """Log the warnings about the data and those about the settings."""
    for warning in prepared.dataset.about.warnings:
        log_once(f"data: {warning}")
    for warning in setting_warnings(prepared):
        log_once(warning)


@functools.cache
def log_once(warning: str) -> None:
    """Log a warning once in a process: the runs of a comparison have the same."""
    log.warning("%s", warning)


def _plan_warnings(stage: str, plan: Plan, settings: Settings) -> Iterator[str]:
    """Warnings about patience without held-out data, about SGD's learning rate for another
    optimiser, and about a cosine that ends early.
    """
    method = settings.method
    may_score_public_data = plan.keep == "best" and stage in method.labelled
    if plan.patience and not plan.validation and not may_score_public_data:
        yield (
            f"plan.{stage}.patience = {plan.patience} does nothing without held-out data to score "
            f"by; set plan.{stage}.validation, for example to 0.1"
        )
    default = method.plans.get(stage, plan)
    has_default_optimiser = plan.optimiser == default.optimiser
    if has_default_optimiser and plan.optimiser != "sgd" and plan.lr >= TOO_FAST * default.lr:
        yield (
            f"plan.{stage}.lr = {plan.lr} is for {plan.optimiser} here, which has {default.lr} by "
            f"default; set plan.{stage}.lr, or plan.{stage}.optimiser = 'sgd'"
        )
    # The config of an earlier run has the rounds of that run.
    rounds = settings.stream.lr_schedule_rounds(settings.rounds)
    if plan.lr_schedule == "cosine" and plan.lr_rounds < rounds:
        yield (
            f"plan.{stage}.lr_rounds = {plan.lr_rounds} is below the {rounds} rounds of the "
            f"schedule, so the rate stays at its lowest value afterwards; set "
            f"plan.{stage}.lr_rounds = 0 for a cosine over all rounds"
        )


@dataclass(frozen=True)
class PlanKeyCondition:
    """A key of a plan that only has an effect with some value of another key."""

    key: str
    condition: str
    """The other key."""
    values: tuple[str, ...]
    """The values of the other key with which the key has an effect."""

    def has_effect(self, plan: Plan) -> bool:
        """Whether the key has an effect in a plan."""
        return getattr(plan, self.condition) in self.values


PLAN_KEY_CONDITIONS = (
    PlanKeyCondition("momentum", "optimiser", ("sgd",)),
    PlanKeyCondition("lr_end", "lr_schedule", ("cosine",)),
    PlanKeyCondition("lr_rounds", "lr_schedule", ("cosine",)),
    PlanKeyCondition("lr_decay", "lr_schedule", ("constant", "step")),
)


def ineffective_plan_keys(plans: Mapping[str, Plan], defaults: Mapping[str, Plan]) -> Iterator[str]:
    """Warnings about values of plans without effect, unless the method or the default sets them.

    A value in ``[plan]`` reaches every stage, so it is no mistake if it has an effect in one.
    ``defaults``: the method's own plans.
    """
    for rule in PLAN_KEY_CONDITIONS:
        effective = {getattr(plan, rule.key) for plan in plans.values() if rule.has_effect(plan)}
        for stage, plan in plans.items():
            value = getattr(plan, rule.key)
            unset_values = (getattr(defaults[stage], rule.key), getattr(DEFAULT_PLAN, rule.key))
            if rule.has_effect(plan) or value in unset_values or value in effective:
                continue
            yield (
                f"plan.{stage}.{rule.key} = {value} does nothing with {rule.condition} = "
                f"{getattr(plan, rule.condition)!r}; remove it, or set {rule.condition} = "
                f"{rule.values[0]!r}"
            )


def _ineffective_share(method: Method) -> Iterator[str]:
    """A warning about a share of hostile clients that the rule of the mean does not use."""
    aggregation = getattr(method, "aggregation", "")
    if getattr(method, "suspected", None) is None or aggregation in RULES_WITH_SHARE:
        return
    yield (
        f"method.suspected does nothing with method.aggregation = {aggregation!r}; remove it, or "
        f"set method.aggregation = {RULES_WITH_SHARE[0]!r}"
    )


def _ineffective_data_keys(prepared: Prepared) -> Iterator[str]:
    """Warnings about keys of ``[data]`` on examples that the run does not have."""
    data = prepared.settings.data
    is_held_out = any(plan.validation for plan in prepared.world.plans.values())
    if data.held_out is not None and not is_held_out:
        yield (
            f"data.held_out = {data.held_out!r} does nothing, because clients hold no examples "
            "out; remove it, or set plan.validation, for example to 0.1"
        )
    if data.public_resize and data.public_from in (TRAIN, NOISE):
        yield (
            f"data.public_resize does nothing with data.public_from = {data.public_from!r}; remove "
            "it, or set data.public_from to other images"
        )
    if not data.public_labels and prepared.sites.public is None:
        yield (
            "data.public_labels = false does nothing without public examples; remove it, or set "
            "data.public"
        )


def _missing_class_warnings(data: Dataset) -> Iterator[str]:
    """Warnings about classes without an example."""
    splits = [data.train, data.test]
    if data.validation is not None:
        splits.append(data.validation)
    present = _present(torch.cat([split.labels for split in splits]))
    absent = [name for label, name in enumerate(data.classes) if label not in present]
    if not absent:
        return
    sentence = f"data: no example is of {_class_list(absent)}"

    # Classes that are called like their numbers come from labels, which may be meant to begin at 1.
    number = len(data.classes)
    is_numbered = data.classes == tuple(map(str, range(number)))
    if is_numbered and present:
        reason = f"labels from 0 to {number - 1} are {number} classes"
        if 0 not in present:
            reason = f"labels count from 0, and yours begin at {min(present)}"
        sentence = f"{sentence}; {reason}"
    yield sentence


def _name_warnings(prepared: Prepared) -> Iterator[str]:
    """Warnings about names of classes, clients or values that only differ in blanks or case."""
    yield from _similar_names("classes", prepared.dataset.classes)
    yield from _similar_names("clients", prepared.client_names)
    for column, values in prepared.dataset.about.categories:
        yield from _similar_names(f"values of {column!r}", values)


def _similar_names(kind: str, names: Iterable[str]) -> Iterator[str]:
    """Pairs of names of one kind that a reader would take for the same."""
    first_names: dict[str, str] = {}
    for name in names:
        plain_name = " ".join(name.split()).lower()
        first_name = first_names.setdefault(plain_name, name)
        if first_name != name:
            yield (
                f"data: {kind} {first_name!r} and {name!r} differ only in blanks or capitals, and "
                "count as two"
            )


def _test_set_warnings(prepared: Prepared) -> Iterator[str]:
    """Warnings about missing tests, and about classes that are only trained or only tested."""
    sites = prepared.sites
    test = sites.common_test
    if test is None or not len(test):
        if not sites.own_tests:
            yield _no_tests(prepared)
        return

    names = prepared.dataset.classes
    trained = _present(sites.train.labels)
    tested = _present(test.labels)
    unseen = [names[label] for label in sorted(tested - trained)]
    if unseen:
        yield f"data: no training example is of {_class_list(unseen)}, so no model can learn it"
    untested = [names[label] for label in sorted(trained - tested)]
    if untested:
        yield (
            f"data: no test example is of {_class_list(untested)}, so whether it is forgotten is "
            "not measured"
        )


def _no_tests(prepared: Prepared) -> str:
    """A warning about a run in which nothing is tested."""
    if prepared.scaler.by_client is not None and len(prepared.dataset.test):
        return (
            "data: with data.standardise = 'own', each client has its own units, so a common test "
            "set cannot be scaled and no accuracy is measured; set partition.own_test"
        )
    return (
        "data: there are no test examples, so no accuracy is measured; give some to the split "
        "'test'"
    )


def _present(labels: torch.Tensor) -> set[int]:
    """The labels that occur."""
    return set(torch.bincount(labels.cpu()).nonzero().flatten().tolist())


def _class_list(names: Sequence[str]) -> str:
    """``class 'cat'``, or several classes, the first few by name."""
    listed = shortened_list([repr(name) for name in names], MOST_NAMED)
    if len(names) == 1:
        return f"class {listed}"
    return f"classes {listed}"
