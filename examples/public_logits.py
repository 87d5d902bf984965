"""Four clients with four different networks learn from each other's logits on public images; no
weights are sent.

    python examples/public_logits.py

Each client keeps its own network and its own digits; the server's is a fifth. Then what each knew
before and after.
"""

import sys
import tempfile
from pathlib import Path

import fedstill
from fedstill import Experiment

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 15

experiment = Experiment(
    seed=5,
    rounds=ROUNDS,
    threads=1,
    # each client's accuracy on its own held-out data, and on the public images
    measure=("private_public",),
    measure_every=1,
    # 300 images that all see; their labels are used to measure only
    data={"name": "digits", "public": 300},
    partition={"kind": "dirichlet", "alpha": 1.0},
    topology={"clients": 4},
    model="digits_cnn",  # the server's network
    clients={
        "models": [
            {"name": "mlp", "hidden": [64]},
            {"name": "mlp", "hidden": [200, 100]},
            "logistic",
            "digits_cnn",
        ]
    },
    method={"name": "hiper_fedkd"},
    plan={"epochs": 5, "batch": 16, "lr": 0.02},
)


def percent(value: float) -> str:
    """A share as a reader likes it."""
    return f"{100 * value:3.0f} %"


with tempfile.TemporaryDirectory() as folder:
    result = fedstill.run(experiment, out=Path(folder) / "run")

print(f"server, digits_cnn: {percent(result.accuracy)} of the test digits after {ROUNDS} rounds\n")
print("client  network                    public, before → after    private")
last = result.history[-1]
for client, network in enumerate(
    ["mlp, 64 hidden", "mlp, 200 and 100 hidden", "logistic regression", "digits_cnn"]
):
    before, after, own = (
        percent(last[key][str(client)])
        for key in ("public_before_by_client", "public_by_client", "private_by_client")
    )
    print(f"{client:>6}  {network:25}  {before:>14} → {after:<8} {own:>9}")

sent = sum(e["bytes_up"] + e["bytes_down"] for e in result.history)
print(
    f"\nsent: {sent / 1e6:.2f} MB, weights: "
    f"{sum(e['bytes_as_weights'] for e in result.history) / 1e6:.2f} MB"
)
