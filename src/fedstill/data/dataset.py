"""Records of data: options for reading, and a data set as arrays (of readers) or tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError
from fedstill.core.fields import nfc, problem
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples

# Kinds of examples, options for reading, and the description of a data set.


Kind = Literal["image", "table", "vector", "series", "text"]
"""The kind of examples: pixels, rows of a table, vectors of features, channels over time, or token
ids.
"""

Missing = Literal["refuse", "drop", "mean"]
"""The treatment of missing numbers: an error, leaving the row out, or the mean of the column."""

Side = Annotated[int, Interval(ge=1, le=4096)]
"""The height and width in pixels to which images are resized."""

Mode = Literal["grey", "rgb"]
"""The mode to which images are converted."""

Broken = Literal["refuse", "skip"]
"""The treatment of images that cannot be decoded: an error, or leaving them out."""

Value = str | int | float | bool

PLURALS = {
    "image": "images",
    "table": "rows of a table",
    "vector": "vectors",
    "series": "series",
    "text": "texts",
}
"""The words for examples of each kind in messages."""

FILE = "<file>"
"""The name of the owner column if files are owners: the file of a table, or the folder of an image.
"""

DEFAULT_TEXT_LENGTH = 64
"""The default number of tokens of a text."""


@dataclass(frozen=True)
class ReadingOptions:
    """Options for turning columns into examples. All fields have defaults."""

    kind: Kind | Literal["auto"] = "auto"
    """The kind of examples; "auto" infers it from the types of the columns."""
    columns: tuple[str, ...] = ()
    """The columns of a table; by default, all columns of numbers except the label, the owner and
    the index of a pandas table.
    """
    categorical: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    """The categorical columns of a table, with their categories; by default, the categories in the
    training data. Each category becomes an input of 0 or 1.
    """
    input: str = ""
    """The column of texts, vectors or series."""
    missing: Missing = "refuse"
    """The treatment of missing numbers."""
    marks: bool | tuple[str, ...] = False
    """The columns with a mark, an input that is 1 if the value is missing and 0 otherwise: True for
    all columns with missing numbers, or the names of columns.
    """
    tokenizer: str = "words"
    """The tokenizer of texts: "words", "bytes", or a file of Hugging Face's tokenizers."""
    vocabulary: int = 8192
    """The number of token ids for "words"."""
    length: int = 0
    """The maximum number of tokens of a text, or of steps of a series; longer examples are
    truncated. 0 means 64 tokens, and no limit for series.
    """
    owner: str = ""
    """The column of the owners of examples; ``FILE`` for the file of a table or the folder of an
    image. With ``cuts``, the column of times.
    """
    cuts: tuple[str, ...] = ()
    """The dates on which tasks begin. Each task then has held-out test examples."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of CSV files."""
    missing_values: tuple[str | int | float, ...] = ()
    """Texts and numbers that mark missing values. In CSV files, they replace the usual marks such
    as NA; an empty field is always missing. Numbers do not apply to labels, owners and splits.
    """
    unlabelled: Literal["refuse", "drop"] = "refuse"
    """The treatment of examples without a label: an error, or leaving them out."""
    split_column: str = ""
    """The column whose values are train, validation and test."""

    @property
    def normalised(self) -> ReadingOptions:
        """The options with all names of columns and categories in Unicode's form NFC."""
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


DEFAULT_OPTIONS = ReadingOptions()

CONFIG_KEYS = {"input": "input_column", "marks": "missing_marks"}
"""The fields of ``ReadingOptions`` that have another name in ``[data]``."""


IMAGE_FIELDS: Mapping[str, Any] = {"size": Side | None, "mode": Mode | None, "broken": Broken}
"""The fields of ``ReadRequest`` on the decoding of images, and their types."""


@dataclass(frozen=True)
class ReadRequest:
    """A request to read a data set. Raises ConfigError for a wrong size, mode or ``broken``."""

    image: str | None = None
    """The column of images; None to infer it."""
    label: str | None = None
    """The column of labels; None to infer it."""
    size: int | None = None
    """The side in pixels to which images are resized; None to keep their size."""
    options: ReadingOptions = DEFAULT_OPTIONS
    """Options for examples other than images."""
    has_checksums: bool = False
    """Whether the data will be compared with known checksums."""
    mode: Mode | None = None
    """The mode to which images are converted; None to keep it."""
    broken: Broken = "refuse"
    """The treatment of images that cannot be decoded."""
    test_is_optional: bool = False
    """Whether the test split is empty if the data have none, instead of a held-out fifth."""

    def __post_init__(self) -> None:
        for name, hint in IMAGE_FIELDS.items():
            fault = problem(hint, getattr(self, name))
            if fault:
                raise ConfigError(f"data.{name} = {fault}; correct or remove it")


