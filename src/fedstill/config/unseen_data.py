"""A server without data: what examples are, as the config says it."""

from __future__ import annotations

from collections.abc import Mapping

from fedstill.config.tables import DataTable, FlowerTable
from fedstill.core.errors import ConfigError
from fedstill.data.form import LENGTH, MANY, About, Form, Kind, nfc
from fedstill.data.table_encoding import TableInputs, category_name
from fedstill.data.text import BYTES

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
        raise ConfigError(
            "data.name = 'none' and one number in flower.shape: set data.kind to table, vector or "
            "text"
        )
    return "series" if len(flower.shape) == 2 else "image"


def unseen_examples(data: DataTable, flower: FlowerTable) -> tuple[tuple[int, ...], About]:
    """The shape of an example that only sites have, and what is said of it.

    Raises ConfigError for what is missing, or contradicts itself: all sites must read their files
    alike.
    """
    kind = unseen_kind(data, flower)
    if len(flower.classes) < 2:
        raise ConfigError(
            "data.name = 'none' needs flower.classes, the names of the classes, at least two"
        )
    about, told = About(kind), tuple[int, ...]()
    if kind == "table":
        about = _columns(data).about
        told = (len(about.features),)
    elif kind == "text":
        about, told = About(kind, _vocabulary(data, flower)), (data.length or LENGTH,)
    if flower.vocabulary and kind != "text":
        raise ConfigError(
            f"flower.vocabulary is for texts, and data.kind says {MANY[kind]}; leave it out"
        )
    shape = flower.shape or told
    if not shape:
        needs = (
            "an image's channels, height and width"
            if kind == "image"
            else f"the shape of one of the {MANY[kind]}"
        )
        raise ConfigError(f"data.name = 'none' needs flower.shape, {needs}")
    if len(shape) != AXES[kind] or (told and shape != told):
        fits = (
            f"flower.shape = {list(told)}, or leave it out" if told else f"{AXES[kind]} number(s)"
        )
        raise ConfigError(
            f"flower.shape = {list(shape)} is not the shape of {MANY[kind]}; give {fits}"
        )
    return shape, about


def _columns(data: DataTable) -> TableInputs:
    """A table's columns and categories: all must be written down, since nobody sees all data."""
    if not data.columns:
        raise ConfigError(
            "data.name = 'none' with a table needs data.columns, so that all sites take the same "
            "ones"
        )
    named = (
        data.categorical
        if isinstance(data.categorical, Mapping)
        else dict.fromkeys(data.categorical or (), ())
    )
    for column, names in named.items():
        if column not in data.columns:
            raise ConfigError(
                f"data.categorical names {column!r}, which is not among data.columns; add it there"
            )
        if not names:
            raise ConfigError(
                f"data.name = 'none' needs the names in column {column!r}, as nobody sees all "
                "data: write "
                f"data.categorical = {{ {column} = [..., ...] }}"
            )
    categories = {column: tuple(map(category_name, names)) for column, names in named.items()}
    columns = tuple(map(nfc, data.columns))
    categories = {nfc(column): names for column, names in categories.items()}
    return TableInputs(columns, categories, columns if data.missing_marks else ())


def _vocabulary(data: DataTable, flower: FlowerTable) -> int:
    how = data.tokenizer or "words"
    if how.endswith(".json"):
        if not flower.vocabulary:
            raise ConfigError(
                "data.name = 'none' with a tokenizer's file needs flower.vocabulary, its token ids"
            )
        return flower.vocabulary
    own = BYTES if how == "bytes" else data.vocabulary or Form.vocabulary
    if flower.vocabulary not in (None, own):
        raise ConfigError(
            f"flower.vocabulary = {flower.vocabulary}, and {how!r} has {own} token ids; leave it "
            "out"
        )
    return own
