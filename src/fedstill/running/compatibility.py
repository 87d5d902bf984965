"""The table of what a run must have before round 1.

Methods, measures and settings require networks, data and stages. Each row of the table (``Rule``)
has a condition, a description of the problem with its remedy, and the error to raise.
``check_data`` and ``check_run`` go through their rows in order and stop at the first that fails.

A mistake can break several rows. The most basic one comes first: the data, the size of networks,
the stages of the topology, the method's own check of the schedule, a trial of the networks, the
needs of the method and of the measures, and then single settings. The rows of outer packages follow
in the order of ``fedstill.manifest``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import torch

from fedstill import manifest
from fedstill.config.settings import Settings
from fedstill.config.stages import SHARED_STAGES, held_out_share
from fedstill.continual.task_test import TEST_STAGES
from fedstill.core.aggregation import ROBUST
from fedstill.core.capabilities import OF_NETWORKS, Need, Permit
from fedstill.core.checks import in_hook
from fedstill.core.errors import (
    ConfigError,
    DataError,
    FedstillError,
    IncompatibleMethod,
    UnknownName,
    suggestion,
)
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import SERVER, ModelSpec, Stage
from fedstill.core.rounds import unchanged
from fedstill.data.dataset import Dataset
from fedstill.data.views import SiteViews
from fedstill.engines.vectorised import stacking_obstacle
from fedstill.measures.base import Measure
from fedstill.measures.choice import MeasuredRun, measures, unsuited_measures
from fedstill.methods.fit import FIT
from fedstill.methods.ridge import RIDGE, no_linear_head
from fedstill.models import contract
from fedstill.running.network_checks import (
    batch_of_one,
    different_forward,
    huge_network,
    missing_structure,
    trains,
    useless_network,
)
from fedstill.running.selection import selection_data
from fedstill.running.world import RunWorld, work_of_stages

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One row of the table.

    applies: whether the row concerns this run. problem: the problem and its remedy in one sentence,
    or an empty string. The function may also raise an error with a cause or a type of its own.
    error: the type of error that has this sentence as its message. at_sites: whether sites check
    the row as well, because a hostile server would leave it out.
    """

    applies: Callable[[Subject], bool]
    problem: Callable[[Subject], str]
    error: type[FedstillError] = IncompatibleMethod
    at_sites: bool = False

    def check(self, subject: Subject) -> None:
        """Raise the error of this row if it applies and is not met."""
        if not self.applies(subject):
            return
        problem = self.problem(subject)
        if problem:
            raise self.error(problem)


@dataclass(frozen=True)
class ReadData:
    """A data set and the settings of the run that will use it."""

    settings: Settings
    dataset: Dataset


