"""Secure sums over Flower: what leaves a site, clients that drop out at any step, and what a site
refuses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import BadPayload, ConfigError, Refused, TooFewReplies
from fedstill.core.extensions import SiteNotebook
from fedstill.core.files import digest
from fedstill.core.records import Examples, Payload, Stage
from fedstill.flower.engine import Parcel, parsed
from fedstill.flower.messages import Request, SiteReply, header_and_payload
from fedstill.flower.site import StageExecutor
from fedstill.flower.site_settings import Site
from fedstill.privacy.masking import Masking
from fedstill.privacy.noise import Privacy
from fedstill.privacy.protocol import KEY, SEALED, STEPS, as_bytes, byte_tensors, question, unmasked
from fedstill.privacy.site_guards import RUNS_WITH_SUMS, RunsWithSums
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import MESSAGE_BYTES, needs_flower, over_flower
from journals import journal_events
from run_bits import model_bytes
from troubled_grid import Delivery, Fault, FaultyGrid, payload_of

pytestmark = needs_flower

ON = {"secure_sum": True}
SECRET = toys.toy(
    "moon",
    privacy=ON,
    measure=(),
    rounds=2,
    topology={"clients": 5},
    plan={"epochs": 1, "batch": 20},
)


CLIENTS = range(5)


def step_of(delivery: Delivery) -> str:
    """The step of the secure sum that the message requests."""
    return str(delivery.payload.get("sum.step"))


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("simulation") / "run"
    run(replace(SECRET, engine="serial"), folder, data=toys.blobs())
    return folder


def run_with(folder: Path, fault: Fault, experiment: Experiment = SECRET) -> None:
    """Run over a grid with a fault, without repetitions of requests."""
    experiment = over_flower(experiment, retries=0)
    grid = FaultyGrid(experiment, folder.parent / "sites", fault)
    run(experiment, folder, data=toys.blobs(), grid=grid)


@dataclass(frozen=True)
class StageResult:
    """What the journal says about the sum of a stage."""

    reasons: dict[int, str]
    """Why clients were refused."""
    examples: set[int]
    """The examples of all clients in the sum, by the events of these clients."""

    @classmethod
    def of(cls, folder: Path, round_index: int = 1) -> StageResult:
        """The result of a round of one stage."""
        events = journal_events(folder, event="client", round=round_index)
        return cls(
            reasons={event["client"]: event["refused"] for event in events if "refused" in event},
            examples={event["summed"] for event in events if "refused" not in event},
        )


def training_examples(*clients: int) -> int:
    """How many examples these clients train on together."""
    sites = prepare(resolve(replace(SECRET, engine="serial")), toys.blobs()).sites
    return sum(sites.training_size(client, "train") for client in clients)


def byte_zeros(length: int) -> dict[str, torch.Tensor]:
    """Zeros in place of the bytes for each client."""
    return byte_tensors({client: bytes(length) for client in CLIENTS})


class Wiretap:
    """Records the headers and payloads of all replies on their way."""

    def __init__(self) -> None:
        self.headers: list[dict[str, Any]] = []
        self.entries: dict[str, set[str]] = {}
        """By step, the names of the entries of payloads."""
        self.vectors: list[torch.Tensor] = []

    def __call__(self, delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        header, payload = header_and_payload(parsed(reply).content, MESSAGE_BYTES)
        self.headers.append(json.loads(header))
        self.entries.setdefault(step_of(delivery), set()).update(payload)
        if "sum.vector" in payload:
            self.vectors.append(payload.tensor("sum.vector"))
        return reply


def test_the_result_is_that_of_one_process_and_no_message_of_a_site_reveals_its_model(
    simulation: Path, tmp_path: Path
) -> None:
    """Masked vectors use all values of their highest four bits, in which changes of a model would
    be all zeros or all ones.
    """
    wiretap = Wiretap()

    run_with(tmp_path / "run", wiretap)

    assert model_bytes(tmp_path / "run") == model_bytes(simulation)
    assert wiretap.entries == {step: {f"sum.{step}"} for step in STEPS}
    assert {header["examples"] for header in wiretap.headers} == {0}
    for header in wiretap.headers:
        assert header["metrics"].keys() <= {"seconds", "seconds_training"}
    assert len(wiretap.vectors) == 10
    numbers = torch.cat(wiretap.vectors).numpy().view(np.uint64)
    highest_bits = numbers >> np.uint64(60)
    assert len(set(highest_bits.tolist())) == 16


@pytest.mark.parametrize("step", STEPS)
def test_clients_that_drop_out_at_any_step_are_left_out_or_counted(
    step: str, tmp_path: Path
) -> None:
    """At the last step, their models are in the sum already."""

    def lost(delivery: Delivery) -> Parcel | None:
        if delivery.client in (1, 4) and step_of(delivery) == step:
            return None
        return delivery.reply()

    run_with(tmp_path / "run", lost)

    for round_index in (1, 2):
        result = StageResult.of(tmp_path / "run", round_index)
        if step == "revealed":
            assert not result.reasons
            assert result.examples == {training_examples(*CLIENTS)}
        else:
            assert result.reasons.keys() == {1, 4}
            for reason in result.reasons.values():
                assert "did not reply within the deadline" in reason
            assert result.examples == {training_examples(0, 2, 3)}


@pytest.mark.parametrize("step", STEPS)
def test_with_too_few_clients_at_any_step_the_run_stops_by_name_and_can_be_resumed(
    step: str, simulation: Path, tmp_path: Path
) -> None:
    def lost(delivery: Delivery) -> Parcel | None:
        if delivery.round == 2 and delivery.client < 3 and step_of(delivery) == step:
            return None
        return delivery.reply()

    experiment = over_flower(SECRET, retries=0)
    grid = FaultyGrid(experiment, tmp_path / "sites", lost)
    stopped = r"no secure sum: round 2, stage 'train': 2 of 5 clients .* needs 3"
    with pytest.raises(TooFewReplies, match=stopped):
        run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)

    grid.fault = None
    resume(tmp_path / "run", data=toys.blobs(), grid=grid)

    assert model_bytes(tmp_path / "run") == model_bytes(simulation)


def test_a_client_that_sends_a_vector_of_another_length_drops_out_by_name(tmp_path: Path) -> None:
    three_numbers = Payload({"sum.vector": torch.zeros(3, dtype=torch.int64)})

    def too_short(delivery: Delivery) -> Parcel:
        if delivery.client == 2 and step_of(delivery) == "vector":
            return delivery.replaced(SiteReply(2, delivery.round, 0, three_numbers))
        return delivery.reply()

    run_with(tmp_path / "run", too_short)

    for round_index in (1, 2):
        reasons = StageResult.of(tmp_path / "run", round_index).reasons
        assert reasons.keys() == {2}
        assert "something else than a masked vector of 182 numbers" in reasons[2]


WRONG_REPLIES = {
    "keys": (Payload({"sum.keys": torch.zeros(96, dtype=torch.uint8)}), "a public key is invalid"),
    "shares": (
        Payload({"sum.shares": byte_zeros(SEALED)}),
        "most clients cannot read the shares that it sent",
    ),
    "vector": (
        Payload({"sum.unread": torch.tensor([77])}),
        "it cannot read shares of clients that sent none",
    ),
}
"""By step, a reply and why it is refused."""


@pytest.mark.parametrize("step", WRONG_REPLIES)
def test_a_wrong_reply_is_refused_by_name_and_the_sum_continues_without_its_client(
    step: str, tmp_path: Path
) -> None:
    payload, reason = WRONG_REPLIES[step]

    def wrong(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.client == 2 and step_of(delivery) == step:
            return delivery.replaced(SiteReply(2, delivery.round, 0, payload))
        return reply

    run_with(tmp_path / "run", wrong)

    result = StageResult.of(tmp_path / "run")
    assert result.reasons.keys() == {2}
    assert reason in result.reasons[2]
    assert result.examples == {training_examples(0, 1, 3, 4)}


def test_of_two_clients_with_the_same_keys_both_drop_out(tmp_path: Path) -> None:
    """Client 2 sends a copy of the keys of client 0."""
    copied: list[Payload] = []

    def copies(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if step_of(delivery) == "keys" and delivery.client == 0:
            copied.append(payload_of(reply))
        if step_of(delivery) == "keys" and delivery.client == 2:
            return delivery.replaced(SiteReply(2, delivery.round, 0, copied[-1]))
        return reply

    run_with(tmp_path / "run", copies)

    result = StageResult.of(tmp_path / "run")
    assert result.reasons.keys() == {0, 2}
    for reason in result.reasons.values():
        assert "its keys are those of another client" in reason
    assert result.examples == {training_examples(1, 3, 4)}


def test_a_client_that_claims_that_it_cannot_read_shares_drops_out_alone(tmp_path: Path) -> None:
    unread = Payload({"sum.unread": torch.tensor([0])})

    def accuses(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.client == 2 and step_of(delivery) == "vector":
            return delivery.replaced(SiteReply(2, delivery.round, 0, unread))
        return reply

    run_with(tmp_path / "run", accuses)

    result = StageResult.of(tmp_path / "run")
    assert result.reasons == {2: "failed: it cannot read the shares that client 0 sent it"}
    assert result.examples == {training_examples(0, 1, 3, 4)}


def test_wrong_shares_of_one_client_at_the_last_step_are_ignored(
    simulation: Path, tmp_path: Path
) -> None:
    wrong_shares = Payload({"sum.revealed": byte_zeros(16)})

    def wrong(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.client == 0 and step_of(delivery) == "revealed":
            return delivery.replaced(SiteReply(0, delivery.round, 0, wrong_shares))
        return reply

    run_with(tmp_path / "run", wrong)

    assert model_bytes(tmp_path / "run") == model_bytes(simulation)


@pytest.mark.parametrize("step", STEPS)
def test_a_reply_of_another_round_is_refused(step: str, tmp_path: Path) -> None:
    """At the last step, the shares of the other clients suffice."""

    def late(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.client == 2 and step_of(delivery) == step:
            header, payload = header_and_payload(parsed(reply).content, MESSAGE_BYTES)
            return delivery.replaced(replace(SiteReply.of(header, payload), round=77))
        return reply

    run_with(tmp_path / "run", late)

    result = StageResult.of(tmp_path / "run")
    if step == "revealed":
        assert not result.reasons
        assert result.examples == {training_examples(*CLIENTS)}
    else:
        assert "replied for round 77 stage 0, not 1 and 0" in result.reasons[2]
        assert result.examples == {training_examples(0, 1, 3, 4)}


@pytest.mark.parametrize("limit", [16, 96])
def test_no_entry_of_a_step_may_be_longer_than_it_is(limit: int) -> None:
    assert as_bytes({"0": torch.zeros(limit, dtype=torch.uint8)}, limit) == {0: bytes(limit)}

    with pytest.raises(BadPayload, match=f"more than {limit} bytes"):
        as_bytes({"0": torch.zeros(limit + 1, dtype=torch.uint8)}, limit)


def test_of_three_clients_none_may_drop_out(tmp_path: Path) -> None:
    """From a sum of two, each could compute the other's model."""

    def lost(delivery: Delivery) -> Parcel | None:
        if delivery.client == 2 and step_of(delivery) == "vector":
            return None
        return delivery.reply()

    three_clients = replace(SECRET, topology={"clients": 3})

    with pytest.raises(TooFewReplies, match=r"2 of 3 clients sent masked vectors.* needs 3"):
        run_with(tmp_path / "run", lost, three_clients)


