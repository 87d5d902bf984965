"""IID: a random permutation cut into equal parts."""

from __future__ import annotations

import numpy as np

from fedstill.core.fields import Count, Seed
from fedstill.data.client_split import ClientSplit, ends_of
from fedstill.data.partition.rules import Labels, Parts, legacy_stream, partition, refuse_too_many


@partition("iid")
def iid(labels: Labels, clients: Count, seed: Seed) -> Parts:
    """Equal parts of a random permutation; sizes differ by one at most, the larger ones first.

    Every example is used. Raises InfeasiblePartition for more clients than examples.

    labels: Class ids (n,).
    seed: What the split is drawn from; unset in a config, it is the run's.

    Reading: FedNTD's code drops the n mod N examples left over; here they are dealt out.
    """
    refuse_too_many("iid", len(labels), clients)
    size, more = divmod(len(labels), clients)
    sizes = size + (np.arange(clients) < more)
    return ClientSplit(legacy_stream(seed).permutation(len(labels)), ends_of(sizes))
