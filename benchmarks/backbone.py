"""A frozen body: training through it in every step, compared with training on features that were
computed once (``data.features_of``).

``python -m benchmarks.backbone [--rounds 20]`` prints the seconds of two complete runs that train
the same head on the same body, and how many times as fast the faster one is. The pass that computes
the features is included. The network is FedNTD's on images of 3 × 32 × 32. Ten clients have 100
images each and train five epochs a round, with ``engine = "auto"`` and an empty cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.options import option_parser
from benchmarks.turns import seconds_of
from fedstill import Experiment, from_tensors, run
from fedstill.data.dataset import Dataset
from fedstill.models import contract
from fedstill.report import terminal

IMAGE_SHAPE = (3, 32, 32)
CLASSES = 10
IMAGES_OF_CLIENT = 100


def noise_images(clients: int) -> Dataset:
    """Images of noise for so many clients."""
    draws = torch.Generator().manual_seed(0)

    def labelled(count: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(256, (count, *IMAGE_SHAPE), generator=draws, dtype=torch.uint8)
        return images, torch.arange(count) % CLASSES

    return from_tensors("noise", labelled(IMAGES_OF_CLIENT * clients), labelled(200))


def variants(body: Path) -> Mapping[str, Mapping[str, Any]]:
    """The config of both runs, by the name in the table. ``body``: the file of its weights."""
    return {
        "through the body": {"model": "cnn", "train_only": ("head.",)},
        "features computed once": {
            "data": {"features_of": {"name": "cnn", "file": str(body)}},
            "start_from_partial": True,
        },
    }


def main() -> None:
    """Run both, and print the table."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=10)
    options = parser.parse_args()
    dataset = noise_images(options.clients)
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FEDSTILL_CACHE"] = str(folder / "cache")
        body = folder / "cnn.safetensors"
        spec = contract.spec_for("cnn", IMAGE_SHAPE, CLASSES)
        safetensors.torch.save_file(contract.initial(spec, 0), body)
        for label, changes in variants(body).items():
            experiment = Experiment(
                rounds=options.rounds,
                engine="auto",
                measure=(),
                start_from=str(body),
                partition="iid",
                topology={"clients": options.clients},
                plan={"epochs": 5, "batch": 50, "lr": 0.01},
                **changes,
            )
            run_folder = folder / label.replace(" ", "-")
            seconds[label] = seconds_of(partial(run, experiment, run_folder, data=dataset))
    slowest = max(seconds.values())
    rows = [(label, f"{taken:.1f}", f"{slowest / taken:.1f}") for label, taken in seconds.items()]
    head = ["a frozen body", f"seconds of {options.rounds} rounds", "times as fast"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
