"""Federated learning written out plainly with torch.optim and autograd, for tests to compare the
library with.

Of the library only draws are used: who is sampled, in which order examples come, and the initial
weights. Both sides compute in float64 from the first weights on, so that what is left between them
is no kernel's way of summing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

import toys
from double import NEAR, in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import State
from fedstill.core.registry import register
from fedstill.core.topology import sample
from fedstill.engines.serial import Memory
from fedstill.models import contract, resnet
from fedstill.running.preparation import Prepared, prepare
from loops import context_of, states_after


@register("model", "toy_slim")
def toy_slim(
    input_shape: tuple[int, int, int], classes: int, norm: Literal["group", "batch"] = "group"
) -> nn.Module:
    """ResNet-56 in small: two stages of one bottleneck block, the last of them slimmable."""
    shape = resnet.ResNetShape("toy_slim", resnet.bottleneck, depths=[1, 1], width=16)
    return resnet._resnet(shape, input_shape, classes, norm)


Params = dict[str, Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
PLAN = {"epochs": 2, "batch": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.9, "weight_decay": 1e-3}


@dataclass
class Sent:
    """What a client of a plain federation ends with."""

    client: int
    params: Params
    examples: int
    steps: int
    reach: float  # how far its steps go, momentum counted, by a counter that runs along


def normal(ready: Prepared, images: Tensor) -> Tensor:
    """Images as inputs in float64."""
    mean, std = (np.reshape(v, (-1, 1, 1)) for v in (ready.dataset.mean, ready.dataset.std))
    return torch.from_numpy((images.cpu().numpy() / 255 - mean) / std)


@dataclass
class Federation:
    """A plain federation over the data that an experiment deals out."""

    ready: Prepared
    sampled: int = 4
    epochs: int = int(PLAN["epochs"])

    @property
    def start(self) -> Params:
        return {k: v.clone() for k, v in self.ready.world.initial(0).items()}

    def net(self, params: Mapping[str, Tensor]) -> nn.Module:
        made = contract.build(self.ready.world.model(0)).double()
        made.load_state_dict(dict(params))
        return made

    def cohort(self, round: int) -> list[int]:
        return sorted(sample(self.ready.world, round, self.sampled))

    def chain(self, round: int) -> list[int]:
        return sample(self.ready.world, round, self.sampled)

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        part, train = self.ready.sites.positions(client), self.ready.sites.train
        return self.inputs(train.values[part]), train.labels[part].cpu()

    def inputs(self, images: Tensor) -> Tensor:
        return normal(self.ready, images)

    def shares(self, client: int) -> np.ndarray:
        labels = self.data(client)[1].numpy()
        return np.array([(labels == c).mean() for c in range(toys.CLASSES)])

    def lr(self, round: int) -> float:
        return PLAN["lr"] * PLAN["lr_decay"] ** (round - 1)

    def fit(
        self,
        start: Params,
        loss: Loss,
        round: int,
        client: int,
        correction: Params | None = None,
        momentum: float = -1,
        stage: int = 0,
        watch: Callable[[Params, Params, Params], None] | None = None,
    ) -> Sent:
        """One client's local training; a correction is added to every gradient.

        ``watch`` sees parameters before, gradients, and parameters after every step.
        """
        rho = PLAN["momentum"] if momentum < 0 else momentum
        model, (x, y) = self.net(start).train(), self.data(client)
        sgd = torch.optim.SGD(
            model.parameters(),
            lr=self.lr(round),
            momentum=rho,
            weight_decay=PLAN["weight_decay"],
            foreach=False,
        )
        order = generator(seed_for(7, round, stage, client, "order"))
        steps, counter, reach = 0, 0.0, 0.0
        for _ in range(self.epochs):
            for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
                sgd.zero_grad()
                loss(model, x[index], y[index]).backward()
                for name, p in model.named_parameters():
                    p.grad += correction[name] if correction else 0
                before = {k: p.detach().clone() for k, p in model.named_parameters()}
                sgd.step()
                if watch:
                    now = dict(model.named_parameters())
                    watch(
                        before,
                        {k: p.grad for k, p in now.items()},
                        {k: p.detach() for k, p in now.items()},
                    )
                steps, counter = steps + 1, rho * counter + 1
                reach += counter
        return Sent(
            client,
            {k: v.detach().clone() for k, v in model.state_dict().items()},
            len(y),
            steps,
            reach,
        )


def average(sent: list[Sent], uniform: bool = False) -> Params:
    """The mean of models, by size or uniform."""
    weights = [1.0 if uniform else s.examples for s in sent]
    return {
        k: sum(w * s.params[k] for w, s in zip(weights, sent, strict=True)) / sum(weights)
        for k in sent[0].params
    }


def minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor], factor: float = 1.0) -> Params:
    """factor times the difference."""
    return {k: factor * (a[k] - b[k]) for k in a}


def norm(a: Mapping[str, Tensor]) -> float:
    return float(sum((v**2).sum() for v in a.values()) ** 0.5)


def ce(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Plain cross-entropy."""
    return nn.functional.nll_loss(model(x).log_softmax(1), y)


def experiment(method: object, **changes: object) -> Experiment:
    """A toy experiment of two rounds under the plain plan, nothing measured."""
    plan = {**PLAN, **changes.pop("plan", {})}  # type: ignore[dict-item]
    return toys.toy(method, plan=plan, **{"rounds": 2, "measure": (), **changes})


FEW, MORE = 150, 300
"""Examples of all clients: few, since one step is like another, and more for what shows late."""


_blobs = functools.cache(toys.blobs)


def ready_for(method: object, examples: int = FEW, **changes: object) -> Prepared:
    """The experiment with its data dealt out, in float64."""
    return in_double(prepare(resolve(experiment(method, **changes)), _blobs(size=examples)))


def drive(ready: Prepared) -> tuple[list[State], Memory]:
    """The library's own run: its states, that before round 1 first, and what its clients
    remember.
    """
    engine = ready.engine()
    return states_after(context_of(ready, engine), ready.world.rounds), engine.memory


def check(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """The same model but for the rounding of float64, which training makes larger, but not 1e-9."""
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert not value.is_floating_point() or ours[key].dtype == value.dtype == torch.float64, key
        torch.testing.assert_close(
            ours[key], value, rtol=NEAR, atol=NEAR, msg=lambda m, k=key: f"{k}: {m}"
        )


def check_matters(ours: Mapping[str, Tensor], ready: Prepared, rounds: int = 2) -> None:
    """That the method did something: its model is not FedAvg's."""
    fed = Federation(ready)
    params = fed.start
    for round in range(1, rounds + 1):
        params = average([fed.fit(params, ce, round, c) for c in fed.cohort(round)])
    way = norm(minus(params, fed.start))
    assert norm(minus({k: ours[k] for k in params}, params)) > 0.01 * way
