"""Facts that all sites must agree on, though none sees all data: classes, what examples are, the
public set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, Refused, on_one_line
from fedstill.core.files import digest
from fedstill.data.dataset import PLURALS, DatasetInfo, Kind, examples_digest
from fedstill.data.encoding import TableInputs
from fedstill.data.inputs import Inputs
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import Origin

T = TypeVar("T")

OF_IMAGES = ("classes", "shape", "mean", "std", "public")
"""What is said of images: requests for them are as they were before there were other kinds."""


@dataclass(frozen=True)
class Facts:
    """What every site must share.

    ``classes``: names, in the order of their ids. ``shape``: of an example. ``mean``, ``std``: of
    images what normalises pixels; else by column or channel what numbers are standardised
    by. ``public``: SHA-256 of the public set, empty if there is none. ``kind``: what examples
    are. ``vocabulary``: how many token ids there are.
    ``tokenizer``: SHA-256 of the tokenizer's file, empty for none. ``columns``: of a
    table; ``features``: the names of its inputs; ``marks``: which of these (positions) are 0
    or 1. ``origin``: whose ``mean`` and ``std`` are.
    """

    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    public: str = ""
    kind: Kind = "image"
    vocabulary: int = 0
    tokenizer: str = ""
    columns: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    marks: tuple[int, ...] = ()
    origin: Origin = "none"

    @staticmethod
    def known_by(prepared: Prepared) -> Facts:
        """What the server knows, and every site must share."""
        data, public = prepared.dataset, prepared.sites.public
        common = Facts(
            data.classes,
            data.input_shape,
            public=examples_digest(public) if public is not None else "",
        )
        about, inputs = data.about, prepared.sites.inputs
        if about.kind == "image":
            return Facts(common.classes, common.shape, data.mean, data.std, common.public)
        return Facts(
            common.classes,
            common.shape,
            inputs.mean,
            inputs.std,
            common.public,
            about.kind,
            about.vocabulary,
            _sealed(prepared.settings.data.tokenizer if about.kind == "text" else None),
            about.columns,
            about.features,
            about.binary_features,
            prepared.scaler.origin,
        )

    @staticmethod
    def of(given: Mapping[str, Any]) -> Facts:
        """The facts in a request; raises Refused if they are none."""
        try:
            texts, whole, numbers = _lists(given, str), _lists(given, int), _lists(given, float)
            facts = Facts(
                texts("classes"),
                whole("shape"),
                numbers("mean"),
                numbers("std"),
                str(given.get("public", "")),
                str(given.get("kind", "image")),  # type: ignore[arg-type]
                int(given.get("vocabulary", 0)),
                str(given.get("tokenizer", "")),
                texts("columns"),
                texts("features"),
                whole("marks"),
                str(given.get("origin", "none")),  # type: ignore[arg-type]
            )
            facts._check()
            return facts
        except (TypeError, ValueError) as error:
            raise Refused(
                f"the request's facts about data are malformed: {on_one_line(error)}"
            ) from error

    def _check(self) -> None:
        """Raise ValueError for facts that contradict themselves."""
        if self.kind not in PLURALS or self.origin not in get_args(Origin):
            raise ValueError(f"kind {self.kind[:40]!r}, standardised {self.origin[:40]!r}")
        if self.kind == "image":
            return
        width = self.shape[0] if self.shape else 0
        if self.features and len(self.features) != width:
            raise ValueError(f"{len(self.features)} names for {width} inputs")
        table = TableInputs.named_by(self.columns, self.features, self.marks)
        if self.columns and (
            table.about.features != self.features or not set(table.marked) <= set(self.columns)
        ):
            raise ValueError("the names of the inputs are not those of the columns")
        if self.mean or self.std:
            usable = all(math.isfinite(v) for v in self.mean) and all(
                0 < v < math.inf for v in self.std
            )
            if {len(self.mean), len(self.std)} != {width} or not usable:
                raise ValueError(
                    f"each of {width} columns or channels needs a finite mean, and a spread above 0"
                )

    def plain(self) -> dict[str, Any]:
        """The same for JSON."""
        return {k: v for k, v in asdict(self).items() if self.kind != "image" or k in OF_IMAGES}

    @property
    def about(self) -> DatasetInfo:
        """What is said of the examples."""
        return DatasetInfo(
            self.kind,
            self.vocabulary,
            columns=self.columns,
            features=self.features,
            binary_features=self.marks,
        )

    def inputs(self, settings: Settings) -> Inputs:
        """How stored values become inputs, the same at every site."""
        return Inputs(self.mean, self.std, tuple(settings.data.augment), self.about)


def _lists(given: Mapping[str, Any], kind: Callable[[Any], T]) -> Callable[[str], tuple[T, ...]]:
    """What reads a list of values of a kind by its name; an empty one where there is none."""
    return lambda key: tuple(map(kind, given.get(key, ())))


def _sealed(tokenizer: str | None) -> str:
    """The SHA-256 of a tokenizer's file; empty for words and bytes."""
    if not tokenizer or not tokenizer.endswith(".json"):
        return ""
    try:
        return digest(Path(tokenizer).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer = {tokenizer!r} cannot be read: {error.strerror}"
        ) from error
