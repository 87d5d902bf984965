"""One federation of three clients, started once for all slow tests of this folder; its sites list
the toy methods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from processes import Deployment, deployed

CLIENTS = 3
TOYS = ["toys:Chain", "toys:Logits", "toys:Peers", "toys:Troubled"]


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The server and three clients, which run until the end."""
    start = time.monotonic()
    with deployed(tmp_path_factory.mktemp("three"), CLIENTS) as deployment:
        print(f"\nserver up after {time.monotonic() - start:.1f} s")
        for client in range(CLIENTS):
            site = deployment.federation.client(client) / "site.toml"
            site.write_text(site.read_text() + f"imports = {TOYS}\n")
        yield deployment
