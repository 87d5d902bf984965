"""Every model: parameters counted, body and head, gradients, stacking, image sizes, and what is
refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from double import NEAR
from fedstill.core import descriptions, registry
from fedstill.core.errors import ConfigError

CIFAR, GREY28, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)

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

OWN = [
    name
    for name in registry.names("model")
    if registry.lookup("model", name).target.__module__.startswith("fedstill.models.")
    and name
    not in (
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
    )  # have tests of their own
]
RESNETS = ["resnet10", "resnet18", "resnet50", "resnet56"]
SMALLEST = {
    "cnn": 4,
    "simple_cnn": 8,
    "fedseq_cnn": 16,
    "qkt_cnn": 4,
    "cwc_cnn": 16,
    "digits_cnn": 4,
    "lenet5": 16,
}
SMALLEST |= {
    "alexnet": 12,
    "mlp": 1,
    "logistic": 1,
    "sphere_mlp": 1,
    "table_resnet": 1,
} | dict.fromkeys(RESNETS, 1)
SMALLEST |= {"sphere_cnn": 4, "sphere_digits_cnn": 4, "tiny_cnn": 4, "qkt_cnn_pooled": 8}


def make(name: str, shape: tuple[int, int, int], classes: int = 10, **fields: object) -> nn.Module:
    """A model in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = registry.lookup("model", name).build(shape, classes, **fields)
    assert isinstance(made, nn.Module)
    return made.double()


@pytest.mark.parametrize(("name", "shape", "classes", "fields", "count"), COUNTS)
def test_parameters_are_as_many_as_published(
    name: str, shape: tuple[int, int, int], classes: int, fields: dict[str, object], count: int
) -> None:
    with torch.device("meta"):
        model = registry.lookup("model", name).build(shape, classes, **fields)
    assert sum(p.numel() for p in model.parameters()) == count


def test_every_model_is_counted() -> None:
    assert {row[0] for row in COUNTS} == set(SMALLEST) == set(OWN)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("shape", [CIFAR, GREY28], ids=["32x32x3", "28x28x1"])
