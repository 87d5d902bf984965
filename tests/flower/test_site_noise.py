"""Noise at real sites: nobody can repeat its draws, and a hostile server gets one noised answer per
stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import erfc, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from test_flower_own_data import CLIENTS, simulated

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.codec import encode
from fedstill.core.files import digest
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Payload, Stage, Tensors
from fedstill.data.views import SiteViews
from fedstill.flower.engine import LoopbackGrid, Parcel, parsed, serialised
from fedstill.flower.facts import Facts
from fedstill.flower.messages import Request, SiteReply, header_and_payload
from fedstill.flower.site import StageExecutor
from fedstill.flower.site_settings import Site
from fedstill.privacy import noise as wire_privacy
from fedstill.privacy.noise import Privacy, clip_rows, secret_normal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import resume, run
from flowers import MESSAGE_BYTES, executor_app, executor_grid, needs_flower, own_sites
from journals import journal_events, refusals

pytestmark = needs_flower

PRIVACY = {"clip": 3.0, "noise": 20.0}
SPREAD = PRIVACY["clip"] * PRIVACY["noise"]
"""The standard deviation of the noise."""

SITES = {"deadline": 30.0, "poll": 1.0, "data": "sites", "federation": "/federation"}
LOCAL = Stage(1, 0, "local", tuple(range(CLIENTS)))
TRAIN = Stage(1, 0, "train", tuple(range(CLIENTS)))


def setting(**privacy: float) -> Experiment:
    """Clients that send logits, with these values of ``[privacy]``."""
    return toys.toy(
        "hiper_fedkd",
        data={"public": toys.PUBLIC},
        topology={"clients": CLIENTS},
        privacy=privacy,
        rounds=2,
        plan={"epochs": 1, "batch": 10},
    )


def at_sites(experiment: Experiment) -> Experiment:
    """The experiment at sites with their own data."""
    return replace(experiment, engine="flower", flower=dict(SITES))


def prepared(experiment: Experiment) -> Prepared:
    """The experiment on blobs."""
    return prepare(resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs())


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[Site]:
    """Three sites, with data of their own."""
    return own_sites(simulated(setting()), tmp_path_factory.mktemp("sites"))


@pytest.fixture
def site(sites: list[Site]) -> Site:
    """The site of client 0."""
    return sites[0]


def request_of(experiment: Experiment, stage: Stage = LOCAL, **contents: Any) -> Request:
    """What the server sends client 0 in a stage; ``contents`` change the payload."""
    federation = prepared(at_sites(experiment))
    config = federation.settings.toml
    return Request(
        fedstill.__version__,
        config,
        digest(config.encode()),
        run="run1",
        client=0,
        stage=stage,
        facts=Facts.known_by(federation).plain(),
        payload=Payload({"temperature": 1.0, **contents}),
    )


def started(site: Site, memory: Path) -> StageExecutor:
    """The executor of a site's process that has just started, with its memory in a folder."""
    return StageExecutor(replace(site, memory=memory), shows_reasons=True)


def logits(answer: SiteReply) -> torch.Tensor:
    """The logits of an answer that is no refusal."""
    assert answer.failure == ""
    return answer.content.tensor("logits").double()


def noise_of_seed(shape: torch.Size, seed: int) -> torch.Tensor:
    """The noise that a server can draw if clients draw theirs by the run's seed."""
    key = seed_for(seed, LOCAL.round, LOCAL.index, 0, "privacy")
    return SPREAD * torch.randn(shape, generator=generator(key), dtype=torch.float64)


def test_a_server_that_knows_the_seed_cannot_subtract_the_noise(site: Site, tmp_path: Path) -> None:
    """Its draw does not cancel the site's: the difference has the spread of two draws."""
    unclipped = logits(started(site, tmp_path / "clean")(request_of(setting())))
    clean = clip_rows(unclipped, PRIVACY["clip"])
    noised = logits(started(site, tmp_path / "noised")(request_of(setting(**PRIVACY))))

    attacked = noised - noise_of_seed(noised.shape, setting().seed)

    assert (attacked - clean).std().item() == pytest.approx(2**0.5 * SPREAD, rel=0.3)
    assert (noised - clean).std().item() == pytest.approx(SPREAD, rel=0.3)


