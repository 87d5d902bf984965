"""The plain loop as a contestant: one client after another."""

from __future__ import annotations

from benchmarks.peers.common import Assignment, RoundClock, cores
from benchmarks.plain import PlainLoop


def main() -> None:
    """Run every round of the task."""
    assignment = Assignment.from_arguments()
    task = assignment.task()
    loop = PlainLoop(task, task.network())
    clock = RoundClock()
    for _ in range(task.rounds):
        clock.begin()
        loop.run_round()
        clock.end()
    setup = f"one client after another, {cores()} threads"
    clock.report(assignment.report_folder, loop.parameters(), setup)


if __name__ == "__main__":
    main()
