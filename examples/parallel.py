"""Clients train in parallel: FedAvg and FedNTD on clients that have only a few digits each.

    python examples/parallel.py [ROUNDS]

FedNTD distils the classes other than the true class from the global model. Both methods run with
the same clients, seed and plan. The program prints the accuracy by round, and how much of each
class the global model forgets.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import fedstill
from fedstill import Experiment

parser = argparse.ArgumentParser(description="FedAvg and FedNTD in parallel rounds.")
parser.add_argument("rounds", nargs="?", type=int, default=20, help="default: 20")
arguments = parser.parse_args()

METHODS = {
    "FedAvg": "fedavg",
    "FedNTD": {"name": "fedntd", "beta": 1.0},
}
COMMON = {
    "seed": 5,
    "rounds": arguments.rounds,
    "threads": 1,
    "data": "digits",  # 1,797 handwritten digits that scikit-learn contains
    "partition": {"kind": "dirichlet", "alpha": 0.1},  # 14 of 20 clients have at most four digits
    "topology": {"kind": "parallel", "clients": 20, "sampled": 5},
    "plan": {"epochs": 5, "batch": 20, "lr": 0.05},
}


def percentages(values: np.ndarray) -> str:
    """Values between 0 and 1 as a line of percentages."""
    return " ".join(f"{100 * value:3.0f}" for value in values)


def print_result(title: str, result: fedstill.Result) -> None:
    """Print accuracies, and how far each class is below its best round."""
    accuracy = np.array([event["accuracy"] for event in result.history])
    class_accuracy = np.array([event["class_accuracy"] for event in result.history])
    decline = class_accuracy.max(axis=0) - class_accuracy[-1]

    print(title)
    print(f"  accuracy by round [%]: {percentages(accuracy)}")
    print(f"  forgetting F: {result.forgetting:.3f}")
    print(f"  points lost since the best round, digits 0 to 9: {percentages(decline)}")
    print()


with tempfile.TemporaryDirectory() as folder:
    for title, method in METHODS.items():
        experiment = Experiment(method=method, **COMMON)
        result = fedstill.run(experiment, out=Path(folder) / title)
        print_result(title, result)
