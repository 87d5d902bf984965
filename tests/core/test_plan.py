"""Learning rates of rounds are those of torch's schedulers, with each engine and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import toys
from fedstill.cli.explain import run_estimate
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.records import Plan
from fedstill.core.trees import same_bits
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

RISING: dict[str, Any] = {"lr": 0.2, "lr_schedule": "cosine", "lr_warmup": 1, "lr_end": 0.1}


def torchs_scheduler(plan: Plan, optimiser: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """The scheduler of torch with the settings of a plan, without its warm-up."""
    match plan.lr_schedule:
        case "constant":
            return lr_scheduler.ExponentialLR(optimiser, plan.lr_decay)
        case "step":
            return lr_scheduler.StepLR(optimiser, plan.lr_step, plan.lr_decay)
        case "cosine":
            rounds = plan.lr_rounds - plan.lr_warmup
            last_rate = plan.lr * plan.lr_end
            return lr_scheduler.CosineAnnealingLR(optimiser, rounds, eta_min=last_rate)


def torchs_rates(plan: Plan, rounds: int) -> list[float]:
    """The rates of torch's own schedulers, one step a round."""
    parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([parameter], lr=plan.lr)
    scheduler = torchs_scheduler(plan, optimiser)
    if plan.lr_warmup:
        warmup = lr_scheduler.LinearLR(
            optimiser, 1 / (plan.lr_warmup + 1), total_iters=plan.lr_warmup
        )
        scheduler = lr_scheduler.SequentialLR(optimiser, [warmup, scheduler], [plan.lr_warmup])
    rates = []
    for _ in range(rounds):
        rates.append(float(optimiser.param_groups[0]["lr"]))
        optimiser.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_decay": 0.97},
        {"lr_schedule": "step", "lr_decay": 0.3, "lr_step": 5},
        {"lr_schedule": "cosine", "lr_rounds": 23},
        {"lr_schedule": "cosine", "lr_rounds": 23, "lr_end": 0.25, "lr_decay": 0.5},
    ],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter")  # torch's SequentialLR warns of itself
def test_rates_are_those_of_torchs_schedulers(schedule: dict[str, Any], warmup: int) -> None:
    plan = Plan(lr=0.3, lr_warmup=warmup, **schedule)
    ours = [plan.lr_at(round) for round in range(1, 24)]
    assert ours == pytest.approx(torchs_rates(plan, 23), rel=0, abs=1e-14)
    assert min(ours) > 0
    assert plan.lr_at(0) == plan.lr_at(1), "a stage before round 1 has its rate"


def test_the_default_is_what_it_was_to_the_bit() -> None:
    plan = Plan(lr=0.3, lr_decay=0.97)
    for round in range(1, 301):
        assert plan.lr_at(round) == 0.3 * 0.97 ** (round - 1)


def test_beyond_its_last_round_a_cosine_stays() -> None:
    plan = Plan(lr_schedule="cosine", lr_rounds=5)
    assert plan.lr_at(6) == plan.lr_at(5) == plan.lr_at(50) > 0


def test_every_engine_trains_at_these_rates_and_a_resumed_run_too(tmp_path: Path) -> None:
    def experiment(engine: str, **plan: Any) -> Experiment:
        plan = {"epochs": 2, "batch": 10, **RISING, **plan}
        return toys.toy("scaffold", plan=plan, engine=engine)

    serial = run(experiment("serial"), tmp_path / "serial", toys.blobs()).model
    for engine in ("pooled", "flower"):
        model = run(experiment(engine), tmp_path / engine, toys.blobs()).model
        assert same_bits(model, serial), engine
    stacked = run(experiment("vectorised"), tmp_path / "stacked", toys.blobs()).model
    for name, entry in serial.items():
        torch.testing.assert_close(stacked[name], entry, rtol=1e-4, atol=1e-5)

    constant = experiment("serial", lr_schedule="constant")
    assert not same_bits(run(constant, tmp_path / "constant", toys.blobs()).model, serial)

    halfway = stopped(experiment("serial"), tmp_path / "stopped", 2)
    resume(halfway, toys.blobs())
    assert_same_bits(bits(halfway), bits(tmp_path / "serial"))


def test_the_config_records_the_rounds_of_a_cosine_and_nothing_where_it_is_the_default() -> None:
    cosine = resolve(toys.toy(plan=RISING))
    assert 'lr_schedule = "cosine"\nlr_end = 0.1\nlr_warmup = 1\nlr_rounds = 3\n' in cosine.toml
    estimate = run_estimate(prepare(cosine, toys.blobs()))
    assert estimate.learning_rates == "train 0.1 in round 1, 0.2 in round 2, 0.11 in round 3"

    default = resolve(toys.toy())
    assert "lr_schedule" not in default.toml
    assert default.tree["plan"]["train"]["lr_schedule"] == "constant", "explain shows it"


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
