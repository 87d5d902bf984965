"""The formulas of the strategies, in float64 and without code of the package; and their runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.keys import seed_for
from fedstill.core.records import SERVER, State, Tensors
from fedstill.models import contract
from fedstill.running.checkpoint import kept_updates
from fedstill.running.journal import read_journal
from fedstill.running.replay import checkpoints_of
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.unlearning.certificate import check_certificate
from fedstill.unlearning.federaser import NORMS, calibrated, norm_key
from fedstill.unlearning.gradient_ascent import LAST_MODEL, RADIUS, projected
from fedstill.unlearning.request import STRATEGIES, UnlearningRequest, strategy_named
from fedstill.unlearning.sifu import Sifu, largest_influence
from fedstill.unlearning.strategy import OriginalRun, repeated_stages
from fedstill.unlearning.unlearn import Unlearned, UnlearningPlan, unlearn

ROUNDS = 4
CLIENT = 3
REQUEST = UnlearningRequest(clients=(CLIENT,))
EXPERIMENT = toys.toy(
    "fedavg",
    rounds=ROUNDS,
    topology={"clients": 6, "sampled": 4},
    data={"public": 30},
    keep_updates=True,
    keep_checkpoints_every=1,
)


def trained(experiment: Experiment, folder: Path) -> Path:
    run(experiment, folder, toys.blobs())
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> OriginalRun:
    folder = trained(EXPERIMENT, tmp_path_factory.mktemp("unlearning") / "run")
    return OriginalRun.of(folder, toys.blobs())


def unlearned(original: OriginalRun, name: str, out: Path, **options: Any) -> Unlearned:
    strategy = strategy_named(name, options)
    return unlearn(original.folder, REQUEST, strategy, out, data=toys.blobs())


def first_state(original: OriginalRun, name: str, **options: Any) -> State:
    """The state from which a new run starts."""
    strategy = strategy_named(name, options)
    plan = UnlearningPlan.of(original.folder, REQUEST, strategy, toys.blobs())
    start = strategy.start(original, REQUEST, plan.prepared)
    assert start is not None
    return start.state


class History:
    """The kept updates of a run in float64: clients' models and their weights, by round."""

    def __init__(self, original: OriginalRun) -> None:
        self.models: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.sizes: dict[int, dict[int, int]] = {}
        for update in kept_updates(original.folder):
            params = {name: t.double() for name, t in update.content().params.items()}
            self.models.setdefault(update.round, {})[update.client] = params
            self.sizes.setdefault(update.round, {})[update.client] = update.examples
        initial = original.prepared.world.initial(SERVER)
        self.globals = {0: {name: t.double() for name, t in initial.items()}}
        for round in range(1, ROUNDS + 1):
            self.globals[round] = self.mean(round)

    def mean(self, round: int, without: int | None = None) -> dict[str, Tensor]:
        """The mean of a round's models, weighted by size; ``without``: a client."""
        clients = [client for client in self.models[round] if client != without]
        total = sum(self.sizes[round][client] for client in clients)
        return {
            name: sum(
                self.sizes[round][client] / total * self.models[round][client][name]
                for client in clients
            )
            for name in self.models[round][clients[0]]
        }  # type: ignore[return-value]

    @property
    def rounds_of_client(self) -> list[int]:
        return [round for round, models in self.models.items() if CLIENT in models]


@pytest.fixture(scope="module")
def history(original: OriginalRun) -> History:
    result = History(original)
    assert 0 < len(result.rounds_of_client) < ROUNDS, "the client must act in some rounds only"
    assert_close(original.final_state.params, result.globals[ROUNDS])
    return result


def assert_close(params: Tensors, expected: Tensors) -> None:
    assert params.keys() == expected.keys()
    for name, tensor in params.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=1e-4, atol=1e-6)


def length(first: Tensors, second: Tensors) -> float:
    return math.sqrt(sum(float((first[n].double() - second[n]).square().sum()) for n in first))


