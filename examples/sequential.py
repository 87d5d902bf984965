"""One after another: any objective also runs on a chain, in which each client goes on from the
model before it.

    python examples/sequential.py

FedSeq is plain training along a chain; FedNTD on a chain distils from the model that was handed
over, SFedKD from models of the last round that together know all classes. Then a run is stopped
after some stages and resumed, to the same bits.
"""

import sys
import tempfile
from pathlib import Path

import torch

import fedstill
from fedstill import Experiment
from fedstill.core.errors import Interrupted
from fedstill.running.recording import Quiet

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 10

COMMON = {
    "seed": 5,
    "rounds": ROUNDS,
    "threads": 1,
    "partition": {
        "kind": "extended_dirichlet",
        "classes_per_client": 3,
        "alpha": 10.0,
        "min_size": 5,
    },
    "topology": {"kind": "sequential", "clients": 20, "sampled": 5},
    "plan": {"epochs": 2, "batch": 20, "lr": 0.05},
}


class StopAfter(Quiet):
    """Ask the run to end after some stages, as Ctrl-C does."""

    def __init__(self, stages: int) -> None:
        self.left = stages

    def stop(self) -> bool:
        """Whether as many stages are done."""
        self.left -= 1
        return self.left <= 0


with tempfile.TemporaryDirectory() as folder:
    for method in ("fedseq", "fedntd", "sfedkd"):
        whole = fedstill.run(Experiment(method=method, **COMMON), out=Path(folder) / method)
        print(
            f"{method} on a chain: accuracy {whole.accuracy:.3f}, forgetting {whole.forgetting:.3f}"
        )
    stopped = Path(folder) / "stopped"
    try:
        fedstill.run(Experiment(method="sfedkd", **COMMON), out=stopped, watch=StopAfter(7))
    except Interrupted:
        resumed = fedstill.resume(stopped)
    same = all(torch.equal(resumed.model[k], whole.model[k]) for k in whole.model)
    print(f"stopped after 7 stages and resumed: {'the same bits' if same else 'OTHER BITS'}")
