"""Data sets from tensors, arrays and torch data sets."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_type_hints

import numpy as np
import torch
import torch.utils.data as torch_data
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError
from fedstill.core.fields import CountOrZero, kind_text, problem
from fedstill.core.keys import drawing_from
from fedstill.core.process_settings import process_settings
from fedstill.data.dataset import (
    PLURALS,
    Dataset,
    DatasetInfo,
    Decoded,
    Kind,
    ReadRequest,
    Split,
    as_dataset,
)
from fedstill.data.sources.files import SPLITS
from fedstill.data.sources.image_sets import image_warnings
from fedstill.data.sources.images import (
    PICTURE_CHANNELS,
    Pictures,
    check_broken,
    check_single_page,
    decode_images,
    decoding_errors,
)
from fedstill.data.sources.tables import LabelledImage
from fedstill.data.sources.verification import verified_with_test_split

Array = Tensor | NDArray[Any]
"""A torch tensor or a NumPy array."""

Pair = tuple[Array, Array]
"""Values (N, …) and labels (N,)."""


@dataclass(frozen=True)
class TensorFields:
    """The user's description of tensors, as keywords of ``from_tensors``."""

    classes: Sequence[str] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    vocabulary: CountOrZero = 0
    kind: Kind | None = None

    def check(self, name: str) -> None:
        """Raise ConfigError for a vocabulary or kind of a wrong type. ``name``: the data set."""
        hints = get_type_hints(TensorFields, include_extras=True)
        for field_name in ("vocabulary", "kind"):
            fault = problem(hints[field_name], getattr(self, field_name))
            if fault:
                raise ConfigError(f"dataset {name!r}: {field_name} = {fault}; correct or remove it")


@dataclass(frozen=True)
class ClientPairs:
    """Pairs by split, and the owners of examples, if they belong to clients."""

    pairs: Mapping[str, Pair]
    clients: tuple[str, ...] = ()
    """The names of the clients."""
    owners: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """The number of each example's client (N,), by split; other splits are common to all clients.
    """
    warnings: tuple[str, ...] = ()


@process_settings()
def from_tensors(  # noqa: PLR0913 - the parts and properties of a data set, by name
    name: str,
    train: Pair,
    test: Pair | None = None,
    validation: Pair | None = None,
    *,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    vocabulary: int = 0,
    kind: Kind | None = None,
) -> Dataset:
    """A data set from tensors or NumPy arrays: a pair (values, labels) for each split, with values
    (N, …) and integer labels (N,).

    Values are one of: images (N, C, H, W) uint8; numbers of any float type, such as vectors or rows
    of a table (N, D) or series (N, C, L); or integer token ids (N, L) in [0, vocabulary), with 0
    for padding. Without ``test``, a stratified fifth of ``train`` is held out.

    kind: "table" if the columns of (N, D) have different units; they are then standardised like
    tables. By default, the shape determines the kind. mean, std: for images, one number per
    channel, default 0.5; for tables and series, one number per column or channel, default none.
    Raises DataError for other shapes or types, for labels or ids out of range, and for images whose
    channels are last.
    """
    pairs = {"train": train, "validation": validation, "test": test}
    checked = {
        split: checked_pair(f"{name}, {split}", pair)
        for split, pair in pairs.items()
        if pair is not None
    }
    fields = TensorFields(classes=classes, mean=mean, std=std, vocabulary=vocabulary, kind=kind)
    return dataset_of_pairs(name, ClientPairs(checked), fields)


