"""Why should a global model be good at every class alike? FedNTD's proposition 3, in numbers.

    python examples/even_model.py [classes]

A class c has a best model w_c. A client with label shares p moves to w_p = sum_c p_c w_c. The
global model is such a mean, too. How far does local training take it in the worst case? Least far
if it stands for all classes alike, and if a client could as well have had any other classes.
"""

import sys

import numpy as np

CLASSES = int(sys.argv[1]) if len(sys.argv) > 1 else 10
STEPS = 20_000


def clients(classes: int) -> np.ndarray:
    """The label shares of every client that has two classes, half and half."""
    rows, columns = np.triu_indices(classes, 1)
    return (np.eye(classes)[rows] + np.eye(classes)[columns]) / 2


def farthest(best: np.ndarray, p: np.ndarray, shares: np.ndarray) -> tuple[float, int]:
    """How far the worst client moves from the model that stands for p, and which client that is."""
    ways = np.linalg.norm((shares - p) @ best, axis=1)
    return float(ways.max()), int(ways.argmax())


def search(best: np.ndarray, shares: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The p from which the worst client moves least: step by step towards that client, a little
    less each time.
    """
    p = start
    for step in range(1, STEPS):
        p = p + (shares[farthest(best, p, shares)[1]] - p) / (step + 1)
    return p


def say(name: str, best: np.ndarray, p: np.ndarray, shares: np.ndarray) -> None:
    """One line: the worst client's way from p."""
    print(
        f"  {name:<34} {farthest(best, p, shares)[0]:.3f}   shares {p.min():.3f} to {p.max():.3f}"
    )


even = np.full(CLASSES, 1 / CLASSES)
uneven = np.arange(1, CLASSES + 1) / np.arange(1, CLASSES + 1).sum()
lone = np.eye(CLASSES)[0]
# the classes' best models at right angles, one unit from the origin
apart, halves = np.eye(CLASSES), clients(CLASSES)

print(
    f"{len(halves)} clients of two classes out of {CLASSES}. The worst one moves this far from a "
    "model that stands for"
)
for name, p in (("all classes alike", even), ("later classes more", uneven), ("one class", lone)):
    say(name, apart, p, halves)
say("the best, searched from one class", apart, search(apart, halves, lone), halves)

# two classes want the same model, the third another one
line, alone = np.array([[0.0], [0.0], [1.0]]), np.eye(3)
print(
    "Three clients of one class each, where two classes have the same best model: the proposition "
    "needs them apart."
)
say("all classes alike", line, np.full(3, 1 / 3), alone)
say("the best, searched", line, search(line, alone, np.full(3, 1 / 3)), alone)
