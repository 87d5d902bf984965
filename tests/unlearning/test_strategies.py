"""The formulas of the strategies, in float64 and without code of the package; and their runs."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from fedstill.running.checkpoint import UPDATES, kept_updates, update_file
from fedstill.running.journal import STOP_REASON
from fedstill.running.replay import Replay, checkpoints_of
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.unlearning.certificate import check_certificate
from fedstill.unlearning.federaser import NORMS, calibrated, norm_key
from fedstill.unlearning.gradient_ascent import LAST_MODEL, RADIUS, projected
from fedstill.unlearning.request import STRATEGIES, UnlearningRequest, strategy_named
from fedstill.unlearning.sifu import Sifu, largest_influence
from fedstill.unlearning.strategy import OriginalRun, repeated_stages
from fedstill.unlearning.unlearn import Unlearned, UnlearningPlan, unlearn
from journals import journal_events

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


INEXACT_STRATEGIES = [name for name in STRATEGIES if name != "retraining"]


def trained(experiment: Experiment, folder: Path) -> Path:
    """The directory of a run on blobs."""
    run(experiment, folder, toys.blobs())
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> OriginalRun:
    """The run that is to forget a client. It keeps everything that a strategy may need."""
    folder = trained(EXPERIMENT, tmp_path_factory.mktemp("unlearning") / "run")
    return OriginalRun.of(folder, toys.blobs())


def unlearned(original: OriginalRun, name: str, out: Path, **options: Any) -> Unlearned:
    """The result of a strategy with these options."""
    strategy = strategy_named(name, options)
    return unlearn(original.folder, REQUEST, strategy, out, data=toys.blobs())


@pytest.fixture(scope="module")
def new_run(
    original: OriginalRun, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function that returns the directory of a strategy's run. Each strategy runs once, so tests
    may only copy it.
    """

    @functools.cache
    def directory(name: str) -> Path:
        out = tmp_path_factory.mktemp("new") / "run"
        return unlearned(original, name, out).result.directory

    return directory


def first_state(original: OriginalRun, name: str, **options: Any) -> State:
    """The state from which a new run starts."""
    strategy = strategy_named(name, options)
    plan = UnlearningPlan.of(original.folder, REQUEST, strategy, toys.blobs())
    start = strategy.start(original, REQUEST, plan.prepared)
    assert start is not None
    return start.state


def in_double(params: Tensors) -> dict[str, Tensor]:
    """The parameters in float64."""
    return {name: tensor.double() for name, tensor in params.items()}


class History:
    """The kept updates of a run in float64: models and numbers of examples by round and client, and
    the global model after each round.
    """

    def __init__(self, original: OriginalRun) -> None:
        self.models: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.sizes: dict[int, dict[int, int]] = {}
        for update in kept_updates(original.folder):
            models = self.models.setdefault(update.round, {})
            models[update.client] = in_double(update.content().params)
            sizes = self.sizes.setdefault(update.round, {})
            sizes[update.client] = update.examples

        self.globals = {0: in_double(original.prepared.world.initial(SERVER))}
        for round in range(1, ROUNDS + 1):
            self.globals[round] = self.mean(round)

    def mean(self, round: int, without: int | None = None) -> dict[str, Tensor]:
        """The mean of a round's models, weighted by size; ``without``: a client."""
        clients = [client for client in self.models[round] if client != without]
        sizes = [self.sizes[round][client] for client in clients]
        weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        means = {}
        for name in self.globals[0]:
            tensors = torch.stack([self.models[round][client][name] for client in clients])
            means[name] = torch.tensordot(weights, tensors, dims=1)
        return means

    @property
    def rounds_of_client(self) -> list[int]:
        """The rounds in which the client acted that is to be forgotten."""
        return [round for round, models in self.models.items() if CLIENT in models]