@dataclass(frozen=True)
class DatasetInfo:
    """The description of a data set: its examples, and notes about left-out data."""

    kind: Kind = "image"
    """The kind of examples."""
    vocabulary: int = 0
    """The number of token ids of texts; 0 for numbers."""
    owners: tuple[str, ...] = ()
    """The names of the owners, by number."""
    columns: tuple[str, ...] = ()
    """The columns of a table."""
    categories: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The categorical columns of a table, and the categories of each."""
    features: tuple[str, ...] = ()
    """The names of the inputs into which the columns of a table are encoded."""
    binary_features: tuple[int, ...] = ()
    """The positions of features that are 0 or 1. They are not standardised."""
    tokenizer: str = ""
    """The tokenizer of texts, as in ``ReadingOptions``."""
    tokenizer_sha: str = ""
    """The SHA-256 of the tokenizer file, if there is one."""
    notes: tuple[str, ...] = ()
    """Sentences about data that were left out or truncated."""
    warnings: tuple[str, ...] = ()
    """The notes that a run prints as warnings at its start."""

    def with_notes(self, *notes: str) -> DatasetInfo:
        """The description with further notes, without empty ones."""
        return replace(self, notes=(*self.notes, *filter(None, notes)))

    def with_warnings(self, *warnings: str) -> DatasetInfo:
        """The description with further warnings, which are also notes, without empty ones."""
        info = self.with_notes(*warnings)
        return replace(info, warnings=(*self.warnings, *filter(None, warnings)))

    def to_json(self) -> dict[str, Any]:
        """All fields, by their names in files."""
        return {JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DatasetInfo:
        """The description from the fields in a file. Fields may be missing; raises TypeError for
        unknown ones.
        """
        field_names = {json_name: field_name for field_name, json_name in JSON_NAMES.items()}
        named = {field_names.get(key, key): with_tuples(value) for key, value in values.items()}
        return DatasetInfo(**named)

    @property
    def many(self) -> str:
        """The plural of the kind in messages, such as "images" or "texts"."""
        return PLURALS[self.kind]

    @property
    def many_or_examples(self) -> str:
        """The word after a number in messages: "images" or "examples"."""
        if self.kind == "image":
            return self.many
        return "examples"


JSON_NAMES = {"binary_features": "marks"}
"""The fields of ``DatasetInfo`` that have another name in journals and in the cache."""

INPUT_FIELDS = tuple(
    JSON_NAMES.get(field.name, field.name)
    for field in fields(DatasetInfo)
    if field.name not in ("kind", "owners", "notes", "warnings")
)
"""The fields, by their names in files, that are needed to encode new examples."""

IMAGE_INFO = DatasetInfo()
"""The description of images."""


def examples_text(inputs: Mapping[str, Any]) -> str:
    """A sentence that describes examples; empty for images.

    inputs: the field of that name in a journal's event ``start``.

    >>> examples_text({"kind": "series", "shape": [9, 128]})
    'examples are series: 9 channels of 128 steps'
    """
    kind = inputs.get("kind", "image")
    shape = list(inputs.get("shape", ()))
    if kind == "table":
        names = [str(name) for name in inputs.get("features", ())]
        sentence = f"examples are {PLURALS['table']}, {shape[0]} features"
        if names:
            from fedstill.core.files import shortened_list  # lazy, because training needs no files

            sentence += f": {shortened_list(names)}"
        return sentence
    if kind == "series":
        return f"examples are {PLURALS['series']}: {shape[0]} channels of {shape[1]} steps"
    if kind == "text":
        vocabulary = f"vocabulary of {inputs.get('vocabulary', 0):,}"
        if inputs.get("tokenizer"):
            vocabulary = f"tokenizer {inputs['tokenizer']}, {vocabulary}"
        return f"examples are {PLURALS['text']} of {shape[0]} token ids ({vocabulary})"
    if kind == "vector":
        return f"examples are {PLURALS['vector']} of {' x '.join(map(str, shape))} numbers"
    return ""


# Arrays.


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of a split as arrays."""

    values: NDArray[Any]
    """Images (N, C, H, W) uint8, numbers (N, …) float32, or token ids (N, L) int64."""
    labels: NDArray[Any]
    """The class ids (N,) int64."""
    owners: NDArray[Any] | None = None
    """The number (N,) int64 of each example's owner, if the split has owners."""

    def __len__(self) -> int:
        return len(self.labels)

    def selected(self, mask: NDArray[np.bool_], values: NDArray[Any]) -> Split:
        """The examples in a mask (N,), with the given values."""
        owners = None
        if self.owners is not None:
            owners = self.owners[mask]
        return Split(values, self.labels[mask], owners)


@dataclass(frozen=True)
class Digests:
    """The SHA-256 of a split's values and of its labels."""

    values: str
    labels: str


@dataclass(frozen=True, eq=False)
class Decoded:
    """A data set as arrays."""

    splits: Mapping[str, Split]
    classes: tuple[str, ...] | None
    """The names of the classes, if the data contain them."""
    source_digests: Mapping[str, Digests] = field(default_factory=dict)
    """The digests of each split before rows are left out or encoded; only for tables, series and
    texts with known checksums.
    """
    about: DatasetInfo = IMAGE_INFO

    def with_warnings(self, *warnings: str) -> Decoded:
        """The data with further warnings, without empty ones."""
        return replace(self, about=self.about.with_warnings(*warnings))


