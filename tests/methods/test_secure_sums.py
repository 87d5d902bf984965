"""Secure sums in a run: the plain run's numbers, nothing of a single client, what is refused, and
clients that fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from all_methods import METHODS, built, needs, network_for
from plain import largest_gap, weighted_mean
from safetensors.torch import load_file

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import registry, trees
from fedstill.core.capabilities import Need, Permit
from fedstill.core.errors import (
    ClientFailed,
    ConfigError,
    FedstillError,
    IncompatibleMethod,
    TooFewReplies,
)
from fedstill.core.extensions import Engine
from fedstill.core.records import Payload, Reply, Stage, State
from fedstill.core.screen import Rules
from fedstill.methods.fedavg import FedAvg
from fedstill.privacy import secure_engine
from fedstill.privacy.masking import Masking
from fedstill.privacy.noise import Privacy
from fedstill.privacy.secure_engine import MaskedEngine, with_masking
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.replay import Replay
from fedstill.running.runner import resume, run
from loops import Collecting, context_of, first_state, next_state
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

SECURE = {"secure_sum": True}
TEN_CLIENTS = {"topology": {"clients": 10}, "clients": toys.TOLERANT}

LINEAR = [name for name in METHODS if Permit.LINEAR_AGGREGATE in built(name).permits]
"""Methods whose fold needs no more than the clients' sum."""

NOT_LINEAR = [name for name in METHODS if name not in LINEAR]


def with_secure_sums(
    method: object = "fedavg", *, privacy: dict[str, object] = SECURE, **changes: object
) -> Experiment:
    """Two rounds with secure sums; nothing is measured."""
    return toys.toy(method, privacy=privacy, **{"measure": (), "rounds": 2, **changes})


def experiment_of(name: str) -> Experiment:
    """Two rounds of a method with secure sums, or one among peers."""
    values: dict[str, Any] = {"plan": {"epochs": 1, "batch": 20, "lr": 0.2}, **toys.suited(name)}
    values["rounds"] = min(2, values["rounds"])
    if needs(name, Need.SLIM):
        values |= network_for(name)
    return with_secure_sums(name, **values)


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a run's journal."""
    return [event for event in read_journal(folder / "journal.jsonl") if event["event"] == kind]


# Whole runs.


def run_with_and_without(experiment: Experiment, folder: Path) -> None:
    """Run an experiment with secure sums, in ``secure``, and without them, in ``plain``."""
    privacy = {key: value for key, value in experiment.privacy.items() if key != "secure_sum"}
    run(experiment, folder / "secure", toys.blobs())
    run(replace(experiment, privacy=privacy), folder / "plain", toys.blobs())


def assert_models_near(folder: Path) -> None:
    """The models of both runs differ by rounding alone."""
    secure = load_file(folder / "secure" / "model.safetensors")
    plain = load_file(folder / "plain" / "model.safetensors")
    assert secure.keys() == plain.keys()
    assert largest_gap(secure, plain) < 1e-3


def test_there_are_methods_of_both_kinds() -> None:
    linear = {"fedavg", "fedprox", "fedntd", "moon", "fedavgm", "fedsam", "fedgkd", "fedavg_once"}
    assert linear <= set(LINEAR)
    not_linear = {"fedadkd", "scaffold", "fednova", "feddf", "fedproto", "hiper_fedkd", "fedgen"}
    assert not_linear <= set(NOT_LINEAR)


@pytest.mark.parametrize("name", LINEAR)
def test_a_run_with_secure_sums_has_the_plain_run_s_accuracies(name: str, tmp_path: Path) -> None:
    """Of 100 test images, a tie may fall to either side."""
    run_with_and_without(experiment_of(name), tmp_path)

    secure = [event["accuracy"] for event in events_of(tmp_path / "secure", "round")]
    plain = [event["accuracy"] for event in events_of(tmp_path / "plain", "round")]
    assert secure == pytest.approx(plain, abs=0.021)


@pytest.mark.parametrize("name", ["fedntd", "fedlc"])
def test_sums_over_tasks_are_the_plain_run_s(name: str, tmp_path: Path) -> None:
    """One that takes label counts anew where tasks change, and one that does not."""
    stream = {"kind": "classes", "tasks": 2}
    experiment = with_secure_sums(name, stream=stream, rounds=4, topology={"clients": 4})

    run_with_and_without(experiment, tmp_path)

    assert_models_near(tmp_path)


