"""A module run with other tensors gives what torch's ``functional_call`` gives, and has its own
again after.
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
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x).relu())
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


def others(m: nn.Module, factor: float = 1.5) -> dict[str, Tensor]:
    """Other tensors for all names of a module; names that share one share the other."""
    made: dict[Tensor, Tensor] = {}
    state = {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())}
    for v in state.values():
        if v not in made:
            made[v] = (v.detach() * factor if v.is_floating_point() else v.clone()).requires_grad_(
                v.requires_grad
            )
    return {k: made[v] for k, v in state.items()}


@pytest.mark.parametrize("kind", MODULES)
def test_it_is_torchs_functional_call(kind: str) -> None:
    torch.manual_seed(0)
    m, x = MODULES[kind](), torch.randn(5, 8)
    own = {k: v.clone() for k, v in m.state_dict().items()}
    ours, theirs = others(m), others(m)
    for _ in range(2):
        got, expected = run_with(m, ours, x), functional_call(m, theirs, (x,))
        assert torch.equal(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    for name, v in ours.items():
        assert torch.equal(v, theirs[name]), "buffers move alike"
        assert v.grad is None or torch.equal(v.grad, theirs[name].grad)
        assert (v.grad is None) == (theirs[name].grad is None)
    assert all(torch.equal(v, own[k]) for k, v in m.state_dict().items())


def test_names_that_are_left_out_are_the_modules_own_and_one_that_it_lacks_is_torchs_to_judge() -> (
    None
):
    m, x = MODULES["layers"](), torch.randn(5, 8)
    some = {"0.weight": torch.zeros(6, 8)}
    assert torch.equal(run_with(m, some, x), functional_call(m, some, (x,)))
    more = {"0.nothing": torch.zeros(1)}
    assert torch.equal(run_with(m, more, x), m(x))
    assert not hasattr(m[0], "nothing")


def test_one_name_of_a_shared_tensor_stands_for_all() -> None:
    m, x = Tied(), torch.randn(5, 8)
    one = {"one.weight": torch.eye(8)}
    assert torch.equal(run_with(m, one, x), x.relu())


def test_a_part_that_has_become_another_is_found_again() -> None:
    m, x = MODULES["layers"](), torch.randn(5, 8)
    run_with(m, others(m), x)
    m[2] = nn.Linear(6, 2, bias=False)
    some = others(m)
    assert torch.equal(run_with(m, some, x), functional_call(m, some, (x,)))
    assert not torch.equal(run_with(m, some, x), m(x))


def test_a_module_that_nobody_has_any_more_is_not_kept() -> None:
    m = MODULES["layers"]()
    run_with(m, others(m), torch.randn(5, 8))
    gone = ref(m)
    del m
    assert gone() is None


def test_a_call_that_fails_leaves_the_module_as_it_was() -> None:
    m = nn.Sequential(nn.Linear(8, 8), Failing(8, 8))
    before = dict(m.named_parameters())
    with pytest.raises(ValueError, match="no"):
        run_with(m, others(m), torch.randn(5, 8))
    assert all(v is before[k] for k, v in m.named_parameters())


def test_a_stack_of_tensors_and_threads() -> None:
    m, x = MODULES["layers"](), torch.randn(3, 5, 8)
    stack = {
        k: torch.stack([v.detach() * f for f in (1.0, 2.0, 3.0)]) for k, v in m.named_parameters()
    }
    together = vmap(lambda p, x: run_with(m, p, x))(stack, x)
    for i in range(3):
        alone = run_with(m, {k: v[i] for k, v in stack.items()}, x[i])
        torch.testing.assert_close(together[i], alone)
    with ThreadPoolExecutor(2) as pool:  # modules of their own, as the engines' threads have
        each = list(
            pool.map(lambda f: run_with(MODULES["layers"](), others(m, f), x[0]), [2.0] * 20)
        )
    assert all(torch.equal(y, each[0]) for y in each)
