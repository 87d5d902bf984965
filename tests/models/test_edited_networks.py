"""A network whose code changes between two runs of a process, as in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.core.registry import register
from fedstill.running.preparation import prepare

FILE = """
from torch import nn
from activations import Activation

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), Activation())
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.body(x))
"""


def features_of(model: dict[str, Any]) -> Tensor:
    """The features of the first examples in a new run."""
    ready = prepare(resolve(toys.toy(model=model)), toys.blobs())
    view = ready.sites.view(0, ready.settings.schedule(1, ready.world)[0])
    return view.features(ready.world.initial(SERVER))


@pytest.mark.parametrize(
    "model", [{"name": "nets.py:Net"}, {"name": "low_rank", "of": "nets.py:Net"}]
)
def test_an_edited_file_is_another_network(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(FILE)
    helper = Path("activations.py")
    helper.write_text("from torch.nn import ReLU as Activation")
    before = features_of(model)
    helper.write_text("from torch.nn import Identity as Activation")
    after = features_of(model)
    assert torch.equal(after.relu(), before)
    assert bool((after < 0).any())


def test_a_network_that_is_registered_again_is_another_one() -> None:
    def define(activation: type[nn.Module]) -> None:
        @register("model", "toy_defined_twice")
        def network(input_shape: tuple[int, ...], classes: int) -> nn.Module:
            network = nn.Sequential()
            network.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), activation())
            network.head = nn.Linear(8, classes)
            return network

    define(nn.ReLU)
    before = features_of({"name": "toy_defined_twice"})
    define(nn.Identity)
    after = features_of({"name": "toy_defined_twice"})
    assert torch.equal(after.relu(), before)
    assert bool((after < 0).any())


def initial_weights(model: Any) -> dict[str, Tensor]:
    """The initial weights of a new run."""
    return prepare(resolve(toys.toy(model=model)), toys.blobs()).world.initial(SERVER)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "nets.py:Net"},
        {"name": "low_rank", "of": "nets.py:Net"},
        {"name": "etf", "of": "low_rank", "arguments": {"of": "nets.py:Net"}},
    ],
)
def test_initial_weights_do_not_depend_on_the_folder_of_a_file(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "nets.py").write_text(FILE)
        (folder / "activations.py").write_text("from torch.nn import ReLU as Activation")
        monkeypatch.chdir(folder)
        weights.append(initial_weights(model))
    first, second = weights
    assert all(torch.equal(first[entry], second[entry]) for entry in first)


def test_a_cell_that_runs_again_has_the_same_initial_weights() -> None:
    def network_of_cell() -> type[nn.Module]:
        class Net(nn.Sequential):
            def __init__(self, classes: int) -> None:
                super().__init__(nn.Flatten(), nn.Linear(16, classes))

        return Net

    first, second = (initial_weights(network_of_cell()) for _ in range(2))
    assert all(torch.equal(first[entry], second[entry]) for entry in first)
