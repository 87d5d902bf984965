"""A test set in one thread and with its shards side by side, each with one torch thread, as in a
comparison's runs.

``python -m benchmarks.evaluation [--models cnn,simple_cnn,mlp] [--pairs 5]``: 2,000 images. Both
take turns.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.speed import spread
from fedstill.core.records import Examples
from fedstill.data.inputs import Inputs
from fedstill.engines.hardware import cores, keep_freed_memory, torch_threads
from fedstill.engines.passes import correct_by_example
from fedstill.models.contract import initial, spec_for
from fedstill.models.predictors import predictor
from fedstill.report import terminal

IMAGES, SHAPE, CLASSES = 2_000, (3, 32, 32), 10


def measure(model: str, pairs: int) -> list[tuple[str, ...]]:
    """Rows of a model: how, seconds, times as fast as one thread."""
    spec = spec_for(model, SHAPE, CLASSES)
    predict = predictor(spec, initial(spec, 0))
    test = Examples(torch.rand(IMAGES, *SHAPE), torch.randint(CLASSES, (IMAGES,)))
    ways = {"one thread": 1, f"side by side, {cores()} cores": cores()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with torch_threads(1):
        for turn in range(1 + pairs):
            for way, workers in ways.items():
                began = time.perf_counter()
                correct_by_example(predict, test, Inputs(), workers)
                seconds[way] += [time.perf_counter() - began] if turn else []
    base = seconds["one thread"]
    ratios = {way: [b / s for b, s in zip(base, own, strict=True)] for way, own in seconds.items()}
    return [(f"{model}, {way}", spread(own), spread(ratios[way])) for way, own in seconds.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="cnn,simple_cnn,mlp", help="which, e.g. cnn,mlp")
    parser.add_argument(
        "--pairs", type=int, default=5, help="passes of each, in turn, after one to warm up"
    )
    asked = parser.parse_args()
    keep_freed_memory()
    rows = [row for name in asked.models.split(",") for row in measure(name, asked.pairs)]
    terminal.console().print(
        terminal.PlainTable(["2,000 test images", "seconds", "times the speed"], rows)
    )