@pytest.fixture(scope="module")
def history(original: OriginalRun) -> History:
    """The history of the original run, which ends with the run's final model."""
    result = History(original)
    assert 0 < len(result.rounds_of_client) < ROUNDS, "the client must act in some rounds only"
    assert_close(original.final_state.params, result.globals[ROUNDS])
    return result


def assert_close(params: Tensors, expected: Tensors) -> None:
    """Two models have the same entries, up to the precision of float32."""
    assert params.keys() == expected.keys()
    for name, tensor in params.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=1e-4, atol=1e-6)


def distance(first: Tensors, second: Tensors) -> float:
    """The Euclidean distance of two models."""
    squares = [(first[name].double() - second[name]).square().sum() for name in first]
    return math.sqrt(sum(map(float, squares)))


# ---- FedEraser -----------------------------------------------------------------------------------


def test_a_calibrated_change_has_the_old_length_and_the_new_direction() -> None:
    draw = torch.Generator().manual_seed(1)
    start = {name: torch.randn(3, 2, generator=draw, dtype=torch.float64) for name in "ab"}
    trained = {name: t + torch.randn(3, 2, generator=draw) for name, t in start.items()}
    norms = {
        "a": torch.tensor(0.7, dtype=torch.float64),
        "b": torch.tensor(3.0, dtype=torch.float64),
    }
    model = calibrated(start, trained, norms)

    for name, norm in norms.items():
        change = (model[name] - start[name]).flatten()
        trained_change = (trained[name] - start[name]).flatten()
        assert float(change.norm()) == pytest.approx(float(norm), rel=1e-12)
        product_of_lengths = float(change.norm() * trained_change.norm())
        assert float(change @ trained_change) == pytest.approx(product_of_lengths, rel=1e-12)

    unchanged = calibrated(start, start, norms)
    assert all(torch.equal(unchanged[name], start[name]) for name in start)


def test_federaser_begins_with_the_first_round_and_the_old_norms(
    original: OriginalRun, history: History
) -> None:
    """The norms are the lengths of the other clients' changes in later rounds, by tensor."""
    state = first_state(original, "federaser")
    assert_close(state.params, history.mean(1, without=CLIENT))

    expected = {}
    for round in range(2, ROUNDS + 1):
        start = history.globals[round - 1]
        for client, model in history.models[round].items():
            if client != CLIENT:
                changes = [model[name] - start[name] for name in sorted(model)]
                norms_of_client = torch.stack([change.norm() for change in changes])
                expected[norm_key(round, client)] = norms_of_client
    norms = state.extra.tensors(NORMS)
    assert norms.keys() == expected.keys()
    for key, lengths in expected.items():
        torch.testing.assert_close(norms[key], lengths, rtol=1e-4, atol=1e-6)


def test_federaser_calibrates_the_rounds_with_their_clients_and_learning_rates(
    original: OriginalRun, history: History, new_run: Callable[[str], Path]
) -> None:
    new = OriginalRun.of(new_run("federaser"), toys.blobs())
    plan = new.settings.plans["calibrate"]
    old_plan = original.settings.plans["train"]

    assert plan.epochs == 1
    for old_round in range(2, ROUNDS + 1):
        new_round = old_round + ROUNDS - 1
        assert plan.lr_at(new_round) == pytest.approx(old_plan.lr_at(old_round), rel=1e-12)
        events = journal_events(new.folder, event="client", round=new_round)
        clients = {event["client"] for event in events}
        assert clients == history.models[old_round].keys() - {CLIENT}
    assert new.last_round == 2 * ROUNDS - 1
    assert new.final_state.extra.keys() >= {NORMS}


# ---- projected gradient ascent -------------------------------------------------------------------