# ---- FedEraser -----------------------------------------------------------------------------------


def test_a_calibrated_change_has_the_old_length_and_the_new_direction() -> None:
    draw = torch.Generator().manual_seed(1)
    start = {name: torch.randn(3, 2, generator=draw, dtype=torch.float64) for name in "ab"}
    trained = {name: t + torch.randn(3, 2, generator=draw) for name, t in start.items()}
    norms = {"a": torch.tensor(0.7, dtype=torch.float64), "b": torch.tensor(3.0).double()}
    model = calibrated(start, trained, norms)
    for name, norm in norms.items():
        old, new = (model[name] - start[name]).flatten(), (trained[name] - start[name]).flatten()
        assert float(old.norm()) == pytest.approx(float(norm), rel=1e-12)
        assert float(old @ new) == pytest.approx(float(old.norm() * new.norm()), rel=1e-12)
    same = calibrated(start, start, norms)
    assert all(torch.equal(same[name], start[name]) for name in start)


def test_federaser_begins_with_the_first_round_and_the_old_norms(
    original: OriginalRun, history: History
) -> None:
    state = first_state(original, "federaser")
    assert_close(state.params, history.mean(1, without=CLIENT))
    norms = state.extra.tensors(NORMS)
    expected = {
        norm_key(round, client): model
        for round, models in history.models.items()
        for client, model in models.items()
        if round > 1 and client != CLIENT
    }
    assert norms.keys() == expected.keys()
    for key, model in expected.items():
        before = history.globals[int(key.partition(".")[0]) - 1]
        lengths = torch.stack([(model[name] - before[name]).norm() for name in sorted(model)])
        torch.testing.assert_close(norms[key], lengths, rtol=1e-4, atol=1e-6)


def test_federaser_calibrates_the_rounds_with_their_clients_and_learning_rates(
    original: OriginalRun, history: History, tmp_path: Path
) -> None:
    folder = unlearned(original, "federaser", tmp_path / "new").result.directory
    new = OriginalRun.of(folder, toys.blobs())
    plan = new.settings.plans["calibrate"]
    old_plan = original.settings.plans["train"]
    assert plan.epochs == 1
    for number, old_round in enumerate(range(2, ROUNDS + 1), start=ROUNDS + 1):
        assert plan.lr_at(number) == pytest.approx(old_plan.lr_at(old_round), rel=1e-12)
        clients = {
            event["client"]
            for event in new.events
            if event["event"] == "client" and event["round"] == number
        }
        assert clients == history.models[old_round].keys() - {CLIENT}
    assert new.last_round == 2 * ROUNDS - 1
    assert new.final_state.extra.keys() >= {NORMS}


# ---- projected gradient ascent -------------------------------------------------------------------


def test_a_projection_is_the_nearest_point_of_the_ball() -> None:
    centre = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    model = {"a": torch.tensor([3.0, 0, 0]).double(), "b": torch.tensor([1.0, 5.0]).double()}
    inside = projected(model, centre, 5.5)
    assert all(torch.allclose(inside[name], model[name]) for name in model)
    outside = projected(model, centre, 2.5)
    assert length(outside, centre) == pytest.approx(2.5, rel=1e-6)
    assert torch.allclose(outside["a"], torch.tensor([1.5, 0, 0]).double(), rtol=1e-6)


def test_gradient_ascent_starts_from_the_model_of_the_others(
    original: OriginalRun, history: History
) -> None:
    state = first_state(original, "gradient_ascent")
    assert_close(state.params, history.mean(ROUNDS, without=CLIENT))
    last = history.rounds_of_client[-1]
    assert_close(state.extra.tensors(LAST_MODEL), history.models[last][CLIENT])
    world = original.prepared.world
    spec = world.model(SERVER)
    squares = []
    for number in range(10):
        seed = seed_for(world.seed, 0, number, SERVER, "random model")
        squares.append(length(history.mean(ROUNDS, CLIENT), contract.initial(spec, seed)) ** 2)
    assert state.extra.number(RADIUS) == pytest.approx(math.sqrt(sum(squares) / 30), rel=1e-4)


