"""Data sets of one's own tensors, and decoded arrays as a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from fedstill.data.sources.verify import verified

WHAT = ("values", "labels")

FAR = 3.0
"""Pixels in [0, 1], and such as are standardised already, are not further from 0."""

REMEDIES = {
    "f": ": labels.astype('int64') of an array, labels.long() of a tensor",
    **dict.fromkeys(
        "OSU",
        ": names, ids = np.unique(labels, return_inverse=True), then give ids, and classes=names",
    ),
}
"""How labels of another type become class ids, by the letter that NumPy has for the type."""

Array = Tensor | NDArray[Any]
"""A tensor of torch's, or an array of NumPy's."""


@process_settings()
def from_tensors(
    name: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    validation: tuple[Array, Array] | None = None,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    vocabulary: int = 0,
    kind: Kind | None = None,
) -> Dataset:
    """A data set of one's own tensors, or NumPy arrays: (values (N, …), labels (N,) of whole
    numbers) for every split.

    Values are images (N, C, H, W) uint8; numbers, of any float type: vectors or rows of a table (N,
    D), series (N, C, L), or of another shape; or token ids (N, L) of whole numbers in [0,
    vocabulary), 0 for padding.
    kind: "table" where (N, D) are columns of several units, which are then standardised as tables
    are; else told by shape. mean, std: of images one number a channel, default 0.5; of a table or
    of series one a column or channel, default none. Raises DataError for other shapes or types, or
    labels or ids out of range.
    """
    pairs = {"train": train, "test": test} | (
        {} if validation is None else {"validation": validation}
    )
    arrays = {
        split: _split(f"{name}, {split}", _pair(name, split, own), vocabulary)
        for split, own in pairs.items()
    }
    types = {split: str(values.dtype) for split, (values, _) in arrays.items()}
    if other := next((split for split in types if types[split] != types["train"]), None):
        raise DataError(
            f"{name}: values of train are {types['train']}, those of {other} {types[other]}; give "
            "all of one type"
        )
    about = About(_kind(name, next(iter(arrays.values()))[0], vocabulary, kind), vocabulary)
    if about.kind == "image" and mean is None:
        about = about.warned(_of_another_scale(arrays["train"][0]))
    names = tuple(map(str, classes)) if classes is not None and len(classes) else None
    data = Decoded(arrays, names, about=about)
    return as_dataset(name, verified(name, data), mean, std)


@process_settings()
def from_clients(
    name: str,
    clients: Sequence[tuple[Array, Array] | tuple[tuple[Array, Array], tuple[Array, Array]]],
    test: tuple[Array, Array] | None = None,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    **fields: Any,
) -> Dataset:
    """A data set of clients' own data, a client each: (values, labels), or ((values, labels),
    (values, labels)) with a test set of its own.

    test: common to all; without it, all own tests together. names: what clients are called. fields:
    as for ``from_tensors``. A run of these data has them for its clients; ``partition`` need not be
    set. Raises DataError where there is no test set at all, and for what ``from_tensors`` refuses.
    """
    pairs = [_train_and_test(name, i, client) for i, client in enumerate(clients)]
    called = (
        tuple(str(n) for n in names)
        if names is not None
        else tuple(f"client {i}" for i in range(len(pairs)))
    )
    if not pairs or len(called) != len(pairs) or len(set(called)) != len(called):
        raise DataError(
            f"{name}: {len(pairs)} clients and {len(set(called))} different names; give one name a "
            "client"
        )
    tests = {i: own for i, (_, own) in enumerate(pairs) if own is not None}
    if test is None and not tests:
        raise DataError(f"{name}: no client has a test set, and there is no common one; give test=")
    train = _below(name, {i: own for i, (own, _) in enumerate(pairs)}, "training", "leave it out")
    held, owners = (
        (test, None)
        if test is not None
        else (_below(name, tests, "test", "give its training data alone"), _owners_of(tests))
    )
    assert held is not None
    data = from_tensors(name, train, held, classes=classes, **fields)
    whose = _owners_of({i: own for i, (own, _) in enumerate(pairs)})
    about = replace(data.about, owners=called)
    return replace(
        data,
        train=replace(data.train, owners=whose),
        test=replace(data.test, owners=owners),
        about=about,
    )


def _pair(name: str, which: str, given: Any) -> Any:
    """What is given, if it is a pair; raises DataError for anything else."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return given
    what = (
        f"{type(given).__name__} of {len(given)}"
        if isinstance(given, (tuple, list))
        else type(given).__name__
    )
    raise DataError(f"{name}, {which}: give a pair (values, labels), not a {what}")