@dataclass(frozen=True)
class PlannedRun:
    """A run before round 1: its settings, its world and its data."""

    settings: Settings
    world: RunWorld
    sites: SiteViews

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.settings.method

    @property
    def method_name(self) -> str:
        """The name of the method, for messages."""
        return self.settings.named.method.label

    @property
    def topology_name(self) -> str:
        """The name of the topology, for messages."""
        return self.settings.named.topology.label

    @property
    def aggregation(self) -> str:
        """How the method averages, if that is one of its fields; else empty."""
        return str(getattr(self.method, "aggregation", ""))

    @cached_property
    def needs(self) -> Need:
        """What the method needs."""
        return self.method.requires()

    @cached_property
    def network_needs(self) -> Need:
        """What the method needs of the structure of networks."""
        needs = self.needs
        if Need.SAME_FEATURES in needs:
            needs |= Need.FEATURES
        return needs & OF_NETWORKS

    @property
    def trains(self) -> bool:
        """Whether anything is trained in the run."""
        return any(trains(plan) for plan in self.world.plans.values())

    @cached_property
    def networks(self) -> list[ModelSpec]:
        """The architectures of the run, the server's first."""
        clients = range(min(self.world.clients, len(self.world.client_models)))
        specs = [self.world.model(SERVER), *map(self.world.model, clients)]
        return list(dict.fromkeys(specs))

    @cached_property
    def measures(self) -> Mapping[str, Measure]:
        """The measures of the run, by name."""
        return measures(self.settings.measure)

    @cached_property
    def first_round(self) -> list[Stage]:
        """The stages of round 1."""
        return list(self.settings.schedule(1, self.world))

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the first round and of the last: all kinds of stages are among them."""
        return [*self.first_round, *self.settings.schedule(self.settings.rounds, self.world)]

    @cached_property
    def stage_names(self) -> frozenset[str]:
        """The names of the stages of the run."""
        return frozenset(stage.name for stage in self.stages)


def always(run: PlannedRun) -> bool:
    """The condition of rows that concern every run."""
    return True


def needs(need: Need) -> Callable[[PlannedRun], bool]:
    """The condition of rows on a need of the method."""
    return lambda run: need in run.needs


# ---- data ---------------------------------------------------------------------------------------


def single_class(data: ReadData) -> str:
    """A data set of one class."""
    dataset = data.dataset
    if len(dataset.classes) != 1:
        return ""
    return (
        f"{dataset.name} has only the class {dataset.classes[0]!r}, so every model is right; give "
        "examples of at least two classes"
    )


def augmented_numbers(data: ReadData) -> str:
    """Augmentation of examples that are not pixels."""
    dataset = data.dataset
    if dataset.train.values.dtype == torch.uint8:
        return ""
    contents = dataset.many
    if dataset.about.kind == "image":
        contents = "images that are numbers already"
    steps = list(data.settings.data.augment)
    return f"data.augment = {steps} is for images as pixels; {dataset.name} holds {contents}"


def scaled_texts(data: ReadData) -> str:
    """A mean or a spread of token ids."""
    dataset = data.dataset
    if dataset.about.kind != "text":
        return ""
    return f"data.mean and data.std are for numbers; {dataset.name} holds {dataset.many}"


def resized_numbers(data: ReadData) -> str:
    """Another size of examples that are not images."""
    dataset = data.dataset
    if dataset.about.kind == "image":
        return ""
    return f"data.public_resize is for images; {dataset.name} holds {dataset.many}"


def cuts_tasks_by_column(data: ReadData) -> bool:
    """Whether each value of a column becomes a task of the data set's training examples."""
    named = data.settings.named
    return bool(
        named.stream.values.get("column")
        and data.dataset.train.owners is not None
        and not data.settings.on_sites
        and not named.partition.values.get("pool")
    )


def untrained_domain(data: ReadData) -> str:
    """A value of ``stream.column`` that only test examples have."""
    owners = data.dataset.train.owners
    assert owners is not None  # cuts_tasks_by_column
    names = data.dataset.about.owners
    counts = torch.bincount(owners, minlength=len(names)).tolist()
    for name, count in zip(names, counts, strict=True):
        if count == 0:
            column = data.settings.named.stream.values["column"]
            return (
                f"stream.column = {column!r}: {name!r} has test examples and no training examples, "
                "so it cannot be a task; leave these rows out of the test split"
            )
    return ""


def unknown_positive_class(data: ReadData) -> str:
    """A positive class that the data set lacks, or beside more than one other class."""
    name = data.settings.positive_class
    classes = data.dataset.classes
    if len(classes) != 2:
        return (
            f"positive_class = {name!r} is for two classes, and {data.dataset.name} has "
            f"{len(classes)}: metrics are means over all of them; leave it out"
        )
    if name in classes:
        return ""
    return (
        f"positive_class = {name!r} is no class of {data.dataset.name}; {suggestion(name, classes)}"
    )


DATA_RULES: tuple[Rule[ReadData], ...] = (
    Rule(lambda data: not data.settings.on_sites, single_class, DataError),
    Rule(lambda data: bool(data.settings.data.augment), augmented_numbers, ConfigError),
    Rule(
        lambda data: data.settings.data.mean is not None or data.settings.data.std is not None,
        scaled_texts,
        ConfigError,
    ),
    Rule(lambda data: data.settings.data.public_resize, resized_numbers, ConfigError),
    Rule(cuts_tasks_by_column, untrained_domain, ConfigError),
    Rule(lambda data: bool(data.settings.positive_class), unknown_positive_class, ConfigError),
)
"""What settings ask of the data set, checked before it is split."""


