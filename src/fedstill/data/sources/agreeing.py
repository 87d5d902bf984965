"""Whether the splits of a data set hold the same in the same columns, and call their classes
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from fedstill.data.sources.column_types import said_kind, unlike
from fedstill.data.sources.kinds import InputColumns
from fedstill.data.sources.stray import stray_of
from fedstill.errors import DataError


def refuse_other_types(
    where: str, table: pa.Table, first: str, other: pa.Table, inputs: InputColumns
) -> None:
    """Raise DataError for a column of values that holds something else than in the first split.

    Columns whose values are names may be written as numbers in one and as texts in the other.
    """
    named = {name for name, _ in inputs.form.categorical}
    for name in (name for name in inputs.values if name not in named):
        kind, theirs = table.schema.field(name).type, other.schema.field(name).type
        if not any(map(pa.types.is_null, (kind, theirs))) and said_kind(kind) != said_kind(theirs):
            stray = stray_of(table.schema.field(name)) or stray_of(other.schema.field(name))
            raise DataError(
                unlike(where, name, kind, first, theirs) + (f" ({stray})" if stray else "")
            )


def refuse_other_labels(what: str, labels: Mapping[str, Sequence[int | str]]) -> None:
    """Raise DataError where a split has names for labels and train numbers, or the other way, and
    none is in both.
    """
    train = labels.get("train", ())
    for split, own in labels.items():
        texts = [any(isinstance(label, str) for label in each) for each in (own, train)]
        if train and texts[0] != texts[1] and not {*map(str, own)} & {*map(str, train)}:
            raise DataError(
                f"{what}: the labels of {split} are {_some(own)}, those of train {_some(train)}; "
                "make them alike"
            )


def _some(labels: Sequence[int | str]) -> str:
    each = sorted(set(map(str, labels)))
    return ", ".join(map(repr, each[:3])) + (", …" if len(each) > 3 else "")
