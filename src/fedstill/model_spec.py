"""A network by name, as records and messages name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedstill.files import short_name


@dataclass(frozen=True)
class ModelSpec:
    """A network by name: what it is built from, so that equal specs are equal architectures.

    ``input_shape``: of one example: (channels, height, width) of an image, (D,) of a vector or a row of a table,
    (channels, L) of a series, (L,) of a text's token ids. ``vocabulary``: how many token ids there are, 0 where inputs
    are numbers. ``classes``: C; ``fields``: its options, sorted by name. ``widths``: the numbers of units of its hidden
    layers, where they are not the network's own.
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    fields: tuple[tuple[str, Any], ...] = ()
    widths: tuple[int, ...] = ()
    vocabulary: int = 0

    def __str__(self) -> str:
        """All of it: the seed of initial weights is made of this."""
        return self._with_options(self.name)

    @property
    def label(self) -> str:
        """The same as people read it, without the folder of a file."""
        return self._with_options(short_name(self.name))

    def _with_options(self, name: str) -> str:
        widths = [("widths", self.widths)] if self.widths else []
        options = ", ".join(f"{k}={v}" for k, v in [*self.fields, *widths])
        return f"{name}({options})" if options else name
