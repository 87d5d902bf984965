"""Clients with different networks exchange logits on public images, and no parameters.

    python examples/public_logits.py [ROUNDS]

Four clients have four different networks and their own digits; the server has a fifth network. The
program prints the accuracy of each client's network before and after it learns from the others.
"""

import argparse
import tempfile
from pathlib import Path

import fedstill
from fedstill import Experiment

parser = argparse.ArgumentParser(description="Four networks exchange logits on public images.")
parser.add_argument("rounds", nargs="?", type=int, default=15, help="default: 15")
arguments = parser.parse_args()

NETWORKS = {
    "mlp, 64 hidden": {"name": "mlp", "hidden": [64]},
    "mlp, 200 and 100 hidden": {"name": "mlp", "hidden": [200, 100]},
    "logistic regression": "logistic",
    "digits_cnn": "digits_cnn",
}

experiment = Experiment(
    seed=5,
    rounds=arguments.rounds,
    threads=1,
    # Each client's accuracy on its held-out examples, and on the public images.
    measure=("private_public",),
    measure_every=1,
    # All clients see 300 public images. Their labels are used by the measure only.
    data={"name": "digits", "public": 300},
    partition={"kind": "dirichlet", "alpha": 1.0},
    topology={"clients": 4},
    model="digits_cnn",  # the server's network
    clients={"models": list(NETWORKS.values())},
    method={"name": "hiper_fedkd"},
    plan={"epochs": 5, "batch": 16, "lr": 0.02},
)


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:3.0f} %"


def megabytes(count: int) -> str:
    """A number of bytes in megabytes."""
    return f"{count / 1e6:.2f} MB"


with tempfile.TemporaryDirectory() as folder:
    result = fedstill.run(experiment, out=Path(folder) / "run")

print(
    f"The server's digits_cnn recognises {percent(result.accuracy).strip()} of the test digits "
    f"after {arguments.rounds} rounds.\n"
)
print("client  network                  public, before → after    held out")
last_round = result.history[-1]
for client, title in enumerate(NETWORKS):
    key = str(client)
    public_before = percent(last_round["public_before_by_client"][key])
    public_after = percent(last_round["public_by_client"][key])
    held_out = percent(last_round["private_by_client"][key])
    accuracies = f"{public_before:>14} → {public_after:<8} {held_out:>9}"
    print(f"{client:>6}  {title:23}  {accuracies}")

bytes_sent = sum(event["bytes_up"] + event["bytes_down"] for event in result.history)
bytes_of_parameters = sum(event["bytes_as_weights"] for event in result.history)
print(f"\nsent: {megabytes(bytes_sent)}; as parameters: {megabytes(bytes_of_parameters)}")
