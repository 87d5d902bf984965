"""Choosing teachers: models that together know all classes, and models that know a class that is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedstill.core.errors import ConfigError, DataError
from fedstill.core.keys import generator
from fedstill.core.labels import Metric, TensorLike, as_floats, distance

TIE = 1e-9
"""Distances nearer than this are equal: a permuted histogram sums in another order, to another last
bit.
"""


def complementary(proportions: TensorLike, k: int, metric: Metric = "kl") -> list[int]:
    """The positions of k teachers whose labels together are most uniform, picked greedily, in the
    order picked.

    proportions: (n, C) label shares of the candidates; k >= 0, all n are given if there are no
    more; metric as in ``distance``. Each step adds the candidate that brings the mean of the chosen
    shares nearest to uniform; ties go to the lower position. Raises ConfigError if k < 0, DataError
    for shares that are none.

    Source: SFedKD, Algorithm 1.
    Reading: the paper sums the chosen shares without normalising. For KL and L2 the choice is the
    same, for L1 and JS normalising is what makes a sum comparable with uniform: we always do. The
    distance is d(chosen, uniform), where KL is finite without smoothing (0 log 0 = 0), so it gets
    none.

    >>> complementary([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], k=2)
    [2, 1]
    """
    shares = as_floats(proportions).to(torch.float64)
    if k < 0:
        raise ConfigError(f"cannot choose k = {k} teachers; k must be >= 0")
    if (
        shares.dim() != 2
        or not bool((shares.isfinite() & (shares >= 0)).all())
        or not bool((shares.sum(-1) > 0).all())
    ):
        raise DataError(
            "label shares must be (clients, classes), >= 0, with a sum > 0; got "
            f"{tuple(shares.shape)}"
        )
    uniform = torch.full_like(shares[:1], 1 / max(shares.shape[1], 1))
    chosen: list[int] = []
    left = list(range(len(shares)))
    while left and len(chosen) < k:
        sums = shares[chosen].sum(0) + shares[left]
        far = distance(sums / sums.sum(-1, keepdim=True), uniform, metric, smoothing=0.0)
        chosen.append(left.pop(int((far <= far.min() + TIE).to(torch.int8).argmax())))
    return chosen


def noise(input_shape: tuple[int, ...], samples: int, seed: int, vocabulary: int = 0) -> Tensor:
    """The examples (samples, *input_shape) of a probe: Gaussian, in the space after normalisation.

    vocabulary: of texts; then every token id from 1 to vocabulary - 1 is equally likely (int64),
    and none is padding.
    """
    if vocabulary:
        return torch.randint(1, vocabulary, (samples, *input_shape), generator=generator(seed))
    return torch.randn(samples, *input_shape, generator=generator(seed))


def as_inputs(x: Tensor, kind: torch.dtype) -> Tensor:
    """Examples as parameters of a type take them: numbers of that type, token ids as they are."""
    return x.to(kind) if x.is_floating_point() else x


def noise_probe(
    model: Callable[[Tensor], Tensor],
    input_shape: tuple[int, ...],
    samples: int = 20,
    seed: int = 0,
    vocabulary: int = 0,
) -> Tensor:
    """What a model predicts on examples without content: its mean softmax on noise.

    model: a module or a function from (samples, *input_shape) to logits (samples, C); a module is
    run in evaluation mode, and each of its parts put back into the mode it had. samples >= 1. Gives
    (C,) >= 0, summing to 1, without gradient: classes that the model was trained on have large
    entries.

    Source: QKT, eq. 2.
    Reading: the noise is N(0, 1) in the space after normalisation, one draw for all models of one
    seed; of texts, random token ids.

    >>> noise_probe(lambda x: torch.zeros(len(x), 4), (1, 8, 8))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    x = noise(input_shape, samples, seed, vocabulary)
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            return torch.softmax(model(x), dim=-1).mean(0)
    like = next(model.parameters(), x)
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.no_grad():
            return torch.softmax(
                model.eval()(as_inputs(x, like.dtype).to(like.device)), dim=-1
            ).mean(0)
    finally:
        for part, mode in modes:
            part.training = mode
