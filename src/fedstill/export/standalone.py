"""Loads the model in this folder with torch and safetensors only; ``python model.py`` checks it.

``Classifier.load()`` returns a module in evaluation mode, which maps examples to logits (N,
classes). Images are (N, channels, height, width), uint8 from 0 to 255 or floats from 0 to 1. Other
examples are numbers (N, ...), with NaN for missing values, or token ids (N, length), with 0 for
padding. config.json describes them under ``inputs``; README.md describes the training, and states
whether numbers must be standardised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf, nan  # noqa: F401 - the network's code may use them
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

TOLERANCE = 1e-3
"""The largest difference of logits in the check, relative to the largest logit."""


class Classifier(nn.Module):
    """The model of this folder: the normalisation of its inputs, and its network."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.classes: list[str] = config["classes"]
        self.input_shape = tuple(config["input_shape"])
        self.pixels = config["pixels"]
        self.kind = config["inputs"]["kind"]
        # The name of a buffer must contain no dots, and must not be the name of another attribute.
        self.buffer_names = {name: f"weights/{name.replace('.', '/')}" for name in weights}
        for name, buffer_name in self.buffer_names.items():
            self.register_buffer(buffer_name, weights[name])
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", self._scaling(config["mean"]))
        self.register_buffer("std", self._scaling(config["std"]))
        self.eval()

    def _scaling(self, values: list[float]) -> Tensor:
        """A number for each channel or column, in the precision of the training."""
        dtype = torch.float64
        if self.kind == "image":
            dtype = torch.float32
        scaling = torch.tensor(values, dtype=dtype)
        if not values:
            return scaling
        return scaling.view(-1, *[1] * (len(self.input_shape) - 1))

    @classmethod
    def load(cls, folder: str | Path = Path(__file__).parent) -> Classifier:
        """The model of a folder; by default, of the folder of this file."""
        place = Path(folder)
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        return cls(load_file(place / "model.safetensors"), config)

    def forward(self, examples: Tensor) -> Tensor:
        """Logits (N, classes) of examples."""
        if tuple(examples.shape[1:]) != self.input_shape:
            shape = ", ".join(map(str, self.input_shape))
            raise ValueError(f"{self.noun} must be (N, {shape}), not {tuple(examples.shape)}")
        if not self._accepts(examples):
            raise ValueError(f"{self.noun} are {examples.dtype}, but must be {self.types}")
        x = self.normalised(examples)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        weights = {name: self.get_buffer(buffer) for name, buffer in self.buffer_names.items()}
        (logits,) = network(weights, x)
        return logits

    @property
    def noun(self) -> str:
        """The examples in words."""
        if self.kind == "image":
            return "images"
        return "examples"

    @property
    def types(self) -> str:
        """The types of the numbers of examples, in words."""
        if self.kind == "text":
            return "integers"
        if self.kind == "image" and self.pixels == "uint8":
            return "uint8 or floats"
        return "floats"

    def _accepts(self, examples: Tensor) -> bool:
        """Whether the numbers of examples have one of ``types``."""
        if self.kind == "text":
            return not examples.is_floating_point() and examples.dtype != torch.bool
        if self.kind == "image" and self.pixels == "uint8" and examples.dtype == torch.uint8:
            return True
        return examples.is_floating_point()

    def normalised(self, examples: Tensor) -> Tensor:
        """Examples as inputs of the network."""
        if self.kind == "text":
            return examples.to(torch.int64)
        x = examples.to(torch.float32)
        if self.kind == "image" and self.pixels != "uint8":
            return x
        if self.kind == "image":
            if examples.dtype == torch.uint8:
                x = x / 255
            return (x - self.mean) / self.std
        if len(self.mean):
            x = ((x.to(torch.float64) - self.mean) / self.std).to(torch.float32)
        return x.nan_to_num(0.0)


def network(weights: Mapping[str, Tensor], examples: Tensor) -> tuple[Tensor]:
    """Logits of normalised examples, as torch.export traced the network; ``weights`` has the names
    of its state_dict.
    """
    raise NotImplementedError  # an export has the network's own lines here


def check() -> None:
    """Compare the model's logits on noise with those from when this folder was written."""
    place = Path(__file__).parent
    model = Classifier.load(place)
    stored = load_file(place / "check.safetensors")
    with torch.no_grad():
        difference = float((model(stored["examples"]) - stored["logits"]).abs().max())
    print(
        f"{len(model.classes)} classes, {model.noun} ({model.kind}) of {model.input_shape}; logits "
        f"differ by {difference:.1e} from the stored ones"
    )
    if difference > TOLERANCE * max(1.0, float(stored["logits"].abs().max())):
        raise SystemExit("this machine computes something else")


if __name__ == "__main__":
    check()
