"""Entries of a network that stay as a file has them: they are in its module, are not trained, and
are never sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fedstill.errors import ConfigError
from fedstill.model_spec import ModelSpec
from fedstill.payload import Tensors

_held: dict[str, Tensors] = {}
"""Held entries by their SHA-256: all modules of this process share them."""


def hold(entries: Tensors) -> str:
    """Keep entries for the modules of this process; the SHA-256 by which a ``ModelSpec`` names
    them.
    """
    sum_ = hashlib.sha256()
    for name, value in sorted(entries.items()):
        sum_.update(f"{name} {tuple(value.shape)} {value.dtype}\0".encode())
        sum_.update(value.detach().cpu().contiguous().numpy().tobytes())
    _held[sum_.hexdigest()] = {name: value.detach() for name, value in entries.items()}
    return sum_.hexdigest()


def moving(spec: ModelSpec, names: Iterable[str]) -> list[str]:
    """Those entries of a network that are trained and sent: all, or those that ``spec.trains``
    names.
    """
    return [name for name in names if not spec.held or matches(name, spec.trains)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether an entry is named: by its whole name, by a beginning with a point, or with * and ?.

    >>> (
    ...     matches("head.weight", ["head."]),
    ...     matches("body.1.lora_a", ["*.lora_?"]),
    ...     matches("body.1.bias", ["head."]),
    ... )
    (True, True, False)
    """
    return any(name.startswith(p) if p.endswith(".") else fnmatchcase(name, p) for p in patterns)


def put_in(made: nn.Module, spec: ModelSpec) -> nn.Module:
    """The module with its held entries, which need no gradient; raises ConfigError where this
    process lacks them.
    """
    if not spec.held:
        return made
    if spec.held not in _held:
        raise ConfigError(
            f"the entries that {spec.label} holds are not here; name their file in start_from"
        )
    own = {
        name: value for name, value in _held[spec.held].items() if not matches(name, spec.trains)
    }
    made.load_state_dict(own, strict=False, assign=True)
    for name, value in made.named_parameters():
        value.requires_grad_(name not in own)
    return made
