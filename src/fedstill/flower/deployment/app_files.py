"""fedstill as a Flower app: the files that make it one, and whether an app is that one.

Flower wants an app with every run, and would run its code on the server and at every site. fedstill
does not: both run what is installed there. So the app holds no more than two imports, and an app
that holds anything else is refused.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

from fedstill.core.errors import Refused
from fedstill.core.files import make_folder, parse_toml, write_whole

MAX_FILE = 1 << 20
"""Bytes of a file of an app that are looked at."""

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstill-app"
version = "{version}"
description = "fedstill on Flower: all it does is in the installed library"
license = "Apache-2.0"
dependencies = []  # Flower would install them at every run: fedstill[flower] {version} must be on every machine already

[tool.hatch.build.targets.wheel]
packages = ["fedstill_app"]

[tool.flwr.app]
publisher = "fedstill"

[tool.flwr.app.components]
serverapp = "fedstill_app.server_app:app"
clientapp = "fedstill_app.client_app:app"

[tool.flwr.app.config]
config = '''
{config}'''
out = ""          # the run's directory on the server; empty: one is made under runs/
resume = false
"""  # noqa: E501

SIDE = '''\
"""The {side} of fedstill."""

from fedstill.flower.apps import {side} as app

__all__ = ["app"]
'''

TRIAL = """\
rounds = 2
threads = 1

[data]
name = "digits"

[topology]
clients = {clients}
"""

CODE = {
    "fedstill_app/__init__.py": b'"""fedstill as a Flower app."""\n',
    **{
        f"fedstill_app/{side}.py": SIDE.format(side=side).encode()
        for side in ("client_app", "server_app")
    },
}
"""All code of the app, by its path in it."""


def write_app(folder: Path, clients: int, version: str) -> None:
    """Write the Flower app: ``flwr run`` in its folder runs a trial; it holds no code but two
    imports.
    """
    make_folder(folder / "fedstill_app")
    trial = TRIAL.format(clients=clients)
    write_whole(folder / "pyproject.toml", PYPROJECT.format(version=version, config=trial).encode())
    for name, code in CODE.items():
        write_whole(folder / name, code)


def require_own_app(packed: bytes) -> None:
    """Raises Refused if an app, packed as Flower packs them, is another one than ``write_app``
    writes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as files:
            names = set(files.namelist())
            code = {name: _read(files, name) for name in CODE.keys() & names}
            components = _components(_read(files, "pyproject.toml"))
    except (
        Exception
    ) as error:  # a stranger's bytes: whatever reading them raises, they are not this app
        raise Refused(
            f"the app is not fedstill's: it cannot be read ({type(error).__name__})"
        ) from error
    other = sorted(name for name in names if name.endswith(".py") and name not in CODE)
    if other:
        raise Refused(f"the app is not fedstill's: it brings code of its own, {other[0][:80]!r}")
    if code != CODE or components != _components(PYPROJECT.encode()):
        raise Refused(
            "the app is not fedstill's: its code is not what `fedstill deploy init` writes"
        )


def _read(files: zipfile.ZipFile, name: str) -> bytes:
    with files.open(name) as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"{name} is too large")
    return data


def _components(pyproject: bytes) -> Any:
    tree: Any = parse_toml(pyproject)
    for key in ("tool", "flwr", "app", "components"):
        tree = tree[key] if isinstance(tree, dict) else {}
    return tree
