"""The table of docs/results/methods.md on what each method is worth, made from finished runs.

``tools.docs_check`` compares it with the page. Each method's difference to its base (FedAvg, of
chains FedSeq) is paired by seed; beside it is what its paper claims, from
``results/worth-claims.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill.metrics.ranks import paired_difference
from fedstill.report.table_files import TextTable
from fedstill.running.runs import Group, groups, method_of, spread

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "worth-digits"
CLAIMS = ROOT / "results" / "worth-claims.toml"
LAST_TEN, MIX = "mean_accuracy_last_10", "personal_accuracy"
NUMBERS = {"global": LAST_TEN, "clients": MIX, "bytes": "bytes"}
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


def by_seed(group: Group, key: str) -> dict[int, float]:
    """{seed: a number of a run}: of those that are reported, ``bytes`` (both ways) or ``cpu``
    (seconds).
    """
    out: dict[int, float] = {}
    for run in group.started:
        summary = run.numbers.summary
        numbers = {
            **summary,
            "bytes": summary["bytes_up"] + summary["bytes_down"],
            "cpu": summary["seconds_cpu"],
        }
        value = numbers.get(key)
        out |= {} if value is None else {run.seed: value}
    return out


def rows(
    compared: Mapping[str, Group], claims: Mapping[str, Mapping[str, Any]]
) -> Iterator[list[str]]:
    """A line of each method that was run, in the order of the claims."""
    for name, said in claims.items():
        if name in compared:
            group, base = compared[name], compared[said.get("against", "fedavg")]
            cells = [
                cell(group, LAST_TEN, 100),
                cell(group, "forgetting", 100),
                cell(group, MIX, 100),
            ]
            cost = [ratio(group, compared["fedavg"], "cpu"), cell(group, "bytes", 1e-6, alone=True)]
            unfinished = "" if group.finished else " (stopped)"
            yield [
                f"`{name}`{unfinished}",
                str(len(group.seeds)),
                *cells,
                *cost,
                said["claim"] or NONE,
                *verdict(group, base, said),
            ]


def cell(group: Group, key: str, scale: float, alone: bool = False) -> str:
    """Mean ± spread over seeds; or the mean alone."""
    value = spread(list(by_seed(group, key).values()))
    return NONE if value is None else f"{scale * value.mean:.1f}" if alone else value.text(scale, 1)


def ratio(group: Group, base: Group, key: str) -> str:
    """How many times a number of the base's, mean over seeds that both have."""
    ours, theirs = by_seed(group, key), by_seed(base, key)
    both = [ours[seed] / theirs[seed] for seed in ours if seed in theirs]
    return f"{sum(both) / len(both):.1f} ×" if both else NONE


def verdict(group: Group, base: Group, said: Mapping[str, Any]) -> list[str]:
    """The difference with its interval, and whether it is what the paper claims; with why where it
    is not.
    """
    if group is base:
        return [NONE, NONE]
    if said["of"] == "bytes":
        less = ratio(base, group, "bytes")
        fewer = float(less.split()[0]) > 1
        return [f"{less} fewer bytes", "confirmed" if fewer else "refuted"]
    apart = paired_difference(*(by_seed(g, NUMBERS[said["of"]]) for g in (group, base)))
    if apart is None or apart.pairs < 2:
        return [NONE, NONE]
    told = f"{100 * apart.mean:+.1f} ({100 * apart.low:+.1f} to {100 * apart.high:+.1f})"
    if not apart.told_apart:
        return [told, "not told apart"]
    if not said["claim"]:
        return [told, "above" if apart.mean > 0 else "below"]
    return [told, "confirmed" if apart.mean > 0 else f"refuted here: {said.get('why', 'open')}"]


def table() -> str:
    """The table, in Markdown."""
    compared = {method_of(group.settings): group for group in groups([RUNS])}
    claims = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))
    return TextTable(HEAD, list(rows(compared, claims))).markdown()
