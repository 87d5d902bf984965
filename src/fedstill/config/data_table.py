"""The table ``[data]`` of a config: its names and paths, the default network for the data, and the
form of examples that only sites have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.config.experiment import Experiment
from fedstill.config.named_tables import known_name, schema_of_name
from fedstill.config.tables import DataTable, FlowerTable
from fedstill.config.validation import WrongConfig, validated, wrong_value
from fedstill.core import registry
from fedstill.core.errors import on_one_line
from fedstill.core.fields import nfc, value_text
from fedstill.core.files import check_windows_path, counted
from fedstill.core.user_modules import split_name
from fedstill.data.dataset import DEFAULT_TEXT_LENGTH, PLURALS, DatasetInfo, Kind, ReadingOptions
from fedstill.data.encoding import TableInputs, category_name
from fedstill.data.sources.catalog import KNOWN_FOLDERS
from fedstill.data.sources.folders import likely_kind, local_folder
from fedstill.data.tokens import BYTE_IDS

# Paths and names of data sets: relative to the config's folder in a config, absolute in a run's
# config.toml.


def absolute_path(path: str, base: Path | None, key: str) -> Path:
    """A path of a config as an absolute one. ``base``: the config's folder; None for the working
    directory.

    Raises ConfigError for the key if the text cannot be a path. The path may be absent.
    """
    check_windows_path(path, key)
    try:
        absolute = ((base or Path.cwd()) / Path(path).expanduser()).resolve()
        absolute.exists()  # fails for texts that no path can have
    except (OSError, RuntimeError, ValueError) as error:
        raise wrong_value(
            key, f"= {value_text(path)} cannot be a path: {on_one_line(error)}", "write another one"
        ) from error
    return absolute


FILE_SUFFIXES = (".csv", ".gz", ".npz", ".parquet", ".py", ".tsv", ".zip")
"""The suffixes of names that are taken for files, not for data sets of the hub."""


def resolved_data_name(name: str, base: Path | None, key: str, folder: str = "") -> str:
    """The name of a data set, or the absolute path of a file or a folder.

    ``base``: the config's folder. ``folder``: the folder of data sets, if the config names one.
    Raises ConfigError for the key if the name is empty or cannot be a path.
    """
    if not name:
        raise wrong_value(key, "is empty", "leave it out, or name a data set, a file or a folder")
    if name in registry.names("dataset"):
        return name
    check_windows_path(name, key)
    parsed = split_name(name)
    absolute = absolute_path(parsed.path, base, key)
    if _is_path(parsed.path, absolute, folder):
        return f"{absolute}{parsed.suffix}"
    return name


def _is_path(name: str, absolute: Path, folder: str) -> bool:
    """Whether a name of data is a path. ``absolute``: the path that it would be."""
    if (absolute / "journal.jsonl").is_file():
        # The directory of a run often has the name of the run's data set. It holds no data.
        return False
    local = local_folder(name, folder or None)
    if name in KNOWN_FOLDERS and local is not None and local.resolve() == absolute:
        # What is known about these data, such as their columns, belongs to the name.
        return False
    # A file that is absent has a path, too: the error is then about a place beside the config.
    return absolute.exists() or _can_only_be_path(name, folder)


def _can_only_be_path(name: str, folder: str) -> bool:
    """Whether a relative name can be neither that of a data set in the folder of data sets, nor
    owner/name on the hub.
    """
    if name.startswith(("/", "~")):
        return False  # an absolute path stays as it is written
    if name.startswith(".") or name.count("/") > 1:
        return True
    return name.endswith(FILE_SUFFIXES) and not local_folder(name, folder or None)


def read_data(experiment: Experiment) -> DataTable:
    """``[data]``, with resolved names and absolute paths. Raises ConfigError for wrong values."""
    base = experiment.base
    data = DataTable.read(experiment.table("data"), "data")
    folder = data.folder
    if folder:
        folder = str(absolute_path(folder, base, "data.folder"))
    public = data.public_from
    if public not in ("train", "noise"):
        public = resolved_data_name(public, base, "data.public_from", folder)
    tokenizer = data.tokenizer
    if tokenizer and tokenizer.endswith(".json"):
        tokenizer = str(absolute_path(tokenizer, base, "data.tokenizer"))
    return data.changed(
        name=resolved_data_name(data.name, base, "data.name", folder),
        public_from=public,
        folder=folder,
        tokenizer=tokenizer,
        features_of=_backbone(data.features_of, base),
    )


def _backbone(table: Mapping[str, Any] | None, base: Path | None) -> Mapping[str, Any] | None:
    """``features_of``, the network whose features are the examples, with an absolute path.

    Raises WrongConfig if it lacks a name or a file, or has fields that the network lacks.
    """
    if table is None:
        return None
    for key in ("name", "file"):
        if not isinstance(table.get(key), str):
            raise wrong_value(
                "data.features_of",
                f"needs {key}",
                'write features_of = { name = "cnn", file = "RUN" }',
            )
    name = known_name("data.features_of.name", "model", table["name"], base)
    file = absolute_path(table["file"], base, "data.features_of.file")
    fields = {key: value for key, value in table.items() if key not in ("name", "file")}
    values = validated(schema_of_name("model", name, base), fields, "data.features_of")
    # Defaults of fields are not written: the file says what the network is.
    return {"name": name, "file": str(file), **{key: values[key] for key in fields}}


# The default network.


DEFAULT_MODELS = {
    "image": "cnn",
    "table": "mlp",
    "vector": "mlp",
    "series": "series_cnn",
    "text": "bag",
}
"""The default network for each kind of examples."""

DIGITS = "digits"
"""The data set of 8 x 8 pixels, which are too few for the default network for images."""

DIGITS_MODEL = "digits_cnn"

FEATURES_MODEL = "logistic"
"""The default network where examples are the features of a backbone."""

ALL_DEFAULT_MODELS = (*dict.fromkeys(DEFAULT_MODELS.values()), DIGITS_MODEL, FEATURES_MODEL)
"""The networks that a run can have if its config names none."""


def default_model(experiment: Experiment, data: DataTable, flower: FlowerTable) -> str:
    """The default network for the kind of examples that the data most likely hold. Empty if the
    config names a network, so that no default is needed.
    """
    if experiment.table("model").get("name") is not None:
        return ""
    if data.features_of:
        return FEATURES_MODEL
    if data.name == DIGITS:
        return DIGITS_MODEL
    if data.name == NO_DATA and flower.data == "sites":
        return DEFAULT_MODELS[unseen_kind(data, flower)]
    if data.image_column:
        return DEFAULT_MODELS["image"]

    form = dict(data.form)
    # The column of owners or of tasks is not a part of the examples.
    owner = experiment.table("partition").get("column") or experiment.table("stream").get("column")
    if isinstance(owner, str):
        form["owner"] = owner
    return DEFAULT_MODELS[likely_kind(data.name, data.folder, data.label_column, form)]


# Examples that only sites have. The server then knows what the config says about them.


NO_DATA = "none"
"""The name of the data set of a server that has neither a test set nor a public set."""

AXES = {"image": 3, "series": 2, "table": 1, "vector": 1, "text": 1}
"""The number of axes of an example."""


class UnseenExamples(NamedTuple):
    """The form of examples that the server does not have."""

    shape: tuple[int, ...]
    """The shape of one example."""
    about: DatasetInfo


def unseen_kind(data: DataTable, flower: FlowerTable) -> Kind:
    """The kind of examples that only sites have. Raises WrongConfig if the config does not
    determine it.
    """
    if data.kind is not None:
        return data.kind
    if data.columns or data.categorical:
        return "table"
    if flower.vocabulary or data.tokenizer or data.vocabulary:
        return "text"
    if len(flower.shape) == 1:
        raise wrong_value(
            "data.kind",
            "is ambiguous when data.name = 'none' and flower.shape has one number",
            "set it to 'table', 'vector' or 'text'",
        )
    return "series" if len(flower.shape) == 2 else "image"


def unseen_examples(data: DataTable, flower: FlowerTable) -> UnseenExamples:
    """The form of examples that only sites have, which is the same at all sites.

    Raises WrongConfig if the config leaves it open, or contradicts itself.
    """
    kind = unseen_kind(data, flower)
    if len(flower.classes) < 2:
        raise wrong_value(
            "data.name",
            "= 'none' needs flower.classes, the names of the classes, at least two",
        )
    derived = _derived_examples(kind, data, flower)
    if flower.vocabulary and kind != "text":
        raise wrong_value(
            "flower.vocabulary",
            f"is for texts, and data.kind says {PLURALS[kind]}",
            "leave it out",
        )
    if derived.shape and flower.shape not in ((), derived.shape):
        raise _wrong_shape(
            kind, flower.shape, f"flower.shape = {list(derived.shape)}, or leave it out"
        )
    shape = flower.shape or derived.shape
    if not shape:
        raise wrong_value("data.name", f"= 'none' needs flower.shape, {_shape_in_words(kind)}")
    if len(shape) != AXES[kind]:
        raise _wrong_shape(kind, shape, counted(AXES[kind], "number"))
    return UnseenExamples(shape, derived.about)


def _derived_examples(kind: Kind, data: DataTable, flower: FlowerTable) -> UnseenExamples:
    """The form of examples as far as the keys of ``[data]`` determine it. The shape is empty if
    they do not determine it.
    """
    if kind == "table":
        about = _table_inputs(data).info
        return UnseenExamples((len(about.features),), about)
    if kind == "text":
        length = data.length or DEFAULT_TEXT_LENGTH
        return UnseenExamples((length,), DatasetInfo(kind, _vocabulary(data, flower)))
    return UnseenExamples((), DatasetInfo(kind))


def _shape_in_words(kind: Kind) -> str:
    if kind == "image":
        return "an image's channels, height and width"
    return f"the shape of one of the {PLURALS[kind]}"


def _wrong_shape(kind: Kind, shape: Sequence[int], legal: str) -> WrongConfig:
    return wrong_value(
        "flower.shape", f"= {list(shape)} is not the shape of {PLURALS[kind]}", f"give {legal}"
    )


def _table_inputs(data: DataTable) -> TableInputs:
    """The columns and categories of a table that only sites have.

    All of them must be in the config, since nobody sees all data. Raises WrongConfig otherwise.
    """
    if not data.columns:
        raise wrong_value(
            "data.name",
            "= 'none' with a table needs data.columns, so that all sites take the same ones",
        )
    categories = {}
    for column, names in data.categories.items():
        if column not in data.columns:
            raise wrong_value(
                "data.categorical",
                f"names {column!r}, which is not among data.columns",
                "add it there",
            )
        if not names:
            raise wrong_value(
                "data.name",
                f"= 'none' needs the names in column {column!r}, as nobody sees all data",
                f"write data.categorical = {{ {column} = [..., ...] }}",
            )
        categories[nfc(column)] = tuple(map(category_name, names))
    columns = tuple(map(nfc, data.columns))
    columns_with_marks = columns if data.missing_marks else ()
    return TableInputs(columns, categories, columns_with_marks)


def _vocabulary(data: DataTable, flower: FlowerTable) -> int:
    """The number of token ids of texts that only sites have. Raises WrongConfig if the config
    leaves it open, or contradicts itself.
    """
    tokenizer = data.tokenizer or "words"
    if tokenizer.endswith(".json"):
        if flower.vocabulary is None:
            raise wrong_value(
                "data.name",
                "= 'none' with a tokenizer file needs flower.vocabulary, its token ids",
            )
        return flower.vocabulary
    size = data.vocabulary or ReadingOptions.vocabulary
    if tokenizer == "bytes":
        size = BYTE_IDS
    if flower.vocabulary not in (None, size):
        raise wrong_value(
            "flower.vocabulary",
            f"= {flower.vocabulary}, and {tokenizer!r} has {size} token ids",
            "leave it out",
        )
    return size
