"""Networks for series, tables and texts: sizes, padding, stacks by torch's fast rules, and data
that they refuse.
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
from fedstill.models.network import Attention

VOCABULARY = 20
LENGTH = 12
BLOCK = 4 * 64 * 65 + 2 * 128 + 128 * 65 + 64 * 129
"""Parameters of a block of attention, 64 wide: four linear layers, two norms, two dense layers."""
TEXTS = ["bag", "text_cnn", "tiny_transformer"]
NUMBERS = {"series_cnn": (2, 16), "table_resnet": (6,), "ft_transformer": (6,), "sphere_mlp": (6,)}
SMALL: dict[str, dict[str, object]] = {
    "tiny_transformer": {"width": 8, "heads": 2},
    "ft_transformer": {"width": 8, "heads": 2},
    "bag": {"width": 8, "hidden": (6,)},
    "text_cnn": {"width": 8},
}
"""Fields of small networks."""


def small_spec(name: str) -> ModelSpec:
    """A small network for three classes."""
    fields = SMALL.get(name, {})
    if name in TEXTS:
        return contract.spec_for(name, (LENGTH,), 3, fields, VOCABULARY)
    return contract.spec_for(name, NUMBERS[name], 3, fields)


def build_in_float64(spec: ModelSpec) -> nn.Module:
    """A network of a spec in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return contract.build(spec).double()


def small_network(name: str) -> nn.Module:
    """A small network in float64."""
    return build_in_float64(small_spec(name))


def random_inputs(name: str, count: int = 5) -> Tensor:
    """Inputs of a small network; texts have all lengths from 0 to the largest."""
    spec = small_spec(name)
    generator = torch.Generator().manual_seed(1)
    if not spec.vocabulary:
        return torch.randn(count, *spec.input_shape, generator=generator, dtype=torch.float64)
    ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.linspace(0, LENGTH, count).long()
    is_word = torch.arange(LENGTH) < lengths.unsqueeze(1)
    return ids * is_word


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
def test_parameters_are_as_many_as_documented(
    name: str, shape: tuple[int, ...], vocabulary: int, fields: dict[str, object], count: int
) -> None:
    spec = contract.spec_for(name, shape, 3, fields, vocabulary)

    model = contract.build(spec)

    assert sum(value.numel() for value in model.parameters()) == count
    assert contract.width(spec) == model.get_submodule("head").in_features