def test_a_projection_is_the_nearest_point_of_the_ball() -> None:
    """The model is at the distance 5 of the centre, in the direction (3, 0, 0, 0, 4) / 5."""
    centre = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    model = {
        "a": torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64),
        "b": torch.tensor([1.0, 5.0], dtype=torch.float64),
    }

    inside = projected(model, centre, 5.5)
    assert all(torch.allclose(inside[name], model[name]) for name in model)

    outside = projected(model, centre, 2.5)
    assert distance(outside, centre) == pytest.approx(2.5, rel=1e-6)
    halfway = torch.tensor([1.5, 0.0, 0.0], dtype=torch.float64)
    assert torch.allclose(outside["a"], halfway, rtol=1e-6)


def test_gradient_ascent_starts_from_the_model_of_the_others(
    original: OriginalRun, history: History
) -> None:
    """The square of its radius is a third of the mean squared distance to ten random models."""
    state = first_state(original, "gradient_ascent")
    model_of_others = history.mean(ROUNDS, without=CLIENT)
    assert_close(state.params, model_of_others)
    last_round = history.rounds_of_client[-1]
    assert_close(state.extra.tensors(LAST_MODEL), history.models[last_round][CLIENT])

    world = original.prepared.world
    squares = []
    for number in range(10):
        seed = seed_for(world.seed, 0, number, SERVER, "random model")
        random_model = contract.initial(world.model(SERVER), seed)
        squares.append(distance(model_of_others, random_model) ** 2)
    assert state.extra.number(RADIUS) == pytest.approx(math.sqrt(sum(squares) / 30), rel=1e-4)


def ascended_params(folder: Path) -> Tensors:
    """The model of a new run after the ascent, which is the first stage."""
    checkpoints = checkpoints_of(folder)
    after_ascent = next(p for p in checkpoints.positions() if p.round == ROUNDS + 1 and p.stage)
    return checkpoints.at(after_ascent).state.params


def test_the_client_raises_its_loss_in_the_ball_and_never_acts_again(
    original: OriginalRun, tmp_path: Path
) -> None:
    options = {"repair_rounds": 1, "stop_distance": 100.0}
    folder = unlearned(original, "gradient_ascent", tmp_path / "new", **options).result.directory

    ascended = ascended_params(folder)
    start = first_state(original, "gradient_ascent")
    assert 0 < distance(ascended, start.params) <= start.extra.number(RADIUS) * (1 + 1e-6)
    assert loss_of_client(original, ascended) > loss_of_client(original, start.params)

    new_events = [
        event
        for event in journal_events(folder, event="client", client=CLIENT)
        if event["round"] > ROUNDS
    ]
    assert [(event["round"], event["name"]) for event in new_events] == [(ROUNDS + 1, "ascend")]


def loss_of_client(original: OriginalRun, params: Tensors) -> float:
    """The cross-entropy of a model on the training data of the client."""
    sites = original.prepared.sites
    examples = sites.train.take(sites.positions(CLIENT))
    logits = sites.passes(sites.model(CLIENT)).logits(params, examples)
    return float(torch.nn.functional.cross_entropy(logits, examples.labels))


def test_an_ascent_stops_at_the_distance(original: OriginalRun, tmp_path: Path) -> None:
    """It makes one step if that leads beyond the distance, and more steps otherwise."""
    start = first_state(original, "gradient_ascent")

    def ascent(stop_distance: float, out: Path) -> float:
        options = {"repair_rounds": 1, "stop_distance": stop_distance}
        new = unlearned(original, "gradient_ascent", out, **options)
        return distance(ascended_params(new.result.directory), start.params)

    one_step = ascent(1e-9, tmp_path / "one step")
    all_steps = ascent(100.0, tmp_path / "all steps")
    plan = strategy_named("gradient_ascent", {}).stage_plans["ascend"]
    assert 0 < one_step <= plan.lr_at(ROUNDS + 1) * plan.clip_norm * (1 + 1e-5)
    assert all_steps > 2 * one_step


# ---- subtraction ---------------------------------------------------------------------------------