def _train_and_test(
    name: str, i: int, client: Any
) -> tuple[tuple[Array, Array], tuple[Array, Array] | None]:
    first, second = _pair(name, f"client {i}", client)
    if isinstance(first, (tuple, list)):
        first = _pair(name, f"client {i}", first)
        second = None if second is None else _pair(name, f"client {i}, test", second)
    return (
        ((first[0], first[1]), second)
        if isinstance(first, (tuple, list))
        else ((first, second), None)
    )


def _below(
    name: str, each: Mapping[int, tuple[Array, Array]], of: str, todo: str
) -> tuple[Array, Array]:
    """All clients' values and labels, one below another; raises DataError for a client that has
    none.
    """
    parts = []
    for i, own in each.items():
        if not len(own[1]):
            raise DataError(f"{name}, client {i} has no {of} examples; {todo}")
        parts.append(
            [
                _array(f"{name}, client {i}: {what}", one)
                for what, one in zip(WHAT, own, strict=True)
            ]
        )
    shapes = {values.shape[1:] for values, _ in parts}
    if len(shapes) > 1:
        raise DataError(
            f"{name}: clients' examples have several shapes: {', '.join(map(str, sorted(shapes)))}"
        )
    return np.concatenate([v for v, _ in parts]), np.concatenate([y for _, y in parts])


def _owners_of(each: Mapping[int, tuple[Array, Array]]) -> Tensor:
    return torch.cat([torch.full((len(own[1]),), i, dtype=torch.int64) for i, own in each.items()])


def _split(what: str, given: tuple[Array, Array], vocabulary: int) -> Arrays:
    values, labels = (_array(f"{what}: {name}", one) for name, one in zip(WHAT, given, strict=True))
    if values.ndim < 2 or not len(values):
        raise DataError(
            f"{what}: values have shape {values.shape}; give (N, …) with N above 0, one row an "
            "example"
        )
    if labels.dtype.kind not in "iub" or labels.shape != values.shape[:1]:
        raise DataError(
            f"{what}: labels are {labels.dtype} of shape {labels.shape}, not whole numbers of "
            f"shape ({len(values)},)"
            + REMEDIES.get(labels.dtype.kind if labels.shape == values.shape[:1] else "", "")
        )
    return (
        _ids(what, values, vocabulary) if vocabulary else _numbers(what, values)
    ), labels.astype(np.int64)


def _numbers(what: str, values: NDArray[Any]) -> NDArray[Any]:
    """Pixels as they are, or numbers as float32."""
    if values.dtype == np.uint8 and values.ndim == 4:
        _refuse_channels_last(what, values)
        return values
    if values.dtype.kind != "f":
        raise DataError(
            f"{what}: values are {values.dtype} of shape {values.shape}; give pixels as uint8 (N, "
            "C, H, W), other "
            "numbers as floats, or token ids with vocabulary="
        )
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(wrong):
        raise DataError(
            f"{what}: example {wrong[0]} has a value that is missing or infinite; correct or leave "
            "it out"
        )
    return np.ascontiguousarray(values, dtype=np.float32)


