"""A frozen backbone: trained through in every step, or its features computed once
(``data.features_of``).

``python -m benchmarks.backbone [--rounds 20]``: seconds of two runs that train the same head on the
same body, all in, the pass that makes the features too, and their ratio. FedNTD's network on images
of 3 × 32 × 32, ten clients of 100 images, five epochs a round, ``engine = "auto"``. The cache is
empty before.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import safetensors.torch
import torch

from fedstill import Experiment, from_tensors, run
from fedstill.data.dataset import Dataset
from fedstill.models import contract
from fedstill.report import terminal


def images(clients: int) -> Dataset:
    """A hundred images of noise a client."""
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(
            256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8
        ), torch.arange(count) % 10

    return from_tensors("noise", some(100 * clients), some(200))


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=10)
    said = parser.parse_args()
    data = images(said.clients)
    with tempfile.TemporaryDirectory() as place:
        os.environ["FEDSTILL_CACHE"] = f"{place}/cache"
        file = Path(place) / "cnn.safetensors"
        safetensors.torch.save_file(
            contract.initial(contract.spec_for("cnn", (3, 32, 32), 10), 0), file
        )
        common = {
            "rounds": said.rounds,
            "engine": "auto",
            "measure": (),
            "start_from": str(file),
            "partition": "iid",
            "topology": {"clients": said.clients},
            "plan": {"epochs": 5, "batch": 50, "lr": 0.01},
        }
        ways = {
            "through the body": {"model": "cnn", "train_only": ("head.",)},
            "features computed once": {
                "data": {"features_of": {"name": "cnn", "file": str(file)}},
                "start_from_partial": True,
            },
        }
        seconds = {}
        for name, way in ways.items():
            began = time.perf_counter()
            run(Experiment(**common, **way), Path(place) / name.replace(" ", "-"), data=data)
            seconds[name] = time.perf_counter() - began
    slowest = max(seconds.values())
    rows = [[name, f"{taken:.1f}", f"{slowest / taken:.1f}"] for name, taken in seconds.items()]
    head = ["a frozen body", f"seconds of {said.rounds} rounds", "times as fast"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
