"""Loads the model in this folder with torch and safetensors alone, and tries it: ``python model.py``.

``Classifier.load()`` is a module in evaluation mode. It takes images (N, channels, height, width), uint8 from 0 to 255
or floats from 0 to 1, and gives logits (N, classes). What it was trained on stands in README.md and config.json.
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
    """The model of this folder: its normalisation, and its network with the weights of model.safetensors."""

    def __init__(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.classes: list[str] = config["classes"]
        self.input_shape = tuple(config["input_shape"])
        self.pixels = config["pixels"]
        self.names = {name: name.replace(".", "/") for name in weights}
        for name, stored in self.names.items():
            self.register_buffer(stored, weights[name])
        self.mean: Tensor
        self.std: Tensor
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(config[name], dtype=torch.float32).view(-1, 1, 1))
        self.eval()

    @classmethod
    def load(cls, folder: str | Path = Path(__file__).parent) -> Classifier:
        """The model of a folder; by default of the one that this file is in."""
        place = Path(folder)
        return cls(load_file(place / "model.safetensors"), json.loads((place / "config.json").read_text("utf-8")))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes) of images."""
        if tuple(images.shape[1:]) != self.input_shape:
            raise ValueError(f"images must be (N, {', '.join(map(str, self.input_shape))}), not {tuple(images.shape)}")
        x = images
        if self.pixels == "uint8":
            scaled = images.to(torch.float32)
            x = ((scaled / 255 if images.dtype == torch.uint8 else scaled) - self.mean) / self.std
        weights = {name: self.get_buffer(stored) for name, stored in self.names.items()}
        (logits,) = network(weights, x.contiguous(memory_format=torch.channels_last))
        return logits


def network(weights: Mapping[str, Tensor], images: Tensor) -> tuple[Tensor]:
    """Logits of normalised images, as torch.export wrote the network down; weights: by name, as in its state_dict."""
    raise NotImplementedError  # an export has the network's own lines here


def _try() -> None:
    """Compare the model's logits with those that were kept when this folder was written; images of noise."""
    place = Path(__file__).parent
    model, kept = Classifier.load(place), load_file(place / "check.safetensors")
    with torch.no_grad():
        away = float((model(kept["images"]) - kept["logits"]).abs().max())
    print(f"{len(model.classes)} classes, images of {model.input_shape}; logits differ by {away:.1e} from those kept")
    if away > 1e-3 * max(1.0, float(kept["logits"].abs().max())):
        raise SystemExit("this machine computes something else")


if __name__ == "__main__":
    _try()
