"""What goes wrong between a server and its clients, on the loopback grid: the same bits, or refused
by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ClientFailed, Interrupted, TooFewReplies
from fedstill.flower.engine import Parcel, parsed
from fedstill.running.journal import read_journal, without_times
from fedstill.running.recording import Quiet
from fedstill.running.runner import resume, run
from flowers import needs_flower, over_flower
from run_bits import StopAfter
from troubled_grid import TroubledGrid

pytestmark = needs_flower

REMEMBERING = toys.toy(toys.Failing(who=-9), rounds=3, topology={"clients": 4, "sampled": 4})
"""Every client remembers how often it acted and says so in its reply."""


def journal(folder: Path) -> list[dict[str, Any]]:
    return [without_times(e) for e in read_journal(folder / "journal.jsonl")]


def refused(folder: Path) -> list[tuple[int, int, str]]:
    return [
        (e["round"], e["client"], e["refused"])
        for e in journal(folder)
        if "refused" in e and "client" in e
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(replace(REMEMBERING, engine="serial"), folder, data=toys.blobs())
    return folder


def troubled(
    folder: Path, trouble: Any, experiment: Experiment = REMEMBERING, **flower: Any
) -> TroubledGrid:
    experiment = over_flower(experiment, **flower)
    grid = TroubledGrid(experiment, folder.parent / "sites", trouble)
    run(experiment, folder, data=toys.blobs(), grid=grid)
    return grid


def same_bits(folder: Path, whole: Path) -> None:
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert journal(folder) == journal(whole)


def lost_once(code: int | None) -> Any:
    """Every client's first reply in round 2 is lost: with Flower's error, or unreadable on its
    way.
    """
    from flwr.app import Error, Message

    from fedstill.flower.engine import serialised

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        reply = grid.work(client, data)
        if round == 2 and not before:
            return serialised(Message(Error(code or 0, "gone"), reply_to=parsed(data)))
        return reply

    return trouble


@pytest.mark.parametrize(
    "code", [3, 4, 5, 8], ids=["message gone", "reply gone", "node gone", "app crashed"]
)
def test_a_lost_reply_is_asked_for_again_and_answered_from_the_kept_one(
    code: int, whole: Path, tmp_path: Path
) -> None:
    same = tmp_path / "run"
    grid = troubled(same, lost_once(code))
    same_bits(same, whole)
    assert grid._met[(0, 2, 0)] == 2


def test_a_client_killed_before_it_kept_its_reply_works_again_to_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        if round == 2 and not before and client == 1:
            grid.work(client, data)
            (kept,) = (tmp_path / "sites").rglob("client1/0000002-0000000.reply")
            kept.unlink()  # the memory was written already, the reply was not
            return lost_once(8)(grid, client, round, before, data)
        return grid.work(client, data)

    troubled(tmp_path / "run", trouble)
    same_bits(tmp_path / "run", whole)


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


def test_a_damaged_kept_reply_is_worked_out_again(whole: Path, tmp_path: Path) -> None:
    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        out = lost_once(8)(grid, client, round, before, data)
        if round == 2 and not before:
            (kept,) = (tmp_path / "sites").rglob(f"client{client}/0000002-0000000.reply")
            kept.write_bytes(kept.read_bytes()[:-7])
        return out

    troubled(tmp_path / "run", trouble)
    same_bits(tmp_path / "run", whole)


def test_a_reply_that_never_comes_is_a_failure_by_name_and_leaves_no_memory(tmp_path: Path) -> None:
    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        reply = grid.work(client, data)
        return None if (client, round) == (1, 2) else reply

    troubled(tmp_path / "run", trouble)
    assert refused(tmp_path / "run") == [
        (2, 1, "failed: did not reply within the deadline of 30 s (flower.deadline)")
    ]
    assert seen(tmp_path / "run") == {0: 3, 1: 2, 2: 3, 3: 3}, (
        "the lost round does not count, at client 1 alone"
    )


def seen(folder: Path) -> dict[int, int]:
    """How often each client remembers to have acted, by the memory that the last checkpoint
    counts.
    """
    import json

    from fedstill.core.codec import decode

    latest = (folder / "checkpoints" / "LATEST").read_text()
    memory = json.loads((folder / "checkpoints" / latest).read_text())["manifest"]["memory"]
    sites = folder.parent / "sites"
    found = {}
    for client, (name, _) in memory.items():
        (path,) = sites.rglob(f"client{client}/{name}")
        found[int(client)] = int(decode(path.read_bytes()).number("seen"))
    return found


def test_a_late_reply_is_not_folded_into_a_later_round(tmp_path: Path) -> None:
    late: list[Parcel] = []

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        if (client, round) == (1, 2):
            late.append(grid.work(client, data) or Parcel(b""))
            return None
        if (client, round) == (1, 3):
            grid._replies["999"] = late[0]  # it comes now, as the answer to a message of long ago
        return grid.work(client, data)

    troubled(tmp_path / "run", trouble)
    assert [r[:2] for r in refused(tmp_path / "run")] == [(2, 1)]
    assert seen(tmp_path / "run")[1] == 2


def test_a_late_reply_sent_as_the_answer_of_another_round_is_refused(tmp_path: Path) -> None:
    from fedstill.flower.engine import serialised

    late = []

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        from flwr.app import Message

        reply = grid.work(client, data)
        if (client, round) == (1, 2):
            late.append(parsed(reply or Parcel(b"")).content)
        if (client, round) == (1, 3):
            return serialised(Message(late[0], reply_to=parsed(data)))
        return reply

    troubled(tmp_path / "run", trouble)
    assert refused(tmp_path / "run") == [(3, 1, "replied for round 2 stage 0, not 3 and 0")]


def test_a_client_that_raises_is_a_failure_and_the_round_goes_on_as_in_process(
    tmp_path: Path,
) -> None:
    all_four = {"clients": 4, "sampled": 4}
    raising = toys.toy(toys.Failing(who=1, how="raise"), topology=all_four, clients=toys.TOLERANT)
    run(replace(raising, engine="serial"), tmp_path / "serial", data=toys.blobs())
    troubled(tmp_path / "run", None, raising)
    same_bits(tmp_path / "run", tmp_path / "serial")
    assert [r[:2] for r in refused(tmp_path / "run")] == [(2, 1), (3, 1)]


@pytest.mark.parametrize("how", ["nan", "shape", "type", "huge", "extra", "missing"])
def test_a_refused_reply_is_refused_by_the_same_name_as_in_process(
    how: str, tmp_path: Path
) -> None:
    bad = toys.toy(toys.Failing(who=1, how=how), topology={"clients": 4, "sampled": 4})
    run(replace(bad, engine="serial"), tmp_path / "serial", data=toys.blobs())
    troubled(tmp_path / "run", None, bad)
    same_bits(tmp_path / "run", tmp_path / "serial")
    assert [r[:2] for r in refused(tmp_path / "run")] == [(2, 1), (3, 1)]
    assert seen(tmp_path / "run")[1] == 1, "what a refused reply left at the client does not count"


def test_an_app_that_crashes_again_and_again_is_given_up_by_name(tmp_path: Path) -> None:
    from flwr.app import Error, Message

    from fedstill.flower.engine import serialised

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        if (client, round) == (1, 2):
            return serialised(
                Message(Error(8, "ClientApp stopped responding."), reply_to=parsed(data))
            )
        return grid.work(client, data)

    grid = troubled(tmp_path / "run", trouble, retries=2)
    assert refused(tmp_path / "run") == [
        (2, 1, "failed: Flower's error 8: ClientApp stopped responding.")
    ]
    assert grid._met[(1, 2, 0)] == 3, "sent once, and twice again"


def test_a_node_that_is_away_is_missed_by_name_and_used_again_when_it_returns(
    tmp_path: Path,
) -> None:
    experiment = over_flower(REMEMBERING)
    grid = TroubledGrid(experiment, tmp_path / "sites")

    class Watch(Quiet):
        def round(self, event: Mapping[str, Any], rounds: int) -> None:
            grid.away = {2} if event["round"] == 1 else set()

    run(experiment, tmp_path / "run", data=toys.blobs(), watch=Watch(), grid=grid)
    assert refused(tmp_path / "run") == [
        (2, 2, "failed: was not connected within the deadline of 30 s (flower.deadline)")
    ]


def test_a_node_that_restarts_within_the_deadline_costs_nothing(
    whole: Path, tmp_path: Path
) -> None:
    """It comes back under another id, as a new machine would, with its disk."""

    class Restarting(TroubledGrid):
        looks = 0

        def get_node_ids(self) -> list[int]:
            self.looks += 1
            if self.looks == 3:  # nobody is seen now; from the next look on it is there
                old = next(n for n in self.nodes if self.client(n) == 2)
                self.nodes[77] = self.nodes.pop(old)
            return super().get_node_ids() if self.looks % 3 else []

    experiment = over_flower(REMEMBERING, deadline=20)
    grid = Restarting(experiment, tmp_path / "sites", None)
    run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)
    assert 77 in grid.nodes
    same_bits(tmp_path / "run", whole)


def test_what_a_node_held_when_it_restarted_is_sent_again_within_the_deadline(
    whole: Path, tmp_path: Path
) -> None:
    """It is back before Flower misses it, under its old id: the message is gone, and no error says
    so.
    """

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        return None if (client, round, before) == (2, 2, 0) else grid.work(client, data)

    grid = troubled(tmp_path / "run", trouble, deadline=30, retries=2)
    same_bits(tmp_path / "run", whole)
    assert grid._met[(2, 2, 0)] == 2


def test_a_client_that_works_for_longer_than_its_share_is_asked_again_and_its_first_answer_counts(
    whole: Path, tmp_path: Path
) -> None:
    class Slow(TroubledGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
            self._replies.update(
                {i: reply for i, (ready, reply) in late.items() if self.time >= ready}
            )
            return super().pull_messages(message_ids)

    late: dict[str, tuple[float, Parcel]] = {}

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        reply = grid.work(client, data)
        if (client, round) != (2, 2) or reply is None:
            return reply
        if not before:
            late[parsed(data).metadata.message_id] = (grid.time + 15, reply)
        return None

    experiment = over_flower(REMEMBERING, deadline=30, retries=2)
    grid = Slow(experiment, tmp_path / "sites", trouble)
    run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)
    same_bits(tmp_path / "run", whole)
    assert grid._met[(2, 2, 0)] == 2, "asked again after ten seconds"


def test_two_nodes_that_claim_one_client_are_both_left_out_by_name(tmp_path: Path) -> None:
    experiment = over_flower(REMEMBERING)
    grid = TroubledGrid(experiment, tmp_path / "sites", None)
    old = next(n for n in grid.nodes if grid.client(n) == 2)
    grid.nodes[77] = grid.nodes[old]
    run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)
    assert {r[1:] for r in refused(tmp_path / "run")} == {
        (2, "failed: is claimed by 2 nodes: stop all but one of them")
    }


def test_below_the_quorum_the_run_stops_by_name_and_goes_on_when_the_nodes_are_back(
    whole: Path, tmp_path: Path
) -> None:
    experiment = over_flower(REMEMBERING)
    grid = TroubledGrid(
        experiment, tmp_path / "sites", lambda g, c, r, b, d: None if r == 2 else g.work(c, d)
    )
    with pytest.raises(TooFewReplies, match="deadline"):
        run(experiment, tmp_path / "run", data=toys.blobs(), grid=grid)
    grid.trouble = None
    resume(tmp_path / "run", data=toys.blobs(), grid=grid)
    same_bits(tmp_path / "run", whole)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_server_that_was_killed_after_it_asked_resumes_to_the_same_bits(
    stages: int, whole: Path, tmp_path: Path
) -> None:
    """Clients had done the stage that the checkpoint does not know; they answer it from the kept
    replies.
    """
    experiment, sites, worked = over_flower(REMEMBERING), tmp_path / "sites", []

    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        out = grid.work(client, data)
        if round == stages + 1 and client == 3:
            # the server ends in the middle of a stage, when all clients have done it
            raise KeyboardInterrupt
        return out

    with pytest.raises(KeyboardInterrupt):
        run(
            experiment,
            tmp_path / "run",
            data=toys.blobs(),
            grid=TroubledGrid(experiment, sites, trouble),
        )
    before = {p: p.stat().st_mtime_ns for p in sites.rglob(f"*-round{stages + 1}-*.safetensors")}
    assert len(before) == 4

    def watch(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        worked.append((client, round))
        return grid.work(client, data)

    again = TroubledGrid(experiment, sites, watch)
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", data=toys.blobs(), watch=StopAfter(1), grid=again)
    assert sorted(worked) == [(c, stages + 1) for c in range(4)]
    assert {p: p.stat().st_mtime_ns for p in before} == before, "nobody worked twice"
    resume(tmp_path / "run", data=toys.blobs(), grid=again)
    same_bits(tmp_path / "run", whole)


def test_a_link_of_a_chain_that_does_not_answer_is_skipped(tmp_path: Path) -> None:
    chain = toys.toy("toy_chain", rounds=2, topology={"clients": 4, "sampled": 4})
    troubled(
        tmp_path / "run", lambda g, c, r, b, d: None if (c, r) == (1, 2) else g.work(c, d), chain
    )
    assert [r[:2] for r in refused(tmp_path / "run")] == [(2, 1)]
    assert [e for e in journal(tmp_path / "run") if e["event"] == "round"][-1]["replies"] == 3


def test_a_site_that_lost_its_disk_says_so(tmp_path: Path) -> None:
    def trouble(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        if (client, round) == (1, 2):
            for path in (tmp_path / "sites").rglob("client1/*.safetensors"):
                path.unlink()
        return grid.work(client, data)

    troubled(tmp_path / "run", trouble)
    ((round, client, why), *_) = refused(tmp_path / "run")
    assert (round, client) == (2, 1)
    assert why.startswith(
        "failed: the client state client1-round1-stage0.safetensors cannot be used"
    )


def test_an_answer_over_the_limit_is_refused_by_name(tmp_path: Path) -> None:

    experiment = over_flower(
        toys.toy(rounds=1, model={"name": "mlp", "hidden": (20000,)}, plan={"epochs": 0}), max_mb=1
    )
    with pytest.raises(TooFewReplies, match="1048576"):
        run(experiment, tmp_path / "run", data=toys.blobs())
