"""Paths and data sets' names: relative to the config's folder in a config, absolute in a run's
config.toml.
"""

from __future__ import annotations

from pathlib import Path

from fedstill import registry
from fedstill.errors import ConfigError, on_one_line
from fedstill.fields import shown


def whole_path(path: str, base: Path | None, key: str) -> Path:
    """A path of a config as an absolute one; raises ConfigError naming the key if it cannot be a
    path.
    """
    try:
        place = ((base or Path.cwd()) / Path(path).expanduser()).resolve()
        place.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{key} = {shown(path)} cannot be a path: {on_one_line(error)}"
        ) from error
    return place


def resolved_data_name(name: str, base: Path | None, key: str) -> str:
    """A data set's name, or the absolute path if it is a file or a folder; a run's directory is
    none.

    Raises ConfigError naming the key if it cannot be a path, or is empty.
    """
    if not name:
        raise ConfigError(
            f"{key} = '' names no data; leave it out, or name a data set, a file or a folder"
        )
    if name in registry.names("dataset"):
        return name
    path, colon, attribute = name.partition(":")
    place = whole_path(path, base, key)
    is_run = (place / "journal.jsonl").is_file()
    return str(place) + colon + attribute if place.exists() and not is_run else name
