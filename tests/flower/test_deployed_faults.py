"""Over real processes: clients and servers that are killed, raise errors, are slow, or send what is
forbidden. Slow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from fedstill.flower.deployment.programs import descendants
from fedstill.flower.messages import public_reason
from flowers import needs_flower
from journals import refusals
from processes import (
    Deployment,
    assert_same_bits,
    events,
    experiment,
    run_fedstill,
    run_over,
    serial_run,
    start_run,
)

pytestmark = [pytest.mark.slow, needs_flower]

FORKS = "multiprocessing.forkserver"
"""The module of the process from which processes of tasks are forked."""

STAGE_SECONDS = 150.0
"""The deadline of a stage that one client is to miss: much more than the other clients need."""


def round_1_has_ended(folder: Path) -> bool:
    """Whether the journal of a run has an event of a round."""
    return any(event["event"] == "round" for event in events(folder))


def test_a_killed_client_and_a_node_that_restarts_cost_nothing(
    three: Deployment, tmp_path: Path
) -> None:
    """In round 1 the process that trains for client 0 is killed; in round 2 all of client 1, which
    starts again.
    """
    trial = experiment("scaffold", "parallel", plan={"epochs": 40})
    serial = serial_run(trial, tmp_path / "serial")
    start_run(three, trial, tmp_path / "run", deadline=900.0, retries=3)
    three.wait_until(lambda: works(three, "client0"), "client 0 to train")
    os.kill(works(three, "client0")[0], signal.SIGKILL)
    killed = time.monotonic()
    three.wait_until(lambda: round_1_has_ended(tmp_path / "run"), "round 1")
    print(f"\na client's process killed: its round ended {time.monotonic() - killed:.0f} s later")
    three.wait_until(lambda: works(three, "client1"), "client 1 to train")
    three.kill("client1")
    three.start_client(1)
    killed = time.monotonic()
    three.wait_for_success("run")
    print(
        f"a node killed and started again: its round ended {time.monotonic() - killed:.0f} s "
        "later; same bits"
    )
    assert_same_bits(tmp_path / "run", serial)


def test_in_a_chain_what_trains_and_what_it_is_forked_from_are_killed(
    three: Deployment, tmp_path: Path
) -> None:
    """In round 1 the first process that trains; in round 2, while one trains, all that others would
    be forked from.
    """
    trial = experiment("toys:Chain", "sequential", plan={"epochs": 40})
    serial = serial_run(trial, tmp_path / "serial")
    start_run(three, trial, tmp_path / "run", deadline=900.0, retries=3)
    sites = [f"client{client}" for client in range(three.federation.clients)]

    def working() -> list[int]:
        return [pid for site in sites for pid in works(three, site)]

    three.wait_until(working, "a client to train")
    os.kill(working()[0], signal.SIGKILL)
    three.wait_until(lambda: round_1_has_ended(tmp_path / "run"), "round 1")
    three.wait_until(working, "a client to train again")
    fork_servers = [pid for site in sites for pid in forking(three, site)]
    for pid in fork_servers:
        os.kill(pid, signal.SIGKILL)
    three.wait_for_success("run")
    print(
        f"\na chain: a training process was killed, and {len(fork_servers)} processes from which "
        "others are forked; same bits"
    )
    assert_same_bits(tmp_path / "run", serial)


def works(deployment: Deployment, name: str) -> list[int]:
    """The processes that train for a client, if any."""
    return [pid for pid, forked in _forks(deployment, name).items() if forked]


def forking(deployment: Deployment, name: str) -> list[int]:
    """The process of a client from which its tasks are forked, once it is there."""
    return [pid for pid, forked in _forks(deployment, name).items() if not forked]


def _forks(deployment: Deployment, name: str) -> dict[int, bool]:
    """By id, those of a client's processes that run the server of forks: whether each is a fork of
    another.
    """
    import psutil

    parents = {}
    for below in descendants(deployment.processes[name].pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if FORKS in " ".join(below.cmdline()) and below.status() != psutil.STATUS_ZOMBIE:
                parents[below.pid] = below.ppid()
    return {pid: parent in parents for pid, parent in parents.items()}


def test_clients_that_raise_are_slow_or_send_what_they_must_not_are_named_and_used_again(
    three: Deployment, tmp_path: Path
) -> None:
    """Round 1: client 1 raises, 2 is too slow. Round 2: 1 sends NaN, 2 more than the limit.
    Round 3: all is well.
    """
    gate = tmp_path / "gate"
    trial = experiment(
        "toys:Troubled", "parallel", rounds=3, method={"name": "toys:Troubled", "gate": str(gate)}
    )
    start_run(three, trial, tmp_path / "run", deadline=STAGE_SECONDS, max_mb=1)
    three.wait_until(lambda: round_1_has_ended(tmp_path / "run"), "round 1")
    gate.touch()
    three.wait_for_success("run")
    refused = {
        (event["round"], event["client"]): event["refused"] for event in refusals(tmp_path / "run")
    }
    for (round_index, client), reason in sorted(refused.items()):
        print(f"\nround {round_index}, client {client}: {reason}")
    assert sorted(refused) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert refused[1, 1] == f"failed: {public_reason('work')}"
    assert (
        refused[1, 2]
        == f"failed: did not reply within the deadline of {STAGE_SECONDS:g} s (flower.deadline)"
    )
    assert "not finite" in refused[2, 1]
    assert "over the limit" in refused[2, 2]


def test_a_killed_server_is_resumed_to_the_bits_of_the_uninterrupted_run(
    three: Deployment, tmp_path: Path
) -> None:
    trial = experiment("scaffold", "parallel", plan={"epochs": 2})
    serial = serial_run(trial, tmp_path / "serial")
    start_run(three, trial, tmp_path / "run")
    three.wait_until(lambda: round_1_has_ended(tmp_path / "run"), "the first round")
    three.kill("server")
    three.kill("run")
    three.start_server()
    process = run_fedstill("resume", str(tmp_path / "run"), "-q")
    assert process.returncode == 0, process.stderr
    assert_same_bits(tmp_path / "run", serial)
    print("\nserver killed and resumed: same bits")


def test_a_configuration_that_no_site_has_accepted_stops_by_name(
    three: Deployment, tmp_path: Path
) -> None:
    sites = [three.federation.client(c) / "site.toml" for c in range(three.federation.clients)]
    original_texts = [site.read_text() for site in sites]
    for site, text in zip(sites, original_texts, strict=True):
        site.write_text(text + f'accept = ["{"0" * 64}"]\n')
    try:
        process = run_over(three, experiment("fedavg", "parallel"), tmp_path / "run")
    finally:
        for site, text in zip(sites, original_texts, strict=True):
            site.write_text(text)
    assert process.returncode == 1
    assert public_reason("accept") in process.stderr, process.stderr
    print("\n" + process.stderr.strip())
