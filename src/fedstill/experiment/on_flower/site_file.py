"""A site's own settings: the file ``site.toml`` on one client's machine."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedstill.errors import ConfigError
from fedstill.fields import CountOrZero, checked, fields_of_record


@dataclass(frozen=True)
class Site:
    """One client's machine, as its ``site.toml`` describes it.

    ``client``: which client it is. ``memory``: the folder for what it remembers. ``data``: a folder
    or file of its own data, or a data set's name; empty: it takes part only in trials, on its part
    of the data that the config names.
    ``tasks``: "folders" where ``data`` has a folder for each task of a run with ``[stream]``,
    task1, task2, …;
    ``time_column``: the column of dates at which the run cuts ``data`` into tasks.
    ``public``: its copy of the public set, for runs that have one. ``tokenizer``: its copy of the
    tokenizer's file, for runs on texts that have one. ``accept``: SHA-256 of the configurations it
    runs; None: any, empty: none.
    ``imports``: files and import paths of code beyond fedstill's own that a configuration may name.
    ``files``: files and folders that the configuration of a trial may have it read, as they are
    written there.
    ``refuse``: measures that it takes part in no run with.
    """

    client: CountOrZero
    memory: Path
    data: str = ""
    tasks: Literal["folders", ""] = ""
    time_column: str = ""
    public: str = ""
    tokenizer: str = ""
    accept: tuple[str, ...] | None = None
    imports: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()


def load_site(path: Path) -> Site:
    """The site in a ``site.toml``; paths are relative to its folder.

    Raises ConfigError for a file that cannot be read, naming the key that is wrong.
    """
    try:
        tree = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the site's settings {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    values = checked({**fields_of_record(Site), "memory": (str, ...)}, tree, path.name)
    if values["tasks"] and values["time_column"]:
        raise ConfigError(
            f"{path}: tasks and time_column both say what a task is; leave one of them out"
        )
    for key in ("data", "public", "tokenizer"):
        place = path.parent / Path(values[key]).expanduser()
        values[key] = str(place.resolve()) if values[key] and place.exists() else values[key]
    return Site(
        **{**values, "memory": (path.parent / Path(values["memory"]).expanduser()).resolve()}
    )
