"""A trained model as people use it: images as they are go in, logits come out; the normalisation is inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.data.inputs import channels_last
from fedstill.errors import ConfigError
from fedstill.models.joined import module_of

SLACK = 0.5
"""How far beyond 0 and 1 floats may be: enlarging a picture overshoots a little, other scales are far off."""


class TrainedModel(nn.Module):
    """A network with its normalisation inside, in evaluation mode.

    images: (N, channels, height, width), uint8 from 0 to 255 as a data set holds them, or floats from 0 to 1, the same
    divided by 255. A run whose data are floats takes those as they are. Gives logits (N, C).
    ``classes``: the names of the C classes; ``input_shape``: (channels, height, width); ``network``: the network alone,
    for normalised images; ``mean``, ``std``: buffers, a number a channel; ``about``: what was trained on what (method,
    data, seed, round, versions). Raises ConfigError for images of another shape, type or scale.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        input_shape: tuple[int, ...],
        mean: Sequence[float],
        std: Sequence[float],
        about: Mapping[str, Any],
        pixels: str = "uint8",
    ) -> None:
        super().__init__()
        self.network = network
        self.classes = tuple(classes)
        self.input_shape = input_shape
        self.about = dict(about)
        self.pixels = pixels
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(tuple(mean), dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(tuple(std), dtype=torch.float32).view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, C) of images."""
        if not torch.compiler.is_compiling():
            self._check(images)
        return self.network(channels_last(self.normalised(images)))  # type: ignore[no-any-return]

    def normalised(self, images: Tensor) -> Tensor:
        """Images as the network takes them."""
        if self.pixels != "uint8":
            return images
        scaled = images.to(torch.float32)
        return ((scaled / 255 if images.dtype == torch.uint8 else scaled) - self.mean) / self.std

    def noise(self, count: int) -> Tensor:
        """Images (count, channels, height, width) of noise, the same each time: to try a model on."""
        draw = torch.Generator().manual_seed(0)
        if self.pixels != "uint8":
            return torch.randn(count, *self.input_shape, generator=draw)
        return torch.randint(0, 256, (count, *self.input_shape), generator=draw, dtype=torch.uint8)

    def _check(self, images: Tensor) -> None:
        if tuple(images.shape[1:]) != self.input_shape:
            shape = ", ".join(map(str, self.input_shape))
            raise ConfigError(f"images must be (N, {shape}), not {tuple(images.shape)}; of one image, give image[None]")
        whole = images.dtype == torch.uint8
        if not (images.is_floating_point() or (whole and self.pixels == "uint8")):
            wanted = "uint8, or floats from 0 to 1" if self.pixels == "uint8" else "floats, as in the run's data"
            raise ConfigError(f"images are {images.dtype}; give {wanted}")
        if self.pixels == "uint8" and not whole and images.numel():
            low, high = (float(end) for end in images.detach().aminmax())
            if not -SLACK <= low <= high <= 1 + SLACK:
                raise ConfigError(
                    f"float images must be from 0 to 1, and these are from {low:.3g} to {high:.3g}; "
                    "give pixels as they are, uint8, or divided by 255: the model normalises them itself"
                )


class OnlyCalled(nn.Module):
    """A predictor of a method that gives a function and no module: it can be called, not exported."""

    def __init__(self, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of inputs."""
        return self.predict(x)


def network_of(predict: Callable[[Tensor], Tensor]) -> nn.Module:
    """A predictor as a module: with its weights if it shows them, else one that can only be called."""
    made = module_of(predict)
    return OnlyCalled(predict) if made is None else made
