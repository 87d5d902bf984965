"""The measure ``divergence``: how far local weights moved, and how far the client's labels are from
the model's.
"""

from __future__ import annotations

from typing import ClassVar

from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.core.trees import only
from fedstill.measures.base import Measure, Numbers, Room, comparable
from fedstill.metrics.distances import distribution_distance, weight_divergence
from fedstill.metrics.local_models import over_clients
from fedstill.models import contract


@register("measure", "divergence")
class Divergence(Measure):
    """Distance of local weights from the received ones, L1 and L2, and of a client's labels from
    what the model knows.

    Source: FedNTD, section 5.2 and figure 8.
    Reading: w in ``||w - w_k||`` and A_G are the global model that the client received, not the
    mean after it.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "client_data"}
    )

    def look(self, seen: StageResult, room: Room) -> Numbers | None:
        """The three distances of each client, and their means."""
        locals_ = comparable(seen, room)
        if not locals_:
            return None
        start, names = seen.before.params, sorted(contract.trainable_names(room.spec))
        accuracy = room.accuracy_by_class(start, room.test)
        apart = [weight_divergence(only(start, names), params) for params in locals_.values()]
        shares = [room.sites.view(c, seen.stage).proportions for c in locals_]
        by_client = {
            "l1": [a for a, _ in apart],
            "l2": [b for _, b in apart],
            "distance": [distribution_distance(accuracy, p) for p in shares],
        }
        means = {f"mean_{k}": over_clients(v, [1.0] * len(v))[""] for k, v in by_client.items()}
        return {"clients": list(locals_), **by_client, **means}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set once."""
        return test