# ---- networks -----------------------------------------------------------------------------------


def runs_parts_of_networks(run: PlannedRun) -> bool:
    """Whether networks are run in parts: the body, and the head on the body's output."""
    parts = Need.FEATURES | Need.HEAD | Need.SLIM | Need.LEVELS
    measured = any("features" in measure.needs for measure in run.measures.values())
    return measured or bool(run.network_needs & parts)


def several_architectures(run: PlannedRun) -> str:
    """Networks that differ, for a method that averages weights."""
    if len(run.networks) == 1:
        return ""
    return (
        f"method {run.method_name} averages weights, so all clients need the same network; omit "
        "clients.models, or choose a method whose clients exchange logits"
    )


def several_widths(run: PlannedRun) -> str:
    """Networks whose features cannot be compared."""
    widths = {contract.width(spec): str(spec) for spec in sorted(run.networks, key=str)}
    if len(widths) == 1:
        return ""
    widths_text = ", ".join(f"{spec} {width}" for width, spec in sorted(widths.items()))
    return (
        f"method {run.method_name} needs models with the same number of features, and they have: "
        f"{widths_text}"
    )


# ---- stages -------------------------------------------------------------------------------------


def misspelt_stage(run: PlannedRun) -> str:
    """A stage that a key of ``[topology]`` adds, and that neither the method nor anybody knows."""
    known_stages = run.method.stages | SHARED_STAGES
    unknown = run.stage_names - known_stages - set(run.method.schedule.values())
    for key, value in run.settings.named.topology.values.items():
        if isinstance(value, str) and value in unknown:
            place = f"topology.{key}, with method {run.method_name}"
            raise UnknownName("stage", value, known_stages, place=place)
    return ""


def unknown_stage(run: PlannedRun) -> str:
    """A stage in which the method does not know what to do."""
    provided = run.settings.schedule.provided_stages
    unknown = sorted(run.stage_names - run.method.stages - SHARED_STAGES - provided)
    if not unknown:
        return ""
    if unknown[0] in run.method.schedule.values():
        return (
            f"method {run.method_name} does not define stage {unknown[0]!r} of its schedule; add "
            "it to stages and plans"
        )
    return (
        f"method {run.method_name} does not define stage {unknown[0]!r} of topology "
        f"{run.topology_name}; omit topology.kind to use its topology, {run.method.topology}"
    )


def late_fit(run: PlannedRun) -> str:
    """The stage ``fit`` without a plan. It gets one only before round 1."""
    if FIT not in run.stage_names - run.method.stages or FIT in run.world.plans:
        return ""
    return (
        f"method {run.method_name} would train nothing in stage {FIT!r} of topology "
        f"{run.topology_name}: models are trained alone only before round 1; set "
        f"topology.first = {FIT!r}"
    )


def missing_task_end(run: PlannedRun) -> str:
    """A topology without the stage that the method has at the end of each task."""
    ending = run.method.schedule.get("task_end")
    if not ending or ending in run.stage_names:
        return ""
    return (
        f"method {run.method_name} needs the stage {ending!r} at each task's end, and topology "
        f"{run.topology_name} has none: set topology.task_end = {ending!r}, or leave "
        f"topology.kind out to get its own, {run.method.topology}"
    )


def unscored_epochs(run: PlannedRun) -> str:
    """A plan that keeps the best epoch by held-out data, and holds none out."""
    by_name = {stage.name: stage for stage in run.stages}  # a chain has one for each client
    for stage in by_name.values():
        plan = run.world.plans.get(stage.name)
        if plan is None or plan.keep != "best" or plan.validation or not trains(plan):
            continue
        if _scores_by_held_out_data(run.method, stage):
            return (
                f"plan.{stage.name}.keep = 'best' scores each epoch on held-out data, and there "
                f"are none: set plan.{stage.name}.validation, for example to 0.1"
            )
    return ""


