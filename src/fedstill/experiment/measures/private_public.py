"""The measure ``private_public``: what each client's own model knows of its held-out data and of the public images."""

from __future__ import annotations

from fedstill.experiment.measures.base import Measure
from fedstill.registry import register


@register("measure", "private_public")
class PrivatePublic(Measure):
    """Accuracy of each client's own model on its held-out examples and on the public images; the server's on these.

    Before and after every stage on public data, after every other. Held out is what ``plan.validation`` says. The
    numbers come with the clients' replies; the formulas are in ``metrics/private_public.py``, and the accuracies by
    client stand in the event of the round. Source: HiPer-FedKD, table 1 and its notebooks.
    """

    def images(self, test: int, clients: int, own: int) -> int:
        """Public and held-out images are taken to be as many as the test set's, at each client."""
        return test * clients
