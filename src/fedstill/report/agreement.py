"""How far the tiers agree: what the small settings of a track say against what the larger ones
do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from scipy.stats import kendalltau

from fedstill.experiment.ranking.suites import TIERS, TRACKS
from fedstill.report.standings import Standings
from fedstill.report.summary import NONE

TITLE = "Do the tiers agree?"

MEANS = (
    "By track, over the methods that both tiers rank: Kendall's tau of their mean ranks, 1 for the "
    "same order and -1"
    " for the reverse; p is how often an order drawn by chance is as far from 0. Ranks that cannot "
    "be told apart move"
    " it too, so that the last columns count pairs: those that both tiers tell apart, in how many "
    "of these the"
    " same method is above, and the others by name, as the larger tier has them."
)

PAIRS = ("pairs", "both tell apart", "same order", "other order")

HEAD = ("track", "tiers", "methods in both", "Kendall's tau", "p", *PAIRS)


def agreement_lines(every: Sequence[Standings]) -> list[list[str]]:
    """A line for each track of which two tiers rank at least two methods alike in name."""
    lines = []
    for track in TRACKS:
        tiers = [
            one
            for one in every
            if one.suite.track == track and one.suite.tier in TIERS and one.placed
        ]
        for one, other in itertools.pairwise(tiers):
            if len(both := _in_both(one, other)) > 1:
                names = f"{one.suite.tier} and {other.suite.tier}"
                lines.append(
                    [
                        track,
                        names,
                        str(len(both)),
                        *_tau(one, other, both),
                        *_pairs(one, other, both),
                    ]
                )
    return lines


def _in_both(one: Standings, other: Standings) -> list[str]:
    names = {p.row.name for p in other.placed}
    return [p.row.name for p in one.placed if p.row.name in names]


def _tau(one: Standings, other: Standings, both: Sequence[str]) -> tuple[str, str]:
    """Kendall's tau and its p; a dash where all ranks of a tier are alike."""
    first, second = _ranks(one), _ranks(other)
    tau, p = kendalltau([first[n] for n in both], [second[n] for n in both])
    return (NONE, NONE) if math.isnan(tau) else (f"{tau:.2f}", f"{p:.3f}")


def _pairs(one: Standings, other: Standings, both: Sequence[str]) -> tuple[str, str, str, str]:
    """How many pairs of methods there are, how many both tiers tell apart, how many of these alike;
    the others.
    """
    first, second = _ranks(one), _ranks(other)
    pairs = list(itertools.combinations(both, 2))
    apart = [
        (a, b) for a, b in pairs if not _on_one_bar(one, a, b) and not _on_one_bar(other, a, b)
    ]
    alike = [(a, b) for a, b in apart if (first[a] < first[b]) == (second[a] < second[b])]
    unlike = [(a, b) if second[a] < second[b] else (b, a) for a, b in apart if (a, b) not in alike]
    names = ", ".join(f"{above} above {below}" for above, below in unlike)
    return str(len(pairs)), str(len(apart)), str(len(alike)), names or NONE


def _ranks(one: Standings) -> dict[str, float]:
    return {p.row.name: p.rank for p in one.placed}


def _on_one_bar(one: Standings, a: str, b: str) -> bool:
    return any(a in bar and b in bar for bar in one.bars)