def _scores_by_held_out_data(method: Method, stage: Stage) -> bool:
    """Whether the work of a stage has the usual score. Errors of the method are ignored here; the
    run reports them with their line.
    """
    with contextlib.suppress(Exception):
        work = method.work(stage)
        return (
            isinstance(work, ClientWork)
            and type(work).validation_score is ClientWork.validation_score
        )
    return False


def unfit_class_weights(run: PlannedRun) -> str:
    """A list of class weights of the wrong length, or with zeros only."""
    classes = run.world.classes
    for stage, plan in run.world.plans.items():
        weights = plan.class_weights
        if not isinstance(weights, tuple):
            continue
        if len(weights) != classes:
            return (
                f"plan.{stage}.class_weights has {len(weights)} numbers, and the data have "
                f"{classes} classes; give one number for each class, in the order of the classes"
            )
        if not any(weights):
            return f"plan.{stage}.class_weights are all 0; give a class a weight above 0"
    return ""


def stated_incompatibility(run: PlannedRun) -> str:
    """The method's own objection to this schedule."""
    with in_hook(run.method, "incompatibility", "before round 1"):
        problem = run.method.incompatibility(run.first_round, run.world)
    if not problem:
        return ""
    return f"method {run.method_name} on topology {run.topology_name}: {problem}"


def ends_with_ridge(run: PlannedRun) -> bool:
    """Whether the stage ``ridge`` follows a method that does not have it."""
    return RIDGE in run.stage_names - run.method.stages


def unsolvable_last_layer(run: PlannedRun) -> str:
    """A method or a network whose last layer the stage ``ridge`` cannot solve."""
    spec = run.world.model(SERVER)
    if Need.SAME_SHAPES not in run.needs or run.method.personal:
        problem = (
            "its clients have models of their own; leave it out, or choose a method with a global "
            "model"
        )
    elif run.method.has_client_predictors:
        problem = "the server has several models; leave it out"
    elif Need.HEAD not in contract.capabilities(spec):
        problem = f"it needs a model with a head, and {spec.label} has none: give it body and head"
    elif run.world.stream.tasks > 1 and not run.world.stream.keeps_data:
        problem = (
            "it would solve the layer for the last task alone and forget the others; choose method "
            "analytic, or set stream.past = 'kept'"
        )
    else:
        problem = no_linear_head(run.world)
    if not problem:
        return ""
    return f"topology.last = {RIDGE!r} with method {run.method_name}: {problem}"


# ---- public data and measures -------------------------------------------------------------------


def missing_public_data(run: PlannedRun) -> str:
    """No public examples."""
    if run.sites.public is not None:
        return ""
    return f"method {run.method_name} needs public data: set data.public to a number of examples"


def has_labelled_public_data(run: PlannedRun) -> bool:
    """Whether there are public examples, and all have labels."""
    public = run.sites.public
    return public is not None and bool((public.labels >= 0).all())


def missing_public_labels(run: PlannedRun) -> str:
    """A stage that reads labels of public examples which have none."""
    reading = sorted(run.stage_names & run.method.labelled)
    if run.sites.public is None or not reading or has_labelled_public_data(run):
        return ""
    remedy = "set [data] public to examples with labels"
    if reading[0] == run.settings.named.topology.values.get("first", ""):
        remedy = 'leave it out with topology.first = ""'
    return (
        f"stage {reading[0]!r} of method {run.method_name} reads the labels of public examples, "
        f"and these have none; {remedy}"
    )


def unfit_measure(run: PlannedRun) -> str:
    """A measure with needs that the method, the networks or the data do not meet."""
    measured_run = MeasuredRun(
        schedule=run.settings.schedule,
        method_name=run.method_name,
        stages=run.stages,
        world=run.world,
        simulated=not run.settings.on_sites,
        tested=run.sites.common_test is not None,
        remembered=run.settings.engine != "flower",
        labelled=has_labelled_public_data(run),
    )
    return unsuited_measures(run.measures, measured_run)


# ---- the best round -----------------------------------------------------------------------------


