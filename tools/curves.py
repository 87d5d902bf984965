"""The table of docs/results/hostile_clients.md: a row per attack, and a column per aggregation.

``python -m tools.curves results/attacks-none results/attacks`` prints the table from the summaries
of runs. ``tools.docs_check`` compares it with the page.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.running.packs import readable
from fedstill.running.runs import spread

RESULTS = Path(__file__).parents[1] / "results"
AGGREGATIONS = ("examples", "trimmed_mean", "median", "norm_clipping", "krum")
ATTACKS = ("none", "sign_flip", "scaled", "label_flip")
DEFAULT_ATTACKERS = 0.1


@dataclass(frozen=True)
class Attack:
    """The attack of a run, and the share of the clients that attack."""

    kind: str
    attackers: float

    @property
    def title(self) -> str:
        """The attack as the table names it."""
        if self.kind == "none":
            return "none"
        return f"`{self.kind}`, {self.attackers:.0%}"


@dataclass(frozen=True)
class AttackedRun:
    """The last accuracy of a run, in percent, with its attack and its aggregation."""

    attack: Attack
    aggregation: str
    accuracy: float


def attack_table(folders: Iterable[Path]) -> str:
    """The last accuracies of all runs in these folders or packs, in Markdown."""
    accuracies = defaultdict[Attack, dict[str, list[float]]](lambda: defaultdict(list))
    for folder in folders:
        for run in read_runs(folder):
            accuracies[run.attack][run.aggregation].append(run.accuracy)
    headings = [f"`{name}`" for name in AGGREGATIONS]
    rows = [table_row(["hostile", *headings]), f"|---|{'---|' * len(AGGREGATIONS)}"]
    for attack in sorted(accuracies, key=position):
        cells = [spread_text(accuracies[attack][name]) for name in AGGREGATIONS]
        rows.append(table_row([attack.title, *cells]))
    return "\n".join(rows)


def read_runs(folder: Path) -> list[AttackedRun]:
    """The finished runs below a folder or in its pack."""
    runs = []
    for path in sorted(readable(folder).rglob("summary.json")):
        config = tomllib.loads((path.parent / "config.toml").read_text(encoding="utf-8"))
        summary = json.loads(path.read_text(encoding="utf-8"))
        aggregation = config["method"]["aggregation"]
        attack = attack_of(config["clients"])
        runs.append(AttackedRun(attack, aggregation, 100 * summary["accuracy"]))
    return runs


def attack_of(clients: Mapping[str, Any]) -> Attack:
    """The attack in the table ``[clients]`` of a config."""
    kind = clients.get("attack", "none")
    if kind == "none":
        return Attack("none", 0.0)
    return Attack(kind, clients.get("attackers", DEFAULT_ATTACKERS))


def position(attack: Attack) -> tuple[int, float]:
    """The sort key of an attack's row."""
    return ATTACKS.index(attack.kind), attack.attackers


def table_row(cells: list[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def spread_text(values: list[float]) -> str:
    """Mean ± standard deviation; empty without values."""
    accuracy = spread(values)
    if accuracy is None:
        return ""
    return accuracy.text(1, 1)


def shipped_attacks() -> str:
    """The table of the runs in ``results``."""
    return attack_table([RESULTS / "attacks-none", RESULTS / "attacks"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, or their packs")
    print(attack_table(parser.parse_args().folders))