@process_settings()
def from_clients(
    name: str,
    clients: Sequence[Pair | tuple[Pair, Pair]],
    test: Pair | None = None,
    *,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    validation: Pair | None = None,
    **fields: Any,
) -> Dataset:
    """A data set from the data of each client: (values, labels), or ((values, labels), (values,
    labels)) for a client with its own test set.

    test: the common test set. By default, it consists of all clients' own test sets, or else of a
    stratified fifth of the training data. names: the names of the clients. fields: as for
    ``from_tensors``. A run on these data has these clients, and ``partition`` can be omitted.
    Raises DataError for a client without examples, and like ``from_tensors``.
    """
    if names is None:
        names = [f"client {index}" for index in range(len(clients))]
    names = tuple(map(str, names))
    if not clients or len(names) != len(clients) or len(set(names)) != len(names):
        raise DataError(
            f"{name}: {len(clients)} clients and {len(set(names))} different names; pass one name "
            "a client"
        )
    by_split: dict[str, dict[int, Pair]] = {"train": {}, "test": {}}
    for number, client in enumerate(clients):
        for split, pair in _client_pairs(f"{name}, client {number}", client).items():
            by_split[split][number] = pair
    common = {"test": test, "validation": validation}
    data = join_clients(
        name, names, by_split, {split: pair for split, pair in common.items() if pair is not None}
    )
    return dataset_of_pairs(name, data, TensorFields(classes, **fields))


def _client_pairs(part: str, client: Any) -> dict[str, Pair]:
    """A client's data by split: a pair of arrays, or two such pairs; DataError for others."""
    pair = checked_pair(part, client)
    if not isinstance(pair[0], (tuple, list)):
        return {"train": pair}
    pairs = {"train": checked_pair(part, pair[0])}
    if pair[1] is not None:
        pairs["test"] = checked_pair(f"{part}, test", pair[1])
    return pairs


def join_clients(
    name: str,
    clients: Sequence[str],
    by_split: Mapping[str, Mapping[int, Pair]],
    common: Mapping[str, Pair],
) -> ClientPairs:
    """The concatenated examples of all clients for each split.

    clients: their names; by_split: the pairs of each split, by the clients' numbers; common: pairs
    of splits that are common to all clients, which replace the clients' own with a warning.
    """
    pairs = dict(common)
    owners = {}
    warnings = []
    for split, by_client in by_split.items():
        if not by_client:
            continue
        if split in common:
            warnings.append(f"{split}= replaces the clients' own {split} sets")
            continue
        arrays = []
        for index, pair in by_client.items():
            part = f"{name}, {_client_text(clients[index])}"
            arrays.append(_client_arrays(part, split, pair))
        pairs[split] = _concatenated(name, arrays)
        counts = list(map(len, arrays))
        owners[split] = np.repeat(np.array(list(by_client), dtype=np.int64), counts)
    return ClientPairs(pairs, tuple(clients), owners=owners, warnings=tuple(warnings))


def _client_text(client: str) -> str:
    """A client in messages: "client 0", "client north"."""
    if client.startswith("client "):
        return client
    return f"client {client}"


def _client_arrays(part: str, split: str, pair: Pair) -> Split:
    values = as_array(f"{part}: values", pair[0])
    labels = as_array(f"{part}: labels", pair[1])
    if not len(labels):
        remedy = f"remove its {split} set"
        if split == "train":
            remedy = "remove the client"
        raise DataError(f"{part} has no {split} examples; {remedy}")
    check_labels(f"{part}, {split}", labels, len(values))
    return Split(values, labels)


def _concatenated(name: str, arrays: Sequence[Split]) -> Pair:
    shapes = sorted({split.values.shape[1:] for split in arrays})
    if len(shapes) > 1:
        raise DataError(
            f"{name}: the shapes of examples differ between clients: "
            f"{', '.join(map(str, shapes))}; use one shape"
        )
    types = sorted({str(split.values.dtype) for split in arrays})
    are_floats = {split.values.dtype.kind == "f" for split in arrays}
    if len(are_floats) > 1:
        # As one array, pixels from 0 to 255 would become floats on another scale.
        raise DataError(
            f"{name}: the types of values differ between clients: {', '.join(types)}; use one type"
        )
    values = np.concatenate([split.values for split in arrays])
    return values, np.concatenate([split.labels for split in arrays])


