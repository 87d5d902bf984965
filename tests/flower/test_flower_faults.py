"""What goes wrong between a server and its clients, on the loopback grid: the same bits, or refused
by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.codec import decode
from fedstill.core.errors import ClientFailed, Interrupted, TooFewReplies
from fedstill.flower.engine import Parcel, parsed
from fedstill.running.journal import without_times
from fedstill.running.recording import Quiet
from fedstill.running.runner import resume, run
from flowers import needs_flower, over_flower
from journals import journal_events, refusals
from run_bits import StopAfter, model_bytes
from troubled_grid import Delivery, Fault, FaultyGrid, StageRequest

pytestmark = needs_flower

ALL_FOUR = {"clients": 4, "sampled": 4}
REMEMBERING = toys.toy(toys.Failing(who=-9), rounds=3, topology=ALL_FOUR)
"""Every client remembers how often it acted and says so in its reply."""


def journal(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, without times."""
    return [without_times(event) for event in journal_events(folder)]


@dataclass(frozen=True)
class Refusal:
    """A client that was refused in a round."""

    round: int
    client: int


def refused_replies(folder: Path) -> dict[Refusal, str]:
    """The reasons of all refusals of a run."""
    reasons: dict[Refusal, str] = {}
    for event in refusals(folder):
        refusal = Refusal(event["round"], event["client"])
        assert refusal not in reasons
        reasons[refusal] = event["refused"]
    return reasons


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("simulation") / "run"
    run(replace(REMEMBERING, engine="serial"), folder, data=toys.blobs())
    return folder


def run_with(
    folder: Path, fault: Fault | None, experiment: Experiment = REMEMBERING, **flower: Any
) -> FaultyGrid:
    """The grid of a run with a fault."""
    experiment = over_flower(experiment, **flower)
    grid = FaultyGrid(experiment, folder.parent / "sites", fault)
    run(experiment, folder, data=toys.blobs(), grid=grid)
    return grid


def assert_same_run(folder: Path, expected: Path) -> None:
    """Both runs have the same model and the same journal."""
    assert model_bytes(folder) == model_bytes(expected)
    assert journal(folder) == journal(expected)


