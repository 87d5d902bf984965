"""Makes one package of fedstill impossible to import, as if its folder had been deleted.

Python imports this file when it starts, if the folder is on PYTHONPATH; so the package is blocked
in child processes, too. ``FEDSTILL_TEST_BLOCK`` in the environment names the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "FEDSTILL_TEST_BLOCK"


class Blocker(MetaPathFinder):
    """Finds none of the modules of a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for a module of the package; leave others to other finders."""
        if name == self.package or name.startswith(f"{self.package}."):
            raise ModuleNotFoundError(f"No module named {name!r}: it is blocked", name=name)
        return None


def block(package: str) -> None:
    """Block a package of fedstill in this process."""
    sys.meta_path.insert(0, Blocker(f"fedstill.{package}"))


if os.environ.get(VARIABLE):
    block(os.environ[VARIABLE])
