"""The measure ``personal``: how good a local model is for its own client, on its training data and on new images."""

from __future__ import annotations

from typing import ClassVar

from fedstill.engines.passes import correct_by_class
from fedstill.experiment.measures.base import Happened, Measure, Numbers, Room
from fedstill.metrics import in_local_accuracy
from fedstill.metrics.local_models import over_clients
from fedstill.models import contract
from fedstill.registry import register


@register("measure", "personal")
class Personal(Measure):
    """Accuracy of local models on their client's training data, and on test images in its proportions of classes.

    Source: FedNTD, appendices H and I, figures 11 and 12 ("local train", "personalised").
    Reading: the code measures training data as augmented for training; here they are as they are.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"test", "local_models", "client_data"})

    def look(self, seen: Happened, room: Room) -> Numbers | None:
        """Both accuracies of each client, with mean and spread over clients."""
        locals_ = seen.local_models
        if not locals_:
            return None
        trained, personal, sizes = [], [], []
        for client, params in locals_.items():
            view = room.sites.view(client, seen.stage)
            predict = contract.predictor(room.spec, params)
            right = correct_by_class(predict, view.data, room.inputs, room.world.classes)
            trained.append(int(right.sum()) / len(view.data))
            personal.append(in_local_accuracy(room.accuracy_by_class(params, room.test), view.proportions))
            sizes.append(float(len(view.data)))
        accuracies = {"local_train": trained, "personalised": personal}
        spreads = {
            f"{k}_accuracy{s}": v for k, each in accuracies.items() for s, v in over_clients(each, sizes).items()
        }
        return {"clients": list(locals_), **accuracies, **spreads}

    def images(self, test: int, clients: int, own: int) -> int:
        """The test set and its own data at each client."""
        return test * clients + own
