"""The evaluation of 2,000 test images in one thread, and with parts of the test set side by side:
``python -m benchmarks.evaluation [--models cnn,simple_cnn,mlp] [--pairs 5]``.

Both use one torch thread in each part, as the runs of a comparison do. They take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.options import option_parser
from benchmarks.turns import ratios, seconds_in_turns, spread
from fedstill.core.records import Examples
from fedstill.data.inputs import Inputs
from fedstill.engines.hardware import cores, keep_freed_memory, torch_threads
from fedstill.engines.passes import correct_by_example
from fedstill.models.contract import initial, spec_for
from fedstill.models.predictors import predictor
from fedstill.report import terminal

IMAGES = 2_000
IMAGE_SHAPE = (3, 32, 32)
CLASSES = 10

BASE = "one thread"


def measure(model: str, pairs: int) -> list[Sequence[str]]:
    """The rows of a model: seconds, and how many times as fast as one thread."""
    spec = spec_for(model, IMAGE_SHAPE, CLASSES)
    predict = predictor(spec, initial(spec, 0))
    images = torch.rand(IMAGES, *IMAGE_SHAPE)
    labels = torch.randint(CLASSES, (IMAGES,))
    evaluate = partial(correct_by_example, predict, Examples(images, labels), Inputs())
    contestants = {
        BASE: partial(evaluate, 1),
        f"side by side, {cores()} cores": partial(evaluate, cores()),
    }
    with torch_threads(1):
        seconds = seconds_in_turns(contestants, pairs)
    return [
        (f"{model}, {name}", spread(passes), spread(ratios(seconds[BASE], passes)))
        for name, passes in seconds.items()
    ]


def main() -> None:
    """Measure the models, and print one table."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--models", default="cnn,simple_cnn,mlp", help="the models (default: cnn,simple_cnn,mlp)"
    )
    parser.add_argument(
        "--pairs", type=int, default=5, help="evaluations of each kind after the warm-up"
    )
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    for model in options.models.split(","):
        rows += measure(model, options.pairs)
    head = ["2,000 test images", "seconds", "times the speed"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