def test_in_a_simulation_the_noise_can_be_subtracted_as_documented() -> None:
    """The test above would pass if the attack itself were wrong."""
    ready = prepared(setting(**PRIVACY))
    work = ready.settings.method.work(LOCAL)
    payloads = {0: Payload(temperature=1.0)}
    seed = setting().seed
    (noised_reply,) = ready.engine().run(work, LOCAL, payloads, seed)
    (clean_reply,) = replace(ready.engine(), hooks=()).run(work, LOCAL, payloads, seed)

    noised = noised_reply.content.tensor("logits").double()
    attacked = noised - noise_of_seed(noised.shape, seed)

    clean = clip_rows(clean_reply.content.tensor("logits").double(), PRIVACY["clip"])
    torch.testing.assert_close(attacked, clean, rtol=0, atol=1e-4)


def test_the_same_request_gets_the_stored_answer_and_noise_is_drawn_once(
    site: Site, tmp_path: Path
) -> None:
    request = request_of(setting(**PRIVACY))

    first = logits(started(site, tmp_path)(request))
    second = logits(started(site, tmp_path)(request))

    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"payload": Payload(temperature=2.0)},
        {"payload": Payload(temperature=1.0, more=1)},
        {"memory": ("client0-round0-stage0.safetensors", "0" * 64)},
    ],
    ids=["another content", "more content", "another memory"],
)
def test_another_request_for_a_stage_that_has_noise_is_refused(
    change: dict[str, Any], site: Site, tmp_path: Path
) -> None:
    """The first request is still answered."""
    request = request_of(setting(**PRIVACY))
    answer = logits(started(site, tmp_path)(request))

    refusal = started(site, tmp_path)(replace(request, **change))

    assert "round 1, stage 'local'" in refusal.failure
    assert not refusal.content
    assert torch.equal(logits(started(site, tmp_path)(request)), answer)


def test_without_noise_another_request_is_computed(site: Site, tmp_path: Path) -> None:
    request = request_of(setting())
    changed = replace(request, payload=Payload(temperature=2.0))

    assert started(site, tmp_path)(request).failure == ""
    assert started(site, tmp_path)(changed).failure == ""


def test_a_stage_stays_answered_without_its_stored_reply(site: Site, tmp_path: Path) -> None:
    request = request_of(setting(**PRIVACY))
    logits(started(site, tmp_path)(request))
    (stored,) = tmp_path.rglob("*.reply")

    stored.unlink()

    assert "answers no other request" in started(site, tmp_path)(request).failure


def test_a_site_that_was_killed_before_its_answer_left_works_again(
    site: Site, tmp_path: Path
) -> None:
    """The file ``noised`` is written before the answer leaves; without it, no answer has left."""
    request = request_of(setting(**PRIVACY))
    logits(started(site, tmp_path)(request))
    (stored,) = tmp_path.rglob("*.reply")
    (cost,) = tmp_path.rglob("noised")

    stored.unlink()
    cost.unlink()

    assert started(site, tmp_path)(request).failure == ""


@pytest.mark.parametrize("round_index", [0, 3, 1000])
def test_rounds_that_the_run_does_not_have_are_refused(
    round_index: int, site: Site, tmp_path: Path
) -> None:
    request = request_of(setting(**PRIVACY), replace(LOCAL, round=round_index))

    answer = started(site, tmp_path)(request)

    assert f"schedule of round {round_index}" in answer.failure


def test_more_rows_than_the_run_accounts_for_are_refused(site: Site, tmp_path: Path) -> None:
    """The server asks for one image again and again, whose noise would average out."""
    images = torch.zeros(toys.PUBLIC + 1, dtype=torch.int64)

    refusal = started(site, tmp_path)(request_of(setting(**PRIVACY), subset=images))
    answer = started(site, tmp_path)(request_of(setting(**PRIVACY), subset=images[1:]))

    assert refusal.failure == "the request asks for 51 rows of logits, where the run has 50"
    assert not refusal.content
    assert len(logits(answer)) == toys.PUBLIC


