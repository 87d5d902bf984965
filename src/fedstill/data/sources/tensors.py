"""Data sets of tensors, arrays and torch data sets, and decoded arrays as a data set."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError, on_one_line
from fedstill.core.keys import drawing_from
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Examples
from fedstill.core.user_code import of_kind
from fedstill.data.cache import Arrays, Decoded
from fedstill.data.dataset import Dataset
from fedstill.data.form import MANY, About, Kind
from fedstill.data.sources.catalog import HALF
from fedstill.data.sources.image_sets import check_broken, labelled_images, read_rows
from fedstill.data.sources.images import Pictures, check_single_page
from fedstill.data.sources.records import Columns
from fedstill.data.sources.splits import SPLITS, hold_out
from fedstill.data.sources.verify import (
    ambiguous_channels,
    check_channels,
    check_labels,
    check_whole,
    unusual_scale,
    verified,
)

Array = Tensor | NDArray[Any]
"""A tensor of torch's, or an array of NumPy's."""

Pair = tuple[Array, Array]
"""Values (N, …) and labels (N,)."""


@dataclass(frozen=True)
class TensorFields:
    """What the user says about tensors, as keywords of ``from_tensors``."""

    classes: Sequence[str] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    vocabulary: int = 0
    kind: Kind | None = None


@dataclass(frozen=True)
class ClientPairs:
    """Pairs by split; if the examples belong to clients, the clients and each example's number.

    owners: by split, the number (N,) of each example's client; a split without it is common to all.
    """

    pairs: Mapping[str, Pair]
    clients: tuple[str, ...] = ()
    owners: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    cautions: tuple[str, ...] = ()


@process_settings()
def from_tensors(
    name: str,
    train: Pair,
    test: Pair | None = None,
    validation: Pair | None = None,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    vocabulary: int = 0,
    kind: Kind | None = None,
) -> Dataset:
    """A data set of tensors, or NumPy arrays: (values (N, …), labels (N,) of whole numbers) for
    each split.

    Values are images (N, C, H, W) uint8; numbers, of any float type: vectors or rows of a table (N,
    D), series (N, C, L), or of another shape; or token ids (N, L) of whole numbers in [0,
    vocabulary), 0 for padding. Without ``test``, a stratified fifth of ``train`` is held out.

    kind: "table" if (N, D) are columns of several units, which are then standardised as tables are;
    otherwise the shape decides. mean, std: for images one number a channel, default 0.5; for a
    table or series one a column or channel, default none. Raises DataError for other shapes or
    types, for labels or ids out of range, and for images whose channels are last.
    """
    pairs = {"train": train, "validation": validation, "test": test}
    checked = {
        split: checked_pair(f"{name}, {split}", pair)
        for split, pair in pairs.items()
        if pair is not None
    }
    fields = TensorFields(classes, mean, std, vocabulary=vocabulary, kind=kind)
    return dataset_of_pairs(name, ClientPairs(checked), fields)


@process_settings()
def from_clients(
    name: str,
    clients: Sequence[Pair | tuple[Pair, Pair]],
    test: Pair | None = None,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    validation: Pair | None = None,
    **fields: Any,
) -> Dataset:
    """A data set of clients' own data, a client each: (values, labels), or ((values, labels),
    (values, labels)) with a test set of its own.

    test: common to all; without it, all own tests together, or else a stratified fifth of the
    training data. names: what clients are called. fields: as for ``from_tensors``. A run of these
    data has these clients; ``partition`` need not be set. Raises DataError for a client without
    examples, and for what ``from_tensors`` refuses.
    """
    if names is None:
        names = [f"client {index}" for index in range(len(clients))]
    names = tuple(map(str, names))
    if not clients or len(names) != len(clients) or len(set(names)) != len(names):
        raise DataError(
            f"{name}: {len(clients)} clients and {len(set(names))} different names; give one name "
            "a client"
        )
    by_split = _pairs_by_split(name, clients)
    common = {"test": test, "validation": validation}
    data = join_clients(
        name, names, by_split, {split: pair for split, pair in common.items() if pair is not None}
    )
    return dataset_of_pairs(name, data, TensorFields(classes, **fields))


def _pairs_by_split(
    name: str, clients: Sequence[Pair | tuple[Pair, Pair]]
) -> dict[str, dict[int, Pair]]:
    """The training and test data of clients, by their numbers."""
    train = {}
    test = {}
    for index, client in enumerate(clients):
        part = f"{name}, client {index}"
        first, second = checked_pair(part, client)
        if not isinstance(first, (tuple, list)):
            train[index] = (first, second)
            continue
        train[index] = checked_pair(part, first)
        if second is not None:
            test[index] = checked_pair(f"{part}, test", second)
    return {"train": train, "test": test}


def join_clients(
    name: str,
    clients: Sequence[str],
    by_split: Mapping[str, Mapping[int, Pair]],
    common: Mapping[str, Pair],
) -> ClientPairs:
    """The clients' examples of each split, one client below another.

    clients: their names; by_split: by split, the pairs of clients by their numbers; common: pairs
    of whole splits, which replace the clients' own with a warning.
    """
    pairs = dict(common)
    owners = {}
    cautions = []
    for split, by_client in by_split.items():
        if not by_client:
            continue
        if split in common:
            cautions.append(
                f"the {split} sets of {len(by_client)} clients are not used, because {split}= is "
                "given"
            )
            continue
        arrays = [
            _client_arrays(f"{name}, client {clients[index].removeprefix('client ')}", split, pair)
            for index, pair in by_client.items()
        ]
        shapes = sorted({values.shape[1:] for values, _ in arrays})
        if len(shapes) > 1:
            raise DataError(
                f"{name}: clients' examples have several shapes: {', '.join(map(str, shapes))}; "
                "make them alike"
            )
        pairs[split] = (
            np.concatenate([values for values, _ in arrays]),
            np.concatenate([labels for _, labels in arrays]),
        )
        counts = [len(labels) for _, labels in arrays]
        owners[split] = np.repeat(np.array(list(by_client), dtype=np.int64), counts)
    return ClientPairs(pairs, tuple(clients), owners=owners, cautions=tuple(cautions))


def _client_arrays(part: str, split: str, pair: Pair) -> tuple[NDArray[Any], NDArray[Any]]:
    values = as_array(f"{part}: values", pair[0])
    labels = as_array(f"{part}: labels", pair[1])
    if not len(labels):
        remedy = "leave it out" if split == "train" else f"leave its {split} set out"
        raise DataError(f"{part} has no {split} examples; {remedy}")
    check_labels(f"{part}, {split}", labels, len(values))
    return values, labels


def dataset_of_pairs(name: str, data: ClientPairs, fields: TensorFields) -> Dataset:
    """The data set of some pairs; without a test split, a stratified fifth is held out.

    Raises DataError for what ``from_tensors`` refuses, and for too few examples to hold any out.
    """
    arrays = {
        split: _checked_arrays(f"{name}, {split}", data.pairs[split], fields.vocabulary)
        for split in SPLITS
        if split in data.pairs
    }
    train = arrays["train"][0]
    for split, (values, _) in arrays.items():
        if values.dtype != train.dtype:
            raise DataError(
                f"{name}: values of train are {train.dtype}, those of {split} {values.dtype}; give "
                "all of one type"
            )

    kind = _kind(name, train, fields)
    about = About(kind, fields.vocabulary, owners=data.clients).warned(*data.cautions)
    if kind == "image":
        about = about.warned(ambiguous_channels(train))
    if kind == "image" and fields.mean is None:
        about = about.warned(unusual_scale(train))
    classes = None
    if fields.classes is not None and len(fields.classes):
        classes = tuple(map(str, fields.classes))
    decoded = hold_out(Decoded(arrays, classes, owners=data.owners, about=about))
    if not len(decoded.splits["test"][1]):
        raise DataError(
            f"{name}: {len(train)} examples are too few to hold a fifth of each class out; give "
            "test="
        )
    return as_dataset(name, verified(name, decoded), fields.mean, fields.std)


# Checks of pairs.


def checked_pair(part: str, pair: Any) -> Any:
    """``pair`` if it has two parts; raises DataError for anything else."""
    if not isinstance(pair, (tuple, list)):
        raise DataError(f"{part}: give a pair (values, labels), not a {type(pair).__name__}")
    if len(pair) != 2:
        raise DataError(
            f"{part}: give a pair (values, labels), not a {type(pair).__name__} of {len(pair)}"
        )
    return pair


def as_array(part: str, values: object) -> NDArray[Any]:
    """A tensor or an array as an array that torch may read; raises DataError for anything else."""
    if isinstance(values, np.ndarray):
        return np.require(values, requirements=["C", "W"])
    if not isinstance(values, Tensor):
        raise DataError(f"{part} are a {type(values).__name__}, not a tensor or a NumPy array")
    tensor = values.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type
        tensor = tensor.float()
    return tensor.numpy()


def _checked_arrays(part: str, pair: Pair, vocabulary: int) -> Arrays:
    values = as_array(f"{part}: values", pair[0])
    labels = as_array(f"{part}: labels", pair[1])
    if values.ndim < 2 or not len(values):
        raise DataError(
            f"{part}: values have shape {values.shape}; give (N, …) with N above 0, one row an "
            "example"
        )
    check_labels(part, labels, len(values))
    checked = _ids(part, values, vocabulary) if vocabulary else _numbers(part, values)
    return checked, labels.astype(np.int64)


def _numbers(part: str, values: NDArray[Any]) -> NDArray[Any]:
    """Pixels as they are, or numbers as float32."""
    is_pixels = values.dtype == np.uint8 and values.ndim == 4
    if not is_pixels and values.dtype.kind != "f":
        raise DataError(
            f"{part}: values are {values.dtype} of shape {values.shape}; give pixels as uint8 (N, "
            "C, H, W), other numbers as floats, or token ids with vocabulary="
        )
    if values.ndim == 4:
        check_channels(part, values)
    if is_pixels:
        return values
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(wrong):
        raise DataError(
            f"{part}: example {wrong[0]} has a value that is missing or infinite; correct or leave "
            "it out"
        )
    return np.ascontiguousarray(values, dtype=np.float32)


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
    """The kind of examples: by their shape, or a table if the user says so."""
    by_dimensions: Mapping[int, Kind] = {3: "series", 4: "image"}
    by_shape = by_dimensions.get(values.ndim, "vector")
    if fields.vocabulary:
        by_shape = "text"
    if fields.kind in (None, by_shape):
        return by_shape
    if fields.kind == "table" and by_shape == "vector":
        return "table"
    raise DataError(
        f"{name}: values of shape {values.shape} and type {values.dtype} are no {MANY[fields.kind]}"
    )


# Torch data sets: pairs of a value and a label.


def dataset_of_loader(
    part: str, loader: torch_data.DataLoader[Any], cautions: list[str]
) -> torch_data.Dataset[Any]:
    """The data set of a DataLoader, with warnings about what is not used.

    Raises DataError for a sampler that selects or repeats examples.
    """
    if isinstance(loader.dataset, torch_data.IterableDataset):
        return loader.dataset
    sampler = loader.sampler
    if isinstance(loader.batch_sampler, torch_data.BatchSampler):
        sampler = loader.batch_sampler.sampler
    is_random = isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement
    if not is_random and not isinstance(sampler, torch_data.SequentialSampler):
        raise DataError(
            f"{part}: a {type(sampler).__name__} selects examples, which a data set cannot do; "
            "give the data set of the DataLoader, or torch.utils.data.Subset(dataset, indices)"
        )
    caution = "the batches of a DataLoader are not used: plan.batch sets their size"
    if loader.collate_fn is not torch_data.default_collate:
        caution += "; nor is its collate_fn"
    cautions.append(caution)
    return loader.dataset


def check_no_image_fields(part: str, columns: Columns) -> None:
    """Raise ConfigError for size or mode of PIL images where there are none."""
    for key in ("size", "mode"):
        if getattr(columns, key) is not None:
            raise ConfigError(
                f"{part}: {key} is for PIL images, and these are tensors or arrays; change them "
                f"before, and leave {key} out"
            )


READ_TWICE = 8
"""The items that are read a second time, to notice transforms that draw at random."""


@dataclass(frozen=True)
class TorchItems:
    """A data set of (value, label) pairs that is read item by item."""

    part: str
    data: Any
    columns: Columns

    def read(self, cautions: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Values (N, …) and labels (N,); adds a warning if an item differs when read again.

        Raises DataError for items that are no pairs, and for values of different types or shapes.
        """
        count = len(self.data)
        if not count:
            raise DataError(f"{self.part} holds no examples; leave it out")
        with _seeded():
            positions = np.linspace(0, count - 1, READ_TWICE).round().astype(int)
            if any(self._changes(index) for index in np.unique(positions).tolist()):
                cautions.append(
                    "a torch data set gives other values when it is read again, as transforms that "
                    "draw at random do; it is read once: leave such transforms out, and set "
                    "data.augment"
                )
            labels: list[Any] = []
            if isinstance(self._item(0)[0], Image.Image):
                values = self._pictures(count, labels, cautions)
            else:
                values = self._arrays(count, labels)
        ids = np.array(labels)
        if ids.dtype.kind == "f":
            check_whole(self.part, ids)
            ids = ids.astype(np.int64)
        return values, ids

    def _item(self, index: int) -> tuple[Any, Any]:
        try:
            item = self.data[index]
        except Exception as error:
            error.add_note(f"{self.part}: example {index} could not be read")
            raise
        if isinstance(item, (tuple, list)) and len(item) == 2:
            return item[0], item[1]
        raise DataError(
            f"{self.part}: example {index} is {of_kind(item)}; a torch data set must give pairs "
            "(value, label)"
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

    def _pictures(self, count: int, labels: list[Any], cautions: list[str]) -> NDArray[Any]:
        """PIL images (N, C, H, W), decoded as those of files are; their labels go into a list."""

        def cells() -> Iterator[tuple[dict[str, Any], int]]:
            for index in range(count):
                picture, label = self._item(index)
                labels.append(self._label(index, label))
                yield self._encoded(index, picture), 0

        rows = read_rows(Pictures(self.part, self.columns, count), cells())
        check_broken(self.part, rows.broken, can_skip=False)
        images = labelled_images(self.part, {"train": rows}, self.columns, None)
        cautions.extend(images.about.cautions)
        return rows.images

    def _encoded(self, index: int, picture: object) -> dict[str, Any]:
        """An image as the bytes of a file, upright."""
        if not isinstance(picture, Image.Image):
            raise DataError(
                f"{self.part}: example {index} is {of_kind(picture)}, and the first is a PIL "
                "image; make them alike"
            )
        check_single_page(f"{self.part}: example {index}", picture)
        upright = picture
        with contextlib.suppress(Exception):  # damaged tags; viewers show such images as they are
            upright = ImageOps.exif_transpose(picture)
        file = io.BytesIO()
        try:
            upright.save(file, "TIFF")  # it has all kinds of pixels
        except OSError as error:
            raise DataError(
                f"{self.part}: example {index} is an image of kind {picture.mode} "
                f"({on_one_line(error)}); convert it to RGB"
            ) from error
        return {"bytes": file.getvalue(), "path": None}

    def _arrays(self, count: int, labels: list[Any]) -> NDArray[Any]:
        """Tensors or arrays (N, …) of one shape and type; their labels go into a list."""
        check_no_image_fields(self.part, self.columns)
        values: NDArray[Any] | None = None
        for index in range(count):
            value, label = self._item(index)
            if not isinstance(value, (Tensor, np.ndarray)):
                raise DataError(
                    f"{self.part}: the value of example {index} is {of_kind(value)}; give a "
                    "tensor, a NumPy array or a PIL image, of one kind"
                )
            array = as_array(f"{self.part}: the values of example {index}", value)
            if values is None:
                values = np.empty((count, *array.shape), array.dtype)
            if array.shape != values.shape[1:] or array.dtype != values.dtype:
                raise DataError(
                    f"{self.part}: example {index} is {array.dtype} of shape {array.shape}, the "
                    f"first {values.dtype} of shape {values.shape[1:]}; make them alike"
                )
            values[index] = array
            labels.append(self._label(index, label))
        assert values is not None
        return values

    def _label(self, index: int, label: Any) -> Any:
        """A label as a number, from a tensor or array of one number, too."""
        if label is None:
            raise DataError(
                f"{self.part}: example {index} has no label; give it one, or leave it out"
            )
        if not isinstance(label, (Tensor, np.ndarray)):
            return label
        array = as_array(f"{self.part}: the label of example {index}", label)
        if array.size != 1:
            raise DataError(
                f"{self.part}: the label of example {index} has shape {array.shape}; give one "
                "class id (if it marks one class: label.argmax())"
            )
        return array.item()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed the global generators that transforms draw from, and restore them afterwards.

    A resumed run reads the same examples then.
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


# Decoded arrays as a data set.


def as_dataset(
    name: str,
    data: Decoded,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Dataset:
    """Verified arrays as a data set; of images, with mean and std 0.5 for each channel by default.

    Raises ConfigError for a mean or std that the data cannot have.
    """
    splits = {split: _examples(data, split) for split in data.splits}
    size = splits["train"].values.shape[1]
    is_image = data.about.kind == "image"
    default = HALF * size if is_image else ()
    means = default if mean is None else tuple(mean)
    stds = default if std is None else tuple(std)
    if data.about.kind == "text" and means:
        raise ConfigError(f"dataset {name!r}: texts have no mean and std; leave them out")
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


def _check_scale(name: str, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) == len(std) == size and min(std) > 0:
        return
    raise ConfigError(
        f"dataset {name!r}: mean and std need {size} number(s), std above 0, not {mean} and {std}"
    )


def _examples(data: Decoded, split: str) -> Examples:
    values, labels = data.splits[split]
    owners = torch.from_numpy(data.owners[split]) if split in data.owners else None
    return Examples(torch.from_numpy(values), torch.from_numpy(labels), owners)
