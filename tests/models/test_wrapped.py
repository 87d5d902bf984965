"""Modules of others as networks with a body and a head: look-alikes of vision's and of language's;
what is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import FedstillError, Interrupted
from fedstill.core.records import ModelSpec, Plan, as_pairs
from fedstill.engines.vectorised import stacking_obstacle
from fedstill.flower.site_settings import code_in
from fedstill.models import contract
from fedstill.models.building import from_pairs
from fedstill.running.runner import resume, run
from fedstill.running.same_run import code_digests
from kinds import small_data
from run_bits import StopAfter, assert_same_bits, bits

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
        self.vocab_size, self.hidden_size = vocab_size, hidden_size


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
        there = torch.ones_like(ids) if attention_mask is None else attention_mask
        total = (states * there.unsqueeze(2)).sum(1)
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
        return y if bool(y.sum() > 0) else 2 * y


CONFIG = {"of": f"{HERE}:Configuration", "vocab_size": 30, "hidden_size": 8}
TEXT = {"of": f"{HERE}:Language", "arguments": {"config": CONFIG}, "mask": True}


def wrapping(
    shape: tuple[int, ...] = (1, 4, 4), vocabulary: int = 0, **fields: object
) -> ModelSpec:
    return contract.spec_for("wrapped", shape, 4, fields, vocabulary)


def test_a_linear_layer_is_replaced_and_the_rest_is_the_body() -> None:
    spec = wrapping(of=f"{HERE}:Vision", arguments={"width": 6}, head="fc")
    params = contract.initial(spec, 0)
    assert {k for k in params if k.startswith("head.")} == {"head.weight", "head.bias"}
    assert not [k for k in params if ".fc." in k]
    assert params["head.weight"].shape == (4, 6)
    x = torch.randn(3, 1, 4, 4)
    z = contract.features(contract.module(spec), params, x)
    assert z.shape == (3, 6)
    logits = contract.forward(contract.module(spec), params, x)
    torch.testing.assert_close(logits, contract.head(contract.module(spec), params, z))
    inner = Vision(6, 4)
    own = {k.removeprefix("body.inner."): v for k, v in params.items() if k.startswith("body.")}
    inner.load_state_dict(
        {**own, "fc.weight": params["head.weight"], "fc.bias": params["head.bias"]}
    )
    torch.testing.assert_close(inner(x), logits)


def test_without_a_head_one_is_put_behind() -> None:
    spec = wrapping(of=f"{HERE}:vision", arguments={"num_classes": 7})
    assert contract.initial(spec, 0)["head.weight"].shape == (4, 7)
    assert contract.initial(wrapping((6,), of=f"{HERE}:Recorded", output="embedding"), 0)[
        "head.weight"
    ].shape == (4, 5)


@pytest.mark.parametrize("output", ["pooler_output", "mean"])
def test_records_of_tokens_and_padding(output: str) -> None:
    spec = wrapping((12,), 30, **TEXT, output=output)
    params, m = contract.initial(spec, 0), contract.module(spec).eval()
    short = torch.randint(1, 30, (3, 5))
    x = nn.functional.pad(short, (0, 7))
    torch.testing.assert_close(contract.forward(m, params, x), contract.forward(m, params, short))
    assert bool(contract.forward(m, params, contract.example(spec, 2)).isfinite().all())


def test_specs_are_hashable_and_tables_come_back() -> None:
    one, two = (wrapping((12,), 30, **TEXT, output="mean") for _ in range(2))
    assert hash(one) == hash(two)
    said = {"a": {"b": [1, 2], "c": {}}, "d": "x"}
    assert from_pairs(as_pairs(said)) == {"a": {"b": (1, 2), "c": ()}, "d": "x"}
    assert len(one.label) < 150


@pytest.mark.parametrize("kind", ["series", "text"])
def test_it_trains_under_every_engine_and_resumes(kind: str, tmp_path: Path) -> None:
    data = small_data(kind)
    network: dict[str, object] = {"name": "wrapped", **TEXT, "output": "mean"}
    if kind == "series":
        own = {"in_channels": 2, "out_channels": 3, "kernel_size": 3}
        network = {
            "name": "wrapped",
            "of": f"{HERE}:Series",
            "arguments": {"layer": {"of": "torch.nn:Conv1d", **own}},
        }
    changes = {
        "model": network,
        "topology": {"clients": 4},
        "rounds": 2,
        "plan": {"epochs": 1, "batch": 10, "lr": 0.1},
    }
    whole = run(toys.toy("moon", engine="pooled", **changes), tmp_path / "whole", data=data)
    serial = run(toys.toy("moon", engine="serial", **changes), tmp_path / "serial", data=data)
    assert all(torch.equal(v, serial.model[k]) for k, v in whole.model.items())
    with pytest.raises(Interrupted):
        run(
            toys.toy("moon", engine="pooled", **changes),
            tmp_path / "half",
            data,
            watch=StopAfter(1),
        )
    resume(tmp_path / "half", data)
    assert_same_bits(bits(tmp_path / "half"), bits(tmp_path / "whole"))


class Series(nn.Module):
    """Takes a layer that is made of a table."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).mean(2)
        return y


def test_modules_that_cannot_be_stacked_are_told_beforehand() -> None:
    assert not stacking_obstacle(wrapping((12,), 30, **TEXT, output="mean"), Plan())
    why = stacking_obstacle(wrapping((6,), of=f"{HERE}:Branching"), Plan())
    assert "under torch.func.vmap, or not at all" in why
    assert "\n" not in why


def test_code_is_listed_wherever_it_stands() -> None:
    tree = {
        "model": {
            "name": "wrapped",
            "of": "a.b:Net",
            "arguments": {"config": {"of": "c.d:Conf", "n": 3}},
        }
    }
    assert code_in(tree) == ["a.b:Net", "c.d:Conf"]
    clients = {"clients": {"models": [{"name": "wrapped", "of": "nets.py:Net"}]}}
    assert code_in({"model": "mlp", **clients}) == ["nets.py:Net"]


def test_a_file_is_found_beside_the_config_and_its_sum_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\ndef net(size: int = 3):\n    return nn.Sequential(nn.Flatten(), "
        "nn.Linear(16, size))\n"
    )
    (tmp_path / "own.toml").write_text(
        "rounds = 1\n[model]\nname = 'wrapped'\nof = 'own.py:net'\nhead = '1'\n"
    )
    from fedstill.config.experiment import load

    settings = resolve(load(tmp_path / "own.toml"))
    assert settings.named.model.values["of"] == f"{tmp_path / 'own.py'}:net"
    assert list(code_digests(settings)) == [str(tmp_path / "own.py")]


@pytest.mark.parametrize(
    ("shape", "vocabulary", "fields", "says"),
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
def test_what_cannot_be_wrapped_is_one_line(
    shape: tuple[int, ...], vocabulary: int, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(FedstillError) as raised:
        contract.build(wrapping(shape, vocabulary, **fields))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