def test_subtraction_removes_the_weighted_updates_of_the_client(
    original: OriginalRun, history: History
) -> None:
    expected = dict(history.globals[ROUNDS])
    for round in history.rounds_of_client:
        weight = history.sizes[round][CLIENT] / sum(history.sizes[round].values())
        start = history.globals[round - 1]
        for name, tensor in history.models[round][CLIENT].items():
            update = tensor - start[name]
            expected[name] = expected[name] - weight * update

    state = first_state(original, "subtraction")
    assert_close(state.params, expected)
    assert_close(state.extra.tensors("old_model"), original.final_state.params)


def test_the_server_distils_the_old_model(
    original: OriginalRun, new_run: Callable[[str], Path]
) -> None:
    """The new model is closer to the old one on public data than the model that it starts from."""
    public = original.prepared.sites.public
    assert public is not None
    passes = original.prepared.sites.passes(original.prepared.world.model(SERVER))
    target = (passes.logits(original.final_state.params, public) / 3).softmax(1)

    def divergence(params: Tensors) -> float:
        log_probabilities = (passes.logits(params, public) / 3).log_softmax(1)
        return float((target * (target.log() - log_probabilities)).sum(1).mean())

    folder = new_run("subtraction")
    start = first_state(original, "subtraction")
    assert divergence(Result.of(folder).model) < divergence(start.params)
    assert "old_model" not in OriginalRun.of(folder, toys.blobs()).final_state.extra


# ---- SIFU ----------------------------------------------------------------------------------------


def influences(history: History, growth: float) -> list[float]:
    """The influence psi of the client before the first round and after each round, by the formula
    psi(n) = sum over s < n of growth^(n - s - 1) * |change by the client in round s + 1|.
    """
    psi = [0.0]
    for round in range(1, ROUNDS + 1):
        change = distance(history.globals[round], history.mean(round, without=CLIENT))
        psi.append(growth * psi[-1] + change)
    return psi


@pytest.mark.parametrize("growth", [1.0, 1.5])
@pytest.mark.parametrize("back_to", range(ROUNDS + 1))
def test_sifu_goes_back_to_the_last_round_within_the_bound(
    growth: float, back_to: int, original: OriginalRun, history: History
) -> None:
    psi = influences(history, growth)
    if back_to < ROUNDS and psi[back_to + 1] == psi[back_to]:
        pytest.skip("the client did not act in the next round")
    noise_per_influence = math.sqrt(2 * math.log(1.25 / 0.01)) / 10
    sigma = psi[back_to] * 1.0001 * noise_per_influence + 1e-9
    assert largest_influence(10, 0.01, sigma) >= psi[back_to]

    rollback = Sifu(sigma=sigma, growth=growth).rollback(original, REQUEST)
    assert rollback.round == back_to
    assert rollback.influence == pytest.approx(psi[back_to], rel=1e-4, abs=1e-9)


def test_the_noise_of_sifu_has_its_standard_deviation(
    original: OriginalRun, history: History
) -> None:
    """Mean and standard deviation are within four standard errors."""
    sigma = 50.0
    params = first_state(original, "sifu", sigma=sigma).params
    differences = [params[name].double() - history.globals[ROUNDS][name] for name in params]
    noise = torch.cat([tensor.flatten() for tensor in differences]) / sigma

    assert abs(float(noise.mean())) < 4 / math.sqrt(len(noise))
    assert float(noise.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * len(noise)))


def test_sifu_states_its_bound(original: OriginalRun, tmp_path: Path) -> None:
    new = unlearned(original, "sifu", tmp_path / "new", sigma=1e-6)
    bound = new.certificate["strategy"]["bound"]
    assert bound["influence"] <= bound["largest_influence"]
    first = bound["from_round"] + 1
    assert new.certificate["rounds"]["first"] >= first
    assert new.result.summary["rounds"] == ROUNDS


