"""Objects that only exist in a Python process: their identity, and the names to which they are
bound.
"""

from __future__ import annotations

import functools
import linecache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstill.config.experiment import Experiment, bind, fingerprint, name_for
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError

CELL = """
from dataclasses import dataclass
import fedstill

@dataclass(frozen=True)
class Typed(fedstill.Method):
    beta: float = 1.0
    personal = {personal}

    def requires(self):
        return super().requires()

note = {note!r}
"""


def class_of_cell(**texts: str) -> Any:
    """The class in a cell of a notebook."""
    text = CELL.format(**texts)
    name = f"<cell {texts}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[name] = (len(text), None, lines, name)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), cell)
    return cell["Typed"]


def identity(kind: str, user_object: Any) -> str:
    return fingerprint(kind, name_for(kind, user_object))


def test_the_identity_of_a_class_in_a_notebook_is_its_source() -> None:
    first = identity("method", class_of_cell(personal="frozenset()", note="a"))
    same = identity("method", class_of_cell(personal="frozenset()", note="b"))
    changed = identity("method", class_of_cell(personal="frozenset({'x'})", note="a"))
    assert first != "unknown"
    assert first == same
    assert first != changed


def split_by(labels: Any, clients: int, owners: Any) -> list[Any]:
    return [np.flatnonzero(owners == client) for client in range(clients)]


@pytest.mark.parametrize("as_owners", [np.asarray, torch.from_numpy])
def test_arrays_are_part_of_the_identity_of_a_partial_function(as_owners: Any) -> None:
    owners = np.arange(2000) % 4
    changed = owners.copy()
    changed[1000] += 1
    first, same, other = (
        identity("partition", functools.partial(split_by, owners=as_owners(values)))
        for values in (owners, owners.copy(), changed)
    )
    assert first == same
    assert first != other


def test_weights_are_part_of_the_identity_of_a_partial_function() -> None:
    networks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    first, other = (
        identity("model", functools.partial(nn.Sequential, network)) for network in networks
    )
    assert first != other


def test_functions_are_part_of_the_identity_of_a_partial_function() -> None:
    """A function has another address in each process."""

    def module_of(offset: int) -> ModuleType:
        text = f"def by(label):\n    return label + {offset}\n"
        file = f"<module {offset}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        module = ModuleType("module")
        exec(compile(text, file, "exec"), vars(module))
        return module

    first, same, other = (
        identity("partition", functools.partial(split_by, owners=module_of(offset).by))
        for offset in (1, 1, 2)
    )
    assert first == same
    assert first != other


def test_a_partial_function_keeps_an_array() -> None:
    partition = functools.partial(split_by, owners=np.arange(8) % 4)
    settings = resolve(Experiment(partition=partition))
    assert dict(settings.named.partition.values) == {}
    assert "owners" not in settings.toml


def first_network() -> type[nn.Module]:
    class Net(nn.Linear):
        pass

    return Net


def other_network() -> type[nn.Module]:
    class Net(nn.Bilinear):
        pass

    return Net


def test_a_name_is_bound_to_one_object_in_a_process() -> None:
    """A resumed run must not continue with an older object than the one that it is given."""
    name = name_for("model", first_network())
    bind("model", name, first_network())
    with pytest.raises(ConfigError, match=f"model '{name}' has other code .* new process"):
        bind("model", name, other_network())
