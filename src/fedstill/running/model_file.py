"""Files of models: the final model of a run, and models whose file also describes the network."""

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

# The final model in a run's directory, whose SHA-256 is in ``summary.json``.


FINAL = "model.safetensors"
"""The name of the file."""

MODEL_SEAL = "model_sha256"
"""The key of the file's SHA-256 in ``summary.json``."""


def read_final(path: Path) -> bytes:
    """The bytes of a model file.

    Raises ValueError if the final model of a run has changed since the run wrote it, and OSError if
    the file cannot be read. Without a readable ``summary.json`` next to the file, the model is not
    checked.
    """
    data = read_file(path)
    try:
        expected_sha256 = json.loads(read_file(path.parent / "summary.json")).get(MODEL_SEAL)
    except (OSError, ValueError, AttributeError, RecursionError):
        return data
    if path.name == FINAL and expected_sha256 not in (None, digest(data)):
        raise ValueError("its SHA-256 is not the one in summary.json")
    return data


# A model in a file: its parameters as safetensors, and its network in the file's header.


_KEY = "fedstill_model"


def save_model(path: Path, spec: ModelSpec, params: Tensors) -> None:
    """Write a model to a file, including the held entries of its network.

    The file is written completely or not at all. Raises DiskFull if it cannot be written.
    """
    entries = {**params, **held_entries(spec)}
    copies = {name: v.detach().cpu().contiguous().clone() for name, v in entries.items()}
    description = json.dumps(spec.to_dict())
    trust_content(description.encode())
    write_whole(path, safetensors.torch.save(copies, {_KEY: description}))


def read_model(path: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The network and the parameters in a file that :func:`save_model` wrote.

    The held entries of the network are stored for the modules of this process. Raises ConfigError
    for a file that is missing or does not describe its network, UnknownName for an unknown network,
    and CorruptFile for a damaged file and for parameters that do not fit the network.
    """
    if not path.is_file():
        raise ConfigError(f"there is no model file {path}")
    try:
        with safe_open(path, "pt") as file:
            description = (file.metadata() or {}).get(_KEY)
            params = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged, or not a safetensors file: {error}") from error
    if description is None:
        raise ConfigError(
            f"{path} does not describe its network; use a model that `fedstill query` wrote"
        )
    with code_named_by(path, description.encode()):
        return _checked_model(path, _spec(path, description), params)


def _checked_model(
    path: Path, spec: ModelSpec, params: dict[str, Tensor]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The network and its parameters without held entries; raises CorruptFile if they do not
    fit.
    """
    if spec.held:
        fixed = {name: v for name, v in params.items() if not matches(name, spec.trains)}
        if sha256_of(fixed) != spec.held:
            raise CorruptFile(f"{path} lacks the held entries of its {spec.label}, or they differ")
        hold(fixed)
        params = {name: v for name, v in params.items() if name not in fixed}
    expected = contract.initial(spec, 0)
    for name in sorted({*params, *expected}):
        if not _has_same_shape(params.get(name), expected.get(name)):
            raise CorruptFile(
                f"{path} is not a {spec.label}: its entry {name!r} is missing, unknown or has "
                "another shape or type"
            )
    return spec, {name: params[name] for name in expected}


def _has_same_shape(value: Tensor | None, expected: Tensor | None) -> bool:
    """Whether two tensors have the same shape and type; False if one is missing."""
    if value is None or expected is None:
        return False
    return value.shape == expected.shape and value.dtype == expected.dtype


def _spec(path: Path, description: str) -> ModelSpec:
    try:
        return ModelSpec.from_dict(json.loads(description))
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"{path}: the description of its network cannot be read: {error}"
        ) from error
