"""An app that is not fedstill's is refused by what it holds; and clients are known by the names of
their keys.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federations import federation_in

from fedstill.core.errors import ConfigError, Refused
from fedstill.flower.deployment import control
from fedstill.flower.deployment.folder import (
    CODE,
    PYPROJECT,
    TRIAL,
    client_of_key,
    require_own_app,
    write_app,
)
from fedstill.flower.fleet import Fleet, Patience
from flowers import needs_flower

PROJECT = PYPROJECT.format(version="1", config=TRIAL.format(clients=2)).encode()


def packed(**changes: bytes | None) -> bytes:
    """The app as a zip file, with some of its files changed, added, or left out."""
    files: dict[str, bytes | None] = {"pyproject.toml": PROJECT, **CODE}
    files |= changes
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            if data is not None:
                archive.writestr(name, data)
    return out.getvalue()


@needs_flower
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pathspec")  # Flower's own
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_app_that_init_writes_passes_as_flower_packs_it(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    write_app(tmp_path / "app", 3, "1.0")
    require_own_app(build_fab_from_disk(tmp_path / "app"))
    (tmp_path / "app/fedstill_app/more.py").write_text("import os\n")
    with pytest.raises(Refused, match=r"fedstill_app/more\.py"):
        require_own_app(build_fab_from_disk(tmp_path / "app"))


FOREIGN = {
    "code beside it": {"evil.py": b"import os"},
    "other code": {
        "fedstill_app/client_app.py": CODE["fedstill_app/client_app.py"] + b"import os\n"
    },
    "no client": {"fedstill_app/client_app.py": None},
    "other entry points": {
        "pyproject.toml": PROJECT.replace(b"fedstill_app.client_app:app", b"os:system")
    },
    "no entry points": {"pyproject.toml": b"[tool]\nflwr = 3\n"},
    "no project": {"pyproject.toml": None},
    "no TOML": {"pyproject.toml": b"\xff"},
    "a bomb": {"pyproject.toml": b"#" * (2 << 20)},
}


@pytest.mark.parametrize("change", FOREIGN)
def test_any_other_app_is_refused(change: str) -> None:
    require_own_app(packed())
    with pytest.raises(Refused, match="the app is not fedstill's"):
        require_own_app(packed(**FOREIGN[change]))


@pytest.mark.parametrize("data", [b"", b"PK", b"\0" * 1000, packed()[:-30], packed()[30:]])
def test_what_is_no_app_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="the app is not fedstill's"):
        require_own_app(data)


NO_CLIENTS = (
    "client",
    "client01",
    "Client1",
    "client-1",
    "client1 ",
    "client1\n",
    "xclient1",
    "client123456",
    "client\u0661",
)


@pytest.mark.parametrize(
    ("name", "client"),
    [("client0", 0), ("client12", 12), *((name, None) for name in NO_CLIENTS)],
)
def test_a_name_says_which_client(name: str, client: int | None) -> None:
    assert client_of_key(name) == client


class Grid:
    """A grid that knows its members, and fails a test that asks a node who it is."""

    def __init__(self, members: dict[int, int]) -> None:
        self._members = members

    def members(self) -> dict[int, int]:
        return self._members

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def test_where_keys_are_listed_they_say_which_client_a_node_is() -> None:
    fleet = Fleet(Grid({70: 1, 71: 0, 72: 0}), Patience())  # type: ignore[arg-type]
    assert fleet._nodes({0: SimpleNamespace(), 5: SimpleNamespace()}, 0.0) == {1: [70], 0: [71, 72]}  # type: ignore[dict-item]


@needs_flower
def test_the_list_of_keys_is_of_clients_each_with_a_key_of_its_own(tmp_path: Path) -> None:
    federation = federation_in(tmp_path, 2)
    allowed = federation.server / "allowed"
    assert sorted(control.listed(federation)) == ["client0", "client1"]
    (allowed / "client2.pub").write_bytes((allowed / "client1.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"client2.pub: .* from client0.pub to client1.pub"):
        control.listed(federation)
    (allowed / "client2.pub").unlink()
    (allowed / "client1.pub").write_bytes((allowed / "client0.pub").read_bytes())
    with pytest.raises(ConfigError, match=r"client1\.pub .*client0"):
        control.listed(federation)
    (allowed / "client1.pub").write_text("ssh-ed25519 AAAA")
    with pytest.raises(ConfigError, match=r"client1\.pub"):
        control.listed(federation)