def test_after_shares_were_revealed_a_resumed_sum_has_the_same_clients(tmp_path: Path) -> None:
    """Client 4 was away when shares were revealed, so it is not in the sum when it is back."""

    def loses_client_4_and_two_shares(delivery: Delivery) -> Parcel | None:
        step = step_of(delivery)
        if delivery.round == 2 and delivery.client == 4 and step == "vector":
            return None
        reply = delivery.reply()
        if delivery.round == 2 and delivery.client in (0, 1) and step == "revealed":
            return None
        return reply

    def loses_client_3(delivery: Delivery) -> Parcel | None:
        if delivery.client == 3:
            return None
        return delivery.reply()

    experiment = over_flower(SECRET, retries=0)
    folder = tmp_path / "run"
    grid = FaultyGrid(experiment, tmp_path / "sites", loses_client_4_and_two_shares)
    stopped = r"2 of 5 clients revealed shares.* needs 3 .*; client 0: .*deadline"
    with pytest.raises(TooFewReplies, match=stopped):
        run(experiment, folder, data=toys.blobs(), grid=grid)

    grid.fault = loses_client_3
    stopped = r"the same clients take part: 0, 1, 2, 3; client 3: .*resume when it is"
    with pytest.raises(TooFewReplies, match=stopped):
        resume(folder, data=toys.blobs(), grid=grid)

    grid.fault = None
    resume(folder, data=toys.blobs(), grid=grid)

    result = StageResult.of(folder, 2)
    assert "was not left when shares were revealed" in result.reasons[4]
    assert result.examples == {training_examples(0, 1, 2, 3)}
    run_with(tmp_path / "without" / "run", without_client_4_in_round_2)
    assert model_bytes(folder) == model_bytes(tmp_path / "without" / "run")


