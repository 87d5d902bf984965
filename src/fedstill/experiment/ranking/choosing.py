"""Fields chosen for the rows of a suite, on training images that clients lack and on seeds that are
not reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstill.experiment.ranking.carried_out import Do, Ended, ended
from fedstill.experiment.ranking.choices import Choice
from fedstill.experiment.ranking.suites import CHOOSING_SEEDS, Suite


def choice_for(suite: Suite, row: str, out: Path, do: Do) -> Choice:
    """What is chosen for a row, when its tries are done; the same call goes on where it was
    stopped.
    """
    trials = suite.trials(row, out)
    return choice_of(ended([run for one in trials for run in one], do), len(trials))


def choice_of(runs: Sequence[Ended], tries: int) -> Choice:
    """The choice from the runs of all tries, in order: a run that diverged scores 0."""
    each = len(CHOOSING_SEEDS)
    own = [runs[i * each : (i + 1) * each] for i in range(tries)]
    scores = tuple(
        tuple(0.0 if one.diverged else one.score.accuracy for one in runs) for runs in own
    )
    return Choice(scores, tuple(sum(one.score.sent for one in runs) // each for runs in own))
