"""The measures ``sphere`` and ``tsne``: where classes lie in the features of the global and the
local models, as directions on a circle or as points on a plane.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedstill.core.registry import register
from fedstill.core.results import StageResult
from fedstill.measures.base import Measure, Numbers, rounded_lists
from fedstill.measures.context import EvaluationContext, comparable, named_models

# The number of local models whose spheres are measured.
SPHERES = 3

BINS = 72


@register("measure", "sphere")
class Sphere(Measure):
    """Directions of test examples' features by class, for the received, three local and the new
    global model.

    Needs features of two numbers, as ``sphere_cnn`` has them. At the end of the run; counts in 72
    steps of 5 degrees.
    Source: FedNTD, appendix N, figure 18.
    """

    needs: ClassVar[frozenset[str]] = frozenset(
        {"test", "global_model", "local_models", "features", "plane"}
    )
    only_last: ClassVar[bool] = True

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """(models, C, bins) counts of test examples; bin 0 begins at -180 degrees."""
        if not comparable(seen, context):
            return None
        labels, passes = context.test.labels.cpu(), context.passes()
        counts = {
            name: directions(passes.features(p, context.test).cpu(), labels, context.world.classes)
            for name, p in named_models(seen, context, SPHERES)
        }
        return {"models": list(counts), "counts": [v.tolist() for v in counts.values()]}

    def examples(self, test: int, clients: int, own: int) -> int:
        """The test set at each model."""
        return test * (min(clients, SPHERES) + 2)


def directions(features: Tensor, labels: Tensor, classes: int, bins: int = BINS) -> Tensor:
    """How many features (n, 2) of each class point into each of ``bins`` equal parts of the circle:
    (C, bins) int64.

    >>> directions(torch.tensor([[0.0, -1.0], [0.1, 1.0]]), torch.tensor([0, 1]), 2, bins=4)
    tensor([[0, 1, 0, 0],
            [0, 0, 1, 0]])
    """
    angle = torch.atan2(features[:, 1].double(), features[:, 0].double())
    bin_ = ((angle + math.pi) / (2 * math.pi) * bins).floor().long().clamp(0, bins - 1)
    return torch.bincount(labels * bins + bin_, minlength=classes * bins).reshape(classes, bins)


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

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        """Labels (n,) of the images, names of the models, and coordinates (models, n) of each image
        under each.
        """
        if not comparable(seen, context):
            return None
        images, passes = context.some(IMAGES), context.passes()
        models = dict(named_models(seen, context, MODELS))
        each = {name: passes.features(p, images).cpu() for name, p in models.items()}
        features = torch.cat(list(each.values()))
        places = embedded(features, int(context.draw("tsne").initial_seed() % 2**32))
        x, y = places.reshape(len(models), len(images), 2).unbind(2)
        return {
            "models": list(models),
            "labels": images.labels.tolist(),
            "x": rounded_lists(x, DIGITS),
            "y": rounded_lists(y, DIGITS),
            "features": context.keep(f"tsne-round{seen.stage.round}-stage{seen.stage.index}", each),
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
