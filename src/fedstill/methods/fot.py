"""FOT: the server projects each update so that layers' outputs for inputs of earlier tasks do not
change.

Source: Bakman et al., "Federated Orthogonal Training: Mitigating Global Catastrophic Forgetting in
Continual Federated Learning" (2024), and its code.
Symbols: eps = ``keeps``; U = basis, of each layer the orthonormal directions (d, r) of earlier
tasks' inputs.
Stages: ``train``; after each task except the last one ``inputs``, of all available clients, without
training.
State: the global parameters; basis = U of each protected layer of the body, in float64, from the
second task on.
Memory: nothing.
Reading: the code's clients send the part of their inputs A outside of U, times random numbers, and
its size; the server adds these up. Here they send the sum of A A^T, (d, d) for each layer, which is
exact, additive over clients, and independent of U. For layers with many inputs it is larger than
the code's message; such networks are refused.
Reading: the share of A outside of U is computed on the inputs of all clients together. The code
takes the mean of their shares.
Reading: the code has a head for each task, and uses the task of a test example. Here there is a
single head, which is not protected; biases and normalisation layers are not protected either. Set
``stream.head`` to "task", so that a task only trains its own columns of the head.
Reading: embeddings, grouped convolutions and all other layers of the body that are neither linear
layers nor convolutions are not protected. The run warns about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import NonNegative, Share
from fedstill.core.label_counts import Received, StatisticsWork
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NO_TRAINING,
    SERVER,
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Tensors,
    View,
    World,
)
from fedstill.core.registry import method
from fedstill.core.trees import add
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.models.contract import module, trainable_names
from fedstill.models.functional import features

INPUTS = "inputs"
"""The stage after a task, in which clients send the products of their layers' inputs."""

MOST_INPUTS = 5000
"""The largest number of inputs of a layer; with more inputs, a client would send over 200 MB for
the layer.
"""


ROUNDING = 1e-12
"""Shares of the energy of a layer's inputs below this value are due to rounding."""


@method("fot")
@dataclass(frozen=True)
class FOT(FedAvg):
    """FedAvg whose changes are orthogonal to the inputs of each layer in earlier tasks; needs
    [stream].
    """

    schedule: ClassVar[Mapping[str, Any]] = {"task_end": INPUTS}
    stages: ClassVar[frozenset[str]] = frozenset({"train", INPUTS})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    permits: ClassVar[Permit] = Permit.NOTHING  # products of inputs are sent, too
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN, INPUTS: NO_TRAINING}

    keeps: Share = 0.98
    """Share of the norm of a layer's inputs that the stored directions explain (eps)."""
    grows: NonNegative = 0.0
    """Increase of this share with each task (the code's eps_inc)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        layers = body_layers(module(world.model(SERVER), "frozen"))
        wide = [name for name, d in layers.items() if d > MOST_INPUTS]
        if wide:
            layer = wide[0].removesuffix(".weight")
            return (
                f"layer {layer} has {layers[wide[0]]} inputs, and clients can send the products of "
                f"at most {MOST_INPUTS}; choose a smaller model"
            )
        if not layers:
            return (
                "the body of its model has no trained layer to protect; choose another model, mlp "
                "or cnn, or train layers of the body, too (train_only)"
            )
        return ""

    def setting_warnings(self, world: World) -> str:
        spec = world.model(SERVER)
        trained = trainable_names(spec)
        unprotected = [name for name in beside_layers(module(spec, "frozen")) if name in trained]
        if world.stream.nothing_before or not unprotected:
            return world.stream.nothing_before
        names = ", ".join(unprotected[:3])
        if len(unprotected) > 3:
            names += ", …"
        return (
            f"only linear layers and convolutions are protected, and {names} of model {spec.label} "
            "trains as with fedavg; choose a model without it, or another method"
        )

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        in_last_task = world.stream.task(stage.round) == world.stream.tasks - 1
        if stage.name == INPUTS and in_last_task:
            return None  # no later task needs the directions
        return Payload(params=state.params)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == INPUTS:
            return SendInputs()
        return super().work(stage)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != INPUTS:
            return super().expected_reply(client, stage, world)
        return Payload(products=no_products(world.model(client)))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        basis: Tensors = {}
        if "basis" in state.extra:
            basis = state.extra.tensors("basis")
        if stage.name != INPUTS:
            averaged = super().aggregate(state, replies, stage, world)
            params = dict(averaged.params)
            for name, directions in basis.items():
                params[name] = orthogonal(params[name], state.params[name], directions)
            return averaged.next(params=params)

        share = min(1.0, self.keeps + self.grows * world.stream.task(stage.round))
        products = [reply.content.tensors("products") for reply in replies]
        grown = {}
        for name in products[0]:
            total = torch.stack([p[name] for p in products]).sum(0)  # (d, d)
            no_directions = total[:, :0]
            directions = with_directions(basis.get(name, no_directions), total, share)
            if directions.shape[1]:
                grown[name] = directions
        return state.next(basis=grown)


class SendInputs(StatisticsWork):
    """The client sends the sums of the products of each layer's inputs."""

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        return Payload(products=summed_products(view, received["params"]))


