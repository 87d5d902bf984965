"""The table of docs/results/methods.md on the gain of each method, from the runs in ``results/``.

``tools.docs_check`` compares it with the page. Each method is compared with its base, which is
FedAvg, or FedSeq for chains. Differences are paired by seed. ``results/worth-claims.toml`` lists
what the papers claim.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedstill.metrics.ranks import paired_difference
from fedstill.report.table_files import TextTable
from fedstill.running.runs import Group, Spread, groups, method_of, spread

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "worth-digits"
CLAIMS = ROOT / "results" / "worth-claims.toml"

LAST_TEN = "mean_accuracy_last_10"
PERSONAL = "personal_accuracy"
METRICS = {"global": LAST_TEN, "clients": PERSONAL}
"""The metric of each kind of claim about accuracy."""

HEAD = [
    "method",
    "seeds",
    "last 10 [%]",
    "F [%]",
    "own mix [%]",
    "CPU",
    "MB",
    "claimed",
    "difference [points]",
    "verdict",
]
NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a paper claims about a method compared with its base."""

    metric: str
    """``global``, ``clients`` or ``bytes``: the server's model, the clients' models, or what is
    sent.
    """
    claim: str
    """``above``, ``fewer``, or empty if the paper claims nothing."""
    base: str = "fedavg"
    explanation: str = "open"
    """Why our runs refute the claim."""


@dataclass(frozen=True)
class Verdict:
    """The difference between a method and its base, and whether it confirms the claim."""

    difference: str
    verdict: str


def table() -> str:
    """The table, in Markdown."""
    compared = {method_of(group.settings): group for group in groups([RUNS])}
    lines = []
    for method, claim in read_claims().items():
        if method in compared:
            lines.append(row(method, claim, compared))
    return TextTable(HEAD, lines).markdown()


def read_claims() -> dict[str, Claim]:
    """The claims by method, in the order of the file."""
    entries = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))
    return {method: Claim(**fields) for method, fields in entries.items()}


def row(method: str, claim: Claim, compared: Mapping[str, Group]) -> list[str]:
    """The line of a method."""
    group = compared[method]
    base = compared[claim.base]
    name = f"`{method}`"
    if not group.finished:
        name += " (stopped)"
    seeds = str(len(group.seeds))
    accuracy = spread_text(spread_of(group, LAST_TEN), 100)
    forgetting = spread_text(spread_of(group, "forgetting"), 100)
    personal = spread_text(spread_of(group, PERSONAL), 100)
    cpu = ratio_text(mean_ratio(group, compared["fedavg"], "cpu"))
    megabytes = mean_text(spread_of(group, "bytes"), 1e-6)
    claimed = claim.claim or NONE
    result = verdict(group, base, claim)
    cells = [name, seeds, accuracy, forgetting, personal, cpu, megabytes, claimed]
    return [*cells, result.difference, result.verdict]


def by_seed(group: Group, metric: str) -> dict[int, float]:
    """A metric of each run that has it, by seed. ``bytes`` counts both directions, and ``cpu``
    seconds.
    """
    values = {}
    for run in group.started:
        summary = dict(run.numbers.summary)
        summary["bytes"] = summary["bytes_up"] + summary["bytes_down"]
        summary["cpu"] = summary["seconds_cpu"]
        value = summary.get(metric)
        if value is not None:
            values[run.seed] = value
    return values


def spread_of(group: Group, metric: str) -> Spread | None:
    """Mean and deviation of a metric over seeds, if any run has it."""
    return spread(list(by_seed(group, metric).values()))


def spread_text(values: Spread | None, scale: float) -> str:
    """Mean ± standard deviation."""
    if values is None:
        return NONE
    return values.text(scale, 1)


def mean_text(values: Spread | None, scale: float) -> str:
    """The mean only."""
    if values is None:
        return NONE
    return f"{scale * values.mean:.1f}"


def mean_ratio(group: Group, base: Group, metric: str) -> float | None:
    """The mean ratio of a metric to that of the base, over the seeds that both groups have."""
    values = by_seed(group, metric)
    base_values = by_seed(base, metric)
    ratios = [values[seed] / base_values[seed] for seed in values if seed in base_values]
    if not ratios:
        return None
    return sum(ratios) / len(ratios)


def ratio_text(ratio: float | None) -> str:
    """A ratio as a factor."""
    if ratio is None:
        return NONE
    return f"{ratio:.1f} ×"


def verdict(group: Group, base: Group, claim: Claim) -> Verdict:
    """Whether a method's runs confirm what its paper claims."""
    if group is base:
        return Verdict(NONE, NONE)
    if claim.metric == "bytes":
        return verdict_on_bytes(group, base)
    metric = METRICS[claim.metric]
    difference = paired_difference(by_seed(group, metric), by_seed(base, metric))
    if difference is None or difference.pairs < 2:
        return Verdict(NONE, NONE)
    interval = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
    text = f"{100 * difference.mean:+.1f} ({interval})"
    if not difference.told_apart:
        return Verdict(text, "not told apart")
    if not claim.claim and difference.mean > 0:
        return Verdict(text, "above")
    if not claim.claim:
        return Verdict(text, "below")
    if difference.mean > 0:
        return Verdict(text, "confirmed")
    return Verdict(text, f"refuted here: {claim.explanation}")


def verdict_on_bytes(group: Group, base: Group) -> Verdict:
    """Whether a method sends fewer bytes than its base."""
    ratio = mean_ratio(base, group, "bytes")
    if ratio is None:
        return Verdict(NONE, NONE)
    text = f"{ratio_text(ratio)} fewer bytes"
    if ratio > 1:
        return Verdict(text, "confirmed")
    return Verdict(text, "refuted")
