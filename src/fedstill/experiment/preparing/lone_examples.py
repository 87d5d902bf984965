"""Batches of one example, which networks that normalise by the batch's statistics cannot be trained on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.anywhere import acting
from fedstill.data.partition.flat import FlatParts
from fedstill.data.views import SiteViews
from fedstill.errors import ConfigError
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.run_world import RunWorld
from fedstill.experiment.preparing.trial_pass import two_examples
from fedstill.hooks import names_in
from fedstill.keys import put_aside
from fedstill.models import contract
from fedstill.records import SERVER, ModelSpec, Plan, Stage

OTHER_DATA = frozenset({"only", "more", "examples", "model"})
"""What ``begin`` may say in a carry, so that it is not the site's network that trains, or not on all its data alone."""


def refuse_lone_examples(settings: Settings, world: RunWorld, sites: SiteViews) -> None:
    """Raise ConfigError where a client that is drawn ends an epoch with one example, which its network cannot take.

    Only where that is sure: in one task, in a simulation that stops where a client fails, on the clients' own data.
    """
    plans = {name: plan for name, plan in world.plans.items() if plan.norm == "batch" and (plan.epochs or plan.steps)}
    known = isinstance(sites.parts, FlatParts) and sites.arrival is None and sites.tasks is None
    if not known or settings.of_clients.failures != "stop" or "same_shapes" not in settings.method.requires():
        return
    sizes = {name: _sizes(sites, name, plan) for name, plan in plans.items()}
    alone = {name: frozenset(np.flatnonzero(_ends_alone(sizes[name], plan)).tolist()) for name, plan in plans.items()}
    if not any(alone.values()) or not _takes_two_only(world.model(SERVER), sites):
        return
    for number in range(1, settings.rounds + 1):
        for stage in settings.topology(number, world):
            hit = alone.get(stage.name, frozenset()).intersection(stage.clients)
            if hit and stage.view == "private" and _on_own_data(settings, stage):
                raise ConfigError(_said(world, stage, min(hit), sizes[stage.name]))


def _sizes(sites: SiteViews, stage: str, plan: Plan) -> NDArray[np.int64]:
    """How many examples each client trains on in a stage (clients,)."""
    if plan.validation == 0 and isinstance(sites.parts, FlatParts):
        return sites.parts.sizes
    return np.array([sites.trains_on(client, stage) for client in range(len(sites.parts))])


def _ends_alone(sizes: NDArray[np.int64], plan: Plan, batch: int = 0) -> NDArray[np.bool_]:
    """Whether the last batch of an epoch has one example, and the plan's steps come to it (clients,)."""
    batch = batch or plan.batch
    reached = plan.steps == 0 or plan.steps >= -(-sizes // batch)
    ends: NDArray[np.bool_] = ((sizes % batch == 1) | (batch == 1)) & (sizes > 0) & reached
    return ends


def _takes_two_only(spec: ModelSpec, sites: SiteViews) -> bool:
    """Whether a network in training mode takes two examples, and not the first of them alone."""
    if not any(isinstance(layer, contract.NORMS) for layer in contract.module(spec, "frozen").modules()):
        return False
    two = two_examples(sites).cpu()
    return _runs(spec, two) and not _runs(spec, two[:1])


def _runs(spec: ModelSpec, x: torch.Tensor) -> bool:
    m = contract.module(spec, "frozen")
    own = {name: value.detach().clone() for name, value in (*m.named_parameters(), *m.named_buffers())}
    try:
        with put_aside(card=True), torch.no_grad():
            contract.forward(m.train(), own, x)
    except ValueError:  # torch's: expected more than 1 value per channel
        return False
    finally:
        m.eval()
    return True


def _on_own_data(settings: Settings, stage: Stage) -> bool:
    work = acting(settings.method, stage).work(stage)
    begins = [vars(kind)["begin"] for kind in type(work).__mro__ if "begin" in vars(kind)]
    return not names_in(*begins) & OTHER_DATA


def _said(world: RunWorld, stage: Stage, client: int, sizes: NDArray[np.int64]) -> str:
    plan, spec = world.plans[stage.name], world.model(client)
    why = f"client {client} has {sizes[client]} examples, and batches of {plan.batch} leave one of them alone"
    key = f"plan.{stage.name}.batch" if len(world.plans) > 1 else "plan.batch"
    others = (plan.batch + way * step for step in range(1, int(sizes.max()) + 1) for way in (1, -1))
    fits = next((batch for batch in others if batch > 1 and not _ends_alone(sizes, plan, batch).any()), None)
    todo = f"set {key} = {fits}" if fits else 'set plan.norm = "frozen", or choose a model with another normalisation'
    return (
        f"round {stage.round}, stage {stage.name!r}: {why}; model {spec.label} normalises by the batch and cannot be "
        f"trained on one: {todo}"
    )
