"""Side by side: does distilling the not-true classes help when each client has only a few digits?

    python examples/parallel.py

Two methods on the same clients, seed and schedule; then what the global model forgets, class by
class.
"""

import sys
import tempfile
from pathlib import Path

import fedstill
from fedstill import Experiment

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

COMMON = {
    "seed": 5,
    "rounds": ROUNDS,
    "threads": 1,
    "data": "digits",  # 1,797 handwritten digits that ship inside scikit-learn
    "partition": {"kind": "dirichlet", "alpha": 0.1},  # 14 of 20 clients hold four digits or fewer
    "topology": {"kind": "parallel", "clients": 20, "sampled": 5},
    "plan": {"epochs": 5, "batch": 20, "lr": 0.05},
}


def show(name: str, result: fedstill.Result) -> None:
    """Accuracy by round, and how far each class is below its best round."""
    curve = " ".join(f"{100 * event['accuracy']:3.0f}" for event in result.history)
    print(f"{name}\n  accuracy by round [%]: {curve}\n  forgetting F: {result.forgetting:.3f}")
    best = [
        max(classes) for classes in zip(*(e["class_accuracy"] for e in result.history), strict=True)
    ]
    last = result.history[-1]["class_accuracy"]
    lost = "  ".join(
        f"{c}: {100 * (b - a):3.0f}" for c, (a, b) in enumerate(zip(last, best, strict=True))
    )
    print(f"  points lost since the best round, by digit: {lost}\n")


with tempfile.TemporaryDirectory() as folder:
    for method in ("fedavg", {"name": "fedntd", "beta": 1.0}):
        experiment = Experiment(method=method, **COMMON)
        name = experiment.table("method")["name"]
        show(name, fedstill.run(experiment, out=Path(folder) / name))
