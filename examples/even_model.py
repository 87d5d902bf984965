"""The global model that suits clients with any classes: FedNTD's proposition 3 in numbers.

    python examples/even_model.py [CLASSES]

Assume that the best model of class c is w_c, and that a client with label shares p trains until it
reaches the model sum_c p_c w_c. The global model has this form, too. How far does the client move
that moves farthest? The distance is smallest if the global model represents all classes equally.
This holds if clients may have any classes, and if the best models are equally far apart.
"""

import argparse

import numpy as np

SEARCH_STEPS = 20_000


def shares_of_two_classes(classes: int) -> np.ndarray:
    """Label shares of all clients that have two classes in equal parts, one client per row."""
    first_class, second_class = np.triu_indices(classes, k=1)
    identity = np.eye(classes)
    return (identity[first_class] + identity[second_class]) / 2


def distances(
    global_shares: np.ndarray, client_shares: np.ndarray, best_models: np.ndarray
) -> np.ndarray:
    """How far each client moves from the global model."""
    movements = (client_shares - global_shares) @ best_models
    return np.linalg.norm(movements, axis=1)


def minimax_shares(
    start: np.ndarray, client_shares: np.ndarray, best_models: np.ndarray
) -> np.ndarray:
    """The class shares of the global model for which the largest distance is smallest.

    Each step moves the shares towards the client that is farthest away, by a smaller fraction
    every time.
    """
    global_shares = start
    for step in range(1, SEARCH_STEPS):
        farthest_client = distances(global_shares, client_shares, best_models).argmax()
        direction = client_shares[farthest_client] - global_shares
        global_shares = global_shares + direction / (step + 1)
    return global_shares


def print_largest_distance(
    title: str, global_shares: np.ndarray, client_shares: np.ndarray, best_models: np.ndarray
) -> None:
    """Print how far the client moves that moves farthest."""
    largest = distances(global_shares, client_shares, best_models).max()
    share_range = f"shares {global_shares.min():.3f} to {global_shares.max():.3f}"
    print(f"  {title:<34} {largest:.3f}   {share_range}")


parser = argparse.ArgumentParser(description="FedNTD's proposition 3 in numbers.")
parser.add_argument("classes", nargs="?", type=int, default=10, help="at least 2 (default: 10)")
classes = parser.parse_args().classes
if classes < 2:
    parser.error(f"classes = {classes}: each client has two classes, so use at least 2")

# The best models are orthogonal and have length 1, so they are equally far apart.
orthogonal_models = np.eye(classes)
client_shares = shares_of_two_classes(classes)
equal_shares = np.full(classes, 1 / classes)
class_numbers = np.arange(1, classes + 1)
increasing_shares = class_numbers / class_numbers.sum()
one_class = np.eye(classes)[0]
searched_shares = minimax_shares(one_class, client_shares, orthogonal_models)

print(
    f"{len(client_shares)} clients have two of {classes} classes. "
    "Largest distance from a global model that represents"
)
print_largest_distance("all classes equally", equal_shares, client_shares, orthogonal_models)
print_largest_distance("later classes more", increasing_shares, client_shares, orthogonal_models)
print_largest_distance("one class", one_class, client_shares, orthogonal_models)
print_largest_distance(
    "the best shares, from a search", searched_shares, client_shares, orthogonal_models
)

# The proposition does not hold if two classes have the same best model.
coinciding_models = np.array([[0.0], [0.0], [1.0]])
client_shares = np.eye(3)
equal_shares = np.full(3, 1 / 3)
searched_shares = minimax_shares(equal_shares, client_shares, coinciding_models)

print("Three clients have one class each, and two of the classes have the same best model.")
print_largest_distance("all classes equally", equal_shares, client_shares, coinciding_models)
print_largest_distance(
    "the best shares, from a search", searched_shares, client_shares, coinciding_models
)
