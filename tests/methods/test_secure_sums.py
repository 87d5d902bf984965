"""Secure sums in a run: the plain run's numbers, nothing of a single client, what is refused, and
clients that fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import plain
import pytest
import torch

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

import toys
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
from fedstill.core.method import Method
from fedstill.core.records import Payload, Reply, State
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

ON = {"secure_sum": True}
NAMES = [n for n in registry.names("method") if not n.startswith("toy_")]


def built(name: str) -> Method:
    return registry.lookup("method", name).build()


LINEAR = [n for n in NAMES if Permit.LINEAR_AGGREGATE in built(n).permits]


def secret(method: object = "fedavg", *, privacy: dict[str, object] = ON, **changes: object):
    return toys.toy(method, privacy=privacy, **{"measure": (), "rounds": 2, **changes})


def of_method(name: str, **changes: object):
    values = {"plan": {"epochs": 1, "batch": 20, "lr": 0.2}, **toys.suited(name), **changes}
    values["rounds"] = min(2, values["rounds"])
    asked = secret(name, **values)
    return (
        asked.with_values({"model": plain.toy_slim.__name__}, "test")
        if Need.SLIM in built(name).requires()
        else asked
    )


def test_there_are_methods_of_both_kinds() -> None:
    assert {
        "fedavg",
        "fedprox",
        "fedntd",
        "moon",
        "fedavgm",
        "fedsam",
        "fedgkd",
        "fedavg_once",
    } <= set(LINEAR)
    assert not {
        "fedadkd",
        "scaffold",
        "fednova",
        "feddf",
        "fedproto",
        "hiper_fedkd",
        "fedgen",
    } & set(LINEAR)


@pytest.mark.parametrize("name", LINEAR)
def test_a_run_with_secure_sums_has_the_plain_run_s_accuracies(name: str, tmp_path: Path) -> None:
    asked = of_method(name)
    run(asked, tmp_path / "secret", toys.blobs())
    run(replace(asked, privacy={}), tmp_path / "plain", toys.blobs())
    one, other = (read_journal(tmp_path / f / "journal.jsonl") for f in ("secret", "plain"))
    ends = [[e["accuracy"] for e in events if e["event"] == "round"] for events in (one, other)]
    # of 100 test images, a tie may fall to either side
    assert ends[0] == pytest.approx(ends[1], abs=0.021)


@pytest.mark.parametrize("name", LINEAR)
def test_the_first_round_s_secure_sum_is_the_plain_one_within_rounding(name: str) -> None:
    # Later rounds have no such bound: training can amplify the rounding of the first sum.
    ready, state = began(of_method(name))
    plain_state = next_state(state, context_of(ready, ready.engine(), rules=Rules()))

    ready, state = began(of_method(name))
    engine = with_masking(ready.engine(), ready.settings)
    secret_state = next_state(state, context_of(ready, engine, rules=Rules()))

    assert secret_state.params.keys() == plain_state.params.keys()
    for entry, values in plain_state.params.items():
        distance = (secret_state.params[entry].double() - values.double()).abs().max()
        assert float(distance) < 1e-5, entry


def near(folder: Path, most: float = 1e-3) -> None:
    from safetensors.torch import load_file

    one, other = (load_file(folder / f / "model.safetensors") for f in ("secret", "plain"))
    assert one.keys() == other.keys()
    for name in one:
        assert float((one[name].double() - other[name].double()).abs().max()) < most, name


def began(asked, engine: str = "serial") -> tuple[Prepared, State]:
    """A prepared run, and its state before round 1."""
    ready = prepare(resolve(replace(asked, engine=engine)), toys.blobs())
    return ready, first_state(context_of(ready))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised"])
def test_one_round_s_mean_is_within_the_stated_error_on_every_engine(
    engine: str, weighting: str
) -> None:
    privacy = {**ON, "secure_bits": 16, "secure_range": 2.0}
    ready, state = began(
        secret({"name": "fedavg", "aggregation": weighting}, privacy=privacy), engine
    )
    inner = ready.engine()
    plain_state = next_state(state, context_of(ready, inner, rules=Rules()))
    summed = with_masking(inner, ready.settings)
    assert isinstance(summed, MaskedEngine)
    hidden = next_state(state, context_of(ready, summed, rules=Rules()))
    error = 2.0 / (2**15 - 1) / 2
    for name, entry in plain_state.params.items():
        off = float((entry - hidden.params[name]).abs().max())
        assert off <= error + 1e-6, name
    assert any(not torch.equal(v, hidden.params[k]) for k, v in plain_state.params.items()), (
        "it was rounded"
    )


def test_a_model_with_counters_and_running_statistics_is_summed_too() -> None:
    ready, state = began(secret(model="toy_batchnorm", plan={"epochs": 1, "batch": 10}))
    inner = ready.engine()
    (stage,) = ready.settings.schedule(1, ready.world)
    payloads = {c: Payload(params=state.params) for c in stage.clients}
    replies = inner.run(ready.settings.method.work(stage), stage, payloads, 7)
    hidden = next_state(
        state, context_of(ready, with_masking(inner, ready.settings), rules=Rules())
    )
    counts = [int(r.content.params["body.1.num_batches_tracked"]) for r in replies]
    weights = [r.examples for r in replies]
    mean = sum(n * w for n, w in zip(counts, weights, strict=True)) / sum(weights)
    assert len(set(counts)) > 1
    assert int(hidden.params["body.1.num_batches_tracked"]) == round(mean)
    plain_state = next_state(state, context_of(ready, inner, rules=Rules()))
    torch.testing.assert_close(
        hidden.params["body.1.running_var"],
        plain_state.params["body.1.running_var"],
        atol=1e-5,
        rtol=1e-5,
    )


def test_the_server_is_told_nothing_of_a_single_client() -> None:
    ready, state = began(secret())
    summed = with_masking(ready.engine(), ready.settings)
    (stage,) = ready.settings.schedule(1, ready.world)
    payloads = {c: Payload(params=state.params) for c in stage.clients}
    first, *others = summed.run(
        ready.settings.method.work(stage), stage, payloads, ready.world.seed
    )
    assert first.metrics["report"]["summed"] == sum(
        ready.sites.training_size(c, "train") for c in stage.clients
    )
    for reply in (first, *others):
        assert reply.examples == 0
        assert trees.same_bits(reply.content.params, first.content.params)
        assert set(reply.metrics) == {"seconds", "seconds_training", "report"}


@dataclass
class Drops:
    """An engine some of whose clients fail, or send what has no room."""

    engine: object
    fails: frozenset[int]
    wild: frozenset[int] = frozenset()

    def run(self, *asked) -> list[Reply]:
        return [self.spoilt(reply) for reply in self.engine.run(*asked)]

    def commit(self, *asked) -> None:
        self.engine.commit(*asked)

    def spoilt(self, reply: Reply) -> Reply:
        if reply.client in self.fails:
            return replace(reply, content=Payload(), failure="it is gone")
        if reply.client in self.wild:
            return replace(
                reply,
                content=Payload(
                    params={k: v * float("nan") for k, v in reply.content.params.items()}
                ),
            )
        return reply


TEN = {"topology": {"clients": 10}, "clients": toys.TOLERANT}


@pytest.mark.parametrize("dropped", range(5))
def test_with_0_to_40_percent_gone_the_mean_is_that_of_the_others(dropped: int) -> None:
    ready, state = began(secret(**TEN))
    wild = frozenset({9}) if dropped > 2 else frozenset()
    engine = Drops(ready.engine(), frozenset(range(dropped - len(wild))), wild)
    rules = Rules(failures="tolerate")
    want = next_state(state, context_of(ready, engine, rules=rules))
    got = next_state(state, context_of(ready, with_masking(engine, ready.settings), rules=rules))
    for name in want.params:
        torch.testing.assert_close(got.params[name], want.params[name], atol=1e-6, rtol=0)


def test_below_the_threshold_the_round_ends_by_name_and_the_state_stays() -> None:
    ready, state = began(secret(**TEN))
    before, recorder = trees.clone(state.params), Collecting()
    summed = with_masking(Drops(ready.engine(), frozenset(range(5))), ready.settings)
    said = (
        "no secure sum: .* 5 of 10 clients sent masked vectors.* needs 6 .*; client 0: it is gone"
    )
    with pytest.raises(TooFewReplies, match=said):
        next_state(
            state,
            context_of(ready, summed, recorder, rules=Rules(quorum=0.1, failures="tolerate")),
        )
    assert trees.same_bits(before, state.params)
    assert recorder.failure is not None
    refused = recorder.failure.refused
    assert len(refused) == 10
    assert all(not refusal.content for refusal in refused), "nothing of a single client is left"


def test_the_journal_counts_the_bytes_of_masked_models_and_no_examples(tmp_path: Path) -> None:
    run(secret(), tmp_path / "run", toys.blobs())
    events = [e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "client"]
    entries = 16 * 8 + 8 + 8 * toys.CLASSES + toys.CLASSES
    assert {e["bytes_up"] for e in events} == {8 * (entries + 1)}
    assert {e["bytes_down"] for e in events} == {4 * entries}
    assert {e["examples"] for e in events} == {0}
    assert not {"loss", "steps", "epochs"} & set().union(*events)


def test_rounds_are_not_gone_through_again(tmp_path: Path) -> None:
    run(secret(), tmp_path / "run", toys.blobs())
    with pytest.raises(ConfigError, match="secure sums"):
        Replay.of_round(tmp_path / "run", 1, toys.blobs())


def test_a_threshold_of_one_s_own() -> None:
    settings = resolve(secret(privacy={**ON, "secure_threshold": 0.8}))
    made = Masking.of(settings.package_table(Privacy), settings.method)
    assert made is not None
    stage = settings.schedule(1, prepare(settings, toys.blobs()).world)[0]
    assert made.new_sum(stage, range(10)).threshold == 9
    assert Masking(1.0, 32, 0.5, True).new_sum(stage, range(10)).threshold == 6
    assert Masking(1.0, 32, 0.5, True).new_sum(stage, range(3)).threshold == 3, (
        "of two, each would know the other's"
    )
    assert Masking(1.0, 32, 0.99, True).new_sum(stage, range(3)).threshold == 3


def test_a_change_out_of_range_is_refused_at_the_client_by_name(tmp_path: Path) -> None:
    privacy = {**ON, "secure_range": 1e-4}
    with pytest.raises(ClientFailed, match=r"body.*privacy\.secure_range = 0\.0001"):
        run(secret(privacy=privacy), tmp_path / "run", toys.blobs())


def test_clients_that_were_sent_different_models_are_not_summed() -> None:
    ready, state = began(secret())
    (stage,) = ready.settings.schedule(1, ready.world)
    payloads = {c: Payload(params=trees.scale(state.params, 1.0 + c)) for c in stage.clients}
    came = with_masking(ready.engine(), ready.settings).run(
        ready.settings.method.work(stage), stage, payloads, ready.world.seed
    )
    assert all("were sent different ones" in reply.failure for reply in came)


def test_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    asked = secret("moon", rounds=3)
    run(asked, tmp_path / "whole", toys.blobs())
    folder = stopped(asked, tmp_path / "stopped")
    resume(folder, toys.blobs())
    assert_same_bits(bits(folder), bits(tmp_path / "whole"))


def test_what_is_measured_unless_something_is_said_is_left_out_and_said_in_the_config() -> None:
    asked = toys.toy(privacy=ON)
    assert resolve(asked).measure == ()
    assert resolve(replace(asked, privacy={})).measure == ("local",)
    with pytest.raises(ConfigError, match="'local'"):
        prepare(resolve(asked.with_values({"measure": ["local"]}, "test")), toys.blobs())


REFUSED = {
    "a robust mean": (
        secret({"name": "fedavg", "aggregation": "median"}),
        "aggregation = 'median'",
    ),
    "a chain": (secret(topology="sequential"), "stage 'train' has 1 client"),
    "two clients": (secret(topology={"clients": 2}), "stage 'train' has 2 client"),
    "two means": (
        secret({"name": "feddyn", "aggregation": "examples"}),
        "method feddyn",
    ),
    "a measure": (
        secret(measure=("alignment",)),
        "measure 'alignment'",
    ),
    "contributions": (
        secret(measure=("contributions",)),
        "measure 'contributions'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_single_models_is_refused_at_the_start_in_a_line(what: str) -> None:
    asked, said = REFUSED[what]
    with pytest.raises((ConfigError, IncompatibleMethod), match=said) as caught:
        prepare(resolve(asked), toys.blobs())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in LINEAR])
def test_every_other_method_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(FedstillError, match=f"privacy.secure_sum with method {name}"):
        prepare(resolve(of_method(name)), toys.blobs())


@registry.method("toy_squares")
@dataclass(frozen=True)
class Squares(FedAvg):
    """It says that its fold is linear, and it is not."""

    def aggregate(self, state: State, replies, stage, world) -> State:
        mean = self.averaged(replies, state.params)
        spread = sum(float(trees.norm(trees.sub(r.content.params, mean))) for r in replies)
        return state.next(params=mean, spread=spread)


def test_a_fold_that_only_says_it_is_linear_is_found_out() -> None:
    with pytest.raises(IncompatibleMethod, match="linear"):
        prepare(resolve(secret("toy_squares")), toys.blobs())


def test_settings_of_sums_that_are_not_made_are_refused() -> None:
    for key, value in (("secure_bits", 16), ("secure_range", 1.0), ("secure_threshold", 0.6)):
        with pytest.raises(ConfigError, match=rf"privacy\.{key} needs privacy.secure_sum = true"):
            resolve(toys.toy(privacy={key: value}))
    with pytest.raises(ConfigError, match=r"secure_threshold = 0\.3"):
        resolve(secret(privacy={**ON, "secure_threshold": 0.3}))


def test_private_training_and_secure_sums_go_together(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    asked = secret(privacy={**ON, "gradient_clip": 0.5, "epsilon": 1e6})
    run(asked, tmp_path / "secret", toys.blobs())
    run(
        replace(asked, privacy={"gradient_clip": 0.5, "epsilon": 1e6}),
        tmp_path / "plain",
        toys.blobs(),
    )
    near(tmp_path)
    told = [
        [
            e["privacy"]
            for e in read_journal(tmp_path / f / "journal.jsonl")
            if e["event"] == "round"
        ]
        for f in ("secret", "plain")
    ]
    assert told[0] == told[1]


def test_masks_are_drawn_anew_for_every_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bytes]()

    class Watched(secure_engine.Summand):
        def __init__(self, *told) -> None:
            super().__init__(*told)
            seen.append(self.secrets)

    monkeypatch.setattr(secure_engine, "Summand", Watched)
    ready, state = began(secret())
    for _ in range(2):
        next_state(
            state,
            context_of(ready, with_masking(ready.engine(), ready.settings), rules=Rules()),
        )
    (stage,) = ready.settings.schedule(1, ready.world)
    assert len(set(seen)) == len(seen) == 2 * len(stage.clients)


TASKS = {"kind": "classes", "tasks": 2}


@pytest.mark.parametrize("name", ["fedntd", "fedlc"])
def test_sums_over_tasks_are_the_plain_run_s(name: str, tmp_path: Path) -> None:
    """One that takes label counts anew where tasks change, and one that does not."""
    asked = secret(name, stream=TASKS, rounds=4, topology={"clients": 4})
    run(asked, tmp_path / "secret", toys.blobs())
    run(replace(asked, privacy={}), tmp_path / "plain", toys.blobs())
    near(tmp_path)