def test_private_training_and_secure_sums_go_together(tmp_path: Path) -> None:
    """The budget is that of the plain run."""
    pytest.importorskip("opacus")
    privacy = {**SECURE, "gradient_clip": 0.5, "epsilon": 1e6}

    run_with_and_without(with_secure_sums(privacy=privacy), tmp_path)

    assert_models_near(tmp_path)
    secure = [event["privacy"] for event in events_of(tmp_path / "secure", "round")]
    assert secure == [event["privacy"] for event in events_of(tmp_path / "plain", "round")]


def test_the_journal_counts_the_bytes_of_masked_models_and_no_examples(tmp_path: Path) -> None:
    """A masked vector has 8 bytes an entry, and one more entry for the sum of weights."""
    run(with_secure_sums(), tmp_path / "run", toys.blobs())

    events = events_of(tmp_path / "run", "client")
    entries = 16 * 8 + 8 + 8 * toys.CLASSES + toys.CLASSES
    assert {event["bytes_up"] for event in events} == {8 * (entries + 1)}
    assert {event["bytes_down"] for event in events} == {4 * entries}
    assert {event["examples"] for event in events} == {0}
    for event in events:
        assert event.keys().isdisjoint({"loss", "steps", "epochs"})


def test_rounds_with_secure_sums_cannot_be_replayed(tmp_path: Path) -> None:
    run(with_secure_sums(), tmp_path / "run", toys.blobs())

    with pytest.raises(ConfigError, match="secure sums"):
        Replay.of_round(tmp_path / "run", 1, toys.blobs())


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    experiment = with_secure_sums("moon", rounds=3)
    run(experiment, tmp_path / "uninterrupted", toys.blobs())

    folder = stopped(experiment, tmp_path / "stopped")
    resume(folder, toys.blobs())

    assert_same_bits(bits(folder), bits(tmp_path / "uninterrupted"))


# Single rounds.


@dataclass(frozen=True)
class BeforeRound1:
    """A prepared run, and its state before round 1."""

    ready: Prepared
    state: State

    @property
    def stage(self) -> Stage:
        """The only stage of round 1."""
        (stage,) = self.ready.settings.schedule(1, self.ready.world)
        return stage

    def masked(self, engine: Engine | None = None) -> Engine:
        """An engine, or a new one, that sums in secret."""
        return with_masking(engine or self.ready.engine(), self.ready.settings)

    def next_state(self, engine: Engine, rules: Rules | None = None) -> State:
        """The state after round 1 under an engine."""
        context = context_of(self.ready, engine, rules=rules or Rules())
        return next_state(self.state, context)

    def replies(self, engine: Engine, payloads: dict[int, Payload] | None = None) -> list[Reply]:
        """What arrives in round 1, of the payloads or of the global model."""
        if payloads is None:
            model = Payload(params=self.state.params)
            payloads = dict.fromkeys(self.stage.clients, model)
        work = self.ready.settings.method.work(self.stage)
        return engine.run(work, self.stage, payloads, self.ready.world.seed)


def before_round_1(experiment: Experiment, engine: str = "serial") -> BeforeRound1:
    """Prepare a run."""
    ready = prepare(resolve(replace(experiment, engine=engine)), toys.blobs())
    return BeforeRound1(ready, first_state(context_of(ready)))


@pytest.mark.parametrize("name", LINEAR)
def test_the_first_round_s_secure_sum_is_the_plain_one_within_rounding(name: str) -> None:
    """Later rounds have no such bound: training can amplify the rounding of the first sum."""
    experiment = experiment_of(name)
    plain_start = before_round_1(experiment)
    secure_start = before_round_1(experiment)

    plain = plain_start.next_state(plain_start.ready.engine())
    secure = secure_start.next_state(secure_start.masked())

    assert secure.params.keys() == plain.params.keys()
    for entry, values in plain.params.items():
        distance = (secure.params[entry].double() - values.double()).abs().max()
        assert float(distance) < 1e-5, entry


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised"])
def test_one_round_s_mean_is_within_the_stated_error_on_every_engine(
    engine: str, weighting: str
) -> None:
    """Half a step of 16 bits over the range; and it was rounded."""
    privacy = {**SECURE, "secure_bits": 16, "secure_range": 2.0}
    method = {"name": "fedavg", "aggregation": weighting}
    start = before_round_1(with_secure_sums(method, privacy=privacy), engine)
    inner_engine = start.ready.engine()
    masked_engine = start.masked(inner_engine)
    assert isinstance(masked_engine, MaskedEngine)

    plain = start.next_state(inner_engine)
    secure = start.next_state(masked_engine)

    step = 2.0 / (2**15 - 1)
    assert largest_gap(plain.params, secure.params) <= step / 2 + 1e-6
    assert not trees.same_bits(plain.params, secure.params)