def without_client_4_in_round_2(delivery: Delivery) -> Parcel | None:
    """Client 4 is away in round 2."""
    if delivery.round == 2 and delivery.client == 4:
        return None
    return delivery.reply()


def test_files_of_a_site_are_its_owners_alone_and_a_new_run_may_overwrite_them(
    tmp_path: Path,
) -> None:
    experiment = over_flower(SECRET, retries=0)
    folder = tmp_path / "run"

    run(experiment, folder, data=toys.blobs())

    files = [path for path in folder.glob("sites/*/client*/*") if path.name != ".lock"]
    assert len([path for path in files if path.name.startswith("secure-sum")]) == 10
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    run(experiment, folder, data=toys.blobs(), overwrite=True)


STAGE = Stage(1, 0, "train", (0, 1, 2))


@dataclass(frozen=True)
class MaskedModels:
    """What a server has after the step ``vector``, by client."""

    keys: dict[int, bytes]
    shares: dict[int, dict[int, bytes]]
    """By sender and receiver."""
    vectors: dict[int, torch.Tensor]


class HostileServer:
    """A server that may send any request to three sites."""

    def __init__(self, folder: Path) -> None:
        experiment = toys.toy(
            privacy=ON, measure=(), topology={"clients": 3}, data={"name": "blobs"}
        )
        self.settings = resolve(replace(experiment, engine="flower"))
        initial = prepare(self.settings, toys.blobs()).world.initial(0)
        self.model = Payload(params=initial)
        self.executors = {
            client: StageExecutor(
                Site(client, folder / str(client)), toys.blobs(), shows_reasons=True
            )
            for client in STAGE.clients
        }

    def request(self, client: int, payload: Payload, stage: Stage = STAGE) -> SiteReply:
        """The reply of a site."""
        config = self.settings.toml
        request = Request(
            fedstill.__version__,
            config,
            digest(config.encode()),
            run="run1",
            client=client,
            stage=stage,
            payload=payload,
        )
        return self.executors[client](request)

    def content(self, client: int, payload: Payload) -> Payload:
        """The content of a reply that is no refusal."""
        reply = self.request(client, payload)
        assert reply.failure == ""
        return reply.content

    def masked_models(self, word: str = "abc") -> MaskedModels:
        """Execute a sum, which this word identifies, up to the step ``vector``."""
        keys = {}
        for client in STAGE.clients:
            content = self.content(client, question("keys", word))
            keys[client] = bytes(content.tensor("sum.keys").tolist())

        shares = {}
        for client in STAGE.clients:
            content = self.content(client, question("shares", word, keys=byte_tensors(keys)))
            shares[client] = as_bytes(content.tensors("sum.shares"), SEALED)

        vectors = {}
        for client in STAGE.clients:
            content = self.content(client, self.vector_request(client, shares, word))
            vectors[client] = content.tensor("sum.vector")
        return MaskedModels(keys, shares, vectors)

    def vector_request(
        self, client: int, shares: dict[int, dict[int, bytes]], word: str = "abc"
    ) -> Payload:
        """The request for a masked model, with the shares that other clients sent."""
        sealed = byte_tensors(
            {sender: by_receiver[client] for sender, by_receiver in shares.items()}
        )
        return Payload({**self.model, **question("vector", word, sealed=sealed)})

    def reveal(
        self, client: int, remaining: tuple[int, ...] = STAGE.clients, word: str = "abc"
    ) -> SiteReply:
        """The shares of a client if these clients remain."""
        return self.request(client, question("revealed", word, left=torch.tensor(remaining)))

    def revealed(self, client: int) -> dict[int, bytes]:
        """The shares of a client if all clients remain."""
        return as_bytes(self.reveal(client).content.tensors("sum.revealed"), KEY)