def no_products(model: ModelSpec) -> dict[str, Tensor]:
    """The sums over no inputs: zeros (d, d), float64, by the weights of each layer of the body."""
    layers = body_layers(module(model, "frozen"))
    return {name: torch.zeros(d, d, dtype=torch.float64) for name, d in layers.items()}


def summed_products(view: View, params: Tensors) -> dict[str, Tensor]:
    """The sums of a a^T (d, d) over the inputs a of each layer on the client's data, float64."""
    sums = no_products(view.model)
    for products in view.passes.run(input_products, params, view.data):
        sums = add(sums, products)
    return sums


def orthogonal(new: Tensor, old: Tensor, basis: Tensor) -> Tensor:
    """Weights moved from ``old`` by the part of the change to ``new`` that is orthogonal to U.

    new, old: (out, ...) with d numbers for each output; basis: U (d, r), orthonormal. Returns
    weights of the same shape, whose change D satisfies D U = 0.
    """
    change = (new.double() - old.double()).flatten(1)
    orthogonal_change = change - (change @ basis) @ basis.T
    return (old.double() + orthogonal_change.view_as(old)).to(old.dtype)


def with_directions(basis: Tensor, products: Tensor, share: float) -> Tensor:
    """The directions U (d, r), extended by as few directions as possible so that at least a share
    of a layer's inputs lies in their span.

    basis: U so far, orthonormal; products: the sum of a a^T over inputs a, (d, d) float64; share:
    eps in [0, 1]. Let q be the norm of the inputs' component orthogonal to U, divided by the norm
    of the inputs. The strongest directions of this component are added until they contain a share
    (q - (1 - eps)) / q of its energy; none if q <= 1 - eps. Returns U with orthonormal columns.

    Source: FOT's FedAVGAggregator.py.
    """
    total_energy = products.diagonal().sum()
    if not total_energy > 0:
        return basis
    projection = torch.eye(len(products), dtype=products.dtype) - basis @ basis.T
    outside = projection @ products @ projection
    eigenvalues, eigenvectors = torch.linalg.eigh((outside + outside.T) / 2)
    energy = eigenvalues.flip(0).clamp(min=0)
    directions = eigenvectors.flip(1)

    q = min(1.0, float((energy.sum() / total_energy).sqrt()))  # above 1 only by rounding
    if q <= max(1 - share, ROUNDING**0.5):
        return basis
    needed_share = (q - (1 - share)) / q
    shares = energy.cumsum(0) / energy.sum()
    count = min(1 + int((shares < needed_share - ROUNDING).sum()), len(products) - basis.shape[1])
    extended, _ = torch.linalg.qr(torch.cat([basis, directions[:, :count]], dim=1))
    # Contiguous, as it is read back from a checkpoint: products of it then have the same bits.
    grown: Tensor = extended.contiguous()
    return grown


# What enters the layers of a network's body: for each linear layer and convolution the sum of its
# inputs' products.
#
# A convolution is taken as a linear layer on patches: its weights (out, channels, k, k) as (out,
# channels k²), its inputs one patch for each place of its output.


def body_layers(m: nn.Module) -> dict[str, int]:
    """The trained weights of a body's linear layers and convolutions by name, with their numbers of
    inputs d.

    Grouped convolutions, and convolutions without zero padding, are left out.
    """
    return {f"{name}.weight": _inputs_of(part) for name, part in _layers(m).items()}


def beside_layers(m: nn.Module) -> list[str]:
    """The names of a body's other parameters with two or more dimensions, for example of
    embeddings.
    """
    layers = body_layers(m)
    named = ((name, value) for name, value in m.named_parameters() if name.startswith("body"))
    return [name for name, value in named if value.dim() > 1 and name not in layers]


def input_products(m: nn.Module, params: Tensors, x: Tensor) -> dict[str, Tensor]:
    """The sum of a a^T (d, d), float64 on the CPU, over all inputs a of each layer, in one pass of
    x (B, ...).
    """
    sums: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            a = _columns(layer, given[0].detach()).double()
            sums[name] = sums.get(name, 0.0) + (a.T @ a).cpu()

        return note

    handles = [
        part.register_forward_pre_hook(noting(f"{name}.weight"))
        for name, part in _layers(m).items()
    ]
    try:
        with torch.no_grad():
            features(m, params, x)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _layers(m: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in m.named_modules()
        if name.startswith("body") and _is_protected(part)
    }


def _is_protected(part: nn.Module) -> bool:
    """Whether a layer is of a protected kind, and its weights are trained."""
    if not isinstance(part, nn.Conv2d | nn.Linear) or not part.weight.requires_grad:
        return False
    if isinstance(part, nn.Conv2d):
        return (
            part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
        )
    return True


def _inputs_of(part: nn.Module) -> int:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel()


def _columns(layer: nn.Module, x: Tensor) -> Tensor:
    """The inputs (n, d) of a layer, with a row for each position of its outputs."""
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    assert not isinstance(layer.padding, str)
    # (B, d, places)
    patches = unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])
