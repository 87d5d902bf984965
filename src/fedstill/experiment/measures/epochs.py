"""The measure ``epochs``: what local models know of their own clients' classes and of the others', epoch by epoch."""

from __future__ import annotations

from typing import ClassVar

from fedstill.experiment.measures.base import Measure
from fedstill.registry import register


@register("measure", "epochs")
class Epochs(Measure):
    """In- and out-local accuracy of local models as received and after every local epoch.

    Each client copies its model when an epoch ends and evaluates the copies on the common test set when it has trained,
    in the stages in which it trains on its own data; training is the same to the bit. The numbers come with the
    clients' replies; the formulas are in ``metrics/local.py``, and the means stand in the event of the round.
    Source: FedNTD, figure 6. Reading: a client's visit is shown from the model it receives (epoch 0) to what it sends.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test_at_clients", "epochs"})
    each_epoch: ClassVar[bool] = True

    def images(self, test: int, clients: int, own: int) -> int:
        """The test set at each client: one look, of which there is one before and one after every epoch."""
        return test * clients
