"""Every model: parameters counted, body and head, gradients, stacking, image sizes, and what is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from double import NEAR
from fedstill.core import descriptions, registry
from fedstill.core.errors import ConfigError

Shape = tuple[int, int, int]

CIFAR = (3, 32, 32)
GREY28 = (1, 28, 28)
DIGITS = (1, 8, 8)

# papers.md 8 and 13.15
COUNTS = [
    ("cnn", CIFAR, 10, {}, 2_156_490),
    ("cnn", CIFAR, 100, {}, 2_202_660),
    ("cnn", GREY28, 10, {}, 1_663_370),
    ("cnn", CIFAR, 10, {"projection": 256}, 2_151_360 + 512 * 513 + 256 * 513 + 10 * 257),
    ("simple_cnn", CIFAR, 10, {}, 1_147_466),
    ("lenet5", GREY28, 10, {}, 44_426),
    ("alexnet", CIFAR, 10, {}, 3_868_746),
    ("alexnet", CIFAR, 10, {"relu": False}, 3_868_746),
    ("fedseq_cnn", CIFAR, 10, {}, 797_962),
    ("qkt_cnn", CIFAR, 10, {}, 94_666),
    ("qkt_cnn_pooled", CIFAR, 10, {}, 27 * 32 + 64 + 9 * 32 * 64 + 128 + 9 * 64 * 128 + 256 + 1290),
    ("qkt_cnn_pooled", CIFAR, 10, {"norm": "batch"}, 94_762),
    (
        "qkt_cnn_pooled",
        CIFAR,
        10,
        {"projection": 64},
        94_762 - 1290 + 128 * 129 + 64 * 129 + 10 * 65,
    ),
    ("cwc_cnn", CIFAR, 10, {}, 2_733_962),
    ("resnet10", CIFAR, 10, {}, 4_903_242),
    ("resnet18", CIFAR, 10, {}, 11_173_962),
    ("resnet18", CIFAR, 10, {"norm": "batch"}, 11_173_962),
    ("resnet18", CIFAR, 100, {}, 11_220_132),
    ("resnet18", CIFAR, 10, {"projection": 256}, 11_168_832 + 512 * 513 + 256 * 513 + 10 * 257),
    ("resnet50", CIFAR, 10, {}, 23_520_842),
    ("resnet56", CIFAR, 10, {"norm": "batch_stats"}, 591_322),
    ("digits_cnn", DIGITS, 10, {}, 13_706),
    ("tiny_cnn", DIGITS, 10, {}, 80 + 16 * (8 * 9 + 1) + 650),
    ("sphere_cnn", CIFAR, 10, {}, 2_156_490 - 5_130 + 2 * 513 + 20),
    ("sphere_digits_cnn", DIGITS, 10, {}, 13_706 - 650 + 2 * 65 + 20),
    ("mlp", DIGITS, 10, {}, 64 * 200 + 200 + 200 * 200 + 200 + 2010),
    ("mlp", CIFAR, 10, {"hidden": (1024,)}, 3_157_002),
    ("mlp", DIGITS, 10, {"hidden": (20,), "projection": 5}, 20 * 65 + 20 * 21 + 5 * 21 + 10 * 6),
    ("logistic", DIGITS, 10, {}, 650),
    ("sphere_mlp", DIGITS, 10, {"hidden": (20,)}, 20 * 65 + 2 * 21 + 20),
    ("table_resnet", DIGITS, 10, {}, 65 * 128 + 2 * (256 + 2 * 128 * 129) + 256 + 1290),
]

WITH_OTHER_TESTS = {
    "pair",
    "series_cnn",
    "ft_transformer",
    "bag",
    "text_cnn",
    "tiny_transformer",
    "wrapped",
    "low_rank",
    "etf",
    "lifted",
}


def is_image_network(name: str) -> bool:
    """Whether a registered model is a network for images of the package."""
    module = registry.lookup("model", name).target.__module__
    return module.startswith("fedstill.models.") and name not in WITH_OTHER_TESTS


MODELS = [name for name in registry.names("model") if is_image_network(name)]
RESNETS = ["resnet10", "resnet18", "resnet50", "resnet56"]
SMALLEST = {
    "cnn": 4,
    "simple_cnn": 8,
    "fedseq_cnn": 16,
    "qkt_cnn": 4,
    "qkt_cnn_pooled": 8,
    "cwc_cnn": 16,
    "digits_cnn": 4,
    "tiny_cnn": 4,
    "sphere_cnn": 4,
    "sphere_digits_cnn": 4,
    "lenet5": 16,
    "alexnet": 12,
    "mlp": 1,
    "logistic": 1,
    "sphere_mlp": 1,
    "table_resnet": 1,
    **dict.fromkeys(RESNETS, 1),
}
"""The smallest side of an image."""


def make(name: str, shape: Shape, classes: int = 10, **fields: object) -> nn.Module:
    """A model in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = registry.lookup("model", name).build(shape, classes, **fields)
    assert isinstance(model, nn.Module)
    return model.double()


