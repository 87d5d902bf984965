"""Networks for series, tables and texts: sizes, padding, stacks by torch's quick rules, and what
they refuse.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from double import NEAR
from fedstill.core.errors import ConfigError
from fedstill.core.records import ModelSpec, Plan
from fedstill.engines.stack import use_stacked_layers
from fedstill.engines.vectorised import stacking_obstacle
from fedstill.models import contract
from fedstill.models.layer_chain import plain_chain, with_widths

VOCABULARY, LENGTH = 20, 12
BLOCK = 4 * 64 * 65 + 2 * 128 + 128 * 65 + 64 * 129
"""Parameters of a block of attention, 64 wide: four linear layers, two norms, two dense layers."""
TEXTS = ["bag", "text_cnn", "tiny_transformer"]
NUMBERS = {"series_cnn": (2, 16), "table_resnet": (6,), "ft_transformer": (6,), "sphere_mlp": (6,)}
SMALL = {"tiny_transformer": {"width": 8, "heads": 2}, "ft_transformer": {"width": 8, "heads": 2}}
SMALL |= {"bag": {"width": 8, "hidden": (6,)}, "text_cnn": {"width": 8}}


def spec_of(name: str, **fields: object) -> ModelSpec:
    own = SMALL.get(name, {}) | fields
    if name in TEXTS:
        return contract.spec_for(name, (LENGTH,), 3, own, VOCABULARY)
    return contract.spec_for(name, NUMBERS[name], 3, own)


def wide(spec: ModelSpec) -> nn.Module:
    """A network of a spec in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return contract.build(spec).double()


def some(spec: ModelSpec, count: int = 5) -> Tensor:
    """Inputs of a spec; of texts, of every length from none to all."""
    draw = torch.Generator().manual_seed(1)
    if not spec.vocabulary:
        return torch.randn(count, *spec.input_shape, generator=draw, dtype=torch.float64)
    ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=draw)
    ends = torch.linspace(0, LENGTH, count).long()
    return ids * (torch.arange(LENGTH) < ends.unsqueeze(1))


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "fields", "count"),
    [
        (
            "series_cnn",
            (9, 128),
            0,
            {},
            32 * 46 + 64 * 161 + 64 * 321 + 128 * (64 * 16 + 1) + 3 * 129,
        ),
        (
            "table_resnet",
            (13,),
            0,
            {"width": 32, "blocks": 1},
            32 * 14 + 64 + 2 * 32 * 33 + 64 + 3 * 33,
        ),
        ("ft_transformer", (13,), 0, {"blocks": 1}, 2 * 13 * 64 + BLOCK + 128 + 3 * 65),
        ("bag", (64,), 8192, {}, 8192 * 64 + 3 * 65),
        ("bag", (64,), 100, {"width": 10, "hidden": (7,)}, 1000 + 7 * 11 + 3 * 8),
        ("text_cnn", (64,), 257, {}, 257 * 64 + 2 * 64 * 321 + 3 * 65),
        ("tiny_transformer", (64,), 257, {}, 257 * 64 + 64 * 64 + 2 * BLOCK + 128 + 3 * 65),
    ],
)
def test_parameters_are_as_many_as_said(
    name: str, shape: tuple[int, ...], vocabulary: int, fields: dict[str, object], count: int
) -> None:
    model = contract.build(contract.spec_for(name, shape, 3, fields, vocabulary))
    assert sum(p.numel() for p in model.parameters()) == count
    assert (
        contract.width(contract.spec_for(name, shape, 3, fields, vocabulary))
        == model.get_submodule("head").in_features
    )


