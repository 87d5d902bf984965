"""A run that has begun: its settings, as its directory says them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fedstill.errors import CorruptFile, RunExists
from fedstill.experiment.config.earlier import as_it_began
from fedstill.experiment.config.experiment import from_tree
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.config.settle import settle


def settings_of(folder: Path) -> Settings:
    """The settings of an existing run; raises RunExists where there is none, CorruptFile for one that is damaged."""
    path = folder / "config.toml"
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunExists(f"{folder} holds no run: there is no config.toml in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    return settle(from_tree(as_it_began(tree), {}, folder))