def test_a_site_answers_no_plain_request_for_its_model(tmp_path: Path) -> None:
    server = HostileServer(tmp_path)
    payloads = [
        server.model,
        Payload({**server.model, **question("model", "abc")}),
        question("keys", "../x"),
    ]

    for payload in payloads:
        reply = server.request(0, payload)
        assert (
            "summed securely: this site answers only the steps of the secure sum" in reply.failure
        )
        assert not reply.content


def test_a_site_reveals_once_and_masks_one_model_only(tmp_path: Path) -> None:
    server = HostileServer(tmp_path)
    masked = server.masked_models()
    request = server.vector_request(0, masked.shares)
    moved = {name: value + 1 for name, value in server.model.params.items()}

    refusal = server.request(0, Payload({**request, "params": moved}))
    assert "a mask hides only one model" in refusal.failure
    repeated = server.content(0, request).tensor("sum.vector")
    assert torch.equal(repeated, masked.vectors[0])

    revealed = {client: server.revealed(client) for client in STAGE.clients}
    assert "two sums would reveal a single model" in server.reveal(0, (0, 1)).failure
    assert server.revealed(0) == revealed[0]

    masking = Masking.of(server.settings.package_table(Privacy), server.settings.method)
    assert masking is not None
    secure_sum = masking.new_sum(STAGE, STAGE.clients, "abc")
    vectors = {client: vector.numpy().view(np.uint64) for client, vector in masked.vectors.items()}
    total = unmasked(secure_sum, masked.keys, masked.shares, vectors, revealed)
    _, mean = masking.mean(secure_sum, total, server.model.params)
    assert any(
        not torch.equal(value, server.model.params[name]) for name, value in mean.params.items()
    )