def dataset_of_pairs(name: str, data: ClientPairs, fields: TensorFields) -> Dataset:
    """The data set of some pairs; without a test split, a stratified fifth is held out.

    Raises DataError like ``from_tensors``, and for too few examples to hold any out.
    """
    fields.check(name)
    splits = {}
    for split in SPLITS:
        if split in data.pairs:
            arrays = _checked_arrays(f"{name}, {split}", data.pairs[split], fields.vocabulary)
            splits[split] = replace(arrays, owners=data.owners.get(split))
    train = splits["train"].values
    for split, arrays in splits.items():
        if arrays.values.dtype != train.dtype:
            raise DataError(
                f"{name}: values of train are {train.dtype}, but those of {split} "
                f"{arrays.values.dtype}; use one type"
            )

    about = _info(name, train, data, fields)
    classes = None
    if fields.classes is not None and len(fields.classes):
        classes = tuple(map(str, fields.classes))
    decoded = verified_with_test_split(name, Decoded(splits, classes, about=about))
    return as_dataset(name, decoded, fields.mean, fields.std)


def _info(name: str, train: NDArray[Any], data: ClientPairs, fields: TensorFields) -> DatasetInfo:
    """The description of training values, with warnings about ambiguous images."""
    kind = _kind(name, train, fields)
    warnings = list(data.warnings)
    if kind == "image":
        warnings.append(ambiguous_channels(train))
    if kind == "image" and fields.mean is None:
        warnings.append(unusual_scale(train))
    return DatasetInfo(kind, int(fields.vocabulary), owners=data.clients).with_warnings(*warnings)


# Checks of pairs.


def checked_pair(part: str, pair: Any) -> Any:
    """Return ``pair`` if it has two parts; raises DataError for anything else."""
    if not isinstance(pair, (tuple, list)):
        raise DataError(f"{part}: pass a pair (values, labels), not a {type(pair).__name__}")
    if len(pair) != 2:
        raise DataError(
            f"{part}: pass a pair (values, labels), not a {type(pair).__name__} of {len(pair)}"
        )
    return pair


def as_array(part: str, values: object) -> NDArray[Any]:
    """A tensor or an array as an array that torch can read; raises DataError for anything else."""
    if isinstance(values, np.ndarray):
        if np.ma.is_masked(values):
            raise DataError(
                f"{part} are an array with masked values; pass values.filled(NUMBER), or leave out "
                "these examples"
            )
        return np.require(np.asarray(values), requirements=["C", "W"])
    if not isinstance(values, Tensor):
        raise DataError(f"{part} are a {type(values).__name__}, not a tensor or a NumPy array")
    if values.layout != torch.strided:
        raise DataError(f"{part} are a sparse tensor; pass a dense one: tensor.to_dense()")
    tensor = values.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type
        tensor = tensor.float()
    return tensor.numpy()


def _checked_arrays(part: str, pair: Pair, vocabulary: int) -> Split:
    values = as_array(f"{part}: values", pair[0])
    labels = as_array(f"{part}: labels", pair[1])
    if values.ndim < 2 or not len(values):
        raise DataError(
            f"{part}: values have shape {values.shape}; pass (N, …) with N above 0, one row per "
            "example"
        )
    check_labels(part, labels, len(values))
    class_ids = labels.astype(np.int64)
    if vocabulary:
        return Split(_ids(part, values, vocabulary), class_ids)
    return Split(_numbers(part, values), class_ids)


def _numbers(part: str, values: NDArray[Any]) -> NDArray[Any]:
    """Pixels without changes, or other numbers as float32."""
    is_pixels = values.dtype == np.uint8 and values.ndim == 4
    if not is_pixels and values.dtype.kind != "f":
        raise DataError(
            f"{part}: values are {values.dtype} of shape {values.shape}; pass pixels as uint8 (N, "
            "C, H, W), other numbers as floats, or token ids with vocabulary="
        )
    if values.ndim == 4:
        check_channels(part, values)
    if is_pixels:
        return values
    with np.errstate(over="ignore"):
        in_32_bits = np.ascontiguousarray(values, dtype=np.float32)
    wrong = np.flatnonzero(~np.isfinite(in_32_bits).reshape(len(values), -1).all(1))
    if len(wrong):
        raise DataError(
            f"{part}: example {wrong[0]} has a missing or infinite value, or one too large for "
            "32 bits; correct or remove it"
        )
    return in_32_bits


