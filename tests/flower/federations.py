"""Folders of federations on this machine."""

from __future__ import annotations

from pathlib import Path

from fedstill.flower.deployment import folder


def federation_in(path: Path, clients: int = 1) -> folder.Federation:
    """A federation in the folder ``fed`` of ``path``, whose server would listen on port 8443."""
    return folder.init(
        path / "fed", clients, ("127.0.0.1",), listen="127.0.0.1", port=8443, version="1.0"
    )
