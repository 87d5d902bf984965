"""A model that a run starts from instead of drawn weights: another run's final one, or one in a file."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedstill.errors import ConfigError, CorruptFile
from fedstill.files import digest
from fedstill.models import contract
from fedstill.records import ModelSpec

FINAL = "model.safetensors"
"""The final global model in a finished run's directory."""


def file_of(place: str) -> Path:
    """The model file that ``start_from`` names: a file, or the final model in a run's directory.

    Raises ConfigError where there is none.
    """
    path = Path(place) / FINAL if Path(place).is_dir() else Path(place)
    if not path.is_file():
        raise ConfigError(
            f"start_from = {place!r}: there is no model; name the directory of a finished run, or a .safetensors file"
        )
    return path


def weights(place: str, spec: ModelSpec) -> dict[str, Tensor]:
    """The parameters of an architecture that a run starts from.

    Raises ConfigError for a model of another architecture, CorruptFile for a file that is damaged.
    """
    path = file_of(place)
    try:
        stored = safetensors.torch.load(path.read_bytes())
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged, or no safetensors file: {error}") from error
    wanted = contract.initial(spec, 0)
    for name in sorted({*stored, *wanted}):
        one, other = (_shape(tensors.get(name)) for tensors in (stored, wanted))
        if one != other:
            raise ConfigError(
                f"start_from = {place!r} is no {spec.label}: its {name!r} is {one}, not {other}; "
                "set [model] as it was there"
            )
    return {name: stored[name] for name in wanted}


def seal(place: str) -> str:
    """The SHA-256 of the model file, by which a resume checks that it is the same file."""
    return digest(file_of(place).read_bytes())


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
