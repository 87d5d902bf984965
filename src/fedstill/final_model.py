"""The final model in a run's directory, and the SHA-256 that ``summary.json`` has of it."""

from __future__ import annotations

import json
from pathlib import Path

from fedstill.files import digest

FINAL = "model.safetensors"
"""The file's name."""

MODEL_SEAL = "model_sha256"
"""What ``summary.json`` calls the file's SHA-256; summaries of earlier versions have none."""


def read_final(path: Path) -> bytes:
    """The bytes of a model file; raises ValueError for a final model that is not the one that its
    run wrote.

    Raises OSError for a file that cannot be read. A model without a summary beside it is taken as
    it is.
    """
    data = path.read_bytes()
    try:
        noted = json.loads((path.parent / "summary.json").read_bytes()).get(MODEL_SEAL)
    except (OSError, ValueError, AttributeError, RecursionError):
        return data
    if path.name == FINAL and noted not in (None, digest(data)):
        raise ValueError("its SHA-256 is not the one in summary.json")
    return data