def test_the_client_raises_its_loss_in_the_ball_and_never_acts_again(
    original: OriginalRun, tmp_path: Path
) -> None:
    options = {"repair_rounds": 1, "stop_distance": 100.0}
    new = unlearned(original, "gradient_ascent", tmp_path / "new", **options)
    checkpoints = checkpoints_of(new.result.directory)
    position = next(p for p in checkpoints.positions() if p.round == ROUNDS + 1 and p.stage)
    ascended = checkpoints.at(position).state.params
    start = first_state(original, "gradient_ascent")
    assert 0 < length(ascended, start.params) <= start.extra.number(RADIUS) * (1 + 1e-6)
    assert loss_of_client(original, ascended) > loss_of_client(original, start.params)
    acting = [
        (event["round"], event["name"])
        for event in read_journal(new.result.directory / "journal.jsonl")
        if event["event"] == "client" and event["client"] == CLIENT and event["round"] > ROUNDS
    ]
    assert acting == [(ROUNDS + 1, "ascend")]


def loss_of_client(original: OriginalRun, params: Tensors) -> float:
    sites = original.prepared.sites
    examples = sites.train.take(sites.positions(CLIENT))
    logits = sites.passes(sites.model(CLIENT)).logits(params, examples)
    return float(torch.nn.functional.cross_entropy(logits, examples.labels))


def test_an_ascent_stops_at_the_distance(original: OriginalRun, tmp_path: Path) -> None:
    """It makes one step if it is beyond the distance from the start, and more otherwise."""
    start = first_state(original, "gradient_ascent")
    plan = strategy_named("gradient_ascent", {}).stage_plans["ascend"]
    moved = {}
    for name, stop_distance in (("one step", 1e-9), ("all steps", 100.0)):
        options = {"repair_rounds": 1, "stop_distance": stop_distance}
        new = unlearned(original, "gradient_ascent", tmp_path / name, **options)
        checkpoints = checkpoints_of(new.result.directory)
        position = next(p for p in checkpoints.positions() if p.round == ROUNDS + 1 and p.stage)
        moved[name] = length(checkpoints.at(position).state.params, start.params)
    assert 0 < moved["one step"] <= plan.lr_at(ROUNDS + 1) * plan.clip_norm * (1 + 1e-5)
    assert moved["all steps"] > 2 * moved["one step"]


# ---- subtraction ---------------------------------------------------------------------------------


def test_subtraction_takes_the_weighted_updates_of_the_client_out(
    original: OriginalRun, history: History
) -> None:
    state = first_state(original, "subtraction")
    expected = dict(history.globals[ROUNDS])
    for round in history.rounds_of_client:
        share = history.sizes[round][CLIENT] / sum(history.sizes[round].values())
        for name in expected:
            change = history.models[round][CLIENT][name] - history.globals[round - 1][name]
            expected[name] = expected[name] - share * change
    assert_close(state.params, expected)
    assert_close(state.extra.tensors("old_model"), original.final_state.params)


def test_the_server_distils_the_old_model(original: OriginalRun, tmp_path: Path) -> None:
    new = unlearned(original, "subtraction", tmp_path / "new").result
    start = first_state(original, "subtraction")
    old_model = original.final_state.params
    public = original.prepared.sites.public
    assert public is not None
    passes = original.prepared.sites.passes(original.prepared.world.model(SERVER))
    target = (passes.logits(old_model, public) / 3).softmax(1)

    def divergence(params: Tensors) -> float:
        log_probabilities = (passes.logits(params, public) / 3).log_softmax(1)
        return float((target * (target.log() - log_probabilities)).sum(1).mean())

    assert divergence(new.model) < divergence(start.params)
    assert "old_model" not in OriginalRun.of(new.directory, toys.blobs()).final_state.extra