def unreached_stage(run: PlannedRun) -> str:
    """A stage after the last round only, which a run that stops early never reaches."""
    last_round = run.settings.rounds
    # Round 1 may have other stages than the rounds after it.
    round_before = run.settings.schedule(max(1, last_round - 1), run.world)
    earlier_names = {stage.name for stage in [*run.first_round, *round_before]}

    for stage in run.settings.schedule(last_round, run.world):
        if stage.name not in earlier_names | TEST_STAGES:
            return (
                f"stage {stage.name!r} of method {run.method_name} takes place after the last "
                "round only, and [stop] may end the run before; remove [stop]"
            )
    return ""


def missing_selection_data(run: PlannedRun) -> str:
    """Rounds that would be compared on data that the run lacks."""
    selection_data(run.settings, run.sites, run.stage_names)  # raises ConfigError
    return ""


def scored_on_used_examples(run: PlannedRun) -> str:
    """A stage uses the held-out examples on which the rounds are compared."""
    settings = run.settings
    if selection_data(settings, run.sites, run.stage_names) != "held_out":
        return ""
    share = held_out_share(settings.plans)
    for stage in run.stages:
        if stage.view == "public" or SERVER in stage.clients or stage.name in TEST_STAGES:
            continue
        plan = run.world.plans.get(stage.name)
        if plan is not None and plan.validation < share:
            return (
                f"stage {stage.name!r} uses the examples on which the rounds are compared; set "
                f"plan.{stage.name}.validation = {share:g}, or set plan.validation for all stages"
            )
    return ""


# ---- hostile clients and robust means -----------------------------------------------------------


FEWEST_COMPARED = 3
"""With fewer clients in a stage, none of them can be recognised as an outlier."""


def plants_attackers(run: PlannedRun) -> bool:
    """Whether hostile clients are planted."""
    return run.settings.clients_table.attack is not None


def missing_attack(run: PlannedRun) -> str:
    """Hostile clients that do nothing."""
    if plants_attackers(run):
        return ""
    return "clients.attackers needs clients.attack, what they do: sign_flip, scaled or label_flip"


def attack_on_federation(run: PlannedRun) -> str:
    """Hostile clients outside of a simulation."""
    if not (run.settings.is_deployed or run.settings.on_sites):
        return ""
    return "clients.attack plants hostile clients in a simulation; leave it out in a federation"


def flipped_task_labels(run: PlannedRun) -> str:
    """Flipped labels, where tasks have classes of their own."""
    if run.settings.clients_table.attack != "label_flip" or run.settings.stream.tasks == 1:
        return ""
    return "clients.attack = 'label_flip' names classes of other tasks; choose sign_flip or scaled"


def averages_robustly(run: PlannedRun) -> bool:
    """Whether the run uses a robust mean, which hostile clients cannot move far."""
    return run.aggregation in ROBUST


def forbidden_robust_mean(run: PlannedRun) -> str:
    """A method whose aggregate is more than a mean."""
    if Permit.ROBUST_AGGREGATE in run.method.permits:
        return ""
    return (
        f"method {run.method_name} cannot take aggregation = {run.aggregation!r}: the server does "
        "more with replies than average them; choose 'examples' or 'uniform', or a method whose "
        "aggregate is a mean (fedavg, fedntd)"
    )


def too_few_compared(run: PlannedRun) -> str:
    """Too few clients in the method's stages for a robust mean."""
    stages = [stage for stage in run.first_round if stage.name in run.method.stages]
    largest_stage = max((len(stage.clients) for stage in stages), default=0)
    if largest_stage >= FEWEST_COMPARED:
        return ""
    return (
        f"aggregation = {run.aggregation!r} of method {run.method_name} needs at least "
        f"{FEWEST_COMPARED} clients side by side, and a stage has {largest_stage}; set "
        "topology.kind = 'parallel' and topology.sampled, or aggregation = 'examples'"
    )


# ---- kept updates -------------------------------------------------------------------------------


def unknown_updates(run: PlannedRun) -> str:
    """Updates to be stored, where the server sees none."""
    if not run.settings.hides_client_models:
        return ""
    return (
        "keep_updates = true: with secure sums the server knows no single client's update; leave "
        "it out, or leave privacy.secure_sum out"
    )


# ---- engine -------------------------------------------------------------------------------------


