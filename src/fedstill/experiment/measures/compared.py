"""Local models beside the global one that clients received, and the one that was made of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedstill.experiment.measures.base import Happened, Room
from fedstill.experiment.measures.whole_models import whole
from fedstill.models import contract
from fedstill.records import Examples, State, Tensors


def comparable(seen: Happened, room: Room) -> dict[int, Tensors]:
    """What each client's training ended with, where a global model of the same network was there
    before it; else none.

    Where the server has none, or a fold has made another network of it, there is nothing to compare
    local models with.
    """
    return seen.local_models if is_global(seen.before, room) else {}


def is_global(state: State, room: Room) -> bool:
    """Whether a state holds a global model of the network that a run began with."""
    return bool(state.params) and state.model in (None, room.spec)


def named_models(seen: Happened, room: Room, most: int) -> Iterator[tuple[str, Tensors]]:
    """The model that was received, at most ``most`` local ones (lowest ids first), and the new
    global one.

    The new one only where it is of the same network.
    """
    yield "received", seen.before.params
    for client, params in sorted(comparable(seen, room).items())[:most]:
        yield f"client {client}", params
    if is_global(seen.after, room):
        yield "aggregated", seen.after.params


def layers(room: Room, params: Tensors, images: Examples) -> dict[str, Tensor]:
    """Outputs of the last hidden layer, "features" (n, D), and of the classifier, "classifier" (n,
    C).
    """
    passes = room.passes()
    features = passes.features(whole(room.spec, params), images)
    network = contract.module(room.spec, "frozen").eval()
    with torch.no_grad():
        logits = contract.head(
            network, {k: v.to(features.device) for k, v in params.items()}, features
        )
    return {"features": features, "classifier": logits}