def test_a_restarted_sum_has_new_secrets_and_the_same_clients(tmp_path: Path) -> None:
    server = HostileServer(tmp_path)
    first = server.masked_models("abc")
    second = server.masked_models("def")

    assert not set(first.keys.values()) & set(second.keys.values())
    for client in STAGE.clients:
        assert not torch.equal(first.vectors[client], second.vectors[client])
    assert second.shares.keys() == {0, 1, 2}
    assert (
        "another secure sum than the one in which this site takes part"
        in server.reveal(0, word="abc").failure
    )
    assert server.reveal(0, word="def").failure == ""

    server.masked_models("ghi")
    assert "two sums would reveal a single model" in server.reveal(0, (0, 1), "ghi").failure
    assert server.reveal(0, word="ghi").failure == ""


def test_a_step_with_too_few_clients_or_without_the_first_step_is_refused(tmp_path: Path) -> None:
    server = HostileServer(tmp_path)
    assert (
        "another secure sum than the one in which this site takes part" in server.reveal(0).failure
    )

    keys = server.masked_models().keys
    assert "1 of 3 clients sent masked vectors" in server.reveal(0, (0,)).failure

    one_key = question("shares", "new", keys=byte_tensors({0: keys[0]}))
    server.content(0, question("keys", "new"))
    assert "1 of 3 clients sent keys" in server.request(0, one_key).failure

    alone = server.request(0, question("keys", "abc"), replace(STAGE, clients=(0,)))
    assert "is not in the schedule of round 1" in alone.failure