def test_a_model_with_counters_and_running_statistics_is_summed_too() -> None:
    """The counter is the rounded mean of the clients'."""
    plan = {"epochs": 1, "batch": 10}
    start = before_round_1(with_secure_sums(model="toy_batchnorm", plan=plan))
    engine = start.ready.engine()
    counter = "body.1.num_batches_tracked"

    replies = start.replies(engine)
    secure = start.next_state(start.masked(engine)).params
    plain = start.next_state(engine).params

    counts = [{"batches": reply.content.params[counter].double()} for reply in replies]
    assert len({float(count["batches"]) for count in counts}) > 1
    mean = weighted_mean(counts, [reply.examples for reply in replies])["batches"]
    assert int(secure[counter]) == round(float(mean))
    variance = secure["body.1.running_var"]
    torch.testing.assert_close(variance, plain["body.1.running_var"], atol=1e-5, rtol=1e-5)


def test_the_server_learns_nothing_about_a_single_client() -> None:
    """All replies have the same content: the sum."""
    start = before_round_1(with_secure_sums())

    replies = start.replies(start.masked())

    sizes = [start.ready.sites.training_size(client, "train") for client in start.stage.clients]
    assert replies[0].metrics["report"]["summed"] == sum(sizes)
    for reply in replies:
        assert reply.examples == 0
        assert trees.same_bits(reply.content.params, replies[0].content.params)
        assert set(reply.metrics) == {"seconds", "seconds_training", "report"}


def test_clients_that_were_sent_different_models_are_not_summed() -> None:
    start = before_round_1(with_secure_sums())
    payloads = {}
    for client in start.stage.clients:
        payloads[client] = Payload(params=trees.scale(start.state.params, 1.0 + client))

    replies = start.replies(start.masked(), payloads)

    assert all("were sent different ones" in reply.failure for reply in replies)


def test_masks_are_drawn_anew_for_every_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets: list[bytes] = []

    class Watched(secure_engine.Summand):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            secrets.append(self.secrets)

    monkeypatch.setattr(secure_engine, "Summand", Watched)
    start = before_round_1(with_secure_sums())
    for _ in range(2):
        start.next_state(start.masked())

    assert len(set(secrets)) == len(secrets) == 2 * len(start.stage.clients)


# Clients that fail.


@dataclass
class FailingClients:
    """An engine some of whose clients fail, or send what has no room."""

    engine: Engine
    failing: set[int]
    not_finite: set[int]

    def run(self, *arguments: Any) -> list[Reply]:
        return [self.spoilt(reply) for reply in self.engine.run(*arguments)]

    def commit(self, *arguments: Any) -> None:
        self.engine.commit(*arguments)

    def spoilt(self, reply: Reply) -> Reply:
        """What arrives of a reply."""
        if reply.client in self.failing:
            return replace(reply, content=Payload(), failure="it is gone")
        if reply.client in self.not_finite:
            params = trees.scale(reply.content.params, float("nan"))
            return replace(reply, content=Payload(params=params))
        return reply


@pytest.mark.parametrize(
    ("failing", "not_finite"),
    [(set(), set()), ({0}, set()), ({0, 1}, set()), ({0, 1}, {9}), ({0, 1, 2}, {9})],
    ids=["0", "10", "20", "30", "40"],
)
def test_with_up_to_40_percent_of_clients_failing_the_mean_is_that_of_the_others(
    failing: set[int], not_finite: set[int]
) -> None:
    start = before_round_1(with_secure_sums(**TEN_CLIENTS))
    engine = FailingClients(start.ready.engine(), failing, not_finite)
    rules = Rules(failures="tolerate")

    plain = start.next_state(engine, rules)
    secure = start.next_state(start.masked(engine), rules)

    for name, value in plain.params.items():
        torch.testing.assert_close(secure.params[name], value, atol=1e-6, rtol=0)


