"""Clients that were left out, said beside the numbers: a table without them would look as usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedstill.experiment.run_directory.refusals import Refusals
from fedstill.report.runs import Run


def refused(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A sentence for each name of which a run has refusals: those of its first such run, and which
    others have some.
    """
    told = []
    for name, own in runs.items():
        said = {run.seed: text for run in own if (text := refusals_of(run).said)}
        if said:
            (seed, text), *others = said.items()
            more = f"; seeds with refusals: {', '.join(map(str, said))}" if others else ""
            told.append(f"{name}{f', seed {seed}' if len(own) > 1 else ''}: {text}{more}")
    return told


def refusals_of(run: Run) -> Refusals:
    """What was refused in a run, finished or not."""
    return Refusals.of(run.clients, int(run.settings.get("topology.clients", 0)), len(run.rounds))
