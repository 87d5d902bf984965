"""The table of hostile clients, from summaries of runs."""

from __future__ import annotations

import json
from pathlib import Path

from tools.curves import attack_table


def test_a_row_for_each_attack_and_a_column_for_each_mean(tmp_path: Path) -> None:
    for number, (clients, mean, accuracy) in enumerate(
        [
            ("", "examples", 0.9),
            ('attack = "scaled"\nattackers = 0.2', "median", 0.5),
            ('attack = "scaled"\nattackers = 0.2', "median", 0.7),
            ('attack = "sign_flip"', "krum", 0.25),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.toml").write_text(
            f'[clients]\n{clients}\n[method]\naggregation = "{mean}"\n'
        )
        (folder / "summary.json").write_text(json.dumps({"accuracy": accuracy}))
    assert attack_table([tmp_path]).splitlines()[2:] == [
        "| none | 90.0 |  |  |  |  |",
        "| `sign_flip`, 10% |  |  |  |  | 25.0 |",
        "| `scaled`, 20% |  |  | 60.0 ± 14.1 |  |  |",
    ]
