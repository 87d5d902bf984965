"""Learning rates of rounds: against torch's schedulers, on every engine, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import toys
from fedstill.cli.explain import run_estimate
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.records import Plan
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

RISING: dict[str, Any] = {"lr": 0.2, "lr_schedule": "cosine", "lr_warmup": 1, "lr_end": 0.1}


def theirs(plan: Plan, rounds: int) -> list[float]:
    """The rates that torch's own schedulers give, one step a round."""
    optimiser = torch.optim.SGD(
        [torch.zeros(1, dtype=torch.float64, requires_grad=True)], lr=plan.lr
    )
    later: lr_scheduler.LRScheduler = {
        "constant": lambda: lr_scheduler.ExponentialLR(optimiser, plan.lr_decay),
        "step": lambda: lr_scheduler.StepLR(optimiser, plan.lr_step, plan.lr_decay),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(
            optimiser, plan.lr_rounds - plan.lr_warmup, eta_min=plan.lr * plan.lr_end
        ),
    }[plan.lr_schedule]()
    if plan.lr_warmup:
        warm = lr_scheduler.LinearLR(
            optimiser, 1 / (plan.lr_warmup + 1), total_iters=plan.lr_warmup
        )
        later = lr_scheduler.SequentialLR(optimiser, [warm, later], [plan.lr_warmup])
    out = []
    for _ in range(rounds):
        out.append(float(optimiser.param_groups[0]["lr"]))
        optimiser.step()
        later.step()
    return out


@pytest.mark.parametrize("warm", [0, 1, 4])
@pytest.mark.parametrize(
    "how",
    [
        {"lr_decay": 0.97},
        {"lr_schedule": "step", "lr_decay": 0.3, "lr_step": 5},
        {"lr_schedule": "cosine", "lr_rounds": 23},
        {"lr_schedule": "cosine", "lr_rounds": 23, "lr_end": 0.25, "lr_decay": 0.5},
    ],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter")  # torch's SequentialLR warns of itself
def test_rates_are_those_of_torchs_schedulers(how: dict[str, Any], warm: int) -> None:
    plan = Plan(lr=0.3, lr_warmup=warm, **how)
    ours = [plan.lr_at(r) for r in range(1, 24)]
    torch.testing.assert_close(torch.tensor(ours).double(), torch.tensor(theirs(plan, 23)).double())
    assert max(abs(a - b) for a, b in zip(ours, theirs(plan, 23), strict=True)) < 1e-14
    assert min(ours) > 0
    assert plan.lr_at(0) == plan.lr_at(1), "a stage before round 1 has its rate"


def test_the_default_is_what_it_was_to_the_bit() -> None:
    plan = Plan(lr=0.3, lr_decay=0.97)
    assert [plan.lr_at(r) for r in range(1, 301)] == [0.3 * 0.97 ** (r - 1) for r in range(1, 301)]


def test_beyond_its_last_round_a_cosine_stays() -> None:
    plan = Plan(lr_schedule="cosine", lr_rounds=5)
    assert plan.lr_at(6) == plan.lr_at(5) == plan.lr_at(50) > 0


def test_every_engine_trains_at_these_rates_and_a_resumed_run_too(tmp_path: Path) -> None:
    plan = {"epochs": 2, "batch": 10, **RISING}
    whole = run(toys.toy("scaffold", plan=plan, engine="serial"), tmp_path / "serial", toys.blobs())
    for engine in ("pooled", "flower"):
        run(toys.toy("scaffold", plan=plan, engine=engine), tmp_path / engine, toys.blobs())
        same = [(tmp_path / e / "model.safetensors").read_bytes() for e in ("serial", engine)]
        assert same[0] == same[1], engine
    stacked = run(
        toys.toy("scaffold", plan=plan, engine="vectorised"), tmp_path / "stacked", toys.blobs()
    )
    for name, value in whole.model.items():
        torch.testing.assert_close(stacked.model[name], value, rtol=1e-4, atol=1e-5)
    flat = run(
        toys.toy("scaffold", plan={**plan, "lr_schedule": "constant"}),
        tmp_path / "flat",
        toys.blobs(),
    )
    assert any(not torch.equal(flat.model[k], v) for k, v in whole.model.items())
    halfway = stopped(toys.toy("scaffold", plan=plan, engine="serial"), tmp_path / "stopped", 2)
    resume(halfway, toys.blobs())
    assert_same_bits(bits(halfway), bits(tmp_path / "serial"))


def test_the_config_records_the_rounds_of_a_cosine_and_nothing_where_it_is_the_default() -> None:
    cosine = resolve(toys.toy(plan=RISING))
    assert 'lr_schedule = "cosine"\nlr_end = 0.1\nlr_warmup = 1\nlr_rounds = 3\n' in cosine.toml
    assert "lr_schedule" not in resolve(toys.toy()).toml
    assert resolve(toys.toy()).tree["plan"]["train"]["lr_schedule"] == "constant", (
        "explain shows it"
    )
    assert (
        run_estimate(prepare(cosine, toys.blobs())).learning_rates
        == "train 0.1 in round 1, 0.2 in round 2, 0.11 in round 3"
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"lr_schedule": "linear"},
            r"plan\.lr_schedule = 'linear'.*'constant', 'step' or 'cosine'",
        ),
        ({"lr_step": 0}, r"plan\.lr_step = 0"),
        ({"lr_end": 2.0}, r"plan\.lr_end = 2\.0"),
        (
            {"lr_schedule": "step", "lr_decay": 1.0},
            r"plan\.train\.lr_schedule = 'step' needs lr_decay below 1",
        ),
        ({"lr_warmup": 3}, r"plan\.train\.lr_warmup = 3 must be below the rounds of the run, 3"),
        (
            {"lr_schedule": "cosine", "lr_rounds": 1, "lr_warmup": 1},
            r"lr_rounds = 1 must be above lr_warmup = 1",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(toys.toy(plan=plan))
