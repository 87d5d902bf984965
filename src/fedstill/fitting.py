"""The stage ``fit``: every client trains a model alone, before it asks others or is averaged with
them.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), appendix A.2.
Reading: early stopping "after 10 epochs without improvement" on a validation set, which A.6.4 says
there is none of: a tenth of the client's own data is held out in this stage alone, and the best
epoch's model is kept.
Reading: in a later round, in which clients ask again, the stage goes on from the model that the
client ended with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedstill.keys import seed_for
from fedstill.models.contract import predictor
from fedstill.queries import Asking, Standing, Why, reasons, without_numbers
from fedstill.records import (
    KEEP,
    SERVER,
    Carry,
    ModelSpec,
    Payload,
    Plan,
    Ran,
    Tensors,
    View,
    World,
)
from fedstill.teachers import as_inputs, noise_probe
from fedstill.trees import dtype_of
from fedstill.wire.reports import PROBE, WHY
from fedstill.work import ClientWork

FIT = "fit"

ASKS = "asks"
"""The group of a reply, (C,) int8, that is 1 for the classes that a client has reason to ask
for.
"""

GOES_ON = "goes_on"
"""The group of a message that tells a client to go on from the model that it ended with, and to
remember it.
"""

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
    """What a model predicts on the noise that all models of a run are shown: (C,), its mean
    softmax.
    """
    predict, kind = predictor(spec, params), dtype_of(params)
    return noise_probe(
        lambda x: predict(as_inputs(x, kind)),
        spec.input_shape,
        samples,
        probe_seed(world),
        spec.vocabulary,
    )


def why_asked(asking: Asking, params: Tensors, view: View) -> dict[int, Why]:
    """The classes that a client has reason to ask for, and why, given the model that it trained
    alone.

    Raises ConfigError if accuracy is a reason and the client holds out no example.
    """
    right = held = None
    if "accuracy" in asking.by and view.validation is not None:
        y, classes = view.validation.labels.cpu(), len(view.counts)
        hits = view.passes.logits(params, view.validation).argmax(1).cpu() == y
        right, held = (torch.bincount(labels, minlength=classes) for labels in (y[hits], y))
    why = reasons(asking, view.client, Standing(view.counts, right, held))
    return {c: without_numbers(w) for c, w in why.items()} if asking.discreet else why


class Fit(ClientWork):
    """Plain local training; the journal then says what the model predicts on noise.

    Where queries are raised in the run, the client also says for which classes it has reason to
    ask, and why. What a client remembers is left as it is; but where the server does not keep its
    model it is told to remember that itself.
    """

    def begin(self, down: Payload, memory: Payload, view: View, world: World) -> Carry:
        if GOES_ON not in down:
            return Carry(params=down.params)
        return Carry(
            params=memory.params if "params" in memory else down.params, constants={GOES_ON: 1}
        )

    def end(
        self, params: Tensors, carry: Carry, ran: Ran, view: View, world: World
    ) -> tuple[Payload, Payload]:
        up = Payload(params=params)
        memory = up if GOES_ON in carry.constants else KEEP
        if world.asking is None:
            return up, memory
        asks = torch.zeros(world.classes, dtype=torch.int8)
        asks[list(why_asked(world.asking, params, view))] = 1
        return Payload(up, **{ASKS: asks}), memory

    def report(self, params: Tensors, carry: Carry, view: View, world: World) -> dict[str, Any]:
        """``probe``: (C,) mean softmax on Gaussian noise, by which a peer estimates what this model
        knows.

        ``why_asked``: by class, as text, why the client has reason to ask for it.
        """
        probe = [round(p, 6) for p in probed(view.model, params, world).double().tolist()]
        if world.asking is None:
            return {PROBE: probe}
        why = why_asked(world.asking, params, view)
        return {PROBE: probe, WHY: {str(c): w for c, w in why.items()}}