@pytest.fixture
def _no_slow_rules() -> Iterator[None]:
    """Where torch has no rule for a stack it runs client after client, and warns: here that is an
    error.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


@pytest.mark.usefixtures("_no_slow_rules")
@pytest.mark.parametrize("rules", ["torch's", "ours"])
@pytest.mark.parametrize("name", [*TEXTS, *NUMBERS])
def test_a_stack_is_its_clients_and_so_are_its_gradients(name: str, rules: str) -> None:
    spec = spec_of(name)
    assert not stacking_obstacle(spec, Plan())
    models = [wide(spec) for _ in range(3)]
    for k, m in enumerate(models):
        for p in m.parameters():
            p.data.mul_(1 + 0.3 * k)
    params, _ = stack_module_state(models)
    x = torch.stack([some(spec).roll(k, 0) for k in range(3)])
    run = (
        copy.deepcopy(models[0])
        if rules == "torch's"
        else use_stacked_layers(copy.deepcopy(models[0]))
    )
    alone = torch.stack([m(x[k]) for k, m in enumerate(models)])
    together = vmap(lambda p, x: functional_call(run, p, (x,)))(params, x)
    torch.testing.assert_close(together, alone, rtol=0, atol=NEAR)
    own = dict(
        zip(
            params,
            torch.autograd.grad(together.logsumexp(2).sum(), list(params.values())),
            strict=True,
        )
    )
    alone.logsumexp(2).sum().backward()
    for k, m in enumerate(models):
        for key, p in m.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(own[key][k], p.grad, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", TEXTS)
def test_more_padding_changes_no_logit(name: str) -> None:
    model, draw = wide(spec_of(name)).eval(), torch.Generator().manual_seed(2)
    for length in range(1, LENGTH):
        ids = torch.randint(1, VOCABULARY, (2, length), generator=draw)
        for more in range(1, LENGTH - length + 1):
            padded = nn.functional.pad(ids, (0, more))
            torch.testing.assert_close(model(padded), model(ids), rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_padding_alone_has_finite_logits_and_gradients(name: str) -> None:
    model = contract.build(spec_of(name))
    x = contract.example(spec_of(name), 4)
    out = model(x)
    assert bool(out.isfinite().all())
    assert torch.equal(
        model.get_submodule("body")(x), torch.zeros(4, model.get_submodule("head").in_features)
    ) or (
        name == "bag"  # its hidden layers have biases
    )
    out.logsumexp(1).sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", TEXTS)
def test_the_order_of_words_counts_where_it_should(name: str) -> None:
    model = wide(spec_of(name)).eval()
    x = some(spec_of(name))[-1:]
    same = torch.allclose(model(x), model(x.flip(1)), atol=1e-6)
    assert same == (name == "bag")


@pytest.mark.parametrize("name", [*TEXTS, *NUMBERS])
def test_every_part_learns_and_has_a_second_derivative(name: str) -> None:
    """The measure ``landscape`` derives twice."""
    model = wide(spec_of(name))
    leaves = dict(model.named_parameters())
    loss = model(some(spec_of(name))).logsumexp(1).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    second = torch.autograd.grad(
        sum(g.square().sum() for g in grads), list(leaves.values()), materialize_grads=True
    )
    for key, g, again in zip(leaves, grads, second, strict=True):
        assert bool(again.isfinite().all()), key
        if not key.endswith("keys.bias"):  # what all keys have in common changes no softmax
            assert g.abs().sum() > 0, key


@pytest.mark.parametrize("name", TEXTS)
def test_the_padding_row_stays_zero(name: str) -> None:
    model = wide(spec_of(name))
    (key,) = [k for k, _ in model.named_parameters() if k.endswith("tokens.weight")]
    model(some(spec_of(name))).square().sum().backward()
    weight = model.get_parameter(key)
    assert weight.grad is not None
    assert weight[0].abs().sum() == weight.grad[0].abs().sum() == 0


def test_attention_is_torchs() -> None:
    """Against ``scaled_dot_product_attention``, which has neither a rule for stacks nor a second
    derivative.
    """
    from fedstill.models.network import Attention

    draw = torch.Generator().manual_seed(4)
    layer = Attention(8, 2).double()
    x = torch.randn(3, 5, 8, generator=draw, dtype=torch.float64)
    there = torch.arange(5) < torch.tensor([[5], [3], [1]])
    parts = (
        part(x).view(3, 5, 2, 4).transpose(1, 2) for part in (layer.asked, layer.keys, layer.values)
    )
    mixed = nn.functional.scaled_dot_product_attention(*parts, attn_mask=there[:, None, None, :])
    want = layer.out(mixed.transpose(1, 2).reshape(3, 5, 8))
    torch.testing.assert_close(layer(x, there), want, rtol=0, atol=NEAR)


def test_series_are_a_plain_chain_whose_layers_can_be_wider() -> None:
    model = wide(spec_of("series_cnn"))
    names = plain_chain(model)
    assert names is not None
    assert len(names) == 5
    wider = with_widths(model, (5, 6, 7, 9)).double()
    assert wider(some(spec_of("series_cnn"))).shape == (5, 3)
    late = nn.Module()
    late.body = nn.Sequential(
        nn.Linear(6, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 1), nn.Flatten()
    )
    late.head = nn.Linear(12, 3)
    assert plain_chain(late) is None, "units would become channels"


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "fields", "says"),
    [
        ("series_cnn", (2, 7), 0, {}, "'mlp'"),
        ("series_cnn", (6,), 0, {}, "rows of numbers"),
        ("series_cnn", (12,), 20, {}, "texts"),
        ("ft_transformer", (2, 16), 0, {}, "series"),
        ("ft_transformer", (6,), 0, {"width": 10}, "heads = 4"),
        ("bag", (6,), 0, {}, "rows of numbers"),
        ("tiny_transformer", (1, 8, 8), 0, {}, "images"),
        ("cnn", (6,), 0, {}, "rows of numbers"),
    ],
)
def test_what_a_network_does_not_take_is_one_line(
    name: str, shape: tuple[int, ...], vocabulary: int, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        contract.build(contract.spec_for(name, shape, 3, fields, vocabulary))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


class Encoder(nn.Module):
    """Numbers through one of torch's transformer layers, which has a fast path in evaluation."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.body = nn.Sequential(
            nn.Linear(input_shape[0], 16), nn.Unflatten(1, (1, 16)), layer, nn.Flatten()
        )
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_low_rank_updates_count_in_evaluation_as_in_training() -> None:
    spec = contract.spec_for("low_rank", (6,), 3, {"of": f"{__name__}:Encoder"})
    network = contract.build(spec)
    plain = contract.build(spec)
    plain.load_state_dict(network.state_dict())
    for name, entry in network.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(entry)
    x = torch.randn(5, 6)
    trained = network.train()(x)
    with torch.inference_mode():
        torch.testing.assert_close(network.eval()(x), trained, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(network(x), plain.eval()(x), atol=1e-2)


@pytest.mark.parametrize("layers", [("body.1",), ("*.1",), ("body.1.",)])
def test_low_rank_layers_are_names_prefixes_or_patterns(layers: tuple[str, ...]) -> None:
    fields = {"of": "mlp", "layers": layers}
    network = contract.build(contract.spec_for("low_rank", (1, 4, 4), 3, fields))
    assert "body.1.lora_a" in dict(network.named_parameters())
