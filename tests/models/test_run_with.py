"""A module that is run with other tensors returns what torch's ``functional_call`` returns, and its
own tensors are not changed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedstill.models.contract import run_with


class Recurrent(nn.Module):
    """Its layer keeps a list of its weights beside torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x.view(len(x), 2, 4))[0][:, -1])
        return y


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


class Failing(nn.Linear):
    """Fails with its input."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


MODULES = {
    "layers": lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2, bias=False)),
    "statistics": lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
    "recurrent": Recurrent,
    "tied": Tied,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 2)),
}


def scaled(module: nn.Module, factor: float = 1.5) -> dict[str, Tensor]:
    """Other tensors for all names of a module; names that share a tensor share the other."""
    params = dict(module.named_parameters(remove_duplicate=False))
    state = {**params, **dict(module.named_buffers())}
    by_tensor: dict[Tensor, Tensor] = {}
    for value in state.values():
        other_value = value.detach().clone()
        if value.is_floating_point():
            other_value = other_value * factor
        by_tensor.setdefault(value, other_value.requires_grad_(value.requires_grad))
    return {name: by_tensor[value] for name, value in state.items()}


def inputs() -> Tensor:
    """Five examples."""
    return torch.randn(5, 8)


@pytest.mark.parametrize("kind", MODULES)
def test_it_is_torchs_functional_call(kind: str) -> None:
    """In a second call too, which finds the places of tensors by those of the first."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    x = inputs()
    original = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = scaled(module)
    torch_tensors = scaled(module)

    for _ in range(2):
        output = run_with(module, tensors, x)
        expected = functional_call(module, torch_tensors, (x,))
        assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()

    for name, value in tensors.items():
        gradient = value.grad
        expected_gradient = torch_tensors[name].grad
        assert torch.equal(value, torch_tensors[name]), "running statistics are the same"
        assert (gradient is None) == (expected_gradient is None)
        assert gradient is None or torch.equal(gradient, expected_gradient)
    for name, value in module.state_dict().items():
        assert torch.equal(value, original[name])


def test_missing_names_are_the_modules_own_and_unknown_names_have_no_effect() -> None:
    module = MODULES["layers"]()
    x = inputs()
    weight_only = {"0.weight": torch.zeros(6, 8)}
    unknown_only = {"0.nothing": torch.zeros(1)}

    assert torch.equal(run_with(module, weight_only, x), functional_call(module, weight_only, (x,)))
    assert torch.equal(run_with(module, unknown_only, x), module(x))
    assert not hasattr(module[0], "nothing")


def test_one_name_of_a_shared_tensor_is_enough() -> None:
    x = inputs()

    assert torch.equal(run_with(Tied(), {"first.weight": torch.eye(8)}, x), x.relu())


def test_a_part_that_was_replaced_is_found_again() -> None:
    module = MODULES["layers"]()
    x = inputs()
    run_with(module, scaled(module), x)

    module[2] = nn.Linear(6, 2, bias=False)
    tensors = scaled(module)

    assert torch.equal(run_with(module, tensors, x), functional_call(module, tensors, (x,)))
    assert not torch.equal(run_with(module, tensors, x), module(x))


def test_a_module_without_references_is_freed() -> None:
    module = MODULES["layers"]()
    run_with(module, scaled(module), inputs())
    reference = ref(module)

    del module

    assert reference() is None


def test_a_call_that_fails_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Failing(8, 8))
    original = dict(module.named_parameters())

    with pytest.raises(ValueError, match="no"):
        run_with(module, scaled(module), inputs())

    for name, value in module.named_parameters():
        assert value is original[name]


def test_stacked_tensors_are_those_of_each_client() -> None:
    module = MODULES["layers"]()
    x = torch.randn(3, 5, 8)
    stacked = {
        name: torch.stack([value.detach(), 2 * value.detach(), 3 * value.detach()])
        for name, value in module.named_parameters()
    }

    outputs = vmap(lambda tensors, client_x: run_with(module, tensors, client_x))(stacked, x)

    for client in range(3):
        tensors = {name: value[client] for name, value in stacked.items()}
        torch.testing.assert_close(outputs[client], run_with(module, tensors, x[client]))


def test_threads_run_modules_of_their_own_at_the_same_time() -> None:
    """As the engines' threads do."""
    module = MODULES["layers"]()
    tensors = scaled(module, 2.0)
    x = inputs()

    def output(_: int) -> Tensor:
        return run_with(MODULES["layers"](), tensors, x)

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(output, range(20)))

    expected = run_with(module, tensors, x)
    assert all(torch.equal(value, expected) for value in outputs)