def test_a_site_refuses_a_request_beyond_the_budget_by_its_records(
    site: Site, tmp_path: Path
) -> None:
    """One upload is within the budget, the second is not; the stored answer costs nothing."""
    experiment = setting(**PRIVACY, epsilon=Privacy(**PRIVACY).spent(toys.PUBLIC))
    executor = started(site, tmp_path)

    assert len(logits(executor(request_of(experiment)))) == toys.PUBLIC
    assert len(logits(executor(request_of(experiment)))) == toys.PUBLIC
    refusal = started(site, tmp_path)(request_of(experiment, replace(LOCAL, round=2)))

    assert (
        refusal.failure
        == "50 more rows of logits would cost this site more than privacy.epsilon allows it"
    )
    assert not refusal.content


@dataclass(frozen=True)
class StageRequest:
    """A request as a message to a node."""

    node: int
    header: str

    @classmethod
    def of(cls, node: int, data: Parcel) -> StageRequest | None:
        """The request of a message, or None if the message is no request."""
        message = parsed(data)
        if message.metadata.message_type != "train.stage":
            return None
        return cls(node, str(message.content.config_records["header"]["json"]))

    @property
    def round_and_stage(self) -> list[int]:
        """The round and the stage's position in it."""
        return json.loads(self.header)["stage"][:2]


class LosingGrid(LoopbackGrid):
    """Every node's first reply in a stage is lost after it has left the node."""

    def __init__(self, executors: Mapping[int, StageExecutor]) -> None:
        super().__init__(executor_app(executors), list(executors))
        self.replies: dict[StageRequest, list[Parcel]] = {}

    def deliver(self, node: int, data: Parcel) -> Parcel | None:
        from flwr.app import Error, Message

        reply = super().deliver(node, data)
        request = StageRequest.of(node, data)
        if request is None or reply is None:
            return reply
        replies = self.replies.setdefault(request, [])
        replies.append(reply)
        if len(replies) == 1:
            return serialised(Message(Error(4, "gone"), reply_to=parsed(data)))
        return reply


def noise_of(answer: Parcel) -> bytes:
    """The encoded payload of an answer."""
    _, payload = header_and_payload(parsed(answer).content, MESSAGE_BYTES)
    return encode(payload)


def test_an_answer_that_was_lost_is_sent_again_with_the_same_noise(
    sites: list[Site], tmp_path: Path
) -> None:
    executors = {site.client: started(site, tmp_path / str(site.client)) for site in sites}
    grid = LosingGrid(executors)

    run(at_sites(setting(**PRIVACY)), tmp_path / "run", toys.blobs(), grid=grid)

    assert not refusals(tmp_path / "run")
    assert grid.replies
    for lost_reply, second_reply in grid.replies.values():
        assert noise_of(lost_reply) == noise_of(second_reply)
    rounds = journal_events(tmp_path / "run", event="round")
    epsilons = [event["privacy"]["epsilon"] for event in rounds]
    after_one_upload = Privacy(**PRIVACY).spent(toys.PUBLIC)
    after_two_uploads = Privacy(**PRIVACY).spent(toys.PUBLIC, 2)
    assert epsilons == [[after_one_upload] * CLIENTS, [after_two_uploads] * CLIENTS]


class KilledServerGrid(LoopbackGrid):
    """The server ends when the last node has answered the first stage of round 2."""

    def __init__(self, executors: Mapping[int, StageExecutor]) -> None:
        super().__init__(executor_app(executors), list(executors))
        self.answered: list[list[int]] = []

    def deliver(self, node: int, data: Parcel) -> Parcel | None:
        reply = super().deliver(node, data)
        request = StageRequest.of(node, data)
        if request is not None:
            self.answered.append(request.round_and_stage)
            if self.answered.count([2, 0]) == CLIENTS:
                raise KeyboardInterrupt
        return reply


def test_a_killed_server_resumes_with_the_noise_that_sites_have_drawn(
    sites: list[Site], tmp_path: Path
) -> None:
    executors = {site.client: started(site, tmp_path / str(site.client)) for site in sites}
    experiment = at_sites(setting(**PRIVACY))
    killed_server = KilledServerGrid(executors)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", toys.blobs(), grid=killed_server)
    stored = {path: path.read_bytes() for path in tmp_path.rglob("0000002-0000000.reply")}
    assert len(stored) == CLIENTS

    resume(tmp_path / "run", toys.blobs(), grid=executor_grid(executors))

    assert {path: path.read_bytes() for path in stored} == stored, "no site worked again"
    assert not refusals(tmp_path / "run")
    last_round = journal_events(tmp_path / "run", event="round")[-1]
    epsilon = Privacy(**PRIVACY).spent(toys.PUBLIC, 2)
    assert last_round["privacy"]["epsilon"] == [epsilon] * CLIENTS


