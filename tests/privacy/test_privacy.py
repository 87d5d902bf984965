"""Clipping and noise on uploaded logits: the mechanism, its epsilon, the account in the journal,
and the budget.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import BudgetSpent, ConfigError
from fedstill.core.extensions import RoundResult
from fedstill.core.records import Payload, Stage
from fedstill.core.trees import same_bits
from fedstill.flower.engine import Parcel, parsed, serialised
from fedstill.privacy.extensions import Budget
from fedstill.privacy.leakage import epsilon_at_least
from fedstill.privacy.noise import Privacy, clip_rows, gaussian_epsilon
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.recording import Quiet
from fedstill.running.runner import resume, run
from flowers import needs_flower, over_flower
from loops import record
from run_bits import stopped
from troubled_grid import Delivery, FaultyGrid

CLIP = {"clip": 2.0}
BUDGET = {"clip": 3.0, "noise": 20.0}
"""Noise with which a toy has a finite epsilon."""


def experiment(method: str = "hiper_fedkd", **privacy: float) -> Experiment:
    """Two rounds of four clients with this table ``[privacy]``."""
    return toys.toy(
        method,
        data={"public": toys.PUBLIC},
        topology={"clients": 4},
        privacy=privacy,
        rounds=2,
        plan={"epochs": 1},
    )


def test_nothing_is_changed_without_privacy_or_logits() -> None:
    logits = Payload(logits=100 * torch.randn(5, 3))
    assert Privacy().protect(logits, 1) is logits
    params = Payload(params={"w": torch.ones(3)})
    assert Privacy(clip=1.0).protect(params, 1) is params


def test_a_row_is_clipped_without_regard_to_other_rows() -> None:
    nan = float("nan")
    rows = [[3.0, 4.0], [0.1, 0.0], [0.0, 0.0], [1e30, 0.0], [nan, 1.0]]
    expected = [[1.2, 1.6], [0.1, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    clipped = clip_rows(torch.tensor(rows, dtype=torch.float64), 2.0)
    np.testing.assert_allclose(clipped.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert clipped.norm(dim=1).max() <= 2.0 + 1e-12


def test_noise_has_the_declared_spread_and_is_determined_by_its_seed() -> None:
    privacy = Privacy(clip=2.0, noise=0.5)
    zeros = Payload(logits=torch.zeros(4000, 5))
    noise = privacy.protect(zeros, 1).tensor("logits")
    assert torch.equal(noise, privacy.protect(zeros, 1).tensor("logits"))
    assert not torch.equal(noise, privacy.protect(zeros, 2).tensor("logits"))
    assert noise.std() == pytest.approx(2.0 * 0.5, rel=0.02)
    assert noise.mean() == pytest.approx(0.0, abs=0.02)
    assert noise.dtype == torch.float32


@pytest.mark.parametrize("noise", [0.5, 3.0, 40.0, 400.0])
@pytest.mark.parametrize(("rows", "uploads"), [(1, 1), (50, 1), (50, 10)])
def test_epsilon_is_where_the_privacy_loss_exceeds_it_no_more_than_delta(
    noise: float, rows: int, uploads: int
) -> None:
    """The outputs for two neighbours have the normal densities p and q. Delta is the integral of
    max(0, p - exp(epsilon) q).
    """
    clip = 7.0
    epsilon = Privacy(clip=clip, noise=noise, delta=1e-3).spent(rows, uploads)
    assert epsilon is not None

    largest_change = 2 * clip * math.sqrt(rows * uploads)
    distance = largest_change / (noise * clip)  # in standard deviations
    x = np.linspace(-12 - distance, 12 + distance, 2_000_001)
    log_p = -(x**2) / 2
    log_q = -((x + distance) ** 2) / 2
    # p - exp(epsilon) q = p (1 - exp(epsilon + log q - log p)), where this is positive.
    log_ratio = np.minimum(epsilon + log_q - log_p, 0)
    excess = np.exp(log_p) * -np.expm1(log_ratio)
    width = x[1] - x[0]
    delta = excess.sum() * width / math.sqrt(2 * math.pi)

    assert delta <= 1e-3 * 1.001
    assert epsilon == 0 or delta == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("multiplier", [0.001, 0.05, 1.0, 7.0, 300.0])
def test_epsilon_is_that_of_dp_accounting(multiplier: float) -> None:
    accounting = pytest.importorskip("dp_accounting")
    expected = accounting.get_epsilon_gaussian(multiplier, 1e-5)
    assert gaussian_epsilon(multiplier, 1e-5) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("multiplier", "epsilon"), [(1e-9, 5e17), (1e-20, 5e39), (1e-200, math.inf)]
)
def test_almost_no_noise_has_a_huge_epsilon_and_is_no_error(
    multiplier: float, epsilon: float
) -> None:
    assert gaussian_epsilon(multiplier, 1e-5) == pytest.approx(epsilon, rel=1e-6)


def test_more_uploads_or_less_noise_cost_more_and_no_noise_has_no_bound() -> None:
    privacy = Privacy(clip=1.0, noise=5.0)
    costs = [privacy.spent(50, k) or 0.0 for k in (0, 1, 2, 10)]
    assert costs == sorted(costs)
    assert costs[0] == 0.0
    assert (Privacy(clip=1.0, noise=1.0).spent(50, 1) or 0) > costs[1]
    assert Privacy(clip=1.0).spent(50, 1) is None
    assert math.isfinite(Privacy(clip=1.0, noise=0.01).spent(5000, 100) or math.inf)


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"clip": -1.0}, "privacy.clip = -1.0"),
        ({"noise": 1.0}, "privacy.noise = 1.0 needs privacy.clip"),
        ({"clip": 1.0, "delta": 0.0}, "privacy.delta = 0.0"),
        ({"clip": 1.0, "delta": 1.0}, "privacy.delta = 1.0"),
        ({"clp": 1.0}, "clip"),
    ],
)
def test_faulty_values_are_refused(privacy: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(experiment(**privacy))


@pytest.mark.parametrize("method", ["fedavg", "feddf", "fedbe", "scaffold", "fedntd"])
def test_methods_that_upload_no_logits_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method {method} "):
        resolve(experiment(method, **CLIP))


@pytest.mark.parametrize("method", ["hiper_fedkd", "fedmd", "dsfl"])
def test_the_summary_has_no_epsilon_for_clipping_without_noise(method: str, tmp_path: Path) -> None:
    result = run(experiment(method, **CLIP), tmp_path / "run", data=toys.blobs())
    assert result.summary["privacy"] == {"epsilon": [None] * 4, "delta": 1e-5, "covers": "logits"}


def test_the_account_is_journaled_and_the_same_after_a_resume(tmp_path: Path) -> None:
    uninterrupted = run(experiment(**BUDGET), tmp_path / "whole", data=toys.blobs())
    assert uninterrupted.accuracy is not None
    events = read_journal(tmp_path / "whole" / "journal.jsonl")
    epsilons = [event["privacy"]["epsilon"] for event in events if event["event"] == "round"]
    after_round_1 = Privacy(**BUDGET).spent(toys.PUBLIC, 1)
    after_round_2 = Privacy(**BUDGET).spent(toys.PUBLIC, 2)
    assert epsilons == [[after_round_1] * 4, [after_round_2] * 4]
    assert uninterrupted.summary["privacy"]["epsilon"] == epsilons[-1]

    uploads = [event for event in events if "noised_rows" in event]
    assert {event["name"] for event in uploads} == {"local"}
    assert {event["noised_rows"] for event in uploads} == {toys.PUBLIC}

    for stages in (2, 5):
        folder = stopped(experiment(**BUDGET), tmp_path / str(stages), stages=stages)
        resume(folder, data=toys.blobs())
        assert without_times(read_journal(folder / "journal.jsonl")) == without_times(events)


def test_uploads_of_different_numbers_of_rows_cost_what_dp_accounting_composes() -> None:
    accounting = pytest.importorskip("dp_accounting")
    privacy = Privacy(clip=3.0, noise=60.0)
    composed = accounting.pld.PLDAccountant()
    for rows in (50, 7, 120):
        multiplier = privacy.noise / (2 * math.sqrt(rows))
        composed.compose(accounting.GaussianDpEvent(multiplier))
    expected = composed.get_epsilon(privacy.delta)
    assert privacy.spent(50 + 7 + 120) == pytest.approx(expected, rel=1e-3)


def test_uploads_of_different_numbers_of_rows_cost_what_their_losses_convolve_to() -> None:
    """The privacy loss of an upload is normal with mean r² / 2 and standard deviation r. The
    distribution of the sum of three losses is their convolution, on a grid.
    """
    privacy = Privacy(clip=3.0, noise=60.0, delta=1e-5)
    epsilon = privacy.spent(50 + 7 + 120)
    assert epsilon is not None

    step = 1e-4
    grid = np.arange(-8.0, 8.0 + step, step)
    length = 4 * len(grid)
    product = np.ones(length // 2 + 1, dtype=complex)
    for rows in (50, 7, 120):
        r = 2 * math.sqrt(rows) / privacy.noise
        density = np.exp(-(((grid - r * r / 2) / r) ** 2) / 2)
        product *= np.fft.rfft(density / density.sum(), length)
    masses = np.fft.irfft(product, length)[: 3 * len(grid) - 2]
    losses = 3 * grid[0] + step * np.arange(len(masses))

    is_above = losses > epsilon
    excess = -np.expm1(epsilon - losses[is_above])
    delta = float((masses[is_above] * excess).sum())
    assert delta == pytest.approx(privacy.delta, rel=1e-3)


def budget() -> Budget:
    """The account of a run in which no client has sent anything."""
    settings = resolve(experiment(**BUDGET).with_values({"data.name": "blobs"}, "test"))
    world = prepare(settings, toys.blobs()).world
    return Budget(settings.package_table(Privacy), settings.schedule, world)


def epsilons_of(account: Budget) -> list[float]:
    """The epsilon of each client in the event of a round."""
    epsilons: list[float] = account.round_fields(NO_ROUND, {})["privacy"]["epsilon"]
    return epsilons


CLIENTS = (0, 1, 2, 3)
LOCAL = Stage(1, 0, "local", CLIENTS)
NO_ROUND = RoundResult(1, (), {})


def test_rows_are_those_that_arrived_and_not_those_that_a_client_claims() -> None:
    """A refused reply counts too, one without logits like one with all rows. A resumed run counts
    the rows in the journal.
    """
    account = budget()
    events = [
        {"client": 0},
        {"client": 1, "refused": "params differ", "noised_rows": 0},
        {"client": 2},
        {"client": 3, "idle": True},
    ]
    contents = {
        0: Payload(logits=torch.zeros(toys.PUBLIC, 5)),
        1: Payload(logits=torch.zeros(200, 5)),
        2: Payload(),
    }
    record(account, LOCAL, events, contents)
    assert [e.get("noised_rows") for e in events] == [toys.PUBLIC, 200, toys.PUBLIC, None]
    privacy = Privacy(**BUDGET)
    of_public_rows = privacy.spent(toys.PUBLIC)
    expected = [of_public_rows, privacy.spent(200), of_public_rows, privacy.spent(0)]
    assert epsilons_of(account) == expected

    resumed = budget()
    for event in json.loads(json.dumps(events)):
        resumed.on_event(event)
    assert resumed.round_fields(NO_ROUND, {}) == account.round_fields(NO_ROUND, {})


def test_uploads_without_logits_and_of_unknown_clients_cost_nothing() -> None:
    account = budget()
    params = Payload(params={"w": torch.ones(1)})
    record(account, Stage(1, 0, "fit", CLIENTS), [{"client": 0}], {0: params})
    record(account, Stage(1, 2, "distil", CLIENTS), [{"client": 0}], {0: Payload()})
    labels = Payload(labels=torch.ones(5))
    record(account, Stage(0, 0, "census", CLIENTS), [{"client": 0}], {0: labels})
    record(account, LOCAL, [{"client": 9}, {"client": -1}])
    assert epsilons_of(account) == [0.0] * 4


@needs_flower
def test_the_claim_of_a_client_does_not_change_the_epsilon_of_others(tmp_path: Path) -> None:
    """In the attack, a listed client reports that its upload had no rows."""

    def fault(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.client != 1 or delivery.round == 0:
            return reply
        message = parsed(reply)
        header = message.content.config_records["header"]
        metrics = '"metrics": {'
        header["json"] = str(header["json"]).replace(metrics, metrics + '"noised_rows": 0, ', 1)
        return serialised(message)

    over_sites = over_flower(experiment(**BUDGET), retries=0)
    grid = FaultyGrid(over_sites, tmp_path / "sites", fault)
    run(over_sites, tmp_path / "run", toys.blobs(), grid=grid)

    events = read_journal(tmp_path / "run" / "journal.jsonl")
    refusals = [e["refused"] for e in events if "refused" in e and "client" in e]
    assert refusals
    assert all("'noised_rows'" in reason for reason in refusals)
    epsilons = [event["privacy"]["epsilon"] for event in events if event["event"] == "round"]
    after_round_1 = Privacy(**BUDGET).spent(toys.PUBLIC, 1)
    after_round_2 = Privacy(**BUDGET).spent(toys.PUBLIC, 2)
    assert epsilons == [[after_round_1] * 4, [after_round_2] * 4], "the uploads arrived"


def test_noise_changes_the_model_of_the_server(tmp_path: Path) -> None:
    plain = run(experiment(**CLIP), tmp_path / "plain", data=toys.blobs())
    loud = run(experiment(**CLIP, noise=50.0), tmp_path / "loud", data=toys.blobs())
    assert not same_bits(plain.model, loud.model)


def spent_by(uploads: int) -> float:
    """The epsilon of some uploads of one client."""
    epsilon = Privacy(**BUDGET).spent(toys.PUBLIC, uploads)
    assert epsilon is not None
    return epsilon


ONE_AND_A_HALF = (spent_by(1) + spent_by(2)) / 2
"""A budget for more than one upload and less than two."""


def rows_sent(folder: Path) -> list[tuple[int, int, int]]:
    """The round, the client and the number of rows of each upload of logits."""
    events = read_journal(folder / "journal.jsonl")
    uploads = [event for event in events if "noised_rows" in event]
    return sorted((event["round"], event["client"], event["noised_rows"]) for event in uploads)


class StageCount(Quiet):
    """Counts the stages of a run."""

    def __init__(self) -> None:
        self.stages = 0

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        self.stages += 1


def test_a_run_ends_before_an_upload_that_its_budget_does_not_allow(tmp_path: Path) -> None:
    """Its budget is enough for the uploads of round 1 only, also after a resume."""
    watch = StageCount()
    limited = experiment(**BUDGET, epsilon=ONE_AND_A_HALF)
    message = r"round 2, stage 'local': client 0 has spent .* privacy.epsilon"
    with pytest.raises(BudgetSpent, match=message):
        run(limited, tmp_path / "run", data=toys.blobs(), watch=watch)
    assert watch.stages == 4, "the census, round 1, and nothing of round 2"
    uploads = rows_sent(tmp_path / "run")
    assert [upload[:2] for upload in uploads] == [(1, 0), (1, 1), (1, 2), (1, 3)]

    for _ in range(2):
        with pytest.raises(BudgetSpent, match="round 2"):
            resume(tmp_path / "run", data=toys.blobs())
        assert rows_sent(tmp_path / "run") == uploads


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_stopped_run_has_the_remaining_budget_after_a_resume(stages: int, tmp_path: Path) -> None:
    limited = experiment(**BUDGET, epsilon=ONE_AND_A_HALF)
    folder = stopped(limited, tmp_path / "run", stages=stages)
    with pytest.raises(BudgetSpent, match="round 2"):
        resume(folder, data=toys.blobs())


def test_a_budget_allows_exactly_the_uploads_that_it_covers(tmp_path: Path) -> None:
    enough = experiment(**BUDGET, epsilon=spent_by(2))
    summary = run(enough, tmp_path / "run", data=toys.blobs()).summary
    assert summary["privacy"]["epsilon"] == [spent_by(2)] * 4

    too_little = experiment(**BUDGET, epsilon=0.99 * spent_by(1))
    with pytest.raises(BudgetSpent, match="round 1, stage 'local'"):
        run(too_little, tmp_path / "none", data=toys.blobs())
    assert rows_sent(tmp_path / "none") == []


def test_a_limit_without_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy.epsilon = 1.0 needs privacy.noise"):
        resolve(experiment(clip=1.0, epsilon=1.0))


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0])
def test_a_canary_confirms_the_claimed_epsilon_and_refutes_a_quarter_of_the_noise(
    multiplier: float,
) -> None:
    """The logits of five images are as far apart as clipping permits, and are protected a thousand
    times each.
    """
    privacy = Privacy(clip=2.0, noise=multiplier * 2 * math.sqrt(5), delta=1e-3)
    logits = torch.zeros(5, 3)
    logits[:, 0] = 100.0

    def scores(logits: torch.Tensor, seeds: range) -> np.ndarray:
        protected = [privacy.protect(Payload(logits=logits), seed) for seed in seeds]
        return np.array([float(payload.tensor("logits")[:, 0].sum()) for payload in protected])

    scores_with = scores(logits, range(1000))
    scores_without = scores(-logits, range(1000, 2000))
    lower_bound = epsilon_at_least(scores_with, scores_without, privacy.delta)
    claim = privacy.spent(5)
    assert claim is not None
    assert claim * 0.2 < lower_bound < claim

    claim_of_more_noise = Privacy(clip=2.0, noise=4 * privacy.noise, delta=1e-3).spent(5)
    assert claim_of_more_noise is not None
    assert multiplier == 2.0 or lower_bound > claim_of_more_noise