# ---- SIFU ----------------------------------------------------------------------------------------


def influences(history: History, growth: float) -> list[float]:
    """Psi after each round, from the formula."""
    steps = [
        length(history.globals[round], history.mean(round, without=CLIENT))
        for round in range(1, ROUNDS + 1)
    ]
    return [sum(growth ** (n - s - 1) * steps[s] for s in range(n)) for n in range(1, ROUNDS + 1)]


@pytest.mark.parametrize("growth", [1.0, 1.5])
@pytest.mark.parametrize("back_to", range(ROUNDS + 1))
def test_sifu_goes_back_to_the_last_round_within_the_bound(
    growth: float, back_to: int, original: OriginalRun, history: History
) -> None:
    psi = [0.0, *influences(history, growth)]
    if back_to < ROUNDS and psi[back_to + 1] == psi[back_to]:
        pytest.skip("the client did not act in the next round")
    sigma = psi[back_to] * 1.0001 * math.sqrt(2 * math.log(1.25 / 0.01)) / 10 + 1e-9
    strategy = Sifu(sigma=sigma, growth=growth)
    assert largest_influence(10, 0.01, sigma) >= psi[back_to]
    rollback = strategy.rollback(original, REQUEST)
    assert rollback.round == back_to
    assert rollback.influence == pytest.approx(psi[back_to], rel=1e-4, abs=1e-9)


def test_the_noise_of_sifu_has_its_standard_deviation(
    original: OriginalRun, history: History
) -> None:
    sigma = 50.0
    state = first_state(original, "sifu", sigma=sigma)
    noise = [state.params[name].double() - history.globals[ROUNDS][name] for name in state.params]
    values = torch.cat([tensor.flatten() for tensor in noise]) / sigma
    assert abs(float(values.mean())) < 4 / math.sqrt(len(values))
    assert float(values.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * len(values)))


def test_sifu_states_its_bound(original: OriginalRun, tmp_path: Path) -> None:
    new = unlearned(original, "sifu", tmp_path / "new", sigma=1e-6)
    bound = new.certificate["strategy"]["bound"]
    assert bound["influence"] <= bound["largest_influence"]
    first = bound["from_round"] + 1
    assert new.certificate["rounds"]["first"] >= first
    assert new.result.summary["rounds"] == ROUNDS


# ---- all strategies ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "retraining"])
def test_the_client_trains_in_no_new_round(
    name: str, original: OriginalRun, tmp_path: Path
) -> None:
    new = unlearned(original, name, tmp_path / "new")
    table = OriginalRun.of(new.result.directory, toys.blobs()).settings.packages["unlearning"].table
    stages = {
        event["name"]
        for event in read_journal(new.result.directory / "journal.jsonl")
        if event["event"] == "client"
        and event["client"] == CLIENT
        and event["round"] >= table["first_round"]
    }
    assert stages <= {"ascend"}
    assert math.isfinite(new.result.accuracy)
    assert check_certificate(new.result.directory).original_checked


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "retraining"])
def test_a_new_run_that_was_stopped_continues_to_the_same_bits(
    name: str, original: OriginalRun, tmp_path: Path
) -> None:
    whole = unlearned(original, name, tmp_path / "new").result
    model = Result.of(whole.directory).model
    for file in ("summary.json", "model.safetensors", "certificate.json"):
        (whole.directory / file).unlink()
    checkpoints = whole.directory / "checkpoints"
    (checkpoints / "LATEST").unlink()
    sorted(checkpoints.glob("*.json"))[-1].unlink()
    again = unlearned(original, name, whole.directory).result
    assert length(again.model, model) == 0