def _ids(part: str, values: NDArray[Any], vocabulary: int) -> NDArray[np.int64]:
    if values.dtype.kind not in "iu" or values.ndim != 2:
        raise DataError(
            f"{part}: token ids are {values.dtype} of shape {values.shape}, not whole numbers (N, "
            "L)"
        )
    wrong = np.flatnonzero(((values < 0) | (values >= vocabulary)).any(1))
    if len(wrong):
        raise DataError(
            f"{part}: example {wrong[0]} has a token id outside 0 to {vocabulary - 1}; correct it"
        )
    return np.ascontiguousarray(values, dtype=np.int64)


def _kind(name: str, values: NDArray[Any], fields: TensorFields) -> Kind:
    """The kind of examples: determined by their shape, or a table if the user says so."""
    by_dimensions: Mapping[int, Kind] = {3: "series", 4: "image"}
    by_shape = by_dimensions.get(values.ndim, "vector")
    if fields.vocabulary:
        by_shape = "text"
    if fields.kind in (None, by_shape):
        return by_shape
    if fields.kind == "table" and by_shape == "vector":
        return "table"
    raise DataError(
        f"{name}: values of shape {values.shape} and type {values.dtype} are not "
        f"{PLURALS[fields.kind]}"
    )


# Labels in arrays of NumPy.


def check_labels(part: str, labels: NDArray[Any], count: int) -> None:
    """Raise DataError, with advice, unless labels are ``count`` whole numbers."""
    if labels.shape == (count,) and labels.dtype.kind in "iub":
        return
    problem = (
        f"{part}: labels are {labels.dtype} of shape {labels.shape}, not whole numbers of shape "
        f"({count},)"
    )
    if labels.shape != (count,):
        raise DataError(problem + _shape_remedy(labels, count))
    if labels.dtype.kind in "OSU":
        raise DataError(
            f"{problem}; convert them with names, ids = np.unique(labels, return_inverse=True), "
            "then pass ids and classes=names"
        )
    if labels.dtype.kind == "f":
        check_whole_labels(part, labels)
        raise DataError(
            f"{problem}; use labels.astype('int64') for an array, or labels.long() for a tensor"
        )
    raise DataError(f"{problem}; use class ids (whole numbers from 0)")


def _shape_remedy(labels: NDArray[Any], count: int) -> str:
    if labels.shape == (count, 1):
        return ": labels.reshape(-1)"
    if labels.ndim == 2 and len(labels) == count:
        return "; for one-hot labels, use labels.argmax(1)"
    return "; use one label per example"


def check_whole_labels(part: str, labels: NDArray[Any]) -> None:
    """Raise DataError for labels with fractions, and for labels that are missing or infinite."""
    is_finite = np.isfinite(labels)
    fractions = np.flatnonzero(is_finite & (labels != np.round(labels)))
    if len(fractions):
        raise DataError(
            f"{part}: labels are not whole numbers (example {fractions[0]} has "
            f"{labels[fractions[0]]:.6g}): fedstill does not support regression; to make classes "
            "of ranges, use np.digitize(labels, limits)"
        )
    unknown = np.flatnonzero(~is_finite)
    if len(unknown):
        raise DataError(
            f"{part}: example {unknown[0]} has the label {labels[unknown[0]]} ({len(unknown):,} of "
            f"{len(labels):,} are not finite); use a class id, or remove such examples"
        )


# Images in arrays: the position of their channels, and the scale of their pixels.


MOST_PICTURE_CHANNELS = max(PICTURE_CHANNELS)

TRANSPOSITION = (
    "values.transpose(0, 3, 1, 2) for an array, or values.permute(0, 3, 1, 2) for a tensor"
)


def check_channels(part: str, values: NDArray[Any]) -> None:
    """Raise DataError for images (N, H, W, C), which would be read as images of H channels."""
    if _channel_axis(values.shape) == "last":
        raise DataError(
            f"{part}: values of shape {values.shape} have their channels last; pass (N, C, H, W): "
            f"{TRANSPOSITION}"
        )


def ambiguous_channels(values: NDArray[Any]) -> str:
    """A warning about images with an ambiguous position of channels, or ""."""
    if _channel_axis(values.shape) != "unclear":
        return ""
    _, channels, height, width = values.shape
    return (
        f"values of shape {values.shape} are read as images of {channels} channels and {height} × "
        f"{width} pixels; if their channels are last, pass {TRANSPOSITION}"
    )


