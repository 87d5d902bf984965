"""The plain loop, client by client, as a contestant."""

from __future__ import annotations

from benchmarks.peers.common import Rounds, cores, given
from benchmarks.plain import PlainLoop


def main() -> None:
    """Run every round of the task."""
    task, _, out = given()
    loop, rounds = PlainLoop(task, task.network()), Rounds()
    for _ in range(task.rounds):
        rounds.begin()
        loop.run_round()
        rounds.end()
    rounds.report(out, loop.parameters(), f"one client after another, {cores()} threads")


if __name__ == "__main__":
    main()