def test_a_model_is_a_linear_head_on_a_body(name: str, shape: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        model = registry.lookup("model", name).build(shape, 7)
        x = torch.zeros(2, *shape)
        features = model.body(x)
    assert {child for child, _ in model.named_children()} == {"body", "head"}
    assert isinstance(model.head, nn.Linear)
    assert features.shape == (2, model.head.in_features)
    assert model(x).shape == (2, 7)


SMALL = sorted(set(OWN) - {"resnet18", "resnet50"})


@pytest.mark.parametrize("name", SMALL)
def test_a_model_learns_something_in_all_its_parts_and_keeps_its_input(name: str) -> None:
    side = max(8, SMALLEST[name])
    model = make(name, (1, side, side), 4)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(3, 1, side, side, generator=source).double()
    before = x.clone()
    out = model.eval()(x)
    torch.testing.assert_close(
        out, model.get_submodule("head")(model.get_submodule("body")(x)), rtol=0, atol=NEAR
    )
    out.square().sum().backward()
    assert torch.equal(x, before)
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", SMALL)
def test_no_model_has_running_statistics_by_default_and_examples_stand_alone(name: str) -> None:
    side = max(8, SMALLEST[name])
    model = make(name, (1, side, side), 4)
    assert dict(model.named_buffers()) == {}
    x = torch.randn(3, 1, side, side, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(model.eval()(x)[:1], model(x[:1]), rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", ["digits_cnn", "mlp", "logistic", "resnet10"])
def test_clients_can_be_stacked(name: str) -> None:
    fields = {"norm": "batch_stats"} if name == "resnet10" else {}
    side = 16 if name == "resnet10" else 8
    models = [make(name, (1, side, side), 4, **fields) for _ in range(2)]
    for p in models[1].parameters():
        p.data.mul_(0.5)
    params, buffers = stack_module_state(models)
    x = torch.randn(2, 3, 1, side, side, generator=torch.Generator().manual_seed(1)).double()

    def run(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(models[0], (params, buffers), (x,))
        return out

    each = torch.stack([model(x[k]) for k, model in enumerate(models)])
    torch.testing.assert_close(vmap(run)(params, x), each, rtol=0, atol=NEAR)


def test_the_three_norms_of_a_resnet() -> None:
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double()
    batch, stats, group = (
        make("resnet10", (3, 16, 16), norm=n) for n in ("batch", "batch_stats", "group")
    )
    assert (
        list(group.state_dict())
        == list(stats.state_dict())
        == [k for k, _ in batch.named_parameters()]
    )
    assert "body.stem.1.running_mean" in batch.state_dict()
    torch.testing.assert_close(
        batch.train()(x), stats.eval()(x), rtol=0, atol=NEAR
    )  # one batch's statistics, in evaluation too
    assert not torch.allclose(stats(x)[:2], stats(x[:2]), atol=1e-3)
    assert not torch.allclose(batch.eval()(x), stats(x), atol=1e-3)
    with pytest.raises(ConfigError, match="group"):
        make("resnet10", (3, 16, 16), norm="layer")


@pytest.mark.parametrize("name", [n for n in OWN if SMALLEST[n] > 1])
def test_images_too_small_are_refused_with_the_least_size(name: str) -> None:
    least = SMALLEST[name]
    with torch.device("meta"):
        registry.lookup("model", name).build((1, least, least), 10)
        for shape in [(1, least - 1, least - 1), (1, 64, 1)]:
            with pytest.raises(
                ConfigError, match=f"'{name}' needs images of at least {least} x {least}"
            ):
                registry.lookup("model", name).build(shape, 10)


@pytest.mark.parametrize(("name", "least"), [("resnet10", 9), ("resnet56", 5)])
@pytest.mark.parametrize("norm", ["batch", "batch_stats"])
def test_batch_statistics_need_more_than_one_place(name: str, least: int, norm: str) -> None:
    with pytest.raises(ConfigError, match=f"at least {least} x {least}.*group"):
        make(name, (1, least - 1, 28), norm=norm)
    if name == "resnet56":
        model = make(name, (1, least, least), norm=norm)
        assert model.train()(torch.zeros(1, 1, least, least).double()).isfinite().all()
        assert make(name, (1, 1, 1))(torch.zeros(1, 1, 1, 1).double()).isfinite().all()


def test_options_of_the_registry() -> None:
    fields = {name: set(descriptions.fields(registry.lookup("model", name))) for name in OWN}
    assert fields["digits_cnn"] == set()
    assert fields["cnn"] == {"projection"}
    assert fields["mlp"] == {"hidden", "projection"}
    assert fields["simple_cnn"] == {"dropout"}
    assert fields["alexnet"] == {"relu"}
    assert all(fields[name] == {"norm", "projection"} for name in [*RESNETS, "qkt_cnn_pooled"])
    assert descriptions.fields(registry.lookup("model", "logistic"))["hidden"][1] == ()
    assert descriptions.fields(registry.lookup("model", "mlp"))["hidden"][1] == (200, 200)
    assert all(descriptions.summary(registry.lookup("model", name)).endswith(".") for name in OWN)


def test_dropout_is_for_training_and_can_be_turned_off() -> None:
    model = make("simple_cnn", (1, 8, 8))
    x = torch.ones(2, 1, 8, 8).double()
    assert torch.equal(model.eval()(x), model(x))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.equal(model.train()(x), model(x))
    assert not any(
        isinstance(m, nn.Dropout) for m in make("simple_cnn", (1, 8, 8), dropout=0.0).modules()
    )


def test_alexnet_without_relu_is_linear_after_its_convolutions() -> None:
    bends = [
        sum(isinstance(m, nn.ReLU) for m in make("alexnet", (1, 16, 16), relu=r).modules())
        for r in (True, False)
    ]
    assert bends == [7, 3]
