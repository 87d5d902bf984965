"""Checks before round 1: methods, models, data and measures that cannot run together."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.config.named_tables import Named
from fedstill.config.resolve import SHARED_STAGES
from fedstill.config.settings import Settings
from fedstill.core.capabilities import OF_NETWORKS, Need
from fedstill.core.errors import (
    ConfigError,
    DataError,
    FedstillError,
    IncompatibleMethod,
    UnknownName,
    on_one_line,
)
from fedstill.core.method import Method
from fedstill.core.records import SERVER, ModelSpec, Plan, Stage, World
from fedstill.core.schedule import Schedule
from fedstill.core.work import ClientWork
from fedstill.data.dataset import Dataset
from fedstill.data.form import MANY
from fedstill.data.views import SiteViews
from fedstill.measures.choice import MeasuredRun, check_fit, measures
from fedstill.methods.fit import FIT
from fedstill.methods.ridge import RIDGE, no_linear_head
from fedstill.models import contract
from fedstill.models.contract import (
    built_size,
    draws_random_numbers,
    is_of_library,
    needs_two_examples,
)
from fedstill.models.parameters import moving
from fedstill.querying.rules import refuse_unraised
from fedstill.running.world import RunWorld

# What two examples tell of a run's networks before anything is trained: what is refused, and what
# is only said.


PARTS = Need.FEATURES | Need.HEAD | Need.SLIM | Need.LEVELS
"""What is asked of a network that is then run by its parts: its body, and its head on that."""

HUGE = 100_000_000
"""Parameters of a network for images: one of the library's that has more was not meant for images
of that size.
"""


def two_examples(sites: SiteViews) -> Tensor:
    """The first two examples as inputs; without content where this side has none."""
    some = sites.train.values[:2]
    return sites.inputs.plain(some if len(some) else some.new_zeros(2, *some.shape[1:]))


def refuse_huge(spec: ModelSpec) -> None:
    """Raise ConfigError for a network of the library that grows with images, on large ones; it is
    not built.
    """
    if (
        len(spec.input_shape) != 3
        or {"of", "own"} & dict(spec.fields).keys()
        or not is_of_library(spec)
    ):
        return
    if (count := built_size(spec)) > HUGE:
        height, width = spec.input_shape[1:]
        raise ConfigError(
            f"model {spec.label} has {count:,} parameters on images of {height} x {width}: "
            "set data.size = 64, or another size, or choose a model that grows less, resnet10 say"
        )


def refuse_odd(spec: ModelSpec, x: Tensor, world: World, needs: Need) -> None:
    """Raise for a network that cannot be trained or looked at as it is: ConfigError or
    IncompatibleMethod.

    needs: what the method and the measures ask of it.
    """
    trains = any(plan.epochs or plan.steps for plan in world.plans.values())
    if trains and not contract.trainable_names(spec):
        raise ConfigError(
            f"no parameter of model {spec.label} is to be trained: all have requires_grad = False; "
            "leave it on for some"
        )
    if draws_random_numbers(spec, training=False):
        raise ConfigError(
            f"model {spec.label} draws random numbers in evaluation mode, so no two looks at it "
            "are alike; "
            "let it draw only where self.training is true"
        )
    if PARTS & needs and Need.FEATURES in contract.capabilities(spec):
        _refuse_other_parts(spec, x)


def _refuse_other_parts(spec: ModelSpec, x: Tensor) -> None:
    """Raise IncompatibleMethod where a network is not its head on its body, as what needs features
    takes it to be.
    """
    m = contract.module(spec, "frozen").eval()
    params = contract.entries(spec, m)
    with torch.no_grad():
        whole = contract.forward(m, params, x)
        z = contract.features(m, params, x)
        parts = contract.head(m, params, z)
    if parts.shape != whole.shape or not torch.allclose(parts, whole, rtol=1e-3, atol=1e-5):
        raise IncompatibleMethod(
            f"model {spec.label}: forward(x) is not head(body(x)), which runs in its place where "
            "features are needed; "
            "put into body all that comes before head, or give the two other names"
        )


def said_of_network(spec: ModelSpec, sites: SiteViews) -> Iterator[str]:
    """What is odd about a network and may be meant, a sentence each."""
    m, trained = contract.module(spec, "frozen"), contract.trainable_names(spec)
    own, every = contract.entries(spec, m), [name for name, _ in m.named_parameters()]
    if still := [name for name in every if name in own and name not in trained]:
        yield (
            f"model {spec.label}: {len(still)} of {len(every)} parameters have requires_grad = "
            f"False ({still[0]}, …), "
            "and are not trained; they are sent, and change by the rounding of means; with "
            "train_only they are neither"
        )
    logits = contract.predictor(spec, own)(two_examples(sites).cpu())
    sums = logits.float().sum(1)
    if (
        spec.classes > 1
        and bool((logits >= 0).all())
        and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    ):
        yield (
            f"model {spec.label} gives probabilities, it seems (each row is positive and sums to "
            "1), and losses take "
            "logits: leave softmax out of its forward()"
        )


# Refuses, by name and before round 1, methods, models, data and measures that cannot run together.


ASKED_OF_MODELS = {
    Need.FEATURES: ("features", "give it submodules body and head"),
    Need.HEAD: ("head", "give it submodules body and head"),
    Need.ETF: (
        "a simplex as its head",
        "set model.name = 'etf', and model.of to the network's name",
    ),
    Need.LEVELS: ("a body that is a chain of layers", "choose mlp, cnn or a ResNet"),
    Need.PAIR: (
        "a network of the client's own beside",
        "set model.name = 'pair', and model.own and model.shared",
    ),
    Need.SLIM: ("a slimmable stage", "set model.name = 'resnet56'"),
}
"""What a method may need of a model: in words, and what would give it."""


def refuse_other_kinds(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError for what is done to images alone, where examples are no images; DataError
    for one class.
    """
    data, pixels = settings.data, dataset.train.values.dtype == torch.uint8
    if len(dataset.classes) == 1 and not settings.on_sites:
        only = f"{dataset.name} holds one class, {dataset.classes[0]!r}"
        raise DataError(
            f"{only}: any model is right about it; give examples of two classes and more"
        )
    if data.augment and not pixels:
        what = dataset.many if dataset.about.kind != "image" else "images that are numbers already"
        raise ConfigError(
            f"data.augment = {list(data.augment)} is for images as pixels; {dataset.name} holds "
            f"{what}"
        )
    if dataset.about.kind == "text" and (data.mean is not None or data.std is not None):
        raise ConfigError(
            f"data.mean and data.std are for numbers; {dataset.name} holds {dataset.many}"
        )
    if data.public_resize and dataset.about.kind != "image":
        raise ConfigError(f"data.public_resize is for images; {dataset.name} holds {dataset.many}")


