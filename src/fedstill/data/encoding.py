"""Encoding of values as inputs of a network: rows of tables become numbers, categories and
marks of missing values; texts become token ids.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
import unicodedata
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedstill.core.codec import table_of_unique_keys
from fedstill.core.errors import ConfigError, DataError, on_one_line
from fedstill.core.fields import nfc
from fedstill.core.files import digest, read_file
from fedstill.data.dataset import DatasetInfo, Value

# The names of the inputs. A numeric column is one input, and a categorical column is one input for
# each category. At the end, there is a mark for each marked column, which is 1 if the value is
# missing.


MARK_SUFFIX = " is missing"
"""The suffix of a mark's name, after the name of its column."""


@dataclass(frozen=True)
class TableInputs:
    """The columns of a table, the categories of its categorical columns, and its marked columns."""

    columns: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    marked: tuple[str, ...] = ()

    @property
    def about(self) -> DatasetInfo:
        """A data set's description with the names of the inputs, and the binary ones among them.

        >>> TableInputs(("age", "sex"), {"sex": ("f", "m")}, ("age",)).about.features
        ('age', 'sex=f', 'sex=m', 'age is missing')
        """
        features: list[str] = []
        binary: list[int] = []
        for column in self.columns:
            if column in self.categories:
                names = [f"{column}={name}" for name in self.categories[column]]
                binary += range(len(features), len(features) + len(names))
                features += names
            else:
                features.append(column)
        binary += range(len(features), len(features) + len(self.marked))
        features += [f"{column}{MARK_SUFFIX}" for column in self.marked]

        categories = tuple(
            (column, self.categories[column])
            for column in self.columns
            if column in self.categories
        )
        return DatasetInfo(
            "table",
            columns=self.columns,
            categories=categories,
            features=tuple(features),
            binary_features=tuple(binary),
        )

    @staticmethod
    def named_by(
        columns: Sequence[str], features: Sequence[str], binary: Collection[int]
    ) -> TableInputs:
        """Derive the columns and categories from the names of inputs.

        features: the names of all inputs; binary: the positions of the binary ones.

        >>> TableInputs.named_by(
        ...     ["age", "sex"], ["age", "sex=f", "sex=m", "age is missing"], [1, 2, 3]
        ... ).categories
        {'sex': ('f', 'm')}
        """
        position = 0
        categories: dict[str, tuple[str, ...]] = {}
        for column in columns:
            prefix = f"{column}="
            names: list[str] = []
            while position < len(features) and position in binary:
                if not features[position].startswith(prefix):
                    break
                names.append(features[position].removeprefix(prefix))
                position += 1
            if names:
                categories[column] = tuple(names)
            else:
                position += 1
        marked = tuple(name.removesuffix(MARK_SUFFIX) for name in features[position:])
        return TableInputs(tuple(columns), categories, marked)


# One-hot encoding of categorical columns.


MOST_CATEGORIES = 1000
"""The largest number of categories that are read from a column.

A column with more categories probably holds numbers, or identifiers of rows.
"""


