"""Modules of other libraries as networks with a body and a head: imitations of modules for vision
and language, and modules that are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError
from fedstill.core.records import ModelSpec, Plan, as_pairs
from fedstill.engines.vectorised import stacking_obstacle
from fedstill.flower.site_settings import code_in
from fedstill.models import contract
from fedstill.models.building import from_pairs
from fedstill.running.runner import resume, run
from fedstill.running.same_run import code_digests
from kinds import small_data
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

HERE = "test_wrapped"


class Vision(nn.Module):
    """As torchvision's and timm's: features, pooling, and a linear layer called ``fc``."""

    def __init__(self, width: int = 4, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.features(x).flatten(1))
        return y


def vision(*, weights: object = None, progress: bool = True, **kwargs: object) -> Vision:
    """A constructor like torchvision's."""
    return Vision(**kwargs)  # type: ignore[arg-type]


class Configuration:
    """As a configuration of transformers."""

    def __init__(self, vocab_size: int = 100, hidden_size: int = 8) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size


class Language(nn.Module):
    """As transformers': built from a configuration, and what it returns is a record."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None
    ) -> OrderedDict[str, Tensor]:
        states = self.tokens(ids)
        if attention_mask is None:
            attention_mask = torch.ones_like(ids)
        total = (states * attention_mask.unsqueeze(2)).sum(1)
        return OrderedDict(last_hidden_state=states, pooler_output=self.pooler(total).tanh())


class Recorded(nn.Module):
    """Returns a record that is no mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(embedding=self.layer(x))


class Branching(nn.Module):
    """Looks at numbers, which a stack does not have one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.sum() > 0:
            return y
        return 2 * y


CONFIG = {"of": f"{HERE}:Configuration", "vocab_size": 30, "hidden_size": 8}
TEXT = {"of": f"{HERE}:Language", "arguments": {"config": CONFIG}, "mask": True}


def wrapping(
    shape: tuple[int, ...] = (1, 4, 4), vocabulary: int = 0, **fields: object
) -> ModelSpec:
    """A wrapped module for four classes."""
    return contract.spec_for("wrapped", shape, 4, fields, vocabulary)


def test_a_linear_layer_becomes_the_head_and_the_rest_is_the_body() -> None:
    spec = wrapping(of=f"{HERE}:Vision", arguments={"width": 6}, head="fc")
    module = contract.module(spec)
    params = contract.initial(spec, 0)
    x = torch.randn(3, 1, 4, 4)

    features = contract.features(module, params, x)
    logits = contract.forward(module, params, x)

    assert {name for name in params if name.startswith("head.")} == {"head.weight", "head.bias"}
    assert not [name for name in params if ".fc." in name]
    assert params["head.weight"].shape == (4, 6)
    assert features.shape == (3, 6)
    torch.testing.assert_close(logits, contract.head(module, params, features))

    state = {"fc.weight": params["head.weight"], "fc.bias": params["head.bias"]}
    for name, value in params.items():
        if name.startswith("body."):
            state[name.removeprefix("body.inner.")] = value
    original = Vision(6, 4)
    original.load_state_dict(state)
    torch.testing.assert_close(original(x), logits)


def test_without_a_head_one_is_added_behind_the_module() -> None:
    vision_spec = wrapping(of=f"{HERE}:vision", arguments={"num_classes": 7})
    recorded_spec = wrapping((6,), of=f"{HERE}:Recorded", output="embedding")

    assert contract.initial(vision_spec, 0)["head.weight"].shape == (4, 7)
    assert contract.initial(recorded_spec, 0)["head.weight"].shape == (4, 5)


@pytest.mark.parametrize("output", ["pooler_output", "mean"])
def test_padding_does_not_change_the_logits_of_a_text(output: str) -> None:
    spec = wrapping((12,), 30, **TEXT, output=output)
    params = contract.initial(spec, 0)
    module = contract.module(spec).eval()
    texts = torch.randint(1, 30, (3, 5))
    padded = nn.functional.pad(texts, (0, 7))

    logits = contract.forward(module, params, texts)
    logits_of_empty = contract.forward(module, params, contract.example(spec, 2))

    torch.testing.assert_close(contract.forward(module, params, padded), logits)
    assert bool(logits_of_empty.isfinite().all())


def test_equal_specs_have_one_hash_and_tables_can_be_restored() -> None:
    first = wrapping((12,), 30, **TEXT, output="mean")
    second = wrapping((12,), 30, **TEXT, output="mean")
    table = {"a": {"b": [1, 2], "c": {}}, "d": "x"}

    assert hash(first) == hash(second)
    assert len(first.label) < 150
    assert from_pairs(as_pairs(table)) == {"a": {"b": (1, 2), "c": ()}, "d": "x"}


SERIES_LAYER = {
    "of": "torch.nn:Conv1d",
    "in_channels": 2,
    "out_channels": 3,
    "kernel_size": 3,
}
WRAPPED: dict[str, dict[str, object]] = {
    "series": {"name": "wrapped", "of": f"{HERE}:Series", "arguments": {"layer": SERIES_LAYER}},
    "text": {"name": "wrapped", **TEXT, "output": "mean"},
}
"""By kind of data, a network."""


@pytest.mark.parametrize("kind", ["series", "text"])
def test_it_trains_under_every_engine_and_resumes(kind: str, tmp_path: Path) -> None:
    data = small_data(kind)
    pooled = toys.toy(
        "moon",
        engine="pooled",
        model=WRAPPED[kind],
        topology={"clients": 4},
        rounds=2,
        plan={"epochs": 1, "batch": 10, "lr": 0.1},
    )

    pooled_result = run(pooled, tmp_path / "pooled", data)
    serial_result = run(replace(pooled, engine="serial"), tmp_path / "serial", data)
    stopped(pooled, tmp_path / "stopped", 1, data)
    resume(tmp_path / "stopped", data)

    for name, value in pooled_result.model.items():
        assert torch.equal(value, serial_result.model[name])
    assert_same_bits(bits(tmp_path / "stopped"), bits(tmp_path / "pooled"))


class Series(nn.Module):
    """Takes a layer that is made of a table."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).mean(2)
        return y