@pytest.fixture
def _no_slow_rules() -> Iterator[None]:
    """Where torch has no rule for a stack, it runs client after client with a warning, which is an
    error in these tests.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


@pytest.mark.usefixtures("_no_slow_rules")
@pytest.mark.parametrize("rules", ["torch's", "ours"])
@pytest.mark.parametrize("name", [*TEXTS, *NUMBERS])
def test_a_stack_has_the_logits_and_gradients_of_its_clients(name: str, rules: str) -> None:
    assert not stacking_obstacle(small_spec(name), Plan())
    models = [small_network(name) for _ in range(3)]
    for client, model in enumerate(models):
        for value in model.parameters():
            value.data.mul_(1 + 0.3 * client)
    params, _ = stack_module_state(models)
    x = torch.stack([random_inputs(name).roll(client, 0) for client in range(3)])
    stacked = copy.deepcopy(models[0])
    if rules == "ours":
        stacked = use_stacked_layers(stacked)

    def client_logits(client_params: dict[str, Tensor], client_x: Tensor) -> Tensor:
        return functional_call(stacked, client_params, (client_x,))

    logits = vmap(client_logits)(params, x)
    loss = logits.logsumexp(2).sum()
    gradients = torch.autograd.grad(loss, list(params.values()))
    gradient_by_name = dict(zip(params, gradients, strict=True))

    for client, model in enumerate(models):
        expected = model(x[client])
        torch.testing.assert_close(logits[client], expected, rtol=0, atol=NEAR)
        expected.logsumexp(1).sum().backward()
        for entry, value in model.named_parameters():
            assert value.grad is not None
            gradient = gradient_by_name[entry][client]
            torch.testing.assert_close(gradient, value.grad, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", TEXTS)
def test_more_padding_changes_no_logit(name: str) -> None:
    model = small_network(name).eval()
    generator = torch.Generator().manual_seed(2)
    for length in range(1, LENGTH):
        ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
        logits = model(ids)
        for padding in range(1, LENGTH - length + 1):
            padded = nn.functional.pad(ids, (0, padding))
            torch.testing.assert_close(model(padded), logits, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_without_words_has_finite_logits_and_gradients(name: str) -> None:
    """Its features are zeros, but for the network ``bag``, whose hidden layers have biases."""
    model = contract.build(small_spec(name))
    empty_texts = contract.example(small_spec(name), 4)

    logits = model(empty_texts)
    logits.logsumexp(1).sum().backward()

    assert bool(logits.isfinite().all())
    if name != "bag":
        assert not model.get_submodule("body")(empty_texts).any()
    for value in model.parameters():
        assert value.grad is None or bool(value.grad.isfinite().all())


@pytest.mark.parametrize("name", TEXTS)
def test_the_order_of_words_counts_but_for_a_bag_of_words(name: str) -> None:
    model = small_network(name).eval()
    text = random_inputs(name)[-1:]

    is_same = torch.allclose(model(text), model(text.flip(1)), atol=1e-6)

    assert is_same == (name == "bag")


@pytest.mark.parametrize("name", [*TEXTS, *NUMBERS])
def test_every_part_learns_and_has_a_second_derivative(name: str) -> None:
    """The measure ``landscape`` derives twice. A common bias of all keys changes no softmax."""
    model = small_network(name)
    entries = dict(model.named_parameters())
    params = list(entries.values())
    loss = model(random_inputs(name)).logsumexp(1).sum()

    gradients = torch.autograd.grad(loss, params, create_graph=True)
    squared_norm = sum(gradient.square().sum() for gradient in gradients)
    second_gradients = torch.autograd.grad(squared_norm, params, materialize_grads=True)

    for entry, gradient, second in zip(entries, gradients, second_gradients, strict=True):
        assert bool(second.isfinite().all()), entry
        if not entry.endswith("keys.bias"):
            assert gradient.abs().sum() > 0, entry


@pytest.mark.parametrize("name", TEXTS)
def test_the_embedding_of_padding_stays_zero(name: str) -> None:
    model = small_network(name)
    (entry,) = [entry for entry, _ in model.named_parameters() if entry.endswith("tokens.weight")]

    model(random_inputs(name)).square().sum().backward()

    weight = model.get_parameter(entry)
    assert weight.grad is not None
    assert not weight[0].any()
    assert not weight.grad[0].any()


def test_attention_is_torchs() -> None:
    """Against ``scaled_dot_product_attention``, which has neither a rule for stacks nor a second
    derivative.
    """
    layer = Attention(8, 2).double()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    is_word = torch.arange(5) < torch.tensor([[5], [3], [1]])

    def by_head(projected: Tensor) -> Tensor:
        return projected.view(3, 5, 2, 4).transpose(1, 2)

    mixed = nn.functional.scaled_dot_product_attention(
        by_head(layer.asked(x)),
        by_head(layer.keys(x)),
        by_head(layer.values(x)),
        attn_mask=is_word[:, None, None, :],
    )
    expected = layer.out(mixed.transpose(1, 2).reshape(3, 5, 8))
    torch.testing.assert_close(layer(x, is_word), expected, rtol=0, atol=NEAR)


def test_series_are_a_plain_chain_whose_layers_can_be_wider() -> None:
    """No layer can be wider if units become channels."""
    model = small_network("series_cnn")
    reshaping = nn.Module()
    reshaping.body = nn.Sequential(
        nn.Linear(6, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 1), nn.Flatten()
    )
    reshaping.head = nn.Linear(12, 3)

    layers = plain_chain(model)
    wider = with_widths(model, (5, 6, 7, 9)).double()

    assert layers is not None
    assert len(layers) == 5
    assert wider(random_inputs("series_cnn")).shape == (5, 3)
    assert plain_chain(reshaping) is None


@pytest.mark.parametrize(
    ("name", "shape", "vocabulary", "fields", "problem"),
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
def test_data_that_a_network_does_not_take_are_refused_in_one_line(
    name: str, shape: tuple[int, ...], vocabulary: int, fields: dict[str, object], problem: str
) -> None:
    spec = contract.spec_for(name, shape, 3, fields, vocabulary)

    with pytest.raises(ConfigError) as refusal:
        contract.build(spec)

    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)


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
    without_updates = contract.build(spec)
    without_updates.load_state_dict(network.state_dict())
    for name, entry in network.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(entry)
    x = torch.randn(5, 6)

    in_training = network.train()(x)
    with torch.inference_mode():
        in_evaluation = network.eval()(x)
        plain = without_updates.eval()(x)

    torch.testing.assert_close(in_evaluation, in_training, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(in_evaluation, plain, atol=1e-2)


@pytest.mark.parametrize("layers", [("body.1",), ("*.1",), ("body.1.",)])
def test_low_rank_layers_are_names_prefixes_or_patterns(layers: tuple[str, ...]) -> None:
    fields = {"of": "mlp", "layers": layers}
    network = contract.build(contract.spec_for("low_rank", (1, 4, 4), 3, fields))
    assert "body.1.lora_a" in dict(network.named_parameters())
