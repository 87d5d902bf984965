"""Accuracies of a comparison with hostile clients as a table: a row for each attack and share, a
column for each mean.

``python -m tools.curves results/attacks-none results/attacks`` prints the table of
docs/results/hostile_clients.md, from summaries; ``tools.docs_check`` compares it with the page.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from pathlib import Path

from fedstill.running.packs import readable

RESULTS = Path(__file__).parents[1] / "results"
MEANS = ("examples", "trimmed_mean", "median", "norm_clipping", "krum")


def attack_table(folders: list[Path]) -> str:
    """The last accuracies, mean and spread over seeds, of all runs under some folders or packs of
    them, in Markdown.
    """
    cells = dict[tuple[str, str], list[float]]()
    for summary in sorted(
        path for folder in folders for path in readable(folder).rglob("summary.json")
    ):
        config = tomllib.loads((summary.parent / "config.toml").read_text(encoding="utf-8"))
        kind = config["clients"].get("attack", "none")
        row = (
            f"`{kind}`, {config['clients'].get('attackers', 0.1):.0%}" if kind != "none" else "none"
        )
        accuracy = json.loads(summary.read_text(encoding="utf-8"))["accuracy"]
        cells.setdefault((row, config["method"]["aggregation"]), []).append(100 * accuracy)
    order = {"none": 0, "`sign_": 1, "`scale": 2, "`label": 3}
    rows = sorted(
        {row for row, _ in cells}, key=lambda row: (order.get(row[:6], order.get(row, 9)), row)
    )
    lines = [
        f"| {row} | {' | '.join(spread_of(cells.get((row, mean), [])) for mean in MEANS)} |"
        for row in rows
    ]
    head = [
        f"| hostile | {' | '.join(f'`{mean}`' for mean in MEANS)} |",
        f"|---|{'---|' * len(MEANS)}",
    ]
    return "\n".join([*head, *lines])


def spread_of(values: list[float]) -> str:
    """Mean ± sample standard deviation; nothing of nothing."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def shipped_attacks() -> str:
    """The table of the runs in ``results``."""
    return attack_table([RESULTS / "attacks-none", RESULTS / "attacks"])


if __name__ == "__main__":
    print(attack_table([Path(name) for name in sys.argv[1:]]))
