"""The stage ``fit``: every client trains a model alone, before it asks others or is averaged with them.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments" (QKT), appendix A.2.
Reading: early stopping "after 10 epochs without improvement" on a validation set, which A.6.4 says there is none of: a
tenth of the client's own data is held out in this stage alone, and the best epoch's model is kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedstill.keys import seed_for
from fedstill.models.contract import predictor
from fedstill.records import SERVER, Carry, ModelSpec, Plan, Tensors, View, World
from fedstill.teachers import noise_probe
from fedstill.trees import dtype_of
from fedstill.work import ClientWork

FIT = "fit"

SAMPLES = 20
"""Examples of noise in a probe. Source: QKT, section 4.3."""

FITTING = Plan(
    epochs=100,
    batch=32,
    optimiser="adam",
    lr=0.001,
    weight_decay=4e-4,
    validation=0.1,
    patience=10,
    keep="best",
)
"""QKT's settings for models that clients train alone."""


def probe_seed(world: World) -> int:
    """The seed of the noise that all models of a run are shown."""
    return seed_for(world.seed, 0, 0, SERVER, "probe")


def probed(spec: ModelSpec, params: Tensors, world: World, samples: int = SAMPLES) -> Tensor:
    """What a model predicts on the noise that all models of a run are shown: (C,), its mean softmax."""
    predict = predictor(spec, params)
    return noise_probe(lambda x: predict(x.to(dtype_of(params))), spec.input_shape, samples, probe_seed(world))


class Fit(ClientWork):
    """Plain local training; the journal then says what the model predicts on noise."""

    def report(self, params: Tensors, carry: Carry, view: View, world: World) -> dict[str, Any]:
        """``probe``: (C,) mean softmax on Gaussian noise, by which a peer estimates what this model knows."""
        return {"probe": [round(p, 6) for p in probed(view.model, params, world).double().tolist()]}