def first_reply_of_round_2_is_lost(code: int) -> Fault:
    """The fault that every client's first reply in round 2 is replaced by Flower's error."""

    def fault(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.round == 2 and delivery.attempt == 1:
            return delivery.error(code)
        return reply

    return fault


@pytest.mark.parametrize(
    "code", [3, 4, 5, 8], ids=["message gone", "reply gone", "node gone", "app crashed"]
)
def test_a_lost_reply_is_requested_again_and_answered_from_the_stored_one(
    code: int, simulation: Path, tmp_path: Path
) -> None:
    grid = run_with(tmp_path / "run", first_reply_of_round_2_is_lost(code))

    assert_same_run(tmp_path / "run", simulation)
    assert grid.attempts[StageRequest(client=0, round=2, stage=0)] == 2


def test_a_client_killed_before_it_stored_its_reply_works_again_to_the_same_bits(
    simulation: Path, tmp_path: Path
) -> None:
    """The client's state is written before the reply."""

    def killed(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.round == 2 and delivery.attempt == 1 and delivery.client == 1:
            (stored,) = (tmp_path / "sites").rglob("client1/0000002-0000000.reply")
            stored.unlink()
            return delivery.error(8)
        return reply

    run_with(tmp_path / "run", killed)

    assert_same_run(tmp_path / "run", simulation)


@pytest.mark.parametrize("failures", ["stop", "tolerate"])
def test_a_failure_at_a_client_names_the_line_and_advises_no_debugging_at_the_server(
    failures: str, tmp_path: Path
) -> None:
    experiment = over_flower(replace(REMEMBERING, method=toys.Failing(who=1)))
    experiment = replace(experiment, clients={"failures": failures, "quorum": 1.0})

    with pytest.raises((ClientFailed, TooFewReplies), match=r"client 1.*toys\.py, line") as caught:
        run(experiment, tmp_path / "run", data=toys.blobs())

    assert "debug" not in str(caught.value)
    assert "debug" not in caught.value.in_shell


def test_a_damaged_stored_reply_is_computed_again(simulation: Path, tmp_path: Path) -> None:
    def damaged(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.round == 2 and delivery.attempt == 1:
            folder = f"client{delivery.client}"
            (stored,) = (tmp_path / "sites").rglob(f"{folder}/0000002-0000000.reply")
            stored.write_bytes(stored.read_bytes()[:-7])
            return delivery.error(8)
        return reply

    run_with(tmp_path / "run", damaged)

    assert_same_run(tmp_path / "run", simulation)


def test_a_reply_that_never_comes_is_a_failure_by_name_and_leaves_no_state(tmp_path: Path) -> None:
    """The lost round does not count, at client 1 only."""

    def lost(delivery: Delivery) -> Parcel | None:
        reply = delivery.reply()
        if delivery.client == 1 and delivery.round == 2:
            return None
        return reply

    run_with(tmp_path / "run", lost)

    reason = "failed: did not reply within the deadline of 30 s (flower.deadline)"
    assert refused_replies(tmp_path / "run") == {Refusal(2, client=1): reason}
    assert remembered_rounds(tmp_path / "run") == {0: 3, 1: 2, 2: 3, 3: 3}


def remembered_rounds(folder: Path) -> dict[int, int]:
    """How often each client acted, according to the state that the last checkpoint names."""
    checkpoints = folder / "checkpoints"
    latest = checkpoints / (checkpoints / "LATEST").read_text()
    versions = json.loads(latest.read_text())["manifest"]["memory"]
    rounds = {}
    for client, (name, _) in versions.items():
        (state,) = (folder.parent / "sites").rglob(f"client{client}/{name}")
        rounds[int(client)] = int(decode(state.read_bytes()).number("seen"))
    return rounds


def test_a_late_reply_is_not_counted_in_a_later_round(tmp_path: Path) -> None:
    """It comes in round 3 as the reply to a message of round 2."""
    late_replies: list[Parcel] = []

    def late(delivery: Delivery) -> Parcel | None:
        if delivery.client == 1 and delivery.round == 2:
            late_replies.append(delivery.reply())
            return None
        if delivery.client == 1 and delivery.round == 3:
            delivery.grid._replies["999"] = late_replies[0]
        return delivery.reply()

    run_with(tmp_path / "run", late)

    assert refused_replies(tmp_path / "run").keys() == {Refusal(2, client=1)}
    assert remembered_rounds(tmp_path / "run")[1] == 2


def test_a_late_reply_sent_as_the_reply_of_another_round_is_refused(tmp_path: Path) -> None:
    contents: list[Any] = []

    def misdated(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.client == 1 and delivery.round == 2:
            contents.append(parsed(reply).content)
        if delivery.client == 1 and delivery.round == 3:
            return delivery.with_content(contents[0])
        return reply

    run_with(tmp_path / "run", misdated)

    assert refused_replies(tmp_path / "run") == {
        Refusal(3, client=1): "replied for round 2 stage 0, not 3 and 0"
    }


def test_a_client_that_raises_is_a_failure_and_the_round_continues_as_in_process(
    tmp_path: Path,
) -> None:
    raising = toys.toy(toys.Failing(who=1, how="raise"), topology=ALL_FOUR, clients=toys.TOLERANT)
    run(replace(raising, engine="serial"), tmp_path / "serial", data=toys.blobs())

    run_with(tmp_path / "run", None, raising)

    assert_same_run(tmp_path / "run", tmp_path / "serial")
    assert refused_replies(tmp_path / "run").keys() == {Refusal(2, client=1), Refusal(3, client=1)}


@pytest.mark.parametrize("fault", ["nan", "shape", "type", "huge", "extra", "missing"])
def test_a_refused_reply_is_refused_for_the_same_reason_as_in_process(
    fault: str, tmp_path: Path
) -> None:
    """The state that the client has after a refused reply does not count."""
    spoiling = toys.toy(toys.Failing(who=1, how=fault), topology=ALL_FOUR)
    run(replace(spoiling, engine="serial"), tmp_path / "serial", data=toys.blobs())

    run_with(tmp_path / "run", None, spoiling)

    assert_same_run(tmp_path / "run", tmp_path / "serial")
    assert refused_replies(tmp_path / "run").keys() == {Refusal(2, client=1), Refusal(3, client=1)}
    assert remembered_rounds(tmp_path / "run")[1] == 1


def test_an_app_that_crashes_again_and_again_is_given_up_by_name(tmp_path: Path) -> None:
    """The message is sent once, and twice again."""

    def crashes(delivery: Delivery) -> Parcel:
        if delivery.client == 1 and delivery.round == 2:
            return delivery.error(8, "ClientApp stopped responding.")
        return delivery.reply()

    grid = run_with(tmp_path / "run", crashes, retries=2)

    assert refused_replies(tmp_path / "run") == {
        Refusal(2, client=1): "failed: Flower's error 8: ClientApp stopped responding."
    }
    assert grid.attempts[StageRequest(client=1, round=2, stage=0)] == 3


def test_an_absent_node_is_missed_by_name_and_used_again_when_it_returns(tmp_path: Path) -> None:
    experiment = over_flower(REMEMBERING)
    grid = FaultyGrid(experiment, tmp_path / "sites")

    class Absence(Quiet):
        """Client 2 is away during round 2."""

        def round(self, event: Mapping[str, Any], rounds: int) -> None:
            grid.away = set()
            if event["round"] == 1:
                grid.away = {2}

    run(experiment, tmp_path / "run", data=toys.blobs(), watch=Absence(), grid=grid)

    reason = "failed: was not connected within the deadline of 30 s (flower.deadline)"
    assert refused_replies(tmp_path / "run") == {Refusal(2, client=2): reason}


NEW_NODE = 77


class RestartingGrid(FaultyGrid):
    """The node of client 2 gets another id at the third query for nodes, as a new machine with the
    same disk would. Every third query finds no nodes.
    """

    queries = 0

    def get_node_ids(self) -> list[int]:
        self.queries += 1
        if self.queries == 3:
            self.nodes[NEW_NODE] = self.nodes.pop(self.node(2))
        if self.queries % 3 == 0:
            return []
        return super().get_node_ids()


def test_a_node_that_restarts_within_the_deadline_has_no_effect(
    simulation: Path, tmp_path: Path
) -> None:
    experiment = over_flower(REMEMBERING, deadline=20)
    grid = RestartingGrid(experiment, tmp_path / "sites")

    run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)

    assert NEW_NODE in grid.nodes
    assert_same_run(tmp_path / "run", simulation)


def test_a_message_that_a_node_lost_at_its_restart_is_sent_again_within_the_deadline(
    simulation: Path, tmp_path: Path
) -> None:
    """The node is back under its old id before Flower misses it, so no error reports the loss."""

    def lost(delivery: Delivery) -> Parcel | None:
        if delivery.request == restarted and delivery.attempt == 1:
            return None
        return delivery.reply()

    restarted = StageRequest(client=2, round=2, stage=0)

    grid = run_with(tmp_path / "run", lost, deadline=30, retries=2)

    assert_same_run(tmp_path / "run", simulation)
    assert grid.attempts[restarted] == 2


class SlowGrid(FaultyGrid):
    """The first reply of a client to one request takes 15 seconds; further ones never come."""

    slow_request = StageRequest(client=2, round=2, stage=0)
    slow_id = ""
    slow_reply: Parcel
    ready_at = 0.0

    def __init__(self, experiment: Experiment, sites: Path) -> None:
        super().__init__(experiment, sites, self.delayed)

    def delayed(self, delivery: Delivery) -> Parcel | None:
        """The fault of this grid."""
        reply = delivery.reply()
        if delivery.request != self.slow_request:
            return reply
        if delivery.attempt == 1:
            self.slow_id = parsed(delivery.message).metadata.message_id
            self.slow_reply = reply
            self.ready_at = self.time + 15
        return None

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        if self.slow_id and self.time >= self.ready_at:
            self._replies[self.slow_id] = self.slow_reply
        return super().pull_messages(message_ids)


def test_a_client_that_works_longer_than_a_retry_is_asked_again_and_its_first_reply_counts(
    simulation: Path, tmp_path: Path
) -> None:
    """With two retries in 30 seconds, it is asked again after ten."""
    experiment = over_flower(REMEMBERING, deadline=30, retries=2)
    grid = SlowGrid(experiment, tmp_path / "sites")

    run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)

    assert_same_run(tmp_path / "run", simulation)
    assert grid.attempts[grid.slow_request] == 2


def test_two_nodes_that_claim_one_client_are_both_left_out_by_name(tmp_path: Path) -> None:
    experiment = over_flower(REMEMBERING)
    grid = FaultyGrid(experiment, tmp_path / "sites")
    grid.nodes[NEW_NODE] = grid.nodes[grid.node(2)]

    run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)

    reasons = refused_replies(tmp_path / "run")
    assert {refusal.client for refusal in reasons} == {2}
    assert set(reasons.values()) == {"failed: is claimed by 2 nodes: stop all but one of them"}


def test_below_the_quorum_the_run_stops_by_name_and_can_be_resumed_when_the_nodes_are_back(
    simulation: Path, tmp_path: Path
) -> None:
    def nobody_replies_in_round_2(delivery: Delivery) -> Parcel | None:
        if delivery.round == 2:
            return None
        return delivery.reply()

    experiment = over_flower(REMEMBERING)
    grid = FaultyGrid(experiment, tmp_path / "sites", nobody_replies_in_round_2)
    with pytest.raises(TooFewReplies, match="deadline"):
        run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)

    grid.fault = None
    resume(tmp_path / "run", data=toys.blobs(), grid=grid)

    assert_same_run(tmp_path / "run", simulation)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_server_that_was_killed_in_a_stage_resumes_to_the_same_bits(
    stages: int, simulation: Path, tmp_path: Path
) -> None:
    """Clients have executed the stage that the checkpoint does not know; they answer it from their
    stored replies.
    """
    experiment = over_flower(REMEMBERING)
    sites = tmp_path / "sites"

    def server_ends_when_all_have_worked(delivery: Delivery) -> Parcel:
        reply = delivery.reply()
        if delivery.round == stages + 1 and delivery.client == 3:
            raise KeyboardInterrupt
        return reply

    killed = FaultyGrid(experiment, sites, server_ends_when_all_have_worked)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", data=toys.blobs(), grid=killed)
    states = list(sites.rglob(f"*-round{stages + 1}-*.safetensors"))
    written_at = [state.stat().st_mtime_ns for state in states]
    assert len(states) == 4

    grid = FaultyGrid(experiment, sites, Delivery.reply)
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", data=toys.blobs(), watch=StopAfter(1), grid=grid)

    assert grid.attempts == {
        StageRequest(client, round=stages + 1, stage=0): 1 for client in range(4)
    }
    assert [state.stat().st_mtime_ns for state in states] == written_at, "nobody worked twice"
    resume(tmp_path / "run", data=toys.blobs(), grid=grid)
    assert_same_run(tmp_path / "run", simulation)


