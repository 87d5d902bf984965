"""A site's settings: the file ``site.toml``, and what of a run's config it must allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstill.config.data_table import absolute_path, resolved_data_name
from fedstill.config.named_tables import NAMED, texts_in
from fedstill.config.validation import fields_of_record, schema_of, validated
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.fields import CountOrZero
from fedstill.core.files import read_toml
from fedstill.data.sources.catalog import KNOWN_FOLDERS
from fedstill.data.sources.folders import at_home, local_folder

# A site's own settings: the file ``site.toml`` on one client's machine.


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
    tokenizer's file, for runs on texts that have one. ``accept``: SHA-256 of the configs with facts
    that it runs (``facts.accepted_text``); None: any, empty: none.
    ``imports``: files and import paths of code beyond fedstill's own that a configuration may name.
    ``files``: files and folders that the configuration of a trial may have it read, as they are
    written there.
    ``refuse``: measures that it takes part in no run with.
    ``repeat_sums``: whether it takes part in secure sums of several runs on the same data.
    ``evaluate``: whether it tests models on its test set and reports the accuracy.
    ``keep_days``: how long its states of a run stay after the last stage; 0: for ever.
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
    repeat_sums: bool = False
    evaluate: bool = True
    keep_days: CountOrZero = 90


def load_site(path: Path) -> Site:
    """The site in a ``site.toml``; paths are relative to its folder.

    Raises ConfigError for a file that cannot be read, naming the key that is wrong.
    """
    try:
        tree = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the site's settings {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    model = schema_of("Site", {**fields_of_record(Site), "memory": (str, ...)})
    values = validated(model, tree, path.name)
    if values["tasks"] and values["time_column"]:
        raise ConfigError(
            f"{path}: tasks and time_column both say what a task is; leave one of them out"
        )
    for key in ("data", "public"):
        values[key] = _resolved_data(values[key], path.parent, key)
    if values["tokenizer"]:
        values["tokenizer"] = str(absolute_path(values["tokenizer"], path.parent, "tokenizer"))
    values["memory"] = absolute_path(values["memory"], path.parent, "memory")
    return Site(**values)


def _resolved_data(name: str, folder: Path, key: str) -> str:
    """A site's data by name, or by the absolute path; a folder beside ``site.toml`` comes before a
    data set of its name.
    """
    if not name:
        return ""
    place = absolute_path(name, folder, key)
    if place.exists():
        return str(place)
    return resolved_data_name(name, folder, key)


# What a configuration names that a site uses only if its operator says so: code, and files on the
# site's disk.


NO_FILES = ("", "train", "noise", "words", "bytes")
"""What ``public_from`` and ``tokenizer`` may say without a file."""


def code_in(tree: Mapping[str, Any]) -> list[str]:
    """Names in a configuration that would import code beyond fedstill's own."""
    names = [_text(tree, table, name_key.key) for table, name_key in NAMED.items()]
    measures = tree.get("measure", [])
    if not isinstance(measures, (list, tuple)):
        measures = [measures]
    names += [str(measure) for measure in measures]
    names += [_text(tree, "data", "name"), _text(tree, "data", "public_from")]
    for table, key in (("clients", "models"), ("data", "features_of")):
        names += texts_in(_table(tree, table).get(key))
    names += texts_in(_table(tree, "model"))
    return sorted({name for name in names if ":" in name or name.endswith(".py")})


def files_in(tree: Mapping[str, Any]) -> list[str]:
    """Files and folders that a trial by this configuration would read, but for data sets that are
    known by name.

    A name of the Hugging Face hub is one only where a folder of that name is on this disk, which
    would be read instead.
    """
    names = [*_of_data(tree)]
    values = (
        tree.get("model"),
        tree.get("partition"),
        tree.get("clients"),
        _table(tree, "data").get("features_of"),
    )
    names += [text for text in texts_in(values) if "/" in text and Path(at_home(text)).exists()]
    return sorted({name for name in names if name})


def _of_data(tree: Mapping[str, Any]) -> Iterator[str]:
    """The files that the table ``[data]`` names: folders, data sets by path, a tokenizer's file."""
    data = _table(tree, "data")
    yield str(data.get("folder", ""))
    tokenizer = str(data.get("tokenizer", ""))
    if tokenizer not in NO_FILES:
        yield tokenizer
    for name in (_text(tree, "data", "name"), str(data.get("public_from", ""))):
        is_registered = name in registry.names("dataset")
        if name in NO_FILES or is_registered or name in KNOWN_FOLDERS:
            continue
        if not _is_on_hub(name) or local_folder(name, None):
            yield name


def _is_on_hub(name: str) -> bool:
    """Whether a data set's name can only be one of the Hugging Face hub."""
    is_path = name.startswith((".", "/", "~")) or Path(name).exists()
    return name.count("/") == 1 and not is_path


def _table(tree: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    value = tree.get(table)
    if isinstance(value, Mapping):
        return value
    return {}


def _text(tree: Mapping[str, Any], table: str, key: str) -> str:
    value = tree.get(table)
    if isinstance(value, Mapping):
        return str(value.get(key, ""))
    return str(value or "")