def refuse_untrained_domain(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError for a value of ``stream.column`` that only test examples have: it could be
    no task.
    """
    column, owners = settings.named.stream.values.get("column"), dataset.train.owners
    if (
        not column
        or owners is None
        or settings.on_sites
        or settings.named.partition.values.get("pool")
    ):
        return
    counts = torch.bincount(owners, minlength=len(dataset.about.owners))
    for value in (counts == 0).nonzero().flatten().tolist()[:1]:
        raise ConfigError(
            f"stream.column = {column!r}: {dataset.about.owners[value]!r} has test examples and no "
            "training examples, "
            "so it can be no task; leave these rows out of the test split"
        )


def refuse_misfits(settings: Settings, world: RunWorld, sites: SiteViews) -> None:
    """Raises IncompatibleMethod, or ConfigError for a model that does not take the examples, with
    what would help.
    """
    method = settings.method
    name, kind = settings.named.method.label, settings.named.topology.label
    for spec in {world.server_model, *world.client_models}:
        refuse_huge(spec)
    schedule = [*settings.schedule(1, world), *settings.schedule(settings.rounds, world)]
    _check_stages(method, name, settings.named.topology, {s.name for s in schedule}, world.plans)
    _check_kept_epochs(method, schedule, world.plans)
    why = method.incompatibility(settings.schedule(1, world), world)
    if why:
        raise IncompatibleMethod(f"method {name} on topology {kind}: {why}")
    looks_at_features = any("features" in m.needs for m in measures(settings.measure).values())
    needs_of_measures = Need.FEATURES if looks_at_features else Need.NOTHING
    models = dict.fromkeys(
        world.model(c) for c in (SERVER, *range(min(world.clients, len(world.client_models) or 1)))
    )
    for spec in models:
        _check_runs(spec, sites, world, _asked_of_models(method) | needs_of_measures)
        missing = _asked_of_models(method) & OF_NETWORKS & ~contract.capabilities(spec)
        if missing:
            what, remedy = ASKED_OF_MODELS[min(missing, key=lambda need: str(need.name))]
            raise IncompatibleMethod(
                f"method {name} needs a model with {what}, and {spec.label} has none: {remedy}"
            )
    if Need.SAME_SHAPES in method.requires() and len(models) > 1:
        raise IncompatibleMethod(
            f"method {name} averages weights, so all models must be one: leave clients.models out, "
            "or choose a method whose clients exchange logits"
        )
    if Need.SAME_FEATURES in method.requires():
        _check_widths(name, models)
    _check_ridge(name, method, world, schedule)
    refuse_unraised(settings, world, sites, schedule)
    if Need.QUERIES in method.requires() and not world.queries and world.asking is None:
        raise IncompatibleMethod(
            f"method {name} needs queries: set query.draw = 'single', 'multi' or 'all', or write "
            "[query.classes]"
        )
    if Need.PUBLIC_DATA in method.requires() and sites.public is None:
        raise IncompatibleMethod(
            f"method {name} needs public data: set data.public to a number of examples"
        )
    tested, here = sites.common_test is not None, settings.engine != "flower"
    labelled = sites.public is not None and bool((sites.public.labels >= 0).all())
    setting = MeasuredRun(
        settings.schedule, name, schedule, world, not settings.on_sites, tested, here, labelled
    )
    check_fit(measures(settings.measure), setting)
    _check_public_labels(settings, sites, {s.name for s in schedule})
    _refuse_single_examples(settings, world, sites)


def _check_kept_epochs(
    method: Method, schedule: Sequence[Stage], plans: Mapping[str, Plan]
) -> None:
    """Raise ConfigError for a plan that keeps the best epoch of a work which scores on held-out
    data, without any.
    """
    # a chain has one of each client
    for stage in {stage.name: stage for stage in schedule}.values():
        plan = plans.get(stage.name)
        if (
            plan is None
            or plan.keep != "best"
            or plan.validation
            or not (plan.epochs or plan.steps)
        ):
            continue
        work = None
        with contextlib.suppress(Exception):  # the run says what it is, with its line
            work = method.work(stage)
        if (
            isinstance(work, ClientWork)
            and type(work).validation_score is ClientWork.validation_score
        ):
            raise ConfigError(
                f"plan.{stage.name}.keep = 'best' scores each epoch on held-out data, and there "
                "are none: "
                f"set plan.{stage.name}.validation, 0.1 say"
            )


def _refuse_single_examples(settings: Settings, world: RunWorld, sites: SiteViews) -> None:
    """Raise ConfigError where a client that is drawn has to train on one example, and its network
    needs two at once.

    Otherwise the run would stop in the round in which that client is drawn. Only what is certain
    is rejected: data that stay the same, clients that may not fail, and training on a client's own
    data alone.
    """
    is_certain = sites.split is not None and sites.arrival is None and sites.tasks is None
    if not is_certain or settings.of_clients.failures != "stop":
        return

    unable = {
        name: _unable_to_train(name, plan, world, sites) for name, plan in world.plans.items()
    }
    if not any(unable.values()):
        return
    for number in range(1, settings.rounds + 1):
        for stage in settings.schedule(number, world):
            drawn = unable.get(stage.name, frozenset()).intersection(stage.clients)
            if drawn and stage.view == "private" and _begins_on_own_data(settings.schedule, stage):
                raise ConfigError(_single_example(stage, min(drawn), world))


def _unable_to_train(stage: str, plan: Plan, world: RunWorld, sites: SiteViews) -> frozenset[int]:
    """The clients whose batches in a stage have one example, if their networks need two."""
    if not (plan.epochs or plan.steps):
        return frozenset()
    assert sites.split is not None  # otherwise nothing is certain
    if plan.validation == 0:
        sizes = sites.split.sizes
    else:
        numbers = range(len(sites.split))
        sizes = np.array([sites.trains_on(client, stage) for client in numbers], dtype=np.int64)
    single = sizes > 0 if plan.batch == 1 else sizes == 1
    clients = np.flatnonzero(single).tolist()
    return frozenset(
        client for client in clients if needs_two_examples(world.model(client), plan.norm)
    )


def _begins_on_own_data(schedule: Schedule, stage: Stage) -> bool:
    """Whether a client trains on its own data alone: a user's ``begin`` may give it further
    examples.
    """
    work = schedule.actor(stage).work(stage)
    author = next(kind for kind in type(work).__mro__ if "begin" in vars(kind))
    return author.__module__.partition(".")[0] == "fedstill"


def _single_example(stage: Stage, client: int, world: RunWorld) -> str:
    """What is wrong with a client's batches of one example, and what to do."""
    plan, spec = world.plans[stage.name], world.model(client)
    table = f"plan.{stage.name}" if len(world.plans) > 1 else "plan"
    remedies = ["choose another model"]
    if not needs_two_examples(spec, "frozen"):
        remedies.insert(0, f'set {table}.norm = "frozen"')
    if plan.batch == 1:
        reason = f"{table}.batch = 1"
        remedies.insert(0, f"set {table}.batch to 2 or more")
    else:
        reason = f"client {client} has one example to train on"
        remedies.insert(0, "choose a partition that gives it two")
    return (
        f"round {stage.round}, stage {stage.name!r}: {reason}, and model {spec.label} in training "
        "mode "
        f"cannot take a single one: {', or '.join(remedies)}"
    )


def _check_named_stages(
    method: Method, name: str, said: Mapping[str, Any], stages: set[str]
) -> None:
    """Raise UnknownName for a stage that a key of ``[topology]`` adds, and that this method does
    not have.
    """
    known = method.stages | SHARED_STAGES
    unknown = stages - known - set(method.schedule.values())
    for key, stage in said.items():
        if isinstance(stage, str) and stage in unknown:
            raise UnknownName("stage", stage, known, where=f"topology.{key}, with method {name}")


def _check_stages(
    method: Method, name: str, topology: Named, stages: set[str], plans: Collection[str]
) -> None:
    """Raise for a stage that a method does not know or that would train nothing, and for a task's
    end that it lacks.
    """
    kind = topology.label
    _check_named_stages(method, name, topology.values, stages)
    if unknown := sorted(stages - method.stages - SHARED_STAGES):
        if unknown[0] in method.schedule.values():
            todo = "write it into stages, and into plans"
            raise IncompatibleMethod(
                f"method {name} does not know stage {unknown[0]!r} of its own schedule; {todo}"
            )
        raise IncompatibleMethod(
            f"method {name} does not know stage {unknown[0]!r} of topology {kind}; "
            f"leave topology.kind out to get its own, {method.topology}"
        )
    if FIT in stages - method.stages and FIT not in plans:
        raise IncompatibleMethod(
            f"method {name} would train nothing in stage {FIT!r} of topology {kind}: models are "
            "trained alone only "
            f"before round 1; set topology.first = {FIT!r}"
        )
    ending = method.schedule.get("task_end")
    if ending and ending not in stages:
        raise IncompatibleMethod(
            f"method {name} needs the stage {ending!r} at each task's end, and topology {kind} has "
            "none: "
            f"set topology.task_end = {ending!r}, or leave topology.kind out to get its own, "
            f"{method.topology}"
        )


def _asked_of_models(method: Method) -> Need:
    needs = method.requires()
    if Need.SAME_FEATURES in needs:
        return needs | Need.FEATURES
    return needs


def _check_widths(name: str, models: Collection[ModelSpec]) -> None:
    widths = {contract.width(spec): str(spec) for spec in sorted(models, key=str)}
    if len(widths) > 1:
        each = ", ".join(f"{spec} {width}" for width, spec in sorted(widths.items()))
        raise IncompatibleMethod(
            f"method {name} needs models with the same number of features, and they have: {each}"
        )


def _check_ridge(name: str, method: Method, world: RunWorld, schedule: Sequence[Stage]) -> None:
    """Where the stage ``ridge`` follows a method: whether its global model can get a last layer
    so.
    """
    if RIDGE not in {s.name for s in schedule} - method.stages:
        return
    if Need.SAME_SHAPES not in method.requires() or method.personal:
        why = (
            "its clients have models of their own; leave it out, or choose a method with a global "
            "model"
        )
    elif Need.HEAD not in contract.capabilities(world.model(SERVER)):
        why = (
            f"it needs a model with a head, and {world.model(SERVER).label} has none: give it body "
            "and head"
        )
    else:
        why = no_linear_head(world)
    if why:
        raise IncompatibleMethod(f"topology.last = {RIDGE!r} with method {name}: {why}")


def _check_public_labels(settings: Settings, sites: SiteViews, stages: set[str]) -> None:
    public, reading = sites.public, sorted(stages & settings.method.labelled)
    if public is not None and reading and bool((public.labels < 0).any()):
        optional = reading[0] == settings.named.topology.values.get("first", "")
        todo = (
            'leave it out with topology.first = ""'
            if optional
            else "set [data] public to examples with labels"
        )
        raise IncompatibleMethod(
            f"stage {reading[0]!r} of method {settings.named.method.label} reads the labels of "
            "public examples, "
            f"and these have none; {todo}"
        )


def _refuse_shared(spec: ModelSpec) -> None:
    """Entries that move are run from outside, each by its one name: two places of a network cannot
    share one.
    """
    m, first = contract.module(spec), dict[int, str]()
    every = dict(
        (*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False))
    )
    for entry in moving(spec, every):
        if (other := first.setdefault(id(every[entry]), entry)) != entry:
            raise ConfigError(
                f"model {spec.label}: {other} and {entry} are one tensor; give it one name, and "
                "use it twice in "
                "forward()"
            )


def _check_runs(spec: ModelSpec, sites: SiteViews, world: RunWorld, needs: Need) -> None:
    """Build a model and give it two examples, so that an error is one clear line now and not a
    failed client later.
    """
    _refuse_shared(spec)
    if not (initial := contract.initial(spec, 0)):
        todo = "a tensor of yours that is to be trained must be an nn.Parameter"
        raise ConfigError(
            f"model {spec.label} has no parameters, so there is nothing to train: {todo}"
        )
    x = two_examples(sites)
    try:
        out = contract.predictor(spec, initial)(x)
    except FedstillError:
        raise
    except Exception as error:
        what = f"{MANY[sites.inputs.about.kind]} of shape {tuple(x.shape[1:])}"
        raise ConfigError(f"model {spec.label} cannot take {what}: {on_one_line(error)}") from error
    if not isinstance(out, torch.Tensor):
        raise ConfigError(f"model {spec.label} gives a {type(out).__name__}, not logits")
    if out.shape != (len(x), spec.classes):
        raise ConfigError(
            f"model {spec.label} gives shape {tuple(out.shape)}, not {(len(x), spec.classes)}"
        )
    refuse_odd(spec, x.cpu(), world, needs)