def unstackable_clients(run: PlannedRun) -> str:
    """Clients that the vectorised engine cannot train as one stack.

    Clients that are left out do not matter: if a single one remains, it trains without a stack.
    """
    schedule = replace(run.settings.schedule, change=unchanged)
    stages = work_of_stages(replace(run.settings, schedule=schedule), run.world, run.sites)
    stacked = [stage for stage in stages if stage.clients > 1]
    if not stacked:
        return (
            f"engine = 'vectorised' stacks the clients of a stage, and a stage of topology "
            f"{run.topology_name} has one client; set engine = 'pooled'"
        )
    for stage in stacked:
        for spec in stage.specs:
            reason = stacking_obstacle(spec, stage.plan)
            if reason:
                return (
                    f"engine = 'vectorised' cannot stack these clients: {reason}; set engine = "
                    "'pooled'"
                )
    return ""


# ---- the table ----------------------------------------------------------------------------------


RULES: tuple[Rule[PlannedRun], ...] = (
    # Stages and networks: nothing else can be checked without them.
    Rule(always, lambda run: huge_network(run.networks), ConfigError),
    Rule(always, misspelt_stage),
    Rule(always, unknown_stage),
    Rule(always, late_fit),
    Rule(always, missing_task_end),
    Rule(always, unscored_epochs, ConfigError),
    Rule(always, unfit_class_weights, ConfigError),
    Rule(always, stated_incompatibility),
    Rule(always, lambda run: useless_network(run.networks, run.sites, run.trains), ConfigError),
    Rule(runs_parts_of_networks, lambda run: different_forward(run.networks, run.sites)),
    # What the method needs.
    Rule(
        lambda run: bool(run.network_needs),
        lambda run: missing_structure(run.networks, run.network_needs, run.method_name),
    ),
    Rule(needs(Need.SAME_SHAPES), several_architectures),
    Rule(needs(Need.SAME_FEATURES), several_widths),
    Rule(ends_with_ridge, unsolvable_last_layer),
    Rule(needs(Need.PUBLIC_DATA), missing_public_data),
    # What measures and stages read.
    Rule(always, unfit_measure),
    Rule(always, missing_public_labels),
    # Single settings.
    Rule(
        lambda run: run.settings.clients_table.failures == "stop",
        lambda run: batch_of_one(run.settings, run.world, run.sites),
        ConfigError,
    ),
    Rule(lambda run: run.settings.clients_table.attackers is not None, missing_attack, ConfigError),
    Rule(plants_attackers, attack_on_federation, ConfigError),
    Rule(plants_attackers, flipped_task_labels, ConfigError),
    Rule(averages_robustly, forbidden_robust_mean),
    Rule(averages_robustly, too_few_compared),
    Rule(lambda run: run.settings.keep_updates, unknown_updates, ConfigError),
    Rule(lambda run: run.settings.stop.is_active, unreached_stage, ConfigError),
    Rule(lambda run: run.settings.selects_round, missing_selection_data, ConfigError),
    Rule(lambda run: run.settings.selects_round, scored_on_used_examples, ConfigError),
    Rule(lambda run: run.settings.engine == "vectorised", unstackable_clients, ConfigError),
)
"""What methods, measures and settings ask of a run."""


def all_rules() -> Iterator[Rule[PlannedRun]]:
    """The rules of this module, followed by those of outer packages in the manifest's order."""
    yield from RULES
    for part in manifest.compatibility_rules():
        yield from part.load()


def check_data(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError or DataError where settings do not go with the data set."""
    data = ReadData(settings, dataset)
    for rule in DATA_RULES:
        rule.check(data)


def check_run(settings: Settings, world: RunWorld, sites: SiteViews) -> None:
    """Raise the error of the first row that the run does not meet: IncompatibleMethod, ConfigError
    or UnknownName.
    """
    run = PlannedRun(settings, world, sites)
    for rule in all_rules():
        rule.check(run)


def check_at_site(settings: Settings, world: RunWorld, sites: SiteViews) -> None:
    """Check the rows that protect a site from a hostile server."""
    run = PlannedRun(settings, world, sites)
    for rule in all_rules():
        if rule.at_sites:
            rule.check(run)