def test_sifu_takes_no_reason_to_stop_from_the_original_run(tmp_path: Path) -> None:
    values = {"rounds": 6, "stop": {"patience": 1, "min_delta": 0.9}, "select_on": "test"}
    folder = trained(EXPERIMENT.with_values(values, "test"), tmp_path / "run")
    stopped = OriginalRun.of(folder, toys.blobs())
    assert STOP_REASON in stopped.events[-1]
    new = unlearned(stopped, "sifu", tmp_path / "new", epsilon=1e6)
    assert new.certificate["strategy"]["bound"]["from_round"] == stopped.last_round
    assert not any(STOP_REASON in event for event in journal_events(tmp_path / "new"))


# ---- all strategies ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INEXACT_STRATEGIES)
def test_the_client_trains_in_no_new_round(name: str, new_run: Callable[[str], Path]) -> None:
    """It only acts in the stage ``ascend``, in which it raises its loss."""
    folder = new_run(name)
    packages = OriginalRun.of(folder, toys.blobs()).settings.packages
    first_round = packages["unlearning"].table["first_round"]

    events = journal_events(folder, event="client", client=CLIENT)
    new_stages = {event["name"] for event in events if event["round"] >= first_round}
    assert new_stages <= {"ascend"}
    assert math.isfinite(Result.of(folder).accuracy)
    assert check_certificate(folder).original_checked


@pytest.mark.parametrize("name", INEXACT_STRATEGIES)
def test_the_new_run_has_copies_of_the_updates_of_other_clients_only(
    name: str, original: OriginalRun, new_run: Callable[[str], Path]
) -> None:
    by_client: dict[int, set[str]] = {}
    for event in journal_events(original.folder, event="client"):
        update = update_file(original.folder / UPDATES, event)
        by_client.setdefault(event["client"], set()).add(update.name)
    of_client = by_client.pop(CLIENT)
    of_others = set().union(*by_client.values())

    found = {path.name for path in (new_run(name) / UPDATES).iterdir()}
    assert not found & of_client
    if name != "sifu":  # it goes back to an early round
        assert of_others <= found


def test_the_new_run_has_no_state_of_the_client(tmp_path: Path) -> None:
    folder = trained(toys.toy("moon", rounds=1, topology={"clients": 6}), tmp_path / "run")
    original = OriginalRun.of(folder, toys.blobs())
    assert CLIENT in original.last_checkpoint.state_files
    new = unlearned(original, "fine_tuning", tmp_path / "new", repair_rounds=1).result.directory
    restored = checkpoints_of(new).latest()
    assert restored is not None
    assert restored.state_files.keys() == original.last_checkpoint.state_files.keys() - {CLIENT}
    state_file, _ = original.last_checkpoint.state_files[CLIENT]
    assert not (new / "memory" / state_file).exists()


@pytest.mark.parametrize("name", INEXACT_STRATEGIES)
def test_a_new_run_that_was_stopped_continues_to_the_same_bits(
    name: str, original: OriginalRun, new_run: Callable[[str], Path], tmp_path: Path
) -> None:
    """The last checkpoint and the files that end a run are missing."""
    stopped = Path(shutil.copytree(new_run(name), tmp_path / "run"))
    for file in ("summary.json", "model.safetensors", "certificate.json"):
        (stopped / file).unlink()
    checkpoints = stopped / "checkpoints"
    (checkpoints / "LATEST").unlink()
    sorted(checkpoints.glob("*.json"))[-1].unlink()

    resumed = unlearned(original, name, stopped).result
    assert distance(resumed.model, Result.of(new_run(name)).model) == 0


@dataclass(frozen=True)
class Unsuitable:
    """A run and a strategy that does not fit it, and a part of the reason."""

    experiment: Experiment
    strategy: str
    reason: str