def _channel_axis(shape: tuple[int, ...]) -> Literal["first", "last", "unclear"]:
    """Whether images of a shape (N, …, …, …) have their channels first or last.

    Small squares with many channels, such as (N, 512, 4, 4), are feature maps. For other images,
    the two axes with the most similar lengths are taken as height and width.

    >>> [_channel_axis((90, *sides)) for sides in ((64, 48, 3), (512, 4, 4), (4, 64, 4))]
    ['last', 'first', 'unclear']
    """
    _, first, second, last = shape
    if last not in PICTURE_CHANNELS or second == last:
        return "first"
    is_elongated = _elongation(first, second) >= _elongation(second, last)
    if first <= MOST_PICTURE_CHANNELS or is_elongated:
        return "unclear"
    return "last"


def _elongation(side: int, other: int) -> float:
    """The longer of two sides, divided by the shorter one."""
    return max(side, other) / max(1, min(side, other))


MAX_SCALED_PIXEL = 3.0
"""The largest absolute value of pixels in [0, 1] or of standardised pixels."""


def unusual_scale(values: NDArray[Any]) -> str:
    """A warning about images whose floats (x - 0.5) / 0.5 does not map to about [-1, 1], or ""."""
    if values.dtype.kind != "f" or not len(values):
        return ""
    low = float(values.min())
    high = float(values.max())
    if max(-low, high) <= MAX_SCALED_PIXEL:
        return ""
    return (
        f"images hold numbers from {low:.4g} to {high:.4g}, which (x - 0.5) / 0.5 maps to "
        f"{2 * low - 1:.4g} to {2 * high - 1:.4g}; divide pixels by 255, or set mean= and std="
    )


# Torch data sets: pairs of a value and a label.


def check_sampler(part: str, loader: torch_data.DataLoader[Any]) -> None:
    """Raise DataError for a DataLoader whose sampler selects or repeats examples."""
    sampler = loader.sampler
    if isinstance(loader.batch_sampler, torch_data.BatchSampler):
        sampler = loader.batch_sampler.sampler
    is_random = isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement
    if not is_random and not isinstance(sampler, torch_data.SequentialSampler):
        raise DataError(
            f"{part}: {type(sampler).__name__} is not supported, because it selects or repeats "
            "examples; pass the data set of the DataLoader, or "
            "torch.utils.data.Subset(dataset, indices)"
        )


def loader_warning(loader: torch_data.DataLoader[Any]) -> str:
    """A warning about options of a DataLoader that are not used."""
    warning = "the batches of a DataLoader are not used: plan.batch sets their size"
    if loader.collate_fn is not torch_data.default_collate:
        warning += "; nor is its collate_fn"
    return warning


def check_no_image_fields(part: str, request: ReadRequest) -> None:
    """Raise ConfigError if size or mode is set although there are no PIL images."""
    for key in ("size", "mode"):
        if getattr(request, key) is not None:
            raise ConfigError(
                f"{part}: {key} is for PIL images, but these are tensors or arrays; convert them "
                f"beforehand, and remove {key}"
            )


READ_TWICE = 8
"""The number of items that are read twice, to detect random transforms."""

RANDOM_WARNING = (
    "a torch data set returns different values when it is read again, as with random transforms. "
    "It is read only once: remove random transforms, and set data.augment"
)


