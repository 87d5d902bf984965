"""Checks of networks on two examples, before training.

Each check returns one sentence that says what is wrong and what to do, or an empty string. The
table in ``running/compatibility.py`` says which error that is. A mistake in a network is thus one
clear line now, and not a failed client later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError, FedstillError, on_one_line
from fedstill.core.fields import kind_text
from fedstill.core.records import ModelSpec, Plan, Stage
from fedstill.core.rounds import Schedule
from fedstill.core.user_modules import is_library_module
from fedstill.data.dataset import PLURALS
from fedstill.data.views import SiteViews
from fedstill.models import building, contract
from fedstill.models.predictors import predictor
from fedstill.running.world import RunWorld

HUGE = 100_000_000
"""Parameters of a network for images. A network of the library that has more was not meant for
images of that size.
"""


@dataclass(frozen=True)
class Structure:
    """A structure of a network that a method needs, in words, and how to provide it."""

    description: str
    remedy: str


STRUCTURES: Mapping[Need, Structure] = {
    Need.FEATURES: Structure("features", "give it submodules body and head"),
    Need.HEAD: Structure("head", "give it submodules body and head"),
    Need.ETF: Structure(
        "a fixed simplex as its head", "set model.name = 'etf', and model.of to the network's name"
    ),
    Need.LEVELS: Structure("a body that is a chain of layers", "choose mlp, cnn or a ResNet"),
    Need.PAIR: Structure(
        "a personal network at each client",
        "set model.name = 'pair', and model.own and model.shared",
    ),
    Need.SLIM: Structure("a slimmable block", "set model.name = 'resnet56'"),
}
"""The needs that a network meets by its structure."""


def two_examples(sites: SiteViews) -> Tensor:
    """The first two examples as inputs; zeros where this side has no examples."""
    values = sites.train.values[:2]
    if not len(values):
        values = values.new_zeros(2, *values.shape[1:])
    return sites.inputs.plain(values)


def huge_network(networks: Iterable[ModelSpec]) -> str:
    """Finds a network of the library that grows with its images, on large ones. It is not built."""
    for spec in networks:
        is_made_of_others = bool({"of", "own"} & dict(spec.fields).keys())
        is_for_images = len(spec.input_shape) == 3
        if not is_for_images or is_made_of_others or not building.is_of_library(spec):
            continue
        size = building.built_size(spec)
        if size > HUGE:
            height, width = spec.input_shape[1:]
            return (
                f"model {spec.label} has {size:,} parameters on images of {height} x {width}: "
                "set data.size = 64, or another size, or choose a smaller model, such as "
                "resnet10"
            )
    return ""


def useless_network(networks: Iterable[ModelSpec], sites: SiteViews, trains: bool) -> str:
    """Finds a network that cannot be run on the run's examples, or cannot be trained.

    trains: whether the run trains anything.
    """
    for spec in networks:
        problem = _shared_tensors(spec) or _extra_state(spec) or _wrong_output(spec, sites)
        if not problem and trains:
            problem = _nothing_to_train(spec)
        problem = problem or _random_evaluation(spec)
        if problem:
            return problem
    return ""


def _shared_tensors(spec: ModelSpec) -> str:
    """Two names of one tensor; entries are replaced by name, so each needs a tensor of its own."""
    module = contract.module(spec)
    entries: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    entries.update(module.named_buffers(remove_duplicate=False))
    first_names: dict[int, str] = {}
    for name in filter(spec.sends, entries):
        first_name = first_names.setdefault(id(entries[name]), name)
        if first_name != name:
            return (
                f"model {spec.label}: {first_name} and {name} are one tensor; give it one name, "
                "and use it twice in forward()"
            )
    return ""


def _extra_state(spec: ModelSpec) -> str:
    """An entry of a network's state that is no tensor, and so cannot be averaged or sent."""
    for name, entry in contract.module(spec).state_dict().items():
        if not isinstance(entry, Tensor):
            return (
                f"model {spec.label}: {name} in its state_dict() is {kind_text(entry)}, not a "
                "tensor; remove get_extra_state()"
            )
    return ""


def _wrong_output(spec: ModelSpec, sites: SiteViews) -> str:
    """The problem of a network without parameters, or without logits for each example."""
    initial = contract.initial(spec, 0)
    if not initial:
        return (
            f"model {spec.label} has no parameters, so there is nothing to train: a tensor of "
            "yours that is to be trained must be an nn.Parameter"
        )

    x = two_examples(sites)
    logits: object
    try:
        logits = predictor(spec, initial)(x)
    except FedstillError:
        raise
    except Exception as error:
        inputs = f"{PLURALS[sites.inputs.about.kind]} of shape {tuple(x.shape[1:])}"
        raise ConfigError(
            f"model {spec.label} cannot take {inputs}: {on_one_line(error)}"
        ) from error

    if not isinstance(logits, Tensor):
        return f"model {spec.label} returns a {type(logits).__name__}, not logits"
    shape = (len(x), spec.classes)
    if logits.shape != shape:
        return f"model {spec.label} returns shape {tuple(logits.shape)}, not {shape}"
    return ""


def _nothing_to_train(spec: ModelSpec) -> str:
    """The problem of a network whose parameters are all frozen."""
    if contract.trainable_names(spec):
        return ""
    return (
        f"no parameter of model {spec.label} is to be trained: all have requires_grad = False; "
        "set it to True for at least one"
    )


def _random_evaluation(spec: ModelSpec) -> str:
    """The problem of a network in evaluation mode whose outputs differ from pass to pass."""
    if not contract.draws_random_numbers(spec, training=False):
        return ""
    return (
        f"model {spec.label} draws random numbers in evaluation mode, so its outputs differ "
        "between passes; draw only if self.training is true"
    )