CHAIN = toys.toy("fedseq", rounds=2, topology={"clients": 6, "sampled": 3}, keep_updates=True)
UNSUITABLE = {
    "a chain": Unsuitable(CHAIN, "federaser", "chain"),
    "state at the server": Unsuitable(
        toys.toy("scaffold", rounds=1, keep_updates=True), "sifu", "control"
    ),
    "states of clients": Unsuitable(
        toys.toy("moon", rounds=1, keep_updates=True),
        "sifu",
        "states from round to round",
    ),
    "entries without noise": Unsuitable(
        toys.toy("fedavg", rounds=1, model="toy_batchnorm", keep_updates=True),
        "sifu",
        "running_mean",
    ),
    "a server stage": Unsuitable(
        toys.toy("feddf", rounds=1, data={"public": 30}, keep_updates=True),
        "federaser",
        "server",
    ),
    "learning rates that fall far": Unsuitable(
        toys.toy("fedavg", rounds=3, plan={"epochs": 1, "lr_decay": 1e-6}, keep_updates=True),
        "federaser",
        r"plan\.lr_decay",
    ),
    "no updates": Unsuitable(toys.toy("fedavg", rounds=1), "federaser", "keep_updates"),
    "no public data": Unsuitable(
        toys.toy("fedavg", rounds=1, keep_updates=True),
        "subtraction",
        "data.public",
    ),
    "models of clients": Unsuitable(
        toys.toy("fedmd", rounds=1, data={"public": toys.PUBLIC}),
        "fine_tuning",
        "model of its own",
    ),
    "another stage": Unsuitable(
        toys.toy("replay", rounds=1, data={"public": 30}, keep_updates=True),
        "subtraction",
        "remember",
    ),
    "another network": Unsuitable(toys.toy("analytic", rounds=1), "fine_tuning", "network"),
    "tasks": Unsuitable(
        toys.toy("fedavg", rounds=2, stream={"kind": "classes", "tasks": 2}),
        "fine_tuning",
        "tasks",
    ),
}


@pytest.mark.parametrize("case", UNSUITABLE)
def test_an_unsuitable_run_is_rejected_with_a_reason(case: str, tmp_path: Path) -> None:
    unsuitable = UNSUITABLE[case]
    folder = trained(unsuitable.experiment, tmp_path / "run")
    strategy = strategy_named(unsuitable.strategy, {})
    request = UnlearningRequest(clients=(1,))
    with pytest.raises((IncompatibleMethod, ConfigError), match=unsuitable.reason):
        unlearn(folder, request, strategy, tmp_path / "new", data=toys.blobs())
    assert not (tmp_path / "new").exists()


def test_the_updates_of_hostile_clients_lead_to_the_models_of_the_run(tmp_path: Path) -> None:
    """The kept updates are what the hostile clients sent; they do not change them once more."""
    attacked = replace(EXPERIMENT, clients={"attack": "sign_flip", "attackers": 0.5})
    original = OriginalRun.of(trained(attacked, tmp_path / "run"), toys.blobs())
    results = list(repeated_stages(original))
    assert results[-1].stage.round == original.last_round


def test_a_round_of_a_new_run_is_replayed_from_one_of_its_checkpoints(
    new_run: Callable[[str], Path],
) -> None:
    """Without one, the replay would begin with the original run, whose state is elsewhere."""
    folder = new_run("gradient_ascent")
    assert Replay.of_round(folder, ROUNDS + 2, toys.blobs()).start == ROUNDS + 2
    with pytest.raises(ConfigError, match="checkpoint before round 2"):
        Replay.of_round(folder, 2, toys.blobs())


def test_fine_tuning_goes_on_in_a_chain(tmp_path: Path) -> None:
    folder = trained(CHAIN, tmp_path / "run")
    strategy = strategy_named("fine_tuning", {"repair_rounds": 1})
    request = UnlearningRequest(clients=(1,))
    new = unlearn(folder, request, strategy, tmp_path / "new", data=toys.blobs()).result

    events = journal_events(new.directory, event="client", round=3)
    clients = {event["client"] for event in events}
    assert clients
    assert 1 not in clients


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
