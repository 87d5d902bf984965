"""Models in files: the final model of a run, and a model with its network in the header."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest, read_file, write_whole
from fedstill.core.records import ModelSpec, Tensors, matches
from fedstill.core.user_modules import code_named_by, trust_content
from fedstill.models import contract
from fedstill.models.building import held_entries, hold, sha256_of

# The final model in a run's directory, and the SHA-256 that ``summary.json`` has of it.


FINAL = "model.safetensors"
"""The file's name."""

MODEL_SEAL = "model_sha256"
"""What ``summary.json`` calls the file's SHA-256."""


def read_final(path: Path) -> bytes:
    """The bytes of a model file; raises ValueError for a final model that is not the one that its
    run wrote.

    Raises OSError for a file that cannot be read. A model without a summary beside it is taken as
    it is.
    """
    data = read_file(path)
    try:
        noted = json.loads(read_file(path.parent / "summary.json")).get(MODEL_SEAL)
    except (OSError, ValueError, AttributeError, RecursionError):
        return data
    if path.name == FINAL and noted not in (None, digest(data)):
        raise ValueError("its SHA-256 is not the one in summary.json")
    return data


# A model in a file: its parameters as safetensors, and in the header the network they are of.


_KEY = "fedstill_model"


def save_model(path: Path, spec: ModelSpec, params: Tensors) -> None:
    """Write a model to a file, with the entries that its network holds.

    The file is written whole or not at all; raises DiskFull if it cannot be written.
    """
    entries = {**params, **held_entries(spec)}
    copies = {name: v.detach().cpu().contiguous().clone() for name, v in entries.items()}
    note = json.dumps(spec.to_dict())
    trust_content(note.encode())
    write_whole(path, safetensors.torch.save(copies, {_KEY: note}))


def read_model(path: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The network and the parameters in a file that :func:`save_model` wrote.

    The entries that the network holds are kept for the modules of this process.
    Raises ConfigError for a file that is not there or names no network, UnknownName for a network
    that does not exist here, CorruptFile for a file that is damaged, or whose parameters are not
    those of its network.
    """
    if not path.is_file():
        raise ConfigError(f"there is no model file {path}")
    try:
        with safe_open(path, "pt") as file:
            note = (file.metadata() or {}).get(_KEY)
            params = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged, or no safetensors file: {error}") from error
    if note is None:
        raise ConfigError(
            f"{path} does not say of which network it is; a model that `fedstill query` wrote does"
        )
    with code_named_by(path, note.encode()):
        return _with_network(path, _spec(path, note), params)


def _with_network(
    path: Path, spec: ModelSpec, params: dict[str, Tensor]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The network and its parameters, without the entries that it holds; see ``read_model``."""
    if spec.held:
        fixed = {name: v for name, v in params.items() if not matches(name, spec.trains)}
        if sha256_of(fixed) != spec.held:
            raise CorruptFile(f"{path} lacks the entries that its {spec.label} holds")
        hold(fixed)
        params = {name: v for name, v in params.items() if name not in fixed}
    expected = contract.initial(spec, 0)
    for name in sorted({*params, *expected}):
        if not _is_alike(params.get(name), expected.get(name)):
            raise CorruptFile(
                f"{path} is not a {spec.label}: its entry {name!r} is missing, unknown or of "
                "another shape"
            )
    return spec, {name: params[name] for name in expected}


def _is_alike(value: Tensor | None, expected: Tensor | None) -> bool:
    """Whether two tensors have the same shape and type; not if one is missing."""
    if value is None or expected is None:
        return False
    return value.shape == expected.shape and value.dtype == expected.dtype


def _spec(path: Path, note: str) -> ModelSpec:
    try:
        return ModelSpec.from_dict(json.loads(note))
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"{path} names its network in a way that cannot be read: {error}"
        ) from error