@dataclass(frozen=True, eq=False)
class ItemsRead:
    """The values (N, …) and labels (N,) of a torch data set, and warnings about them."""

    values: Array
    labels: Array
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchItems:
    """A torch data set of (value, label) pairs, which is read item by item."""

    part: str
    data: Any
    request: ReadRequest

    def read(self) -> ItemsRead:
        """Read all items, with a warning if an item differs when it is read again.

        Raises DataError for items that are not pairs, and if the types or shapes of values differ.
        """
        count = len(self.data)
        if not count:
            raise DataError(f"{self.part} holds no examples; remove it")
        with _seeded():
            positions = np.linspace(0, count - 1, READ_TWICE).round().astype(int)
            changes = any(self._changes(index) for index in np.unique(positions).tolist())
            if isinstance(self._item(0)[0], Image.Image):
                items = self._pictures(count)
            else:
                items = self._arrays(count)
        labels = np.asarray(items.labels)
        if labels.dtype.kind == "f":
            check_whole_labels(self.part, labels)
            labels = labels.astype(np.int64)
        warnings = items.warnings
        if changes:
            warnings = (RANDOM_WARNING, *warnings)
        return ItemsRead(items.values, labels, warnings)

    def _item(self, index: int) -> tuple[Any, Any]:
        try:
            item = self.data[index]
        except Exception as error:
            error.add_note(f"{self.part}: example {index} could not be read")
            raise
        if isinstance(item, (tuple, list)) and len(item) == 2:
            return item[0], item[1]
        raise DataError(
            f"{self.part}: example {index} is {kind_text(item)}; a torch data set must return "
            "pairs (value, label)"
        )

    def _changes(self, index: int) -> bool:
        """Whether a value differs when it is read a second time."""
        first = self._value_array(index)
        second = self._value_array(index)
        return not np.array_equal(first, second, equal_nan=first.dtype.kind == "f")

    def _value_array(self, index: int) -> NDArray[Any]:
        value = self._item(index)[0]
        if isinstance(value, Tensor):
            return as_array(self.part, value)
        return np.asarray(value)

    def _pictures(self, count: int) -> ItemsRead:
        """PIL images as (N, C, H, W), decoded like image files."""
        labels = []

        def labelled_images() -> Iterator[LabelledImage]:
            for index in range(count):
                picture, label = self._item(index)
                labels.append(self._label(index, label))
                yield LabelledImage(self._loaded(index, picture), 0)

        rows = decode_images(Pictures(self.part, self.request, count), labelled_images())
        check_broken(self.part, rows.broken, can_skip=False)
        warnings = image_warnings(self.part, {"train": rows})
        return ItemsRead(rows.images, np.array(labels), tuple(warnings))

    def _loaded(self, index: int, picture: object) -> Image.Image:
        """A copy of an image with its pixels, because a data set may change an image later."""
        name = f"{self.part}: example {index}"
        if not isinstance(picture, Image.Image):
            raise DataError(
                f"{name} is {kind_text(picture)}, but the first is a PIL image; use one type"
            )
        check_single_page(name, picture)
        with decoding_errors(name):
            return picture.copy()

    def _arrays(self, count: int) -> ItemsRead:
        """Tensors or arrays (N, …) of one shape and type."""
        check_no_image_fields(self.part, self.request)
        labels = []
        values: NDArray[Any] | None = None
        for index in range(count):
            value, label = self._item(index)
            if not isinstance(value, (Tensor, np.ndarray)):
                raise DataError(
                    f"{self.part}: the value of example {index} is {kind_text(value)}; use a "
                    "tensor, a NumPy array or a PIL image, of one kind"
                )
            array = as_array(f"{self.part}: the values of example {index}", value)
            if values is None:
                values = np.empty((count, *array.shape), array.dtype)
            if array.shape != values.shape[1:] or array.dtype != values.dtype:
                raise DataError(
                    f"{self.part}: example {index} is {array.dtype} of shape {array.shape}, but "
                    f"the first is {values.dtype} of shape {values.shape[1:]}; use one type and "
                    "shape"
                )
            values[index] = array
            labels.append(self._label(index, label))
        assert values is not None
        return ItemsRead(values, np.array(labels))

    def _label(self, index: int, label: Any) -> Any:
        """A label as a number; tensors and arrays of one number are converted."""
        if label is None:
            raise DataError(
                f"{self.part}: example {index} has no label; add a label, or remove the example"
            )
        if not isinstance(label, (Tensor, np.ndarray)):
            return label
        array = as_array(f"{self.part}: the label of example {index}", label)
        if array.size != 1:
            raise DataError(
                f"{self.part}: the label of example {index} has shape {array.shape}; use one "
                "class id (for one-hot labels: label.argmax())"
            )
        return array.item()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """A context in which the global generators are seeded; they are restored afterwards.

    If transforms draw from them, a resumed run reads the same examples.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with drawing_from(0):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