def test_attacks_of_a_simulation_and_private_training_at_sites_are_refused() -> None:
    experiment = over_flower(SECRET)
    attacked = replace(experiment, clients={"attack": "scaled", "attackers": 0.2})
    with pytest.raises(ConfigError, match=r"clients\.attack"):
        prepare(resolve(attacked), toys.blobs())

    pytest.importorskip("opacus")
    private = replace(
        experiment.with_values({"data.name": "blobs"}, "test"),
        method="fedavg",
        privacy={**ON, "gradient_clip": 1.0},
        flower={"data": "sites", "federation": "/federation"},
    )
    with pytest.raises(ConfigError, match="gradient_clip"):
        prepare(resolve(private), toys.blobs())


def test_label_counts_of_a_later_task_are_sent_without_masks(tmp_path: Path) -> None:
    experiment = replace(
        SECRET, method="fedlc", stream={"kind": "classes", "tasks": 2}, topology={"clients": 4}
    )
    run(replace(experiment, engine="serial"), tmp_path / "serial", data=toys.blobs())

    run_with(tmp_path / "run", Delivery.reply, experiment)

    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "serial")


def runs_with_sums(memory: Path, run: str, labels: list[int], **allowed: bool) -> RunsWithSums:
    """A site's record of its runs, as a request of this run sees it."""
    train = Examples(torch.arange(6.0).reshape(3, 2), torch.tensor(labels))
    return RunsWithSums(SiteNotebook(memory / run, memory, run, **allowed), train)


ORIGINAL = [0, 1, 1]
RELABELLED = [0, 1, 0]
OTHER = [1, 1, 1]


def test_data_that_change_in_a_run_with_secure_sums_belong_to_this_run(tmp_path: Path) -> None:
    runs_with_sums(tmp_path, "first", ORIGINAL).enter()
    runs_with_sums(tmp_path, "first", RELABELLED).enter()
    with pytest.raises(Refused):
        runs_with_sums(tmp_path, "second", ORIGINAL).enter()
    with pytest.raises(Refused):
        runs_with_sums(tmp_path, "second", RELABELLED).enter()

    runs_with_sums(tmp_path, "second", OTHER).enter()
    runs_with_sums(tmp_path, "first", ORIGINAL).enter()
    with pytest.raises(Refused):
        runs_with_sums(tmp_path, "first", OTHER).enter()
    runs_with_sums(tmp_path, "first", OTHER, repeat_sums=True).enter()


def test_a_record_of_an_earlier_version_counts(tmp_path: Path) -> None:
    """It had one digest for a run, where a record now has a list."""
    file = tmp_path / RUNS_WITH_SUMS
    runs_with_sums(tmp_path, "first", ORIGINAL).enter()
    ((name, (data_digest,)),) = json.loads(file.read_text()).items()
    file.write_text(json.dumps({name: data_digest}))

    with pytest.raises(Refused):
        runs_with_sums(tmp_path, "second", ORIGINAL).check()
    runs_with_sums(tmp_path, "first", ORIGINAL).enter()
