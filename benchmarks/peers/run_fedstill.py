"""fedstill as a contestant: with its defaults, on the images as it stores them."""

from __future__ import annotations

from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.peers import tasks
from benchmarks.peers.common import Assignment, RoundClock, cores
from fedstill.config.resolve import resolve
from fedstill.running.preparation import prepare


def main() -> None:
    """Run every round of the task."""
    assignment = Assignment.from_arguments()
    task = assignment.task()
    workload = tasks.workload_of(task.about)
    dataset = tasks.stored_images(assignment.folder, workload.name)
    prepared = prepare(resolve(workload.experiment("fedavg")), dataset)
    loop = FedstillLoop(prepared)
    clock = RoundClock()
    for _ in range(task.rounds):
        clock.begin()
        loop.run_round()
        clock.end()
    setup = f"engine {prepared.settings.engine} (default), on {cores()} cores"
    clock.report(assignment.report_folder, loop.parameters(), setup)


if __name__ == "__main__":
    main()
