"""Runs of the ranking, done or gone on with, and their scores; a run that diverged counts as far as
it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedstill.errors import Diverged, Interrupted, RunsFailed, TooFewReplies
from fedstill.experiment.comparing.compare import Outcome
from fedstill.experiment.comparing.variants import Variant
from fedstill.experiment.ranking.scoring import Score, score_of

Do = Callable[[Sequence[Variant]], Sequence[Outcome]]
"""Carries runs out, and leaves alone those that are finished."""


@dataclass(frozen=True)
class Ended:
    """A run that has come to its end, its score, and why it diverged; empty where it did not."""

    run: Variant
    score: Score
    diverged: str = ""


def ended(runs: Sequence[Variant], do: Do) -> list[Ended]:
    """Do the runs and score them; raises as ``completed``."""
    return [
        Ended(o.variant, score_of(o.variant.folder, o.rounds), o.problem)
        for o in completed(runs, do)
    ]


def completed(runs: Sequence[Variant], do: Do) -> list[Outcome]:
    """Do the runs, to their end; raises Interrupted if stopped, RunsFailed if one failed but did
    not diverge.
    """
    own = not_stopped(runs, do)
    if failed := [o for o in own if o.problem and not _diverged(o)]:
        first = failed[0]
        raise RunsFailed(
            f"{len(failed)} of {len(own)} failed; {first.variant.label}, seed "
            f"{first.variant.seed}: {first.problem}"
        )
    return own


def not_stopped(runs: Sequence[Variant], do: Do) -> list[Outcome]:
    """Do the runs, as far as each comes by itself; raises Interrupted if they were stopped."""
    outcomes = {o.variant.folder: o for o in do(runs)}
    own = [outcomes[run.folder] for run in runs]
    if left := sum(o.state in ("waiting", "running", "stopped") for o in own):
        raise Interrupted(f"stopped; the same command goes on with {left} of {len(own)} runs")
    return own


def _diverged(outcome: Outcome) -> bool:
    """Whether a run ended because its numbers grew beyond all bounds, not by a mistake in its
    code.
    """
    last = outcome.trace.strip().rpartition("\n")[2]
    kinds = (Diverged, TooFewReplies)
    return (
        any(last.startswith(f"{kind.__module__}.{kind.__name__}:") for kind in kinds)
        and "failed" not in last
    )
