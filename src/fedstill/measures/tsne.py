"""The measure ``tsne``: how test examples lie in the features of the global and the local models,
on a plane.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits

from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.measures.base import Measure, Numbers, Room, comparable, named_models, rounded_lists

IMAGES, MODELS, DIGITS = 200, 10, 1
PERPLEXITY = 30.0


@register("measure", "tsne")
class JointTSNE(Measure):
    """One joint t-SNE of 200 test examples' features under the received, at most ten local, and the
    new global model.

    At the end of the run; scikit-learn's, seeded, on one thread: its result depends on their
    number. The features are kept beside the journal, so that runs which started from one model can
    be embedded together.
    Source: FedNTD, appendix O, figures 19 to 21.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features"}
    )
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, room: Room) -> Numbers | None:
        """Labels (n,) of the images, names of the models, and coordinates (models, n) of each image
        under each.
        """
        if not comparable(seen, room):
            return None
        images, passes = room.some(IMAGES), room.passes()
        models = dict(named_models(seen, room, MODELS))
        each = {name: passes.features(p, images).cpu() for name, p in models.items()}
        features = torch.cat(list(each.values()))
        places = embedded(features, int(room.draw("tsne").initial_seed() % 2**32))
        x, y = places.reshape(len(models), len(images), 2).unbind(2)
        return {
            "models": list(models),
            "labels": images.labels.tolist(),
            "x": rounded_lists(x, DIGITS),
            "y": rounded_lists(y, DIGITS),
            "features": room.keep(f"tsne-round{seen.stage.round}-stage{seen.stage.index}", each),
        }

    def examples(self, test: int, clients: int, own: int) -> int:
        """A few hundred at each model; the embedding itself takes longer than that."""
        return min(test, IMAGES) * (min(clients, MODELS) + 2)


def embedded(features: torch.Tensor, seed: int) -> torch.Tensor:
    """(n, D) features as (n, 2) places, near ones near each other; the same for equal seeds."""
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    with threadpool_limits(1):
        places = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(
            features.numpy()
        )
    return torch.from_numpy(places)