def random_images(count: int, *shape: int) -> Tensor:
    """Normal inputs in float64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *shape, generator=generator).double()


@pytest.mark.parametrize(("name", "shape", "classes", "fields", "count"), COUNTS)
def test_parameters_are_as_many_as_published(
    name: str, shape: Shape, classes: int, fields: dict[str, object], count: int
) -> None:
    with torch.device("meta"):
        model = registry.lookup("model", name).build(shape, classes, **fields)

    assert sum(value.numel() for value in model.parameters()) == count


def test_every_model_is_counted() -> None:
    assert {row[0] for row in COUNTS} == set(MODELS)
    assert set(SMALLEST) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [CIFAR, GREY28], ids=["32x32x3", "28x28x1"])
def test_a_model_is_a_linear_head_on_a_body(name: str, shape: Shape) -> None:
    with torch.device("meta"):
        model = registry.lookup("model", name).build(shape, 7)
        images = torch.zeros(2, *shape)
        features = model.body(images)

    assert {child for child, _ in model.named_children()} == {"body", "head"}
    assert isinstance(model.head, nn.Linear)
    assert features.shape == (2, model.head.in_features)
    assert model(images).shape == (2, 7)


SMALL = sorted(set(MODELS) - {"resnet18", "resnet50"})


@pytest.mark.parametrize("name", SMALL)
def test_a_model_learns_in_all_its_parts_and_does_not_change_its_input(name: str) -> None:
    side = max(8, SMALLEST[name])
    model = make(name, (1, side, side), 4).eval()
    images = random_images(3, 1, side, side)
    copy = images.clone()

    logits = model(images)
    logits.square().sum().backward()

    features = model.get_submodule("body")(images)
    by_parts = model.get_submodule("head")(features)
    torch.testing.assert_close(logits, by_parts, rtol=0, atol=NEAR)
    assert torch.equal(images, copy)
    for entry, value in model.named_parameters():
        assert value.grad is not None, entry
        assert value.grad.abs().sum() > 0, entry


@pytest.mark.parametrize("name", SMALL)
def test_no_model_has_running_statistics_by_default_and_examples_are_independent(name: str) -> None:
    side = max(8, SMALLEST[name])
    model = make(name, (1, side, side), 4).eval()
    images = random_images(3, 1, side, side)

    assert dict(model.named_buffers()) == {}
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=0, atol=NEAR)


@pytest.mark.parametrize(
    ("name", "side", "fields"),
    [
        ("digits_cnn", 8, {}),
        ("mlp", 8, {}),
        ("logistic", 8, {}),
        ("resnet10", 16, {"norm": "batch_stats"}),
    ],
)
def test_clients_can_be_stacked(name: str, side: int, fields: dict[str, object]) -> None:
    first = make(name, (1, side, side), 4, **fields)
    second = make(name, (1, side, side), 4, **fields)
    for value in second.parameters():
        value.data.mul_(0.5)
    params, buffers = stack_module_state([first, second])
    images = random_images(2, 3, 1, side, side)

    def logits(client_params: dict[str, Tensor], client_images: Tensor) -> Tensor:
        return functional_call(first, (client_params, buffers), (client_images,))

    stacked = vmap(logits)(params, images)

    torch.testing.assert_close(stacked[0], first(images[0]), rtol=0, atol=NEAR)
    torch.testing.assert_close(stacked[1], second(images[1]), rtol=0, atol=NEAR)


def test_the_three_norms_of_a_resnet() -> None:
    """``batch_stats`` uses the statistics of a batch, as ``batch`` does in training; in evaluation,
    ``batch`` uses running statistics, which are entries of the model.
    """
    images = random_images(4, 3, 16, 16)
    batch = make("resnet10", (3, 16, 16), norm="batch")
    batch_stats = make("resnet10", (3, 16, 16), norm="batch_stats")
    group = make("resnet10", (3, 16, 16), norm="group")

    entries = [name for name, _ in batch.named_parameters()]
    assert list(group.state_dict()) == entries
    assert list(batch_stats.state_dict()) == entries
    assert "body.stem.1.running_mean" in batch.state_dict()

    by_batch = batch_stats.eval()(images)
    torch.testing.assert_close(batch.train()(images), by_batch, rtol=0, atol=NEAR)
    assert not torch.allclose(batch_stats(images[:2]), by_batch[:2], atol=1e-3)
    assert not torch.allclose(batch.eval()(images), by_batch, atol=1e-3)
    with pytest.raises(ConfigError, match="group"):
        make("resnet10", (3, 16, 16), norm="layer")


@pytest.mark.parametrize("name", [name for name in MODELS if SMALLEST[name] > 1])
def test_images_too_small_are_refused_with_the_smallest_size(name: str) -> None:
    smallest = SMALLEST[name]
    build = registry.lookup("model", name).build
    problem = f"'{name}' needs images of at least {smallest} x {smallest}"

    with torch.device("meta"):
        build((1, smallest, smallest), 10)
        with pytest.raises(ConfigError, match=problem):
            build((1, smallest - 1, smallest - 1), 10)
        with pytest.raises(ConfigError, match=problem):
            build((1, 64, 1), 10)


@pytest.mark.parametrize(("name", "smallest"), [("resnet10", 9), ("resnet56", 5)])
@pytest.mark.parametrize("norm", ["batch", "batch_stats"])
def test_batch_statistics_need_more_than_one_place(name: str, smallest: int, norm: str) -> None:
    """One image of one place has no variance; the norm of groups does not need it."""
    with pytest.raises(ConfigError, match=f"at least {smallest} x {smallest}.*group"):
        make(name, (1, smallest - 1, 28), norm=norm)

    if name == "resnet56":
        model = make(name, (1, smallest, smallest), norm=norm).train()
        assert model(random_images(1, 1, smallest, smallest)).isfinite().all()
        grouped = make(name, (1, 1, 1))
        assert grouped(random_images(1, 1, 1, 1)).isfinite().all()


def fields_of(name: str) -> dict[str, Any]:
    """The fields of a registered model."""
    return descriptions.fields(registry.lookup("model", name))


def test_options_of_the_registry() -> None:
    assert set(fields_of("digits_cnn")) == set()
    assert set(fields_of("cnn")) == {"projection"}
    assert set(fields_of("mlp")) == {"hidden", "projection"}
    assert set(fields_of("simple_cnn")) == {"dropout"}
    assert set(fields_of("alexnet")) == {"relu"}
    for name in [*RESNETS, "qkt_cnn_pooled"]:
        assert set(fields_of(name)) == {"norm", "projection"}
    assert fields_of("logistic")["hidden"][1] == ()
    assert fields_of("mlp")["hidden"][1] == (200, 200)
    for name in MODELS:
        assert descriptions.summary(registry.lookup("model", name)).endswith(".")


def count_layers(model: nn.Module, kind: type[nn.Module]) -> int:
    """The number of layers of a kind."""
    return sum(isinstance(layer, kind) for layer in model.modules())


def test_dropout_is_for_training_and_can_be_turned_off() -> None:
    model = make("simple_cnn", (1, 8, 8))
    without_dropout = make("simple_cnn", (1, 8, 8), dropout=0.0)
    images = torch.ones(2, 1, 8, 8).double()

    assert torch.equal(model.eval()(images), model(images))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.equal(model.train()(images), model(images))
    assert count_layers(without_dropout, nn.Dropout) == 0


def test_alexnet_without_relu_is_linear_after_its_convolutions() -> None:
    assert count_layers(make("alexnet", (1, 16, 16), relu=True), nn.ReLU) == 7
    assert count_layers(make("alexnet", (1, 16, 16), relu=False), nn.ReLU) == 3
