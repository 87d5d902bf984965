"""Clipping and noise on uploaded logits: what is done, what it is worth, what is journaled, who is
refused.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import BudgetSpent, ConfigError
from fedstill.core.extensions import RoundResult
from fedstill.core.records import Payload, Stage
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
from troubled_grid import TroubledGrid

CLIP = {"clip": 2.0}


def experiment(method: str = "hiper_fedkd", **privacy: float):
    return toys.toy(
        method,
        data={"public": toys.PUBLIC},
        topology={"clients": 4},
        privacy=privacy,
        rounds=2,
        plan={"epochs": 1},
    )


def test_off_it_changes_nothing() -> None:
    up = Payload(logits=100 * torch.randn(5, 3))
    assert Privacy().protect(up, 1) is up
    params = Payload(params={"w": torch.ones(3)})
    assert Privacy(clip=1.0).protect(params, 1) is params


def test_rows_are_clipped_each_by_itself() -> None:
    rows = torch.tensor(
        [[3.0, 4.0], [0.1, 0.0], [0.0, 0.0], [1e30, 0.0], [float("nan"), 1.0]], dtype=torch.float64
    )
    clipped = clip_rows(rows, 2.0)
    expected = [[1.2, 1.6], [0.1, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(
        clipped, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    assert clipped.norm(dim=1).max() <= 2.0 + 1e-12


def test_noise_has_the_spread_that_is_said_and_is_drawn_by_key() -> None:
    privacy, up = Privacy(clip=2.0, noise=0.5), Payload(logits=torch.zeros(4000, 5))
    one, same, other = (privacy.protect(up, seed).tensor("logits") for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.std() == pytest.approx(1.0, rel=0.02)
    assert one.mean() == pytest.approx(0.0, abs=0.02)
    assert one.dtype == torch.float32


@pytest.mark.parametrize("noise", [0.5, 3.0, 40.0, 400.0])
@pytest.mark.parametrize(("rows", "uploads"), [(1, 1), (50, 1), (50, 10)])
def test_epsilon_is_where_the_privacy_loss_exceeds_it_no_more_than_delta(
    noise: float, rows: int, uploads: int
) -> None:
    """From the densities of two neighbours' outputs: delta is the integral of max(0, p -
    exp(epsilon) q).
    """
    found = Privacy(clip=7.0, noise=noise, delta=1e-3).spent(rows, uploads)
    assert found is not None
    apart = math.sqrt(uploads) * 2 * 7.0 * math.sqrt(rows) / (noise * 7.0)  # in standard deviations
    x = np.linspace(-12 - apart, 12 + apart, 2_000_001)
    log_p, log_q = -(x**2) / 2, -((x + apart) ** 2) / 2
    over = np.where(
        log_p > found + log_q, np.exp(log_p) * -np.expm1(np.minimum(found + log_q - log_p, 0)), 0
    )
    delta = over.sum() * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    assert delta <= 1e-3 * 1.001
    assert found == 0 or delta == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("multiplier", [0.001, 0.05, 1.0, 7.0, 300.0])
def test_epsilon_is_dp_accountings_where_that_is_installed(multiplier: float) -> None:
    accounting = pytest.importorskip("dp_accounting")
    ours = gaussian_epsilon(multiplier, 1e-5)
    assert ours == pytest.approx(
        accounting.get_epsilon_gaussian(multiplier, 1e-5), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize(
    ("multiplier", "epsilon"), [(1e-9, 5e17), (1e-20, 5e39), (1e-200, math.inf)]
)
def test_next_to_no_noise_has_a_huge_epsilon_and_no_error(
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
    ("privacy", "says"),
    [
        ({"clip": -1.0}, "privacy.clip = -1.0"),
        ({"noise": 1.0}, "privacy.noise = 1.0 needs privacy.clip"),
        ({"clip": 1.0, "delta": 0.0}, "privacy.delta = 0.0"),
        ({"clip": 1.0, "delta": 1.0}, "privacy.delta = 1.0"),
        ({"clp": 1.0}, "clip"),
    ],
)
def test_bad_values_are_one_clear_line(privacy: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(experiment(**privacy))


@pytest.mark.parametrize("method", ["fedavg", "feddf", "fedbe", "scaffold", "fedntd"])
def test_methods_that_upload_no_logits_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method {method} "):
        resolve(experiment(method, **CLIP))


@pytest.mark.parametrize("method", ["hiper_fedkd", "fedmd", "dsfl"])
def test_clipping_alone_has_no_epsilon_and_says_so(method: str, tmp_path: Path) -> None:
    result = run(experiment(method, **CLIP), tmp_path / "run", data=toys.blobs())
    assert result.summary["privacy"] == {"epsilon": [None] * 4, "delta": 1e-5, "covers": "logits"}


def test_the_account_is_journaled_and_the_same_after_a_resume(tmp_path: Path) -> None:
    privacy = {"clip": 3.0, "noise": 20.0}
    whole = run(experiment(**privacy), tmp_path / "whole", data=toys.blobs())
    events = read_journal(tmp_path / "whole" / "journal.jsonl")
    spent = [e["privacy"]["epsilon"] for e in events if e["event"] == "round"]
    expected = [Privacy(**privacy).spent(toys.PUBLIC, k) for k in (1, 2)]
    assert [row[0] for row in spent] == expected
    assert (
        json.loads((tmp_path / "whole" / "summary.json").read_text())["privacy"]["epsilon"]
        == spent[-1]
    )
    marked = [e for e in events if "noised_rows" in e]
    assert {(e["name"], e["noised_rows"]) for e in marked} == {("local", toys.PUBLIC)}
    for stages in (2, 5):
        resume(
            stopped(experiment(**privacy), tmp_path / str(stages), stages=stages), data=toys.blobs()
        )
        other = read_journal(tmp_path / str(stages) / "journal.jsonl")
        assert without_times(other) == without_times(events)
    assert whole.accuracy is not None


def test_uploads_of_different_rows_cost_what_dp_accounting_composes() -> None:
    accounting = pytest.importorskip("dp_accounting")
    privacy = Privacy(clip=3.0, noise=60.0)
    composed = accounting.pld.PLDAccountant()
    for rows in (50, 7, 120):
        multiplier = privacy.noise / (2 * math.sqrt(rows))
        composed.compose(accounting.GaussianDpEvent(multiplier))
    assert privacy.spent(50 + 7 + 120) == pytest.approx(
        composed.get_epsilon(privacy.delta), rel=1e-3
    )


def test_uploads_of_different_rows_cost_what_their_loss_distributions_convolve_to() -> None:
    """Each upload's privacy loss on a grid, from its densities; their sum's by convolution; delta
    from that.
    """
    privacy, step = Privacy(clip=3.0, noise=60.0, delta=1e-5), 1e-4
    at = np.arange(-8.0, 8.0 + step, step)
    total = None
    for rows in (50, 7, 120):
        r = 2 * math.sqrt(rows) / privacy.noise  # the loss is normal: mean r^2 / 2, spread r
        mass = np.exp(-(((at - r * r / 2) / r) ** 2) / 2)
        mass = np.fft.rfft(mass / mass.sum(), 4 * len(at))
        total = mass if total is None else total * mass
    summed = np.fft.irfft(total, 4 * len(at))[: 3 * len(at) - 2]
    loss = 3 * at[0] + step * np.arange(len(summed))
    found = privacy.spent(50 + 7 + 120)
    assert found is not None
    over = loss > found
    assert float((summed[over] * -np.expm1(found - loss[over])).sum()) == pytest.approx(
        privacy.delta, rel=1e-3
    )


def budget(method: str = "hiper_fedkd", **changes: object) -> Budget:
    settings = resolve(
        experiment(method, clip=3.0, noise=20.0).with_values(
            {"data.name": "blobs", **changes}, "test"
        )
    )
    return Budget(
        settings.package_table(Privacy), settings.schedule, prepare(settings, toys.blobs()).world
    )


LOCAL = Stage(1, 0, "local", (0, 1, 2, 3))
NO_ROUND = RoundResult(1, (), {})


def test_rows_are_counted_by_client_from_what_arrived_and_claims_have_no_part() -> None:
    spent = budget()
    events = [{"client": c} for c in range(3)] + [{"client": 3, "idle": True}]
    # a claim from before reports were checked
    events[1] |= {"refused": "params differ", "noised_rows": 0}
    came = {
        0: Payload(logits=torch.zeros(toys.PUBLIC, 5)),
        1: Payload(logits=torch.zeros(200, 5)),
        2: Payload(),
    }
    record(spent, LOCAL, events, came)
    assert [e.get("noised_rows") for e in events] == [toys.PUBLIC, 200, toys.PUBLIC, None]
    alone = [
        Privacy(clip=3.0, noise=20.0).spent(rows) for rows in (toys.PUBLIC, 200, toys.PUBLIC, 0)
    ]
    assert spent.round_fields(NO_ROUND, {})["privacy"]["epsilon"] == alone
    again = budget()
    for event in json.loads(json.dumps(events)):
        again.on_event(event)
    assert again.round_fields(NO_ROUND, {}) == spent.round_fields(NO_ROUND, {}), (
        "a resumed run counts the journal"
    )


def test_what_is_no_upload_of_logits_costs_nothing() -> None:
    spent = budget()
    record(
        spent,
        Stage(1, 0, "fit", (0, 1, 2, 3)),
        [{"client": 0}],
        {0: Payload(params={"w": torch.ones(1)})},
    )
    record(spent, Stage(1, 2, "distil", (0, 1, 2, 3)), [{"client": 0}], {0: Payload()})
    record(
        spent,
        Stage(0, 0, "census", (0, 1, 2, 3)),
        [{"client": 0}],
        {0: Payload(labels=torch.ones(5))},
    )
    record(spent, LOCAL, [{"client": 9}, {"client": -1}])
    assert spent.round_fields(NO_ROUND, {})["privacy"]["epsilon"] == [0.0] * 4


@needs_flower
def test_one_clients_claims_change_nobodys_epsilon(tmp_path: Path) -> None:
    """The attack: a listed client reports that its upload had no rows, which made everybody's
    epsilon 0.
    """

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        reply = grid.work(client, data)
        if client != 1 or round == 0 or reply is None:
            return reply
        message = parsed(reply)
        header = message.content.config_records["header"]
        header["json"] = str(header["json"]).replace(
            '"metrics": {', '"metrics": {"noised_rows": 0, ', 1
        )
        return serialised(message)

    asked = over_flower(experiment(clip=3.0, noise=20.0), retries=0)
    run(
        asked, tmp_path / "run", toys.blobs(), grid=TroubledGrid(asked, tmp_path / "sites", trouble)
    )
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    refused = [e["refused"] for e in events if "refused" in e and "client" in e]
    assert refused
    assert all("'noised_rows'" in why for why in refused)
    told = [e["privacy"]["epsilon"] for e in events if e["event"] == "round"]
    assert told == [[Privacy(clip=3.0, noise=20.0).spent(toys.PUBLIC, k)] * 4 for k in (1, 2)], (
        "its uploads arrived"
    )


def test_noise_reaches_what_everybody_learns(tmp_path: Path) -> None:
    plain = run(experiment(**CLIP), tmp_path / "plain", data=toys.blobs())
    loud = run(experiment(**CLIP, noise=50.0), tmp_path / "loud", data=toys.blobs())
    assert any(not torch.equal(plain.model[k], loud.model[k]) for k in plain.model)


BUDGET = {"clip": 3.0, "noise": 20.0}


def limited(uploads: float) -> dict[str, float]:
    """A budget that is enough for so many uploads of one client."""
    one, two = (Privacy(**BUDGET).spent(toys.PUBLIC, k) or 0.0 for k in (1, 2))
    return {**BUDGET, "epsilon": {1: one, 1.5: (one + two) / 2, 2: two}[uploads]}


def rows_sent(folder: Path) -> list[tuple[int, int, int]]:
    events = read_journal(folder / "journal.jsonl")
    return sorted((e["round"], e["client"], e["noised_rows"]) for e in events if "noised_rows" in e)


def test_a_run_stops_by_name_before_an_upload_that_its_budget_does_not_allow(
    tmp_path: Path,
) -> None:
    """Two rounds would need the budget of two uploads; with that of one and a half the second never
    begins.
    """
    asked, acted = experiment(**limited(1.5)), []

    class Counting(Quiet):
        def stage(self, *at: int) -> None:
            acted.append(at)

    with pytest.raises(
        BudgetSpent, match=r"round 2, stage 'local': client 0 has spent .* privacy.epsilon"
    ):
        run(asked, tmp_path / "run", data=toys.blobs(), watch=Counting())
    assert len(acted) == 4, "the census, round 1, and nothing of round 2"
    sent = rows_sent(tmp_path / "run")
    assert [row[:2] for row in sent] == [(1, c) for c in range(4)]
    for _ in range(2):
        with pytest.raises(BudgetSpent, match="round 2"):
            resume(tmp_path / "run", data=toys.blobs())
        assert rows_sent(tmp_path / "run") == sent, "a resume has no budget of its own"


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_stop_in_the_middle_leaves_the_rest_of_the_budget(stages: int, tmp_path: Path) -> None:
    folder = stopped(experiment(**limited(1.5)), tmp_path / "run", stages=stages)
    with pytest.raises(BudgetSpent, match="round 2"):
        resume(folder, data=toys.blobs())


def test_a_budget_is_enough_for_what_it_says(tmp_path: Path) -> None:
    spent = run(experiment(**limited(2)), tmp_path / "run", data=toys.blobs()).summary["privacy"][
        "epsilon"
    ]
    assert spent == [limited(2)["epsilon"]] * 4
    with pytest.raises(BudgetSpent, match="round 1, stage 'local'"):
        run(
            experiment(**{**BUDGET, "epsilon": limited(1)["epsilon"] * 0.99}),
            tmp_path / "none",
            data=toys.blobs(),
        )
    assert rows_sent(tmp_path / "none") == []


def test_a_limit_without_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy.epsilon = 1.0 needs privacy.noise"):
        resolve(experiment(clip=1.0, epsilon=1.0))


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0])
def test_a_canary_shows_no_more_than_is_claimed_and_not_much_less(multiplier: float) -> None:
    """Logits of five images as far apart as clipping lets them be, protected a thousand times
    each.
    """
    privacy = Privacy(clip=2.0, noise=multiplier * 2 * math.sqrt(5), delta=1e-3)
    far = torch.zeros(5, 3)
    far[:, 0] = 100.0
    both = [
        np.array(
            [
                float(privacy.protect(Payload(logits=sign * far), s).tensor("logits")[:, 0].sum())
                for s in seeds
            ]
        )
        for sign, seeds in ((1, range(1000)), (-1, range(1000, 2000)))
    ]
    claim, seen = privacy.spent(5), epsilon_at_least(*both, privacy.delta)
    assert claim is not None
    assert claim * 0.2 < seen < claim
    less = Privacy(clip=2.0, noise=4 * privacy.noise, delta=1e-3).spent(5)
    assert less is not None
    assert multiplier == 2.0 or seen > less, (
        "the same audit refutes the claim of four times the noise"
    )
