"""The table of hostile clients, from summaries of runs."""

from __future__ import annotations

import json
from pathlib import Path

from tools.curves import attack_table


def write_run(folder: Path, clients: str, mean: str, accuracy: float) -> None:
    """Write config and summary of a run with a table ``[clients]`` and an aggregation."""
    folder.mkdir()
    config = f'[clients]\n{clients}\n[method]\naggregation = "{mean}"\n'
    (folder / "config.toml").write_text(config)
    (folder / "summary.json").write_text(json.dumps({"accuracy": accuracy}))


def test_a_row_for_each_attack_and_a_column_for_each_mean(tmp_path: Path) -> None:
    scaled = 'attack = "scaled"\nattackers = 0.2'
    write_run(tmp_path / "0", "", "examples", 0.9)
    write_run(tmp_path / "1", scaled, "median", 0.5)
    write_run(tmp_path / "2", scaled, "median", 0.7)
    write_run(tmp_path / "3", 'attack = "sign_flip"', "krum", 0.25)

    assert attack_table([tmp_path]).splitlines()[2:] == [
        "| none | 90.0 |  |  |  |  |",
        "| `sign_flip`, 10% |  |  |  |  | 25.0 |",
        "| `scaled`, 20% |  |  | 60.0 ± 14.1 |  |  |",
    ]
