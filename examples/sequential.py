"""Clients train one after another, each from its predecessor's model, and a run is resumed.

    python examples/sequential.py [ROUNDS]

Three methods run on the same chain of clients. FedSeq trains without distillation. FedNTD distils
from the model that a client receives. SFedKD distils from models of the previous round that
together know all classes. A last run is stopped during its first round and resumed: the final model
has the same bits.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import fedstill
from fedstill import Experiment
from fedstill.core.errors import Interrupted
from fedstill.running.recording import Quiet

parser = argparse.ArgumentParser(description="Three methods on a chain, and a resumed run.")
parser.add_argument("rounds", nargs="?", type=int, default=10, help="default: 10")
arguments = parser.parse_args()

METHODS = {"FedSeq": "fedseq", "FedNTD": "fedntd", "SFedKD": "sfedkd"}
COMMON = {
    "seed": 5,
    "rounds": arguments.rounds,
    "threads": 1,
    "data": "digits",
    "partition": {
        "kind": "extended_dirichlet",
        "classes_per_client": 3,
        "alpha": 10.0,
        "min_size": 5,
    },
    "topology": {"kind": "sequential", "clients": 20, "sampled": 5},
    "plan": {"epochs": 2, "batch": 20, "lr": 0.05},
}
STAGES_BEFORE_STOP = 3


class StopAfter(Quiet):
    """Stops a run after some stages, as Ctrl-C does."""

    def __init__(self, stages: int) -> None:
        self.remaining_stages = stages

    def stop(self) -> bool:
        """Return whether the run should stop; called after every stage."""
        self.remaining_stages -= 1
        return self.remaining_stages <= 0


def have_same_bits(first: fedstill.Result, second: fedstill.Result) -> bool:
    """Whether the final models of two runs are equal."""
    return all(torch.equal(first.model[name], second.model[name]) for name in first.model)


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    results = {}
    for title, method in METHODS.items():
        result = fedstill.run(Experiment(method=method, **COMMON), out=folder / title)
        results[title] = result
        print(
            f"{title} on a chain: accuracy {result.accuracy:.3f}, "
            f"forgetting {result.forgetting:.3f}"
        )

    experiment = Experiment(method="sfedkd", **COMMON)
    try:
        fedstill.run(experiment, out=folder / "stopped", watch=StopAfter(STAGES_BEFORE_STOP))
    except Interrupted:
        resumed = fedstill.resume(folder / "stopped")

if have_same_bits(resumed, results["SFedKD"]):
    print(f"SFedKD stopped after {STAGES_BEFORE_STOP} stages and resumed: the same model")
else:
    print(f"SFedKD stopped after {STAGES_BEFORE_STOP} stages and resumed: another model")
