"""A site's settings: ``site.toml``, and the parts of a run's config that need its permission."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedstill.config.data_table import absolute_path, resolved_data_name
from fedstill.config.named_tables import NAMED, texts_in
from fedstill.config.validation import (
    fields_of_record,
    schema_of,
    unknown_name,
    validated,
    wrong_value,
)
from fedstill.core import registry
from fedstill.core.errors import ConfigError, suggestion
from fedstill.core.fields import CountOrZero, value_text
from fedstill.core.files import named_path, read_toml
from fedstill.core.user_modules import split_name
from fedstill.data.sources.catalog import KNOWN_FOLDERS
from fedstill.data.sources.folders import local_folder
from fedstill.metrics.classification import RECORDED

# The settings of a site: the file ``site.toml`` on a client's machine.


@dataclass(frozen=True)
class Site:
    """The machine of one client, described by its ``site.toml``.

    ``client``: the number of the client. ``memory``: the folder for client states. ``data``: a
    folder or file of its own data, or the name of a data set; if empty, it only takes part in
    trials, with its part of the config's data.
    ``tasks``: "folders" if ``data`` has a folder for each task of a run with ``[stream]``: task1,
    task2, …
    ``time_column``: the column of dates by which the run divides ``data`` into tasks.
    ``public``: its copy of the public set, for runs with public data. ``tokenizer``: its copy of
    the tokenizer file, for runs with such a file. ``accept``: the SHA-256 of the accepted configs
    with facts (``facts.accepted_text``); None: any, empty: none.
    ``imports``: files and import paths of code outside fedstill that a configuration may use.
    ``files``: files and folders that the configuration of a trial may read, spelled as in it.
    ``refuse``: measures that exclude this site from a run.
    ``repeat_sums``: whether it takes part in secure sums of several runs on the same data.
    ``evaluate``: whether it tests models on its test set and reports the accuracy.
    ``keep_days``: the number of days for which its states are kept after the last stage of a run;
    0: forever.
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
    """Read a ``site.toml``; paths are relative to its folder.

    Raises ConfigError, with the wrong key, for an invalid file.
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
        raise ConfigError(f"{path}: tasks and time_column both define tasks; remove one of them")
    _check_accepted_names(f"{path.name}.accept", values["accept"] or ())
    _check_refused_names(f"{path.name}.refuse", values["refuse"])
    for key in ("data", "public"):
        values[key] = _resolved_data(values[key], path.parent, key)
    if values["tokenizer"]:
        values["tokenizer"] = str(absolute_path(values["tokenizer"], path.parent, "tokenizer"))
    values["memory"] = absolute_path(values["memory"], path.parent, "memory")
    return Site(**values)


SHA_256 = re.compile(r"[0-9a-f]{64}")


def _check_accepted_names(key: str, names: Iterable[str]) -> None:
    """Raise WrongConfig for a name that no config has."""
    for name in names:
        if not SHA_256.fullmatch(name):
            raise wrong_value(
                key,
                f"has {value_text(name)}, which is not a SHA-256 of 64 digits",
                "write the name of a file in the folder offered of its memory, without .toml",
            )


def _check_refused_names(key: str, names: Iterable[str]) -> None:
    """Raise WrongConfig for a name that no measure and no metric has."""
    known = [*registry.names("measure"), *RECORDED]
    for name in names:
        if not split_name(name).is_code and name not in known:
            raise unknown_name(key, "measure or metric", name, suggestion(name, known))


def _resolved_data(name: str, folder: Path, key: str) -> str:
    """A site's data as a name or an absolute path. A folder next to ``site.toml`` takes precedence
    over a data set with the same name.
    """
    if not name:
        return ""
    place = absolute_path(name, folder, key)
    if place.exists():
        return str(place)
    return resolved_data_name(name, folder, key)


# The parts of a configuration that need the permission of a site's operator: code, and files on the
# site's disk.


NO_FILES = ("", "train", "noise", "words", "bytes")
"""The values of ``public_from`` and ``tokenizer`` that do not refer to a file."""


def code_in(tree: Mapping[str, Any]) -> list[str]:
    """Names in a configuration that would import code outside fedstill."""
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
    """Files and folders that a trial with this configuration would read, except known data sets.

    A name on the Hugging Face hub counts as a folder if there is a folder with this name, which
    would be read instead.
    """
    names = [*_of_data(tree)]
    values = (
        tree.get("model"),
        tree.get("partition"),
        tree.get("clients"),
        _table(tree, "data").get("features_of"),
    )
    names += [text for text in texts_in(values) if "/" in text and named_path(text).exists()]
    return sorted({name for name in names if name})


def _of_data(tree: Mapping[str, Any]) -> Iterator[str]:
    """The files in the table ``[data]``: folders, data sets by path, and a tokenizer file."""
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
    """Whether the name of a data set can only refer to the Hugging Face hub."""
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
