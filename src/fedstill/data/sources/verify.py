"""Whether decoded data are what their name promises: sizes, shapes, class names, label range,
checksums.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.cache import Arrays, Decoded
from fedstill.data.form import MANY
from fedstill.data.sources.catalog import Known

ORDER = ("train", "validation", "test")
BLOCK = 4096
"""Images hashed at once, so that no second copy of a large data set is made."""


def verified(name: str, data: Decoded, known: Known | None = None) -> Decoded:
    """``data`` with class names filled in; DataError with the first thing wrong, and what to do.

    Anything: a train and a test split, equal shapes, every label the id of a class. A known
    data set: its sizes, its shape, its class names and, where they have been read from the real
    files, the checksums.
    """
    for split in ("train", "test"):
        if split not in data.splits:
            raise DataError(
                f"{name} has no {split} split (it has {', '.join(data.splits) or 'none'}); add "
                f"{split} files"
            )
    for split, (values, labels) in data.splits.items():
        if len(values) != len(labels):
            raise DataError(
                f"{name}, {split} has {len(values)} {MANY[data.about.kind]} and {len(labels)} "
                "labels; download it again"
            )
    classes = _classes(name, data, known)
    shapes = {split: values.shape[1:] for split, (values, _) in data.splits.items()}
    if len(set(shapes.values())) != 1:
        if data.about.kind != "image":
            raise DataError(
                f"{name}: examples differ between splits, their shapes are {shapes}; make them "
                "alike"
            )
        raise DataError(
            f"{name}: images differ between splits, (C, H, W) = {shapes}; set data.size to resize "
            "all"
        )
    for split, (_, labels) in data.splits.items():
        wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
        if len(wrong):
            raise DataError(
                f"{name}, {split}: example {wrong[0]} has label {labels[wrong[0]]}, outside 0 to "
                f"{len(classes) - 1}; "
                "correct or leave out the example"
            )
    if known is not None:
        (_check_known if data.about.kind == "image" else _check_read)(known, data)
    return replace(
        data,
        splits={split: data.splits[split] for split in ORDER if split in data.splits},
        classes=classes,
    )


def sums(arrays: Arrays) -> tuple[str, str]:
    """SHA-256 of a split's pixels, as bytes in the order (N, H, W, C), and of its labels, a byte
    each.
    """
    images, labels = arrays
    pixels = hashlib.sha256()
    for start in range(0, len(images), BLOCK):
        pixels.update(
            np.ascontiguousarray(images[start : start + BLOCK].transpose(0, 2, 3, 1)).data
        )
    return pixels.hexdigest(), hashlib.sha256(labels.astype(np.uint8).tobytes()).hexdigest()


def _classes(name: str, data: Decoded, known: Known | None) -> tuple[str, ...]:
    if known is not None:
        if data.classes is not None and _plain(data.classes) != _plain(known.classes):
            raise DataError(
                f"{name}: the classes are {', '.join(data.classes)}, not "
                f"{', '.join(known.classes)}; "
                "this is other data: give the folder another name"
            )
        return known.classes
    if data.classes is not None:
        return data.classes
    highest = max(int(labels.max(initial=0)) for _, labels in data.splits.values())
    examples = sum(len(labels) for _, labels in data.splits.values())
    if highest >= examples:
        raise DataError(
            f"{name}: label {highest} among {examples} examples; class ids count up from 0"
        )
    return tuple(str(c) for c in range(highest + 1))


def _plain(names: Iterable[str]) -> list[str]:
    return [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]


def _check_read(known: Known, data: Decoded) -> None:
    """Compare what was read with the checksums, where the columns are those that were read for
    them.
    """
    for split, expected in known.sums.items():
        if data.about.columns == known.form.columns and data.read.get(split, expected) != expected:
            raise DataError(
                f"{known.name}, {split}: the examples are not those of that name; give the folder "
                "another"
            )


def _check_known(known: Known, data: Decoded) -> None:
    sizes = {split: len(data.splits[split][1]) for split in ORDER if split in data.splits}
    remedy = (
        "the files are incomplete or other data: download them again, or give the folder another "
        "name"
    )
    wrong = {s: n for s, n in known.sizes.items() if sizes.get(s) != n}
    if wrong:
        raise DataError(f"{known.name} has {sizes} examples, not {dict(known.sizes)}; {remedy}")
    if known.total is not None and sum(sizes.values()) != known.total:
        raise DataError(
            f"{known.name} has {sum(sizes.values())} examples, not {known.total}; {remedy}"
        )
    shape = data.splits["train"][0].shape[1:]
    if shape != known.shape:
        raise DataError(
            f"{known.name} has images of (C, H, W) = {shape}, not {known.shape}; {remedy}"
        )
    for split, expected in known.sums.items():
        for what, got, wanted in zip(
            ("pixels", "labels"), sums(data.splits[split]), expected, strict=True
        ):
            if got != wanted:
                raise DataError(
                    f"{known.name}, {split}: the {what} have SHA-256 {got}, not {wanted}; {remedy}"
                )
