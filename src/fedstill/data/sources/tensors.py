"""Data sets of tensors and arrays in memory, and decoded arrays as a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Examples
from fedstill.data.cache import Arrays, Decoded
from fedstill.data.dataset import Dataset
from fedstill.data.form import MANY, About, Kind
from fedstill.data.sources.catalog import HALF
from fedstill.data.sources.splits import SPLITS, hold_out
from fedstill.data.sources.verify import verified

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
        about = about.warned(_ambiguous_channels(train))
    if kind == "image" and fields.mean is None:
        about = about.warned(_unusual_scale(train))
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


def check_labels(part: str, labels: NDArray[Any], count: int) -> None:
    """Raise DataError for labels that are not ``count`` whole numbers, with how to make them so."""
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
            f"{problem}: names, ids = np.unique(labels, return_inverse=True), then give ids, and "
            "classes=names"
        )
    if labels.dtype.kind == "f":
        check_whole(part, labels)
        raise DataError(f"{problem}: labels.astype('int64') of an array, labels.long() of a tensor")
    raise DataError(f"{problem}; give class ids, whole numbers from 0")


def _shape_remedy(labels: NDArray[Any], count: int) -> str:
    if labels.shape == (count, 1):
        return ": labels.reshape(-1)"
    if labels.ndim == 2 and len(labels) == count:
        return ": labels.argmax(1), if they mark one class in each row"
    return "; give one label an example"


def check_whole(part: str, labels: NDArray[Any]) -> None:
    """Raise DataError for labels with fractions, and for labels that are missing or infinite."""
    is_finite = np.isfinite(labels)
    fractions = np.flatnonzero(is_finite & (labels != np.round(labels)))
    if len(fractions):
        raise DataError(
            f"{part}: labels are numbers with fractions (example {fractions[0]} has "
            f"{labels[fractions[0]]:.6g}): fedstill classifies and has no regression; for classes "
            "of ranges, np.digitize(labels, limits)"
        )
    unknown = np.flatnonzero(~is_finite)
    if len(unknown):
        raise DataError(
            f"{part}: example {unknown[0]} has the label {labels[unknown[0]]} ({len(unknown):,} of "
            f"{len(labels):,} are not finite); give it a class id, or leave such examples out"
        )


def _numbers(part: str, values: NDArray[Any]) -> NDArray[Any]:
    """Pixels as they are, or numbers as float32."""
    is_pixels = values.dtype == np.uint8 and values.ndim == 4
    if not is_pixels and values.dtype.kind != "f":
        raise DataError(
            f"{part}: values are {values.dtype} of shape {values.shape}; give pixels as uint8 (N, "
            "C, H, W), other numbers as floats, or token ids with vocabulary="
        )
    if values.ndim == 4:
        _check_channels(part, values)
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


# Images: where their channels are, and the scale of their pixels.


PICTURE_CHANNELS = (1, 3, 4)
"""Channels of grey, RGB and RGBA pictures, which most image libraries give last."""

MOST_PICTURE_CHANNELS = max(PICTURE_CHANNELS)

TRANSPOSITION = "values.transpose(0, 3, 1, 2) of an array, values.permute(0, 3, 1, 2) of a tensor"


def _check_channels(part: str, values: NDArray[Any]) -> None:
    """Raise DataError for images (N, H, W, C), which would be read as images of H channels."""
    if _channels_are_last(values.shape) is True:
        raise DataError(
            f"{part}: values of shape {values.shape} have their channels last; give (N, C, H, W): "
            f"{TRANSPOSITION}"
        )


def _ambiguous_channels(values: NDArray[Any]) -> str:
    """A warning about images that could be read either way, or ""."""
    if _channels_are_last(values.shape) is not None:
        return ""
    _, channels, height, width = values.shape
    return (
        f"values of shape {values.shape} are read as images of {channels} channels and {height} × "
        f"{width} pixels; if their channels are last, give {TRANSPOSITION}"
    )


def _channels_are_last(shape: tuple[int, ...]) -> bool | None:
    """Whether images of a shape (N, …, …, …) have their channels last; None if that is unclear.

    Squares that few channels wide are maps of features, such as (N, 512, 4, 4). Otherwise, images
    are about as wide as high: the two of the three axes that are more alike are height and width.

    >>> _channels_are_last((90, 64, 48, 3)), _channels_are_last((90, 512, 4, 4))
    (True, False)
    >>> _channels_are_last((90, 4, 64, 4)) is None
    True
    """
    _, first, second, last = shape
    if last not in PICTURE_CHANNELS or second == last:
        return False
    sides_alike = max(first, second) * min(second, last) < max(second, last) * min(first, second)
    if first > MOST_PICTURE_CHANNELS and sides_alike:
        return True
    return None


FAR = 3.0
"""Pixels in [0, 1], and such as are standardised already, are not further from 0."""


def _unusual_scale(values: NDArray[Any]) -> str:
    """A warning about images of floats that (x - 0.5) / 0.5 does not bring near [-1, 1], or ""."""
    if values.dtype.kind != "f" or not len(values):
        return ""
    low = float(values.min())
    high = float(values.max())
    if max(-low, high) <= FAR:
        return ""
    return (
        f"images hold numbers from {low:.4g} to {high:.4g}, which (x - 0.5) / 0.5 makes "
        f"{2 * low - 1:.4g} to {2 * high - 1:.4g}; divide pixels by 255, or give mean= and std="
    )


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
