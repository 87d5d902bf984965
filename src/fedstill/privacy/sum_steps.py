"""The messages of a secure sum whose clients are elsewhere: four steps in a stage.

The server asks for each step with ``question``, beside what the stage itself sends. A client's
answer to step ``keys`` is the group ``sum.keys``, and so on. Neither side trusts what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import BadPayload
from fedstill.core.records import Payload, Tensors
from fedstill.privacy.primitives import Masks

PREFIX = "sum."
"""The names of the protocol's groups begin with it; the other groups are the stage's."""

STEPS = ("keys", "shares", "vector", "revealed")
"""The four steps, by what a client answers."""

UNREAD = f"{PREFIX}unread"
"""A client's answer instead of its vector if it cannot read some shares: who sent these."""

MOST_DIGITS = 9
"""The most digits of a client's id in a message."""


def question(step: str, word: str, **groups: Any) -> Payload:
    """What a client is asked in a step of the sum with this word, beside the stage's payload."""
    prefixed = {PREFIX + name: group for name, group in groups.items()}
    return Payload({f"{PREFIX}step": step, f"{PREFIX}word": word, **prefixed})


def asked_step(payload: Payload) -> tuple[str, str]:
    """The step and the word of a question; empty strings for what is missing."""
    return str(payload.get(f"{PREFIX}step", "")), str(payload.get(f"{PREFIX}word", ""))


def plain_payload(payload: Payload) -> Payload:
    """The stage's payload in a question."""
    return Payload({name: group for name, group in payload.items() if not name.startswith(PREFIX)})


def byte_tensors(data: Mapping[int, bytes]) -> dict[str, Tensor]:
    """Bytes by client, for a message."""
    return {str(client): byte_tensor(data[client]) for client in sorted(data)}


def byte_tensor(data: bytes) -> Tensor:
    """Bytes, for a message."""
    return torch.tensor(list(data), dtype=torch.uint8)


def as_bytes(tensors: Tensors, most: int) -> dict[int, bytes]:
    """Bytes by client out of a message, at most ``most`` of each.

    Raises BadPayload for anything else.
    """
    for name, tensor in tensors.items():
        is_client = name.isdecimal() and len(name) <= MOST_DIGITS
        if not is_client or tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise BadPayload("a step of a secure sum brings bytes by client, and nothing else")
    if any(len(tensor) > most for tensor in tensors.values()):
        raise BadPayload(f"a step of a secure sum brings more than {most} bytes for a client")
    return {int(name): tensor.numpy().tobytes() for name, tensor in tensors.items()}


def as_tensor(vector: Masks) -> Tensor:
    """A masked vector for a message, (n,) int64."""
    return torch.from_numpy(vector.view(np.int64))