@dataclass(frozen=True)
class Categories:
    """The categories of a column; each category becomes an input."""

    column: str
    values: tuple[str, ...]

    @staticmethod
    def of(
        source: str, column: str, declared: Sequence[Value], train: pa.ChunkedArray
    ) -> Categories:
        """The declared categories, or else those in the training data, in order.

        Raises DataError if there are none, or more than ``MOST_CATEGORIES``.
        """
        if declared:
            return Categories(column, tuple(category_name(value) for value in declared))
        names = names_in_order(distinct_values(train).values)
        if not 0 < len(names) <= MOST_CATEGORIES:
            raise DataError(
                f"{source}: column {column!r} has {len(names):,} categories, not 1 to "
                f"{MOST_CATEGORIES:,}; remove it"
            )
        return Categories(column, names)

    def encoded(self, source: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        """The one-hot encoding (n, categories), NaN in rows without a value.

        Raises DataError for a value that is not a category.
        """
        place = {value: index for index, value in enumerate(self.values)}
        distinct = distinct_values(column)
        places = [place.get(category_name(value), -1) for value in distinct.values]
        self._check_known(source, distinct, np.array(places, dtype=np.int64))

        # One row for each distinct value; the last row is for missing values.
        rows = np.zeros((len(places) + 1, len(place)), dtype=np.float32)
        rows[np.arange(len(places)), places] = 1
        rows[-1] = np.nan
        return rows[distinct.codes]

    def _check_known(
        self, source: str, distinct: DistinctValues, places: NDArray[np.int64]
    ) -> None:
        unknown = np.isin(distinct.codes, np.flatnonzero(places < 0))
        if unknown.any():
            row = int(np.argmax(unknown))
            value = category_name(distinct.values[distinct.codes[row]])
            raise DataError(
                f"{source}: example {row} has {value[:60]!r} in column {self.column!r}, which is "
                f"none of {', '.join(self.values)[:200]}; correct it, or add it to data.categorical"
            )


@dataclass(frozen=True)
class DistinctValues:
    """The distinct values of a column, and the position of each row's value among them, (n,).

    The position of a missing value is -1.
    """

    values: list[Any]
    codes: NDArray[np.int64]

    def mapped(self, function: Callable[[Any], Any], missing: Any) -> NDArray[Any]:
        """Apply a function to each row's value, (n,); missing values become ``missing``."""
        # The code -1 of a missing value is the position of the last entry.
        results = np.array([*map(function, self.values), missing])
        return results[self.codes]


def distinct_values(column: pa.ChunkedArray) -> DistinctValues:
    """The distinct values of a column, in the order of their first occurrence."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return DistinctValues([], np.full(len(column), -1, dtype=np.int64))
    if pa.types.is_nested(column.type):  # types that Arrow cannot compare
        return DistinctValues(column.to_pylist(), np.arange(len(column)))
    encoded = column.combine_chunks().dictionary_encode()
    codes = _buffer(encoded.indices, np.int32).astype(np.int64)
    codes[null_mask(encoded.indices)] = -1
    values = encoded.dictionary.to_pylist()
    nan = [index for index, value in enumerate(values) if is_missing(value)]
    codes[np.isin(codes, nan)] = -1
    return DistinctValues(values, codes)


def float_values(
    column: pa.ChunkedArray | pa.Array, dtype: type[np.floating[Any]] = np.float64
) -> NDArray[Any]:
    """The numbers (n,) of a column of type ``dtype``, with NaN for nulls.

    Arrow's own conversion imports pandas, which takes as long as reading a small file.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.zeros(0, dtype=dtype)]
    for chunk in chunks:
        values = _buffer(chunk, dtype)
        if chunk.null_count:
            values = np.where(null_mask(chunk), dtype(np.nan), values)
        parts.append(values)
    if len(parts) == 2:
        return parts[1]  # a single chunk is not copied
    return np.concatenate(parts)


def null_mask(array: pa.Array) -> NDArray[np.bool_]:
    """Whether each value is null, (n,)."""
    if not array.null_count:
        return np.zeros(len(array), dtype=bool)
    return np.from_dlpack(array.is_null().cast(pa.uint8())).astype(bool)


def _buffer(array: pa.Array, dtype: type[np.generic]) -> NDArray[Any]:
    """The stored values of an array, with arbitrary values at nulls."""
    end = array.offset + len(array)
    return np.frombuffer(array.buffers()[1] or b"", dtype=dtype, count=end)[array.offset :]


def is_missing(value: Any) -> bool:
    """Whether a value is missing: null, or NaN, which pandas writes for missing values."""
    return value is None or value != value


def names_in_order(values: Iterable[Any]) -> tuple[str, ...]:
    """The distinct names of values, without missing ones.

    Numbers come first, in ascending order, followed by texts in alphabetical order.
    """
    present = [nfc(value) for value in values if not is_missing(value)]
    present.sort(key=lambda value: (isinstance(value, str), value))
    return tuple(dict.fromkeys(map(category_name, present)))


def category_name(value: Any) -> str:
    """The name of a value. It is equal for 3, 3.0 and "3", and for all Unicode forms of a text."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return nfc(str(value))


# Rows of all columns.


Floats = NDArray[np.float32]


def table_rows(
    source: str, table: pa.Table | Mapping[str, pa.ChunkedArray], about: DatasetInfo
) -> Floats:
    """Encode columns as the inputs (n, features) of ``about``, without marks; missing values
    become NaN.

    Raises DataError for a value that is neither a number nor a category of its column.
    """
    categories = dict(about.categories)
    positions = first_position_of_column(about)
    width = sum(_width(name, categories) for name in about.columns)
    count = len(table[about.columns[0]])
    rows = np.empty((count, width), dtype=np.float32)
    for name, position in positions.items():
        if name in categories:
            columns = Categories(name, categories[name]).encoded(source, table[name])
            rows[:, position : position + len(categories[name])] = columns
        else:
            rows[:, position] = numbers(table[name], f"{source}: column {name!r}")
    return rows


def first_position_of_column(about: DatasetInfo) -> dict[str, int]:
    """The position of each column's first input."""
    categories = dict(about.categories)
    positions = {}
    position = 0
    for name in about.columns:
        positions[name] = position
        position += _width(name, categories)
    return positions


def column_of_feature(about: DatasetInfo, feature: int) -> str:
    """The column of an input, given the input's position; not for marks.

    >>> about = TableInputs(("age", "sex"), {"sex": ("f", "m")}).about
    >>> column_of_feature(about, 0), column_of_feature(about, 2)
    ('age', 'sex')
    """
    column = ""
    for name, first in first_position_of_column(about).items():
        if first <= feature:
            column = name
    return column


def _width(column: str, categories: Mapping[str, Sequence[str]]) -> int:
    """The number of inputs of a column."""
    if column in categories:
        return len(categories[column])
    return 1


def with_marks(rows: Floats, about: DatasetInfo, marked: Collection[str]) -> Floats:
    """Append a mark to rows for each marked column: 1 if the value is missing, else 0."""
    positions = first_position_of_column(about)
    marks = np.isnan(rows[:, [positions[name] for name in marked]])
    return np.concatenate([rows, marks.astype(np.float32)], axis=1)


def numbers(column: pa.ChunkedArray, source: str = "") -> Floats:
    """A numeric column (n,) as float32, with NaN for missing values.

    Raises DataError for values that are not numbers, or are too large for float32.
    """
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    try:
        exact = float_values(column.cast(pa.float64()))
    except pa.ArrowException as error:
        if pa.types.is_integer(column.type):
            raise DataError(
                f"{source} holds whole numbers beyond 2^53, which a float cannot represent; if it "
                "is an id, leave it out with data.columns"
            ) from error
        raise DataError(
            f"{source} holds a value that is not a number: {on_one_line(error)}; correct it"
        ) from error
    large = np.flatnonzero(np.isfinite(exact) & (np.abs(exact) > np.finfo(np.float32).max))
    if len(large):
        raise DataError(
            f"{source} holds {exact[large[0]]:g}, which is too large for a 32-bit float; correct "
            "or rescale it"
        )
    as_floats: Floats = exact.astype(np.float32)
    return as_floats


# Columns that may be read incorrectly. A run warns about them.


ROW_NUMBER_NAME = re.compile(
    r"unnamed: ?\d+|(.*[^a-z])?(id|ids|uuid|idx|index|nr|no)", re.IGNORECASE
)
ROW_NUMBER_SUFFIX = re.compile(r".*[a-z](ID|Id|Nr|No)")
"""Names of columns that probably number rows: id, patient_id, patientID, Unnamed: 0."""

MIN_FLOAT_STEPS = 1024
"""Columns whose range has fewer steps of float32 than this are checked for values that become
equal.
"""


def row_numbers(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A warning for each integer column that probably numbers rows: by its name, and because all
    values differ.
    """
    warnings = []
    for name in columns:
        has_such_name = ROW_NUMBER_NAME.fullmatch(name) or ROW_NUMBER_SUFFIX.fullmatch(name)
        if not has_such_name or not pa.types.is_integer(table[name].type) or len(table) < 2:
            continue
        if pc.count_distinct(table[name], mode="all").as_py() == len(table):
            warnings.append(
                f"{name}: all {len(table):,} values differ; if it only numbers the rows, leave it "
                "out with data.columns"
            )
    return warnings


def lost_precision(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A warning for each column with numbers that become equal as float32, such as times in
    seconds.
    """
    warnings = []
    for name in columns:
        arrow_type = table[name].type
        is_exact = pa.types.is_integer(arrow_type) or pa.types.is_decimal(arrow_type)
        if not is_exact and not pa.types.is_float64(arrow_type):
            continue
        exact = float_values(table[name].cast(pa.float64(), safe=False))
        exact = exact[np.isfinite(exact)]
        if not len(exact):
            continue
        step = np.finfo(np.float32).eps * np.abs(exact).max()
        if np.ptp(exact) >= MIN_FLOAT_STEPS * step:
            continue
        distinct = len(np.unique(exact))
        distinct_in_32_bits = len(np.unique(exact.astype(np.float32)))
        if distinct_in_32_bits < distinct:
            warnings.append(
                f"{name}: its {distinct:,} distinct numbers, from {exact.min():.12g} to "
                f"{exact.max():.12g}, become {distinct_in_32_bits:,} in 32 bits; subtract the "
                "minimum from all"
            )
    return warnings


# Texts as token ids: hashes of words, bytes, or the tokens of a tokenizer file. Ids are not
# learned from texts. Id 0 is padding at the end of shorter texts, and is never the id of a word or
# a byte.


BYTES = 257
"""The number of token ids of ``"bytes"``: 256, and padding."""

PADDING_NAMES = {"[PAD]", "<pad>", "<|pad|>", "[pad]", "<PAD>"}
"""The names of padding in tokenizer files that do not declare it."""


MAX_TOKENIZER_BYTES = 1 << 27
"""The largest size of a tokenizer file in bytes; those of large language models have up to 34 MB.
"""

MAX_GROWTH = 10_000
"""The largest factor by which a tokenizer may lengthen a text; known tokenizers have 4."""

MOST_SECONDS = 2.0
SECONDS_PER_CHARACTER = 1e-4
"""The processor time that a tokenizer may take per character; known tokenizers take about a
microsecond.
"""

FIRST_CHARACTERS = 128
"""The largest length of a text that is initially encoded as a whole; later, it is doubled."""

SPARE_IDS = 10_000
"""A tokenizer may leave this many ids unused, in addition to the number of ids that it uses."""

INSERTION_KEYS = ("content", "prepend", "replacement", "ids", "single", "pair")
"""The keys of a tokenizer file whose texts or tokens are inserted into a text."""


@dataclass(frozen=True, eq=False)
class TokenIds:
    """Texts as token ids."""

    ids: NDArray[np.int64]
    """The ids (n, length), in [0, ``vocabulary``); 0 is padding."""
    vocabulary: int
    cut_share: float
    """The share of texts with more than ``length`` tokens."""
    sha: str = ""
    """The SHA-256 of the tokenizer file, if there is one."""


def token_ids(texts: Sequence[str], tokenizer: str, vocabulary: int, length: int) -> TokenIds:
    """Encode texts as token ids.

    tokenizer: one of

    - "words": the text is converted to lower case and to Unicode form NFC. Each sequence of
      letters, their marks and digits is a word. Its id is 1 + the CRC-32 of its UTF-8 bytes modulo
      (``vocabulary`` - 1), so two words may share an id.
    - "bytes": the UTF-8 bytes, each plus 1.
    - a file ``*.json`` of Hugging Face's ``tokenizers``, with its own vocabulary. If its padding is
      not 0, its ids are shifted by 1, so that 0 is padding for every network.

    vocabulary: the number of ids for words, >= 2. length: the number of tokens to keep, >= 1.

    Raises ConfigError for an unknown tokenizer, an invalid file, or numbers out of range, and
    DataError for a value that is not a text.

    >>> token_ids(["A cat, a cat", ""], "words", 100, 3).ids.tolist()
    [[46, 92, 46], [0, 0, 0]]
    >>> token_ids(["Hi"], "bytes", 0, 3).ids.tolist()
    [[73, 106, 0]]
    """
    if length < 1:
        raise ConfigError(f"data.length = {length} must be at least 1 for texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"text {index} is a {type(text).__name__}, not a text; remove it, or write an "
                "empty one"
            )
    if tokenizer == "words":
        if vocabulary < 2:
            raise ConfigError(
                f"data.vocabulary = {vocabulary} must be at least 2, because one id is padding"
            )
        return _padded(_words(texts, vocabulary), len(texts), vocabulary, length)
    if tokenizer == "bytes":
        return _padded(_bytes(texts), len(texts), BYTES, length)
    if tokenizer.endswith(".json"):
        return _by_file(texts, Path(tokenizer), length)
    raise ConfigError(
        f"data.tokenizer = {tokenizer!r:.80} must be 'words', 'bytes' or a file tokenizer.json"
    )


ASCII_WORD = re.compile(r"\w+", re.ASCII)


@functools.cache
def _word() -> re.Pattern[str]:
    """The pattern of a word: a letter, digit or underscore, followed by any of these and marks.

    Vowel signs of Hindi and Thai are marks, for example.
    """
    characters = map(chr, range(sys.maxunicode + 1))
    marks = "".join(c for c in characters if unicodedata.category(c).startswith("M"))
    return re.compile(rf"\w[\w{re.escape(marks)}]*")


def _words(texts: Sequence[str], vocabulary: int) -> Iterator[Sequence[int]]:
    ids: dict[str, int] = {}
    for index, text in enumerate(texts):
        normal = unicodedata.normalize("NFC", text.lower())
        # ASCII has no marks, and the pattern without marks is three times as fast.
        pattern = ASCII_WORD if normal.isascii() else _word()
        words = pattern.findall(normal)
        for word in words:
            if word not in ids:
                ids[word] = 1 + zlib.crc32(_utf8(word, index)) % (vocabulary - 1)
        yield [ids[word] for word in words]


def _bytes(texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    for index, text in enumerate(texts):
        yield np.frombuffer(_utf8(text, index), dtype=np.uint8).astype(np.int64) + 1


def _utf8(text: str, index: int) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text {index} cannot be written as UTF-8: {on_one_line(error)}") from error


def _padded(rows: Iterator[Any], count: int, vocabulary: int, length: int) -> TokenIds:
    """Truncate and pad rows of ids, one row per text."""
    ids = np.zeros((count, length), dtype=np.int64)
    cut_count = 0
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row[:length]
        cut_count += len(row) > length
    return TokenIds(ids, vocabulary, cut_count / max(count, 1))


def _by_file(texts: Sequence[str], path: Path, length: int) -> TokenIds:
    """Encode texts with a file of Hugging Face's ``tokenizers``, including special tokens."""
    file = _read_tokenizer(path)
    tokenizer = file.tokenizer
    size = 1 + _largest_id(tokenizer)
    shift = 1
    if _zero_is_padding(tokenizer):
        shift = 0
    tokenizer.no_padding()
    ids = np.zeros((len(texts), length), dtype=np.int64)
    cut_count = 0
    with _library_errors(f"data.tokenizer = {str(path)!r} cannot read these texts"):
        # Truncation keeps the special tokens at the end of a text.
        tokenizer.enable_truncation(length)
        encoder = _TimedEncoder(tokenizer)
        # One text at a time, because the library's threads for batches would survive a fork.
        for index, text in enumerate(texts):
            tokens = encoder.encode(text)
            ids[index, : len(tokens.ids)] = np.asarray(tokens.ids, dtype=np.int64) + shift
            cut_count += bool(tokens.overflowing)
    return TokenIds(ids, size + shift, cut_count / max(len(texts), 1), file.sha)


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """A context that turns errors of Hugging Face's library into ConfigError with a problem.

    The library raises Exception itself. A panic, for example after too many attempts to match a
    regular expression, is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{problem}: {on_one_line(error)}") from error


@dataclass
class _TimedEncoder:
    """Encodes texts with a time limit, because a malicious tokenizer may take very long.

    The time to match a regular expression can grow with a power of the length of a text, and the
    library cannot be interrupted. Therefore, a text that is more than twice as long as all previous
    ones is first encoded in parts. The limit refers to the CPU time of this thread, so that a busy
    machine does not matter.
    """

    tokenizer: Any
    seconds: float = 0.0
    characters: int = 0
    longest: int = FIRST_CHARACTERS

    def encode(self, text: str) -> Any:
        """The tokens of a text; raises TimeoutError if the tokenizer is far too slow."""
        while len(text) > 2 * self.longest:
            self.longest *= 2
            self._encode(text[: self.longest])
        self.longest = max(self.longest, len(text))
        return self._encode(text)

    def _encode(self, text: str) -> Any:
        began = time.thread_time()
        tokens = self.tokenizer.encode(text)
        self.seconds += time.thread_time() - began
        self.characters += len(text)
        if self.seconds > MOST_SECONDS + SECONDS_PER_CHARACTER * self.characters:
            raise TimeoutError(
                f"{self.characters:,} characters took {self.seconds:.1f} s of processor time; its "
                "regular expressions are too slow"
            )
        return tokens


def _check_growth(content: bytes) -> None:
    """Raise ValueError for a tokenizer file that is too large or lengthens texts too much.

    Its normalisers replace characters by texts, one after another, so a file of a few lines could
    expand a word to terabytes. Duplicate keys are rejected, because the library may use a different
    one of the two values than this check.
    """
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ValueError(f"it has more than {MAX_TOKENIZER_BYTES:,} bytes")
    tree = json.loads(content, object_pairs_hook=table_of_unique_keys)
    if not isinstance(tree, Mapping):
        raise TypeError("it is not a JSON object")
    growth = 1.0
    for key in ("normalizer", "pre_tokenizer", "post_processor"):
        for part in _parts(tree.get(key)):
            growth *= max(1.0, _growth_by(part))
            if growth > MAX_GROWTH:
                raise ValueError(f"its {key} lengthens texts by a factor of more than {MAX_GROWTH}")


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """A part of a tokenizer, and all nested parts."""
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


def _growth_by(part: Mapping[str, Any]) -> float:
    """The largest factor by which a part of a tokenizer lengthens a text."""
    insertions = [part.get(key) for key in INSERTION_KEYS]
    longest = max((len(text) for text in insertions if isinstance(text, (str, list))), default=0)
    pattern = part.get("pattern")
    if isinstance(pattern, Mapping) and isinstance(pattern.get("String"), str):
        return longest / max(1, len(pattern["String"]))
    if pattern is not None:
        # A regular expression may match the empty text between any two characters.
        return 1.0 + longest
    return float(longest)


def _largest_id(tokenizer: Any) -> int:
    """The largest id of a token; 0 without tokens."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)


def _zero_is_padding(tokenizer: Any) -> bool:
    """Whether the token with id 0 is padding, according to the file or else to its name."""
    if tokenizer.padding is None or tokenizer.padding.get("pad_id") is None:
        return tokenizer.id_to_token(0) in PADDING_NAMES
    return bool(tokenizer.padding["pad_id"] == 0)


@dataclass(frozen=True, eq=False)
class _TokenizerFile:
    """A tokenizer of Hugging Face's library, and the SHA-256 of its file."""

    tokenizer: Any
    sha: str


def _read_tokenizer(path: Path) -> _TokenizerFile:
    """Read a tokenizer; raises ConfigError if the file is invalid."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} needs Hugging Face's tokenizers: pip install "
            "'fedstill[text]'"
        ) from error
    try:
        content = read_file(path)
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} cannot be read: {on_one_line(error)}"
        ) from error
    with _library_errors(
        f"data.tokenizer = {str(path)!r} is not a file of Hugging Face's tokenizers"
    ):
        _check_growth(content)
        tokenizer = Tokenizer.from_str(content.decode())
    largest_id = _largest_id(tokenizer)
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if largest_id > 2 * tokens + SPARE_IDS:
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} has {tokens:,} tokens with ids up to {largest_id:,}; "
            "a network would need an entry for each id"
        )
    if getattr(tokenizer.model, "dropout", None):
        raise ConfigError(
            f"data.tokenizer = {str(path)!r} has dropout, which draws random tokens; set it to null"
        )
    return _TokenizerFile(tokenizer, digest(content))
