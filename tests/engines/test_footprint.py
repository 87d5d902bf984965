"""The cost of a step: operations, dense gradients and activations. That of images keeps its
formula.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import Tensor, nn

from fedstill.core.records import Plan
from fedstill.core.registry import register
from fedstill.engines import passes
from fedstill.engines.pooled import step_cost
from fedstill.engines.vectorised import stacking_obstacle
from fedstill.models import contract

TEXT = contract.spec_for("bag", (12,), 4, {"width": 6}, 30)
TABLE = contract.spec_for("mlp", (5,), 3, {"hidden": (8,)})


def test_products_are_counted_and_an_embeddings_gradient_is_dense() -> None:
    assert passes.forward_flops(TEXT) == 2 * 6 * 4
    assert passes.embedding_size(TEXT) == 30 * 6
    assert passes.step_flops(TEXT, 10) == 3 * 10 * 2 * 6 * 4 + 2 * 30 * 6
    assert passes.step_flops(TABLE, 7) == 3 * 7 * 2 * (5 * 8 + 8 * 3)


def test_activations_are_what_layers_give() -> None:
    assert passes.activations(TABLE) == 8 + 8 + 3, "linear, ReLU, linear; a view is nothing new"


def test_counting_does_not_import_torchs_compiler() -> None:
    program = (
        "import sys\n"
        "from fedstill.engines import passes\n"
        "from fedstill.models import contract\n"
        "series = contract.spec_for('series_cnn', (3, 40), 4, {})\n"
        "print(passes.activations(series), passes.forward_flops(series))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "False"


@register("model", "toy_looking")
class Looking(nn.Module):
    """A network that looks at a number of its input, which has none where there are only shapes."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], classes)
        self.register_buffer("hidden", self.layer.weight.detach().clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x) + 0 * (x @ self.hidden.T)
        if bool(x.sum() < 1):
            return logits
        return 2 * logits


def test_a_network_that_looks_at_numbers_is_counted_on_zeros() -> None:
    spec = contract.spec_for("toy_looking", (5,), 3, {})
    assert passes.forward_flops(spec) == 2 * 2 * 5 * 3
    assert passes.activations(spec) == 4 * 3 + 1, "two products, two sums of x's size, and x's sum"


@pytest.mark.parametrize("name", ["mlp", "digits_cnn", "cnn"])
def test_images_keep_their_numbers(name: str) -> None:
    """How many clients fit into a stack, and so the last bit of old runs, depends on them."""
    spec = contract.spec_for(name, (1, 8, 8), 10, {})
    assert step_cost(spec, 50) == 6 * 50 * (contract.size(spec) + 10 * 64)


def test_more_tokens_a_larger_vocabulary_and_a_larger_batch_are_more_work() -> None:
    def cost(*, length: int, vocabulary: int, batch: int) -> float:
        return step_cost(contract.spec_for("bag", (length,), 4, {}, vocabulary), batch)

    smallest = cost(length=12, vocabulary=30, batch=10)
    more_tokens = cost(length=24, vocabulary=30, batch=10)
    larger_batch = cost(length=24, vocabulary=30, batch=20)
    larger_vocabulary = cost(length=24, vocabulary=9000, batch=20)
    assert smallest < more_tokens < larger_batch < larger_vocabulary


@register("model", "toy_sparse_bag")
class SparseBag(nn.Module):
    """A bag of words by torch's own layer for it."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.body = nn.EmbeddingBag(vocabulary, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def test_layers_without_a_rule_are_named() -> None:
    obstacle = stacking_obstacle(contract.spec_for("toy_sparse_bag", (12,), 4, {}, 30), Plan())
    assert obstacle.startswith("model toy_sparse_bag ")
    assert "EmbeddingBag" in obstacle
    assert not stacking_obstacle(TEXT, Plan())