def test_a_link_of_a_chain_that_does_not_reply_is_skipped(tmp_path: Path) -> None:
    def lost(delivery: Delivery) -> Parcel | None:
        if delivery.client == 1 and delivery.round == 2:
            return None
        return delivery.reply()

    chain = toys.toy("toy_chain", rounds=2, topology=ALL_FOUR)

    run_with(tmp_path / "run", lost, chain)

    assert refused_replies(tmp_path / "run").keys() == {Refusal(2, client=1)}
    last_round = journal_events(tmp_path / "run", event="round")[-1]
    assert last_round["replies"] == 3


def test_a_site_that_lost_its_disk_reports_it(tmp_path: Path) -> None:
    def disk_is_lost(delivery: Delivery) -> Parcel:
        if delivery.client == 1 and delivery.round == 2:
            for state in (tmp_path / "sites").rglob("client1/*.safetensors"):
                state.unlink()
        return delivery.reply()

    run_with(tmp_path / "run", disk_is_lost)

    first_refusal = refusals(tmp_path / "run")[0]
    assert first_refusal["round"] == 2
    assert first_refusal["client"] == 1
    assert first_refusal["refused"].startswith(
        "failed: the client state client1-round1-stage0.safetensors cannot be used"
    )


def test_a_reply_over_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    large = toys.toy(rounds=1, model={"name": "mlp", "hidden": (20000,)}, plan={"epochs": 0})
    experiment = over_flower(large, max_mb=1)

    with pytest.raises(TooFewReplies, match="1048576"):
        run(experiment, tmp_path / "run", data=toys.blobs())
