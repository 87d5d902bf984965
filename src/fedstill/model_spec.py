"""A network by name, as records and messages name it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedstill.files import short_name


@dataclass(frozen=True)
class ModelSpec:
    """A network by name: what it is built from, so that equal specs are equal architectures.

    ``input_shape``: of one example: (channels, height, width) of an image, (D,) of a vector or a
    row of a table, (channels, L) of a series, (L,) of a text's token ids. ``vocabulary``: how many
    token ids there are, 0 where inputs are numbers. ``classes``: C; ``fields``: its options, sorted
    by name. ``widths``: the numbers of units of its hidden layers, where they are not the network's
    own. ``trains``, ``held``: which entries are trained, and the SHA-256 of all others, which stay
    as they are (``models.held_entries``); empty: all are trained. ``adds``: what the method of a
    run adds to it (``models.additions``); initial weights do not depend on that.
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    fields: tuple[tuple[str, Any], ...] = ()
    widths: tuple[int, ...] = ()
    vocabulary: int = 0
    trains: tuple[str, ...] = ()
    held: str = ""
    adds: tuple[str, ...] = ()

    def __str__(self) -> str:
        """All of it: the seed of initial weights is made of this."""
        return self._with_options(self.name)

    @property
    def label(self) -> str:
        """The same as people read it, without the folder of a file, and without tables."""
        return self._with_options(short_name(self.name), longest=60)

    def _with_options(self, name: str, longest: int | None = None) -> str:
        widths = [("widths", self.widths)] if self.widths else []
        said = [(k, str(v)) for k, v in [*self.fields, *widths]]
        options = ", ".join(
            f"{k}={v if longest is None or len(v) <= longest else '…'}" for k, v in said
        )
        return f"{name}({options})" if options else name


def as_pairs(value: Any) -> Any:
    """A value of a config, or one of a file of before, that can be hashed: tables as sorted pairs,
    lists as tuples.

    >>> as_pairs({"b": [1, 2], "a": {"c": 3}})
    (('a', (('c', 3),)), ('b', (1, 2)))
    """
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), as_pairs(v)) for k, v in value.items()))
    return tuple(as_pairs(v) for v in value) if isinstance(value, (list, tuple)) else value


def as_table_again(value: Any) -> Any:
    """What ``as_pairs`` was given, tables as mappings: pairs of a text and a value are a table.

    >>> as_table_again((('a', (('c', 3),)), ('b', (1, 2))))
    {'a': {'c': 3}, 'b': (1, 2)}
    """
    if isinstance(value, Mapping):
        return {k: as_table_again(v) for k, v in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if value and all(
        isinstance(v, (list, tuple)) and len(v) == 2 and isinstance(v[0], str) for v in value
    ):
        return {k: as_table_again(v) for k, v in value}
    return tuple(as_table_again(v) for v in value)