def test_modules_that_cannot_be_stacked_are_found_before_training() -> None:
    text_spec = wrapping((12,), 30, **TEXT, output="mean")
    branching_spec = wrapping((6,), of=f"{HERE}:Branching")

    obstacle = stacking_obstacle(branching_spec, Plan())

    assert not stacking_obstacle(text_spec, Plan())
    assert "under torch.func.vmap, or not at all" in obstacle
    assert "\n" not in obstacle


def test_code_is_listed_from_all_tables() -> None:
    arguments = {"config": {"of": "c.d:Conf", "n": 3}}
    model = {"name": "wrapped", "of": "a.b:Net", "arguments": arguments}
    clients = {"models": [{"name": "wrapped", "of": "nets.py:Net"}]}

    assert code_in({"model": model}) == ["a.b:Net", "c.d:Conf"]
    assert code_in({"model": "mlp", "clients": clients}) == ["nets.py:Net"]


NETWORK_FILE = """
from torch import nn

def net(size: int = 3):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, size))
"""
CONFIG_FILE = """
rounds = 1
[model]
name = 'wrapped'
of = 'own.py:net'
head = '1'
"""


def test_a_file_is_found_beside_the_config_and_its_digest_is_stored(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NETWORK_FILE)
    (tmp_path / "own.toml").write_text(CONFIG_FILE)

    settings = resolve(load(tmp_path / "own.toml"))

    assert settings.named.model.values["of"] == f"{tmp_path / 'own.py'}:net"
    assert list(code_digests(settings)) == [str(tmp_path / "own.py")]


@pytest.mark.parametrize(
    ("shape", "vocabulary", "fields", "problem"),
    [
        (
            (1, 4, 4),
            0,
            {"of": f"{HERE}:Vision", "head": "classifier"},
            "model.head = 'classifier'",
        ),
        (
            (1, 4, 4),
            0,
            {"of": f"{HERE}:Vision", "arguments": {"depth": 3}},
            "TypeError",
        ),
        ((1, 4, 4), 0, {"of": f"{HERE}:Vison"}, "did you mean"),
        ((1, 4, 4), 0, {"of": "no.such:Thing"}, "failed to import"),
        ((1, 4, 4), 0, {"of": "Vision"}, "must be an import path"),
        (
            (1, 4, 4),
            0,
            {"of": f"{HERE}:Configuration"},
            "Configuration",
        ),
        (
            (3, 4, 4),
            0,
            {"of": f"{HERE}:Vision", "head": "fc"},
            "(3, 4, 4)",
        ),
        (
            (6,),
            0,
            {"of": f"{HERE}:Recorded"},
            "['embedding']",
        ),
        (
            (12,),
            30,
            {**TEXT, "output": "logits"},
            "model.output = 'logits'",
        ),
        (
            (12,),
            30,
            {**TEXT, "mask": False},
            "['last_hidden_state', 'pooler_output']",
        ),
        ((6,), 0, {"of": f"{HERE}:Recorded", "mask": True}, "model.mask = true"),
        (
            (12,),
            30,
            {"of": "torch.nn:Embedding", "arguments": {"num_embeddings": 30, "embedding_dim": 4}},
            "model.output = 'mean'",
        ),
        (
            (12,),
            30,
            {**TEXT, "arguments": {"config": {**CONFIG, "depth": 3}}},
            "model.arguments: test_wrapped:Conf",
        ),
    ],
)
def test_modules_that_cannot_be_wrapped_are_refused_in_one_line(
    shape: tuple[int, ...], vocabulary: int, fields: dict[str, object], problem: str
) -> None:
    with pytest.raises(FedstillError) as refusal:
        contract.build(wrapping(shape, vocabulary, **fields))

    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_networks_of_a_pair_are_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NETWORK_FILE)
    (tmp_path / "pair.toml").write_text("[model]\nname = 'pair'\nown = 'own.py:net'\n")

    settings = resolve(load(tmp_path / "pair.toml"))

    assert settings.named.model.values["own"] == f"{tmp_path / 'own.py'}:net"
    assert settings.named.model.values["shared"] == "cnn"
