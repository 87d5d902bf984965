"""The measure ``local``: what local models know of their own clients' classes and of the others'."""

from __future__ import annotations

from fedstill.experiment.measures.base import Measure
from fedstill.registry import register


@register("measure", "local")
class Local(Measure):
    """In- and out-local accuracy of local models; each client evaluates its own on the common test set.

    The numbers come with the clients' replies, so that they exist where no server sees a local model; the formulas are
    in ``metrics/local.py``, and the means stand in the event of the round.
    """

    def images(self, test: int, clients: int, own: int) -> int:
        """The test set at each client."""
        return test * clients
