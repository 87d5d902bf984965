"""Models by PFNM: exactly where they are plain chains of layers, approximately where they are
residual networks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor, nn

from fedstill.errors import IncompatibleMethod
from fedstill.matching.layer import MatchingSettings
from fedstill.matching.residual import match_residual
from fedstill.matching.whole_network import class_shares, match_chains
from fedstill.models.attention import Attention
from fedstill.models.contract import module
from fedstill.models.layer_chain import last_block, plain_chain
from fedstill.records import ModelSpec, Tensors

KNOWN_CHAINS = defaultdict(lambda: "mlp", {2: "series_cnn", 3: "qkt_cnn"})
"""Plain chains of ours, by the axes of an example."""


def matchable(spec: ModelSpec) -> Literal["exact", "approximate", ""]:
    """How models of a spec can be matched; empty if they cannot."""
    m = module(spec)
    if plain_chain(m) is not None:
        return "exact"
    return (
        "approximate" if last_block(m) and isinstance(getattr(m, "head", None), nn.Linear) else ""
    )


def unmatched(spec: ModelSpec) -> str:
    """What models of a spec have that cannot be matched, for people, and a model that can: for one
    line of refusal.
    """
    layers = list(module(spec).modules())
    others = [
        "attention"
        * any(isinstance(layer, (Attention, nn.MultiheadAttention)) for layer in layers),
        "embeddings" * any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in layers),
    ]
    why = " and ".join(filter(None, others))
    other = (
        "choose another method"
        if spec.vocabulary
        else f"set model.name = {KNOWN_CHAINS[len(spec.input_shape)]!r}"
    )
    return f"{spec.label} {f'has {why}' if why else 'is neither'}; {other}"


def match_models(
    spec: ModelSpec,
    models: Sequence[Tensors],
    counts: Tensor,
    sizes: Sequence[float],
    setting: MatchingSettings,
    draw: np.random.Generator,
) -> dict[str, Tensor]:
    """One model of several of a spec; its hidden layers may be wider (``widened`` gives its spec).

    models: J of them, J >= 1; counts: (J, C) label counts of those who trained them; sizes: (J,)
    their numbers of examples; draw: gives the order of the clients in each pass. Raises
    IncompatibleMethod for a spec that cannot be matched.
    """
    shares = class_shares(counts)
    match matchable(spec):
        case "exact":
            return match_chains(spec, models, shares, setting, draw)
        case "approximate":
            return match_residual(spec, models, shares, sizes, setting, draw)
    raise IncompatibleMethod(
        f"{spec.label} is neither a plain chain of layers nor a residual network"
    )