def different_forward(networks: Iterable[ModelSpec], sites: SiteViews) -> str:
    """Finds a network that is not its head on its body, though it has both."""
    x = two_examples(sites).cpu()
    for spec in networks:
        if Need.FEATURES in contract.capabilities(spec) and not _is_head_on_body(spec, x):
            return (
                f"model {spec.label}: forward(x) is not head(body(x)), which runs in its place "
                "where features are needed; put into body all that comes before head, or give the "
                "two other names"
            )
    return ""


def _is_head_on_body(spec: ModelSpec, x: Tensor) -> bool:
    """Whether body and head of a network give the logits of its forward pass."""
    module = contract.module(spec, "frozen").eval()
    params = contract.entries(spec, module)
    with torch.no_grad():
        logits = contract.forward(module, params, x)
        features = contract.features(module, params, x)
        by_parts = contract.head(module, params, features)
    if by_parts.shape != logits.shape:
        return False
    return torch.allclose(by_parts, logits, rtol=1e-3, atol=1e-5)


def missing_structure(networks: Iterable[ModelSpec], needs: Need, method_name: str) -> str:
    """Finds a network without a structure that the method needs."""
    for spec in networks:
        missing = needs & ~contract.capabilities(spec)
        if missing:
            need = min(missing, key=lambda flag: str(flag.name))
            structure = STRUCTURES[need]
            return (
                f"method {method_name} needs a model with {structure.description}, and "
                f"{spec.label} has none: {structure.remedy}"
            )
    return ""


def network_warnings(spec: ModelSpec, sites: SiteViews) -> Iterator[str]:
    """Warnings about a network that is unusual but may be intended, one sentence each."""
    module = contract.module(spec, "frozen")
    entries = contract.entries(spec, module)
    trained = contract.trainable_names(spec)
    names = [name for name, _ in module.named_parameters()]
    frozen = [name for name in names if name in entries and name not in trained]
    if frozen:
        yield (
            f"model {spec.label}: {len(frozen)} of {len(names)} parameters have requires_grad = "
            f"False ({frozen[0]}, …), "
            "and are not trained; they are sent, and change by the rounding of means; with "
            "train_only they are neither"
        )
    logits = predictor(spec, entries)(two_examples(sites).cpu())
    if spec.classes > 1 and _are_probabilities(logits):
        yield (
            f"model {spec.label} seems to return probabilities (each row is positive and sums to "
            "1), but losses take logits; remove softmax from its forward()"
        )


def _are_probabilities(logits: Tensor) -> bool:
    """Whether each row is a distribution, as after a softmax."""
    sums = logits.float().sum(1)
    return bool((logits >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


# ---- batches of one example ---------------------------------------------------------------------


def trains(plan: Plan) -> bool:
    """Whether a plan trains anything."""
    return bool(plan.epochs or plan.steps)


def batch_of_one(settings: Settings, world: RunWorld, sites: SiteViews) -> str:
    """Finds a sampled client that trains on one example, with a network that needs two at once.

    Otherwise the run would stop in the round in which that client is sampled. Only what is certain
    is rejected: data that stay the same, and training on a client's own data alone.
    """
    split = sites.split
    if split is None or sites.arrival is not None or sites.tasks is not None:
        return ""

    unable = {}
    for name, plan in world.plans.items():
        if not trains(plan):
            continue
        sizes = split.sizes
        if plan.validation:
            clients = range(len(split))
            sizes = np.array([sites.training_size(c, name) for c in clients], dtype=np.int64)
        unable[name] = _unable_to_train(plan, world, sizes)
    if not any(unable.values()):
        return ""

    for number in range(1, settings.rounds + 1):
        for stage in settings.schedule(number, world):
            sampled = unable.get(stage.name, frozenset()).intersection(stage.clients)
            if (
                sampled
                and stage.view == "private"
                and _begins_on_own_data(settings.schedule, stage)
            ):
                return _single_example(stage, min(sampled), world)
    return ""


def _unable_to_train(plan: Plan, world: RunWorld, sizes: NDArray[np.int64]) -> frozenset[int]:
    """The clients whose batches have one example, if their networks need two.

    sizes: (clients,) the number of examples that each trains on.
    """
    single = sizes == 1
    if plan.batch == 1:
        single = sizes > 0
    clients = np.flatnonzero(single).tolist()
    return frozenset(
        client for client in clients if contract.needs_two_examples(world.model(client), plan.norm)
    )


def _begins_on_own_data(schedule: Schedule, stage: Stage) -> bool:
    """Whether a client trains on its own data alone: a user's ``begin`` may give it further
    examples.
    """
    work = schedule.actor(stage).work(stage)
    author = next(kind for kind in type(work).__mro__ if "begin" in vars(kind))
    return is_library_module(author.__module__)


def _single_example(stage: Stage, client: int, world: RunWorld) -> str:
    """The error message for a client whose batches have one example."""
    plan = world.plans[stage.name]
    spec = world.model(client)
    table = "plan"
    if len(world.plans) > 1:
        table = f"plan.{stage.name}"
    remedies = ["choose another model"]
    if not contract.needs_two_examples(spec, "frozen"):
        remedies.insert(0, f'set {table}.norm = "frozen"')
    if plan.batch == 1:
        reason = f"{table}.batch = 1"
        remedies.insert(0, f"set {table}.batch to 2 or more")
    else:
        reason = f"client {client} has one example to train on"
        remedies.insert(0, "choose a partition that gives it two")
    return (
        f"round {stage.round}, stage {stage.name!r}: {reason}, and model {spec.label} in training "
        f"mode cannot take a single one: {', or '.join(remedies)}"
    )