CHAIN = toys.toy("fedseq", rounds=2, topology={"clients": 6, "sampled": 3}, keep_updates=True)
UNSUITABLE: dict[str, tuple[Experiment, str, str]] = {
    "a chain": (CHAIN, "federaser", "chain"),
    "state at the server": (toys.toy("scaffold", rounds=1, keep_updates=True), "sifu", "control"),
    "states of clients": (
        toys.toy("moon", rounds=1, keep_updates=True),
        "sifu",
        "states from round to round",
    ),
    "entries without noise": (
        toys.toy("fedavg", rounds=1, model="toy_batchnorm", keep_updates=True),
        "sifu",
        "running_mean",
    ),
    "a server stage": (
        toys.toy("feddf", rounds=1, data={"public": 30}, keep_updates=True),
        "federaser",
        "server",
    ),
    "learning rates that fall far": (
        toys.toy("fedavg", rounds=3, plan={"epochs": 1, "lr_decay": 1e-6}, keep_updates=True),
        "federaser",
        r"plan\.lr_decay",
    ),
    "no updates": (toys.toy("fedavg", rounds=1), "federaser", "keep_updates"),
    "no public data": (
        toys.toy("fedavg", rounds=1, keep_updates=True),
        "subtraction",
        "data.public",
    ),
    "models of clients": (
        toys.toy("fedmd", rounds=1, data={"public": toys.PUBLIC}),
        "fine_tuning",
        "model of its own",
    ),
    "another stage": (
        toys.toy("replay", rounds=1, data={"public": 30}, keep_updates=True),
        "subtraction",
        "remember",
    ),
    "another network": (toys.toy("analytic", rounds=1), "fine_tuning", "network"),
    "tasks": (
        toys.toy("fedavg", rounds=2, stream={"kind": "classes", "tasks": 2}),
        "fine_tuning",
        "tasks",
    ),
}


@pytest.mark.parametrize("case", UNSUITABLE)
def test_an_unsuitable_run_is_rejected_with_a_reason(case: str, tmp_path: Path) -> None:
    experiment, name, reason = UNSUITABLE[case]
    folder = trained(experiment, tmp_path / "run")
    strategy = strategy_named(name, {})
    request = UnlearningRequest(clients=(1,))
    with pytest.raises((IncompatibleMethod, ConfigError), match=reason):
        unlearn(folder, request, strategy, tmp_path / "new", data=toys.blobs())
    assert not (tmp_path / "new").exists()


def test_the_updates_of_hostile_clients_lead_to_the_models_of_the_run(tmp_path: Path) -> None:
    """The kept updates are what the hostile clients sent; they do not change them once more."""
    attacked = replace(EXPERIMENT, clients={"attack": "sign_flip", "attackers": 0.5})
    original = OriginalRun.of(trained(attacked, tmp_path / "run"), toys.blobs())
    results = list(repeated_stages(original))
    assert results[-1].stage.round == original.last_round


def test_fine_tuning_goes_on_in_a_chain(tmp_path: Path) -> None:
    folder = trained(CHAIN, tmp_path / "run")
    strategy = strategy_named("fine_tuning", {"repair_rounds": 1})
    request = UnlearningRequest(clients=(1,))
    new = unlearn(folder, request, strategy, tmp_path / "new", data=toys.blobs()).result
    acting = {
        event["client"]
        for event in read_journal(new.directory / "journal.jsonl")
        if event["event"] == "client" and event["round"] == 3
    }
    assert acting
    assert 1 not in acting


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_only_retraining_can_start_without_another_run(name: str, tmp_path: Path) -> None:
    values = {"unlearning.clients": (1,), "unlearning.strategy": name}
    experiment = toys.toy("fedavg", rounds=1).with_values(values, "test")
    if name == "retraining":
        run(experiment, tmp_path / "run", toys.blobs())
        return
    with pytest.raises(ConfigError, match=r"unlearning\.strategy"):
        run(experiment, tmp_path / "run", toys.blobs())
    assert not (tmp_path / "run").exists()
