"""Who was left in a stage's secure sum, noted in the run's directory before shares are asked for.

Sites that have revealed shares take part in another sum of the same stage only with the same
clients left (``site_sums``). So where a run stops between that and the next checkpoint, its resume
has the same clients left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedstill.engines.masking import as_failed
from fedstill.errors import TooFewReplies
from fedstill.files import write_whole
from fedstill.records import Reply, Stage
from fedstill.secure.primitives import Masks
from fedstill.secure.protocol import Sum

NOTE = "sum-left.json"
"""The file in a run's directory: by stage, the clients that were left."""

KEPT = 8
"""Of how many stages that is known: a resume goes back to one of the last checkpoints."""


def note_left(
    folder: Path, stage: Stage, sum: Sum, masked: Mapping[int, Masks], came: dict[int, Reply]
) -> dict[int, Masks]:
    """The vectors of the clients that are left: of those that were, where that is noted; else of
    all, noted now.

    ``came`` gets why the others are not in the sum. Raises TooFewReplies where one that was left
    did not answer.
    """
    path, name = folder / NOTE, f"{stage.round}-{stage.index}"
    noted: dict[str, list[int]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    )
    left = noted.get(name)
    if left is None:
        kept = [*noted.items(), (name, sorted(masked))][-KEPT:]
        write_whole(path, json.dumps(dict(kept)).encode())
        return dict(masked)
    if away := sorted(set(left) - masked.keys()):
        raise TooFewReplies(
            f"{sum.name}: clients already revealed shares for this sum, and repeat that only if "
            "the same clients take "
            f"part: {', '.join(map(str, left))}; client {away[0]}: {came[away[0]].failure}; resume "
            "when it is back"
        )
    for client in masked.keys() - set(left):
        came[client] = as_failed(
            came[client], "was not left when shares were revealed, before the run stopped"
        )
    return {client: masked[client] for client in left}