def test_secret_draws_are_normal_and_independent_of_the_seed() -> None:
    torch.manual_seed(1)
    first = secret_normal((300, 100))
    torch.manual_seed(1)
    second = secret_normal((300, 100))

    assert first.shape == (300, 100)
    assert first.dtype == torch.float64
    assert not torch.equal(first, second)
    assert kstest(torch.cat([first, second]).flatten().numpy(), "norm").pvalue > 1e-6


def secret_draw(word: int) -> float:
    """The draw of a word of 64 bits: the lowest bit is its sign, and a bisection of erfc inverts
    the distribution at the other bits.
    """
    probability = ((word >> 1) + 0.5) * 2.0**-64
    low = -40.0
    high = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if 0.5 * erfc(-middle / sqrt(2)) < probability:
            low = middle
        else:
            high = middle

    if word & 1:
        return low
    return -low


def test_a_draw_is_the_inverse_of_the_normal_distribution_at_the_systems_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [0, 1, 2**64 - 1, 2**64 - 2, 2**63, 12345678901234567890, 3, 2**32]
    requested_bytes = []

    def urandom(size: int) -> bytes:
        requested_bytes.append(size)
        return b"".join(word.to_bytes(8, "little") for word in words)

    monkeypatch.setattr(wire_privacy.os, "urandom", urandom)

    draws = secret_normal((2, 4)).flatten().tolist()

    assert requested_bytes == [64]
    assert draws == pytest.approx([secret_draw(word) for word in words], rel=1e-9, abs=1e-12)
    assert max(draws) > 9


def private_training(**privacy: float) -> Experiment:
    """Training with noise on gradients."""
    table = {"gradient_clip": 0.5, "gradient_noise": 1.0, **privacy}
    return setting().with_values({"method": "fedavg", "privacy": table}, "test")


def training_request(experiment: Experiment) -> Request:
    """The request of round 1, with the initial model."""
    initial = prepared(experiment).world.initial(0)
    return replace(request_of(experiment, TRAIN), payload=Payload(params=initial))


def equal_names(first: Tensors, second: Tensors) -> list[str]:
    """The parameters that two models have in common."""
    return [name for name, value in first.items() if torch.equal(value, second[name])]


def test_noise_of_private_training_is_secret_drawn_once_and_within_the_budget(
    site: Site, tmp_path: Path
) -> None:
    pytest.importorskip("opacus")
    request = training_request(private_training())

    answer = started(site, tmp_path / "one")(request)
    independent = started(site, tmp_path / "two")(request)
    repeated = started(site, tmp_path / "one")(request)

    assert answer.failure == ""
    assert independent.failure == ""
    params = answer.content.params
    assert equal_names(params, independent.content.params) == [], "the run's seed draws no noise"
    assert equal_names(params, repeated.content.params) == list(params), "the answer is stored"

    moved = {name: value + 1 for name, value in params.items()}
    changed = replace(request, payload=Payload(params=moved))
    assert "answers no other request for it" in started(site, tmp_path / "one")(changed).failure
    (cost,) = (tmp_path / "one").rglob("noised")
    steps = int(cost.read_text().split(":")[1])
    assert steps > 0

    refusal = started(site, tmp_path / "tight")(training_request(private_training(epsilon=0.5)))
    assert refusal.failure.endswith(
        "more steps would cost this site more than privacy.epsilon allows it"
    )
    assert not refusal.content


def test_a_stored_answer_has_its_original_cost_even_if_the_site_has_more_data_meanwhile(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site stopped after it had stored the reply and before it noted the cost."""
    pytest.importorskip("opacus")
    request = training_request(private_training())
    started(site, tmp_path)(request)
    (cost,) = tmp_path.rglob("noised")
    original_cost = cost.read_text()
    cost.unlink()

    monkeypatch.setattr(SiteViews, "training_size", lambda *_: 1_000_000)

    assert started(site, tmp_path)(request).failure == ""
    assert cost.read_text() == original_cost
