"""Loads the model in this folder with torch and safetensors alone, and tries it:
``python model.py``.

``Classifier.load()`` is a module in evaluation mode, and gives logits (N, classes). It takes images
(N, channels, height, width), uint8 from 0 to 255 or floats from 0 to 1; of a run on other data
numbers (N, ...) as the data have them, NaN for one that is missing, or token ids (N, length), 0 for
padding. config.json says under ``inputs`` what these are, and with README.md what the model was
trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf, nan  # noqa: F401 - the network's lines may use them
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Classifier(nn.Module):
    """The model of this folder: its normalisation, and its network with the weights of
    model.safetensors.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.classes: list[str] = config["classes"]
        self.input_shape = tuple(config["input_shape"])
        self.pixels = config["pixels"]
        self.kind = config["inputs"]["kind"]
        self.names = {name: name.replace(".", "/") for name in weights}
        for name, stored in self.names.items():
            self.register_buffer(stored, weights[name])
        self.mean: Tensor
        self.std: Tensor
        kind = torch.float32 if self.kind == "image" else torch.float64
        side = (-1, *[1] * (len(self.input_shape) - 1))
        for name in ("mean", "std"):
            self.register_buffer(
                name, torch.tensor(config[name], dtype=kind).view(side if config[name] else (0,))
            )
        self.eval()

    @classmethod
    def load(cls, folder: str | Path = Path(__file__).parent) -> Classifier:
        """The model of a folder; by default of the one that this file is in."""
        place = Path(folder)
        settings = json.loads((place / "config.json").read_text(encoding="utf-8"))
        return cls(load_file(place / "model.safetensors"), settings)

    def forward(self, examples: Tensor) -> Tensor:
        """Logits (N, classes) of examples."""
        if tuple(examples.shape[1:]) != self.input_shape:
            many = "images" if self.kind == "image" else "examples"
            shape = ", ".join(map(str, self.input_shape))
            raise ValueError(f"{many} must be (N, {shape}), not {tuple(examples.shape)}")
        x = self.normalised(examples)
        weights = {name: self.get_buffer(stored) for name, stored in self.names.items()}
        (logits,) = network(
            weights, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        )
        return logits

    def normalised(self, examples: Tensor) -> Tensor:
        """Examples as the network takes them."""
        if self.kind == "text":
            return examples.to(torch.int64)
        x = examples.to(torch.float32)
        if self.kind != "image":
            scaled = (
                ((x.to(torch.float64) - self.mean) / self.std).to(torch.float32)
                if len(self.mean)
                else x
            )
            return scaled.nan_to_num(0.0)
        if self.pixels != "uint8":
            return examples
        return ((x / 255 if examples.dtype == torch.uint8 else x) - self.mean) / self.std


def network(weights: Mapping[str, Tensor], examples: Tensor) -> tuple[Tensor]:
    """Logits of normalised examples, as torch.export wrote the network down; weights: by name, as
    in its state_dict.
    """
    raise NotImplementedError  # an export has the network's own lines here


def _try() -> None:
    """Compare the model's logits with those that were kept when this folder was written; examples
    of noise.
    """
    place = Path(__file__).parent
    model, kept = Classifier.load(place), load_file(place / "check.safetensors")
    with torch.no_grad():
        away = float((model(kept["examples"]) - kept["logits"]).abs().max())
    many = "images" if model.kind == "image" else f"examples ({model.kind})"
    print(
        f"{len(model.classes)} classes, {many} of {model.input_shape}; logits differ by {away:.1e} "
        "from those kept"
    )
    if away > 1e-3 * max(1.0, float(kept["logits"].abs().max())):
        raise SystemExit("this machine computes something else")


if __name__ == "__main__":
    _try()
