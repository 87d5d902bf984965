"""Checks of a user's network on two examples before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, FedstillError, IncompatibleMethod
from fedstill.core.records import SERVER
from fedstill.core.registry import names, register
from fedstill.data.sources import from_tensors
from fedstill.models import contract
from fedstill.models.building import built_size
from fedstill.running.preparation import Prepared, prepare, suited_engine_of
from fedstill.running.runner import run
from fedstill.running.setting_warnings import setting_warnings

pytestmark = pytest.mark.usefixtures("with_threads")


class Halves(nn.Module):
    """A body, a head, and what a subclass does between and after them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


@register("model", "toy_between")
class Between(Halves):
    """A ReLU that is in neither part."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).relu())
        return y


@register("model", "toy_softmax")
class Probabilities(Halves):
    """Gives probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


@register("model", "toy_still_body")
class StillBody(Halves):
    """Its body is not to be trained."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.body.requires_grad_(False)


@register("model", "toy_still")
class Still(Halves):
    """Nothing of it is to be trained."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.requires_grad_(False)


@register("model", "toy_branching")
class Branching(Halves):
    """Looks at the numbers of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return super().forward(-x)
        return super().forward(x)


def ready(model: str, method: str = "fedavg", **changes: object) -> Prepared:
    """A prepared run of a network."""
    return prepare(resolve(toys.toy(method, model=model, **changes)), toys.blobs())


def warnings_with(word: str, prepared: Prepared) -> list[str]:
    """The warnings before a run that have a word in them."""
    return [warning for warning in setting_warnings(prepared) if word in warning]


@pytest.mark.parametrize("changes", [{"method": "moon"}, {"measure": ("tsne",)}])
def test_features_of_a_network_that_is_not_its_parts_are_refused(
    changes: dict[str, object],
) -> None:
    with pytest.raises(IncompatibleMethod, match="toy_between"):
        ready("toy_between", **changes)  # type: ignore[arg-type]
    assert ready("toy_between")
    assert ready("toy_still_body", **changes)  # type: ignore[arg-type]


def test_plans_that_need_scores_need_held_out_data() -> None:
    with pytest.raises(ConfigError, match=r"plan\.train\.keep = 'best' .*plan\.train\.val"):
        ready("toy_softmax", plan={"keep": "best"})
    assert ready("toy_softmax", plan={"keep": "best", "validation": 0.2, "patience": 1})

    (warning,) = warnings_with("patience", ready("toy_branching", plan={"patience": 2}))
    assert warning == (
        "plan.train.patience = 2 does nothing without held-out data to score by; set "
        "plan.train.validation, for example to 0.1"
    )


def test_patience_has_an_effect_if_public_labels_are_the_score() -> None:
    scored = {"patience": 2, "keep": "best", "validation": 0.0}
    plan = {"epochs": 3, "batch": 10, "validation": 0.2, "transfer": scored, "refine": scored}
    changes = {
        "rounds": 1,
        "topology": {"clients": 6},
        "query": {"draw": "single", "fewer_than": 5},
    }
    settings = resolve(toys.toy("qkt_var_e", plan=plan, data={"public": 20}, **changes))
    warnings = warnings_with("patience", prepare(settings, toys.blobs()))

    assert settings.method.labelled
    for stage in settings.method.labelled:
        assert not [warning for warning in warnings if f"plan.{stage}." in warning]


def test_a_network_that_returns_probabilities_is_warned_of() -> None:
    (warning,) = warnings_with("toy_softmax", ready("toy_softmax"))
    assert "forward()" in warning
    assert not warnings_with("toy_branching", ready("toy_branching"))


METHODS = (
    "fedavg",
    "scaffold",
    "feddyn",
    "fednova",
    "fedprox",
    "fedcurv",
    "moon",
    "fedavgm",
    "feddc",
    "fedsam",
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ["serial", "vectorised"])
def test_parameters_that_the_constructor_of_a_network_fixes_are_not_trained(
    method: str, engine: str, tmp_path: Path
) -> None:
    experiment = toys.toy(method, model="toy_still_body", engine=engine, rounds=2)
    result = run(experiment, tmp_path / "run", toys.blobs())
    start = ready("toy_still_body", method).world.initial(SERVER)
    changed = set()
    for name, parameter in result.model.items():
        if not torch.allclose(parameter, start[name], rtol=1e-5, atol=1e-7):
            changed.add(name)

    assert changed == {"head.weight", "head.bias"}


def test_the_number_of_parameters_that_are_not_trained_is_warned_of() -> None:
    (warning,) = warnings_with("requires_grad", ready("toy_still_body"))
    assert warning.startswith(
        "model toy_still_body: 2 of 4 parameters have requires_grad = False (body.1.weight, …)"
    )


def test_a_network_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="toy_still"):
        ready("toy_still")
    assert ready("toy_still", plan={"epochs": 0})


def test_a_network_that_cannot_be_stacked_is_known_before_the_run() -> None:
    prepared = ready("toy_branching", engine="auto")
    assert prepared.settings.engine == "pooled"

    choice = suited_engine_of(prepared)
    assert choice.engine == "pooled"
    assert choice.reason.startswith("model toy_branching cannot run under torch.func.vmap:")
    with pytest.raises(ConfigError, match="toy_branching"):
        ready("toy_branching", engine="vectorised")
    assert ready("toy_softmax", engine="auto").settings.engine == "vectorised"


def test_a_network_that_grows_too_large_with_images_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def built(*_: object) -> None:
        raise AssertionError("it was built")

    images = torch.zeros(10, 3, 512, 512, dtype=torch.uint8)
    labels = torch.arange(10) % 2
    test = (images[:2], labels[:2])
    data = from_tensors("large", (images, labels), test, classes=["a", "b"])
    settings = resolve(toys.toy(model="cnn", partition="iid", topology={"clients": 2}))
    monkeypatch.setattr(contract, "module", built)

    with pytest.raises(ConfigError, match=r"536,926,146 .*512 x 512"):
        prepare(settings, data)


def test_the_size_of_a_network_is_computed_from_shapes() -> None:
    count = 0
    for name in names("model"):
        if name.startswith(("toy_", "low_rank", "wrapped")) or ":" in name:
            continue
        spec = contract.spec_for(name, (3, 32, 32), 10)
        try:
            size = sum(v.numel() for v in contract.module(spec).parameters())
        except FedstillError:  # one that takes no images, or is made of another
            continue
        count += 1
        assert built_size(spec) == size, name

    assert count > 8


def test_a_file_must_define_a_class_or_function_and_not_a_finished_network(
    tmp_path: Path,
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\nnet = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))\n"
    )
    with pytest.raises(ConfigError, match=r"net\.py:net"):
        ready(f"{tmp_path / 'net.py'}:net")
