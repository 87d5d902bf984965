"""The table ``[data]`` of a config: names and paths resolved, the network that fits the data, and
what examples are where only sites have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.config.experiment import Experiment
from fedstill.config.named_tables import known_name, model_of_name
from fedstill.config.tables import DataTable, FlowerTable
from fedstill.config.validation import contradiction, validated
from fedstill.core import registry
from fedstill.core.errors import on_one_line
from fedstill.core.fields import shown
from fedstill.core.files import refuse_windows_path
from fedstill.data.form import LENGTH, MANY, About, Form, Kind, nfc
from fedstill.data.sources.load import likely_kind, local_folder
from fedstill.data.table_encoding import TableInputs, category_name
from fedstill.data.text import BYTES

# Paths and data sets' names: relative to the config's folder in a config, absolute in a run's
# config.toml.


def whole_path(path: str, base: Path | None, key: str) -> Path:
    """A path of a config as an absolute one; raises ConfigError naming the key if it cannot be a
    path.
    """
    refuse_windows_path(path, key)
    try:
        place = ((base or Path.cwd()) / Path(path).expanduser()).resolve()
        place.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise contradiction(
            key, f"= {shown(path)} cannot be a path: {on_one_line(error)}", "write another one"
        ) from error
    return place


FILE_SUFFIXES = (".csv", ".gz", ".npz", ".parquet", ".py", ".tsv", ".zip")
"""How the names of files of data end."""


def resolved_data_name(name: str, base: Path | None, key: str, folder: str = "") -> str:
    """A data set's name, or the absolute path of a file or a folder; a run's directory is none.

    folder: the folder of data sets that the config names. Raises ConfigError naming the key if it
    cannot be a path, or is empty.
    """
    if not name:
        raise contradiction(
            key, "= '' names no data", "leave it out, or name a data set, a file or a folder"
        )
    if name in registry.names("dataset"):
        return name
    refuse_windows_path(name, key)
    path, colon, attribute = name.partition(":")
    place = whole_path(path, base, key)
    if (place / "journal.jsonl").is_file():
        return name
    # The path of a file that is absent is resolved, too, so that the error about it names the place
    # beside the config.
    is_path = place.exists() or _can_only_be_path(path, folder)
    return str(place) + colon + attribute if is_path else name


def _can_only_be_path(name: str, folder: str) -> bool:
    """Whether a relative name of data is neither that of a folder of data sets nor, as owner/name,
    one on the hub.
    """
    if name.startswith(("/", "~")):
        return False
    is_nested = name.startswith(".") or name.count("/") > 1
    return is_nested or (name.endswith(FILE_SUFFIXES) and not local_folder(name, folder or None))


def read_data(experiment: Experiment) -> DataTable:
    """``[data]``, with whole paths; raises ConfigError for values that are wrong."""
    base = experiment.base
    data = DataTable.read(experiment.table("data"), "data")
    public = data.public_from
    if public not in ("train", "noise"):
        public = resolved_data_name(public, base, "data.public_from", data.folder)
    folder = data.folder
    if folder:
        folder = str(whole_path(folder, base, "data.folder"))
    return data.changed(
        name=resolved_data_name(data.name, base, "data.name", data.folder),
        public_from=public,
        folder=folder,
        tokenizer=_tokenizer(data.tokenizer, base),
        features_of=_backbone(data.features_of, base),
    )


def _backbone(said: Mapping[str, Any] | None, base: Path | None) -> Mapping[str, Any] | None:
    """The network whose features are examples, with whole paths; raises ConfigError where it has no
    name or file.
    """
    if said is None:
        return None
    for key in ("name", "file"):
        if not isinstance(said.get(key), str):
            raise contradiction(
                "data.features_of",
                f"needs {key}",
                'write features_of = { name = "cnn", file = "RUN" }',
            )
    name = known_name("data.features_of.name", "model", said["name"], base)
    file = whole_path(said["file"], base, "data.features_of.file")
    others = {key: value for key, value in said.items() if key not in ("name", "file")}
    values = validated(model_of_name("model", name, base), others, "data.features_of")
    # defaults may change with the library, and are not written
    return {"name": name, "file": str(file), **{key: values[key] for key in others}}


def _tokenizer(said: str | None, base: Path | None) -> str | None:
    """What makes token ids of texts, a file with its whole path."""
    return (
        str(whole_path(said, base, "data.tokenizer")) if said and said.endswith(".json") else said
    )


DEFAULT_MODELS = {
    "image": "cnn",
    "table": "mlp",
    "vector": "mlp",
    "series": "series_cnn",
    "text": "bag",
}
"""The model of each kind of examples where none is named."""


def default_model(experiment: Experiment, data: DataTable, flower: FlowerTable) -> str:
    """The model where none is named: for the kind of examples that the data most likely hold."""
    named = experiment.table("model").get("name")
    if data.features_of:
        return "logistic"
    if named is not None or data.name == "digits":
        return "digits_cnn"
    if data.name == NO_DATA and flower.data == "sites":
        return DEFAULT_MODELS[unseen_kind(data, flower)]
    owner = experiment.table("partition").get("column") or experiment.table("stream").get("column")
    form = {**data.form, **({"owner": owner} if isinstance(owner, str) else {})}
    return DEFAULT_MODELS[likely_kind(data.name, data.folder, data.label_column, form)]


# Examples that only sites have.


NO_DATA = "none"
"""The data set's name for a server that has neither a test set nor a public set."""

