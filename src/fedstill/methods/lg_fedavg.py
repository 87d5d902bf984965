"""LG-FedAvg: lower layers are each client's own, the top layers are averaged.

Source: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations" (2020), and its code.
Symbols: ``layers`` = how many layers are global, from the top.
State: the global parameters, of which only the top layers are ever trained; nothing more.
Memory: params = the client's own model, whole.
Reading: the code begins with a model of 1,200 rounds of federated averaging, and then averages the
last two layers of its convolutional network, three of its other one, for 200 rounds: set
``start_from`` and ``layers``.
Reading: a layer is a part of the network with entries of its own; a normalisation layer counts.
Reading: the code keeps of each client the model that was best on test data; here it is the last.
Reading: its clients train for one epoch at 0.1 with momentum 0.5; here as in the other methods'
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.core.fields import CountOrZero
from fedstill.core.registry import method
from fedstill.methods.partly_shared import PartlyShared


@method("lg_fedavg")
@dataclass(frozen=True)
class LGFedAvg(PartlyShared):
    """Clients keep their lower layers; the top layers are averaged."""

    layers: CountOrZero = 1
    """How many layers are averaged, from the top; 0: none, clients train alone."""

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        every = list(dict.fromkeys(name.rpartition(".")[0] for name in entries))
        top = set(every[max(0, len(every) - self.layers) :])
        return [name for name in entries if name.rpartition(".")[0] in top]
