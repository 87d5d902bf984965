"""What an example is made of: which columns, of what kind, and what is done about missing values
and long texts; and the dates at which a time column is cut into tasks.
"""

from __future__ import annotations

import datetime
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

from fedstill.core.errors import ConfigError, DataError

Kind = Literal["image", "table", "vector", "series", "text"]
"""What examples are: pixels; a row of a table; numbers of one meaning (features); channels over
time; token ids.
"""

Missing = Literal["refuse", "drop", "mean"]
"""What is done about a missing number: the data are refused, the row is left out, or it counts as
the mean.
"""

Mode = Literal["grey", "rgb"]
"""What all images are converted to."""

Broken = Literal["refuse", "skip"]
"""What is done about images that cannot be decoded: the data are refused, or they are left out."""

Value = str | int | float | bool

MANY = {
    "image": "images",
    "table": "rows of a table",
    "vector": "vectors",
    "series": "series",
    "text": "texts",
}
"""The kinds as people read them."""

FILE = "<file>"
"""The owner of an example that is its file: of a table's row the file, of an image the folder."""

LENGTH = 64
"""Tokens of a text that are read, where nobody says how many."""


Name = TypeVar("Name")


def nfc(name: Name) -> Name:
    """A name in Unicode's composed form (NFC), in which equal names have equal characters.

    macOS writes names of files in decomposed form. Other types than texts stay as they are.
    """
    if isinstance(name, str):
        return unicodedata.normalize("NFC", name)  # type: ignore[return-value]
    return name


@dataclass(frozen=True)
class Form:
    """What examples are made of. Every field can be left out.

    ``kind``: "auto" looks at the columns. ``columns``: those of a table; empty: all columns of
    numbers but the label, the owner and a pandas index. ``categorical``: of a table, columns whose
    values are names, and these names (none: those in the training data); each becomes a column of 0
    and 1. ``input``: the column of texts, vectors or series.
    ``missing``: see ``Missing``; ``marks``: a further column of 0 and 1 for each column with
    missing numbers, or for those that are named.
    ``tokenizer``: "words", "bytes", or a file of Hugging Face's tokenizers; ``vocabulary``: how
    many token ids words are given; ``length``: of a text or a series, what is longer is cut (0: 64
    tokens, and series as they are).
    ``owner``: the column that says whose an example is, or, with ``cuts``, when it was taken: these
    are the dates on which tasks begin, and test examples are held out of each. ``FILE`` stands for
    the file of a table, or the folder of an image.
    ``decimal``: the decimal mark of CSV files, "." or ",". ``missing_values``: texts and numbers
    that mean missing; they replace the marks of CSV files, except the empty field.
    ``unlabelled``: "drop" leaves out examples without a label. ``split_column``: the column whose
    values are train, validation and test.
    """

    kind: Kind | Literal["auto"] = "auto"
    columns: tuple[str, ...] = ()
    categorical: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    input: str = ""
    missing: Missing = "refuse"
    marks: bool | tuple[str, ...] = False
    tokenizer: str = "words"
    vocabulary: int = 8192
    length: int = 0
    owner: str = ""
    cuts: tuple[str, ...] = ()
    decimal: Literal[".", ","] = "."
    missing_values: tuple[str | int | float, ...] = ()
    unlabelled: Literal["refuse", "drop"] = "refuse"
    split_column: str = ""

    @property
    def normalised(self) -> Form:
        """The same with all names of columns and categories in one Unicode form."""
        categorical = tuple(
            (nfc(column), tuple(map(nfc, values))) for column, values in self.categorical
        )
        return replace(
            self,
            columns=tuple(map(nfc, self.columns)),
            categorical=categorical,
            input=nfc(self.input),
            owner=nfc(self.owner),
            split_column=nfc(self.split_column),
        )


@dataclass(frozen=True)
class About:
    """What reading made of the examples of a data set.

    ``vocabulary``: how many token ids there are, 0 for numbers. ``owners``: their names, by
    number. ``columns``: those that a table was made of; ``categories``: those of them whose values
    are names, and these names; ``features``: the names of its inputs; ``marks``: which of these
    (positions) are 0 or 1 and are not standardised.
    ``tokenizer``: what made ids of texts, as in ``Form``; ``tokenizer_sha``: the SHA-256 of its
    file, if it is one.
    ``notes``: what was left out or cut, a sentence each; ``cautions``: what of it a run says when
    it begins.
    """

    kind: Kind = "image"
    vocabulary: int = 0
    owners: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    categories: tuple[tuple[str, tuple[str, ...]], ...] = ()
    features: tuple[str, ...] = ()
    marks: tuple[int, ...] = ()
    tokenizer: str = ""
    tokenizer_sha: str = ""
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    def warned(self, *said: str) -> About:
        """The same with more that a run says when it begins; empty sentences are left out."""
        more = tuple(filter(None, said))
        return replace(self, notes=(*self.notes, *more), cautions=(*self.cautions, *more))

    @property
    def many(self) -> str:
        """What examples are, for people: "images", "texts"."""
        return MANY[self.kind]

    @property
    def many_or_examples(self) -> str:
        """The word in a sentence that counts: "images", or else "examples"."""
        return self.many if self.kind == "image" else "examples"


IMAGES = About()
"""Images, of which nothing more is said."""

FOUND = Form()
"""Examples of which nothing is said: what they are is looked for."""


def cut_times(cuts: Sequence[str]) -> list[datetime.datetime]:
    """The moments at which each task but the first begins; raises ConfigError for what is no date,
    or out of order.
    """
    moments = []
    for cut in cuts:
        if (moment := moment_of(cut)) is None:
            raise ConfigError(
                f"stream.cuts has {cut!r}, which is no date; write dates as 2023-01-31"
            )
        moments.append(moment)
    for k, (before, after) in enumerate(pairwise(moments)):
        if before >= after:
            raise ConfigError(
                f"stream.cuts must ascend, and {cuts[k + 1]} does not come after {cuts[k]}"
            )
    return moments


def tasks_of_times(what: str, column: str, values: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """The task of each value of a time column, from 0: as many as there are cuts that are not after
    it.

    Raises DataError for a value that is no date.

    >>> tasks_of_times("rows", "acquired", ["2022-12-31", "2023-01-01"], ["2023-01-01"])
    [0, 1]
    """
    moments, tasks = cut_times(cuts), []
    for value in values:
        if (moment := moment_of(value)) is None:
            raise DataError(
                f"{what}: column {column!r} has {value[:40]!r}, which is no date; write dates as "
                "2023-01-31"
            )
        tasks.append(bisect_right(moments, moment))
    return tasks


def moment_of(text: str) -> datetime.datetime | None:
    """A date or time in ISO's form, UTC where it names no zone; None for any other text.

    >>> moment_of("2023-01-31").isoformat(), moment_of("31.1.2023"), moment_of("7")
    ('2023-01-31T00:00:00+00:00', None, None)
    """
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