AXES = {"image": 3, "series": 2, "table": 1, "vector": 1, "text": 1}
"""Numbers in the shape of an example."""


def unseen_kind(data: DataTable, flower: FlowerTable) -> Kind:
    """What examples are that only sites have; raises ConfigError where the config leaves that
    open.
    """
    if data.kind is not None:
        return data.kind
    if data.columns or data.categorical:
        return "table"
    if flower.vocabulary or data.tokenizer or data.vocabulary:
        return "text"
    if len(flower.shape) == 1:
        raise contradiction(
            "data.kind",
            "is open, with data.name = 'none' and one number in flower.shape",
            "set it to 'table', 'vector' or 'text'",
        )
    return "series" if len(flower.shape) == 2 else "image"


def unseen_examples(data: DataTable, flower: FlowerTable) -> tuple[tuple[int, ...], About]:
    """The shape of an example that only sites have, and what is said of it.

    Raises ConfigError for what is missing, or contradicts itself: all sites must read their files
    alike.
    """
    kind = unseen_kind(data, flower)
    if len(flower.classes) < 2:
        raise contradiction(
            "data.name",
            "= 'none' needs flower.classes, the names of the classes, at least two",
        )
    about, told = About(kind), tuple[int, ...]()
    if kind == "table":
        about = _columns(data).about
        told = (len(about.features),)
    elif kind == "text":
        about, told = About(kind, _vocabulary(data, flower)), (data.length or LENGTH,)
    if flower.vocabulary and kind != "text":
        raise contradiction(
            "flower.vocabulary",
            f"is for texts, and data.kind says {MANY[kind]}",
            "leave it out",
        )
    shape = flower.shape or told
    if not shape:
        needs = (
            "an image's channels, height and width"
            if kind == "image"
            else f"the shape of one of the {MANY[kind]}"
        )
        raise contradiction("data.name", f"= 'none' needs flower.shape, {needs}")
    if len(shape) != AXES[kind] or (told and shape != told):
        fits = (
            f"flower.shape = {list(told)}, or leave it out" if told else f"{AXES[kind]} number(s)"
        )
        raise contradiction(
            "flower.shape", f"= {list(shape)} is not the shape of {MANY[kind]}", f"give {fits}"
        )
    return shape, about


def _columns(data: DataTable) -> TableInputs:
    """A table's columns and categories: all must be written down, since nobody sees all data."""
    if not data.columns:
        raise contradiction(
            "data.name",
            "= 'none' with a table needs data.columns, so that all sites take the same ones",
        )
    named = (
        data.categorical
        if isinstance(data.categorical, Mapping)
        else dict.fromkeys(data.categorical or (), ())
    )
    for column, names in named.items():
        if column not in data.columns:
            raise contradiction(
                "data.categorical",
                f"names {column!r}, which is not among data.columns",
                "add it there",
            )
        if not names:
            raise contradiction(
                "data.name",
                f"= 'none' needs the names in column {column!r}, as nobody sees all data",
                f"write data.categorical = {{ {column} = [..., ...] }}",
            )
    categories = {column: tuple(map(category_name, names)) for column, names in named.items()}
    columns = tuple(map(nfc, data.columns))
    categories = {nfc(column): names for column, names in categories.items()}
    return TableInputs(columns, categories, columns if data.missing_marks else ())


def _vocabulary(data: DataTable, flower: FlowerTable) -> int:
    how = data.tokenizer or "words"
    if how.endswith(".json"):
        if not flower.vocabulary:
            raise contradiction(
                "data.name",
                "= 'none' with a tokenizer's file needs flower.vocabulary, its token ids",
            )
        return flower.vocabulary
    own = BYTES if how == "bytes" else data.vocabulary or Form.vocabulary
    if flower.vocabulary not in (None, own):
        raise contradiction(
            "flower.vocabulary",
            f"= {flower.vocabulary}, and {how!r} has {own} token ids",
            "leave it out",
        )
    return own