# Tensors.


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: verified splits, class names, and a description of its inputs.

    Values may be memory-mapped with copy-on-write, so changing them does not change files.
    """

    name: str
    train: Examples
    test: Examples
    validation: Examples | None
    classes: tuple[str, ...]
    """The names of the classes, by label."""
    mean: tuple[float, ...]
    """For images, the mean of each channel, with pixels in [0, 1]; for other numbers, the declared
    mean of each column or channel, or empty.
    """
    std: tuple[float, ...]
    """The standard deviations, like ``mean``."""
    about: DatasetInfo = IMAGE_INFO
    """The description of the data."""
    backbone_inputs: Mapping[str, Any] | None = None
    """If the examples are features of a backbone, the description of the backbone's inputs
    (``Inputs.description``).
    """

    def __repr__(self) -> str:
        splits = {"train": self.train, "test": self.test, "validation": self.validation}
        counts = ", ".join(f"{len(e):,} {split}" for split, e in splits.items() if e is not None)
        return (
            f"<Dataset {self.name}: {counts}; {self.many} of {self.input_shape}, "
            f"{len(self.classes)} classes>"
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of an example: (C, H, W) for images, (D,) for vectors and rows, (C, L) for
        series, (L,) for token ids.
        """
        return tuple(self.train.values.shape[1:])

    @property
    def vocabulary(self) -> int:
        """The number of token ids; 0 for other examples than texts."""
        return self.about.vocabulary

    @property
    def many(self) -> str:
        """The plural of the kind in messages, such as "images" or "texts"."""
        return self.about.many


def half(channels: int) -> tuple[float, ...]:
    """0.5 for each channel, the default mean and standard deviation of images."""
    return (0.5,) * channels


def as_dataset(
    name: str,
    data: Decoded,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Dataset:
    """A data set from verified arrays. The default mean and std of images are 0.5 for each channel.

    Raises ConfigError for a mean or std that does not fit the data.
    """
    splits = {split: _as_examples(arrays) for split, arrays in data.splits.items()}
    size = splits["train"].values.shape[1]
    is_image = data.about.kind == "image"
    default: tuple[float, ...] = ()
    if is_image:
        default = half(size)
    means = _floats(name, default if mean is None else mean)
    stds = _floats(name, default if std is None else std)
    if data.about.kind == "text" and means:
        raise ConfigError(f"dataset {name!r}: texts have no mean and std; remove them")
    if is_image or means or stds:
        _check_scale(name, size, means, stds)
    return Dataset(
        name,
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        classes=data.classes or (),
        mean=means,
        std=stds,
        about=data.about,
    )


def _floats(name: str, numbers: Any) -> tuple[float, ...]:
    """A number, or the numbers of a list, an array or a tensor."""
    try:
        return tuple(np.ravel(np.asarray(numbers, dtype=np.float64)).tolist())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"dataset {name!r}: mean and std must be lists of numbers; correct or remove them"
        ) from error


def _as_examples(split: Split) -> Examples:
    owners = None
    if split.owners is not None:
        owners = torch.from_numpy(split.owners)
    return Examples(torch.from_numpy(split.values), torch.from_numpy(split.labels), owners)


def _check_scale(name: str, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) == len(std) == size and min(std) > 0 and np.isfinite([*mean, *std]).all():
        return
    raise ConfigError(
        f"dataset {name!r}: mean and std must have length {size} and be finite, and std must be "
        f"above 0, but they are {mean} and {std}"
    )


def examples_digest(examples: Examples) -> str:
    """The SHA-256 of values and labels, independent of their device.

    Values in the CPU's memory are not copied.
    """
    hasher = hashlib.sha256(f"{tuple(examples.values.shape)} {examples.values.dtype}".encode())
    for tensor in (examples.values, examples.labels):
        hasher.update(tensor.cpu().contiguous().numpy().data)
    return hasher.hexdigest()


def stratified_positions(labels: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """The positions of a random stratified sample of ``size`` examples, in ascending order."""
    stream = generator(seed_for(seed, 0, 0, SERVER, "stratified"))
    counts = torch.bincount(labels)
    shares = counts.double() * size / len(labels)
    sizes = shares.floor().long()
    # The classes with the largest remainders get one more example.
    remainder = size - int(sizes.sum())
    sizes[(shares - sizes).argsort(descending=True, stable=True)[:remainder]] += 1

    drawn = []
    for label, class_size in enumerate(sizes.tolist()):
        members = (labels == label).nonzero().flatten()
        drawn.append(members[torch.randperm(len(members), generator=stream)[:class_size]])
    return torch.cat(drawn).sort().values


def with_tuples(value: Any) -> Any:
    """A value with tuples for lists, also in lists and tables.

    >>> with_tuples({"columns": [["a"], "b"]})
    {'columns': (('a',), 'b')}
    """
    if isinstance(value, Mapping):
        return {str(key): with_tuples(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(with_tuples, value))
    return value