def _of_another_scale(values: NDArray[Any]) -> str:
    """What is said of images of floats that (x - 0.5) / 0.5 does not bring near [-1, 1]; empty for
    others.
    """
    if values.dtype.kind != "f" or not len(values):
        return ""
    low, high = float(values.min()), float(values.max())
    if max(-low, high) <= FAR:
        return ""
    return (
        f"images hold numbers from {low:.4g} to {high:.4g}, which (x - 0.5) / 0.5 makes "
        f"{2 * low - 1:.4g} to "
        f"{2 * high - 1:.4g}; divide pixels by 255, or give mean= and std="
    )


def _refuse_channels_last(what: str, values: NDArray[Any]) -> None:
    """Raise DataError for images (N, H, W, C), as most image libraries give them: they would be
    read as H channels.
    """
    _, first, second, last = values.shape
    if last in (1, 3, 4) and first == second > 4:
        raise DataError(
            f"{what}: values of shape {values.shape} have their channels last; give (N, C, H, W): "
            "values.transpose(0, 3, 1, 2) of an array, values.permute(0, 3, 1, 2) of a tensor"
        )


def _ids(what: str, values: NDArray[Any], vocabulary: int) -> NDArray[np.int64]:
    if values.dtype.kind not in "iu" or values.ndim != 2:
        raise DataError(
            f"{what}: token ids are {values.dtype} of shape {values.shape}, not whole numbers (N, "
            "L)"
        )
    wrong = np.flatnonzero(((values < 0) | (values >= vocabulary)).any(1))
    if len(wrong):
        raise DataError(
            f"{what}: example {wrong[0]} has a token id outside 0 to {vocabulary - 1}; correct it"
        )
    return np.ascontiguousarray(values, dtype=np.int64)


def _kind(name: str, values: NDArray[Any], vocabulary: int, kind: Kind | None) -> Kind:
    told: Kind = (
        "text"
        if vocabulary
        else "image"
        if values.ndim == 4
        else "series"
        if values.ndim == 3
        else "vector"
    )
    if kind in (None, told):
        return told
    if (kind, told) == ("table", "vector"):
        return "table"
    raise DataError(
        f"{name}: values of shape {values.shape} and type {values.dtype} are no {MANY[kind]}"
    )


def _array(what: str, given: object) -> NDArray[Any]:
    """A tensor or an array as an array that torch may read; raises DataError for anything else."""
    if isinstance(given, Tensor):
        own = given.detach().cpu()
        return (own.float() if own.dtype == torch.bfloat16 else own).numpy()
    if isinstance(given, np.ndarray):
        return np.require(given, requirements=["C", "W"])
    raise DataError(f"{what} are a {type(given).__name__}, not a tensor or a NumPy array")


def as_dataset(
    name: str,
    data: Decoded,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Dataset:
    """Verified arrays as a data set; of images, with mean and std 0.5 for every channel where none
    are given.

    Raises ConfigError for a mean or std that the data cannot have.
    """
    splits = {split: _examples(data, split) for split in data.splits}
    shape = splits["train"].values.shape[1:]
    if data.about.kind == "image":
        mean, std = (HALF * shape[0] if given is None else tuple(given) for given in (mean, std))
    elif mean is None and std is None:
        mean = std = ()
    else:
        mean, std = tuple(mean or ()), tuple(std or ())
    if data.about.kind == "text" and mean:
        raise ConfigError(f"dataset {name!r}: texts have no mean and std; leave them out")
    if (mean or data.about.kind == "image") and not (
        len(mean) == len(std) == shape[0] and min(std) > 0
    ):
        raise ConfigError(
            f"dataset {name!r}: mean and std need {shape[0]} number(s), std above 0, not {mean} "
            f"and {std}"
        )
    return Dataset(
        name,
        splits["train"],
        splits["test"],
        splits.get("validation"),
        data.classes or (),
        mean,
        std,
        data.about,
    )


def _examples(data: Decoded, split: str) -> Examples:
    values, labels = data.splits[split]
    owners = torch.from_numpy(data.owners[split]) if split in data.owners else None
    return Examples(torch.from_numpy(values), torch.from_numpy(labels), owners)