def test_below_the_threshold_the_round_ends_and_the_state_stays() -> None:
    """Nothing of a single client is left."""
    start = before_round_1(with_secure_sums(**TEN_CLIENTS))
    model = trees.clone(start.state.params)
    engine = FailingClients(start.ready.engine(), failing={0, 1, 2, 3, 4}, not_finite=set())
    recorder = Collecting()
    rules = Rules(quorum=0.1, failures="tolerate")
    context = context_of(start.ready, start.masked(engine), recorder, rules=rules)

    message = (
        "no secure sum: .* 5 of 10 clients sent masked vectors.* needs 6 .*; client 0: it is gone"
    )
    with pytest.raises(TooFewReplies, match=message):
        next_state(start.state, context)

    assert trees.same_bits(model, start.state.params)
    assert recorder.failure is not None
    assert len(recorder.failure.refused) == 10
    assert all(not refusal.content for refusal in recorder.failure.refused)


@pytest.mark.parametrize(
    ("share", "clients", "threshold"),
    [
        (0.8, 10, 9),
        (0.5, 10, 6),
        (0.5, 3, 3),  # of two, each would know the other's
        (0.99, 3, 3),
    ],
)
def test_the_threshold_is_more_than_the_share_of_clients_and_at_least_three(
    share: float, clients: int, threshold: int
) -> None:
    stage = Stage(1, 0, "train", tuple(range(clients)))

    masking = Masking(1.0, 32, share, True)

    assert masking.new_sum(stage, range(clients)).threshold == threshold


def test_the_threshold_is_configurable() -> None:
    settings = resolve(with_secure_sums(privacy={**SECURE, "secure_threshold": 0.8}))
    stage = Stage(1, 0, "train", tuple(range(10)))

    masking = Masking.of(settings.package_table(Privacy), settings.method)

    assert masking is not None
    assert masking.new_sum(stage, range(10)).threshold == 9


# What is refused.


def test_a_change_out_of_range_is_refused_at_the_client_by_name(tmp_path: Path) -> None:
    privacy = {**SECURE, "secure_range": 1e-4}
    with pytest.raises(ClientFailed, match=r"body.*privacy\.secure_range = 0\.0001"):
        run(with_secure_sums(privacy=privacy), tmp_path / "run", toys.blobs())


def test_default_measures_of_single_clients_are_left_out() -> None:
    """Asked for by name, it is refused."""
    experiment = toys.toy(privacy=SECURE)

    assert resolve(experiment).measure == ()
    assert resolve(replace(experiment, privacy={})).measure == ("local",)
    with_measure = experiment.with_values({"measure": ["local"]}, "test")
    with pytest.raises(ConfigError, match="'local'"):
        prepare(resolve(with_measure), toys.blobs())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": {"name": "fedavg", "aggregation": "median"}}, "aggregation = 'median'"),
        ({"topology": "sequential"}, "stage 'train' has 1 client"),
        ({"topology": {"clients": 2}}, "stage 'train' has 2 client"),
        ({"method": {"name": "feddyn", "aggregation": "examples"}}, "method feddyn"),
        ({"measure": ("alignment",)}, "measure 'alignment'"),
        ({"measure": ("contributions",)}, "measure 'contributions'"),
    ],
    ids=["a robust mean", "a chain", "two clients", "two means", "a measure", "contributions"],
)
def test_settings_that_need_single_models_are_refused_in_one_line(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises((ConfigError, IncompatibleMethod), match=reason) as caught:
        prepare(resolve(with_secure_sums(**changes)), toys.blobs())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_every_other_method_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(FedstillError, match=f"privacy.secure_sum with method {name}"):
        prepare(resolve(experiment_of(name)), toys.blobs())


@registry.method("toy_squares")
@dataclass(frozen=True)
class Squares(FedAvg):
    """It says that its fold is linear, and it is not."""

    def aggregate(self, state: State, replies, stage, world) -> State:  # type: ignore[no-untyped-def]
        mean = self.averaged(replies, state.params)
        distances = [trees.norm(trees.sub(reply.content.params, mean)) for reply in replies]
        return state.next(params=mean, spread=float(sum(distances)))


def test_a_fold_that_is_not_linear_is_refused_although_its_method_permits_sums() -> None:
    with pytest.raises(IncompatibleMethod, match="linear"):
        prepare(resolve(with_secure_sums("toy_squares")), toys.blobs())


@pytest.mark.parametrize(
    ("key", "value"), [("secure_bits", 16), ("secure_range", 1.0), ("secure_threshold", 0.6)]
)
def test_settings_of_secure_sums_are_refused_without_secure_sums(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"privacy\.{key} needs privacy.secure_sum = true"):
        resolve(toys.toy(privacy={key: value}))


def test_a_threshold_below_half_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"secure_threshold = 0\.3"):
        resolve(with_secure_sums(privacy={**SECURE, "secure_threshold": 0.3}))
