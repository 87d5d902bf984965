"""Facts that all sites must share: the classes, the form of examples, the public set, and the model
that a run starts from.

Sites do not see each other's data, so the server sends these facts with each request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import tomli_w

from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, Refused, on_one_line
from fedstill.core.files import digest
from fedstill.data.dataset import PLURALS, DatasetInfo, Kind, examples_digest
from fedstill.data.encoding import TableInputs
from fedstill.data.inputs import Inputs
from fedstill.models.building import sha256_of
from fedstill.running.preparation import Prepared
from fedstill.running.standardisation import Origin

T = TypeVar("T")

OF_IMAGES = ("classes", "shape", "mean", "std", "public", "start")
"""The facts of a run on images. Other facts have their defaults, and requests omit them."""


@dataclass(frozen=True)
class Facts:
    """The facts that all sites must share.

    ``classes``: the names, in the order of their ids. ``shape``: the shape of an example. ``mean``,
    ``std``: the mean and standard deviation for normalising images, or for standardising each
    column or channel. ``public``: the SHA-256 of the public set, or empty. ``kind``: the kind of
    examples. ``vocabulary``: the number of token ids. ``tokenizer``: the SHA-256 of the tokenizer
    file, or empty. ``columns``: the columns of a table. ``features``: the names of its inputs.
    ``marks``: the positions of the binary inputs. ``origin``: the data from which ``mean`` and
    ``std`` were computed. ``start``: the SHA-256 of the model that the run starts from; empty for
    random weights.
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
    start: str = ""

    @staticmethod
    def of_trial(prepared: Prepared) -> Facts:
        """The facts of a run whose clients read the run's data themselves: only ``start``."""
        start = prepared.world.start
        if start is None:
            return Facts()
        return Facts(start=sha256_of(start.params))

    @staticmethod
    def known_by(prepared: Prepared) -> Facts:
        """The facts of a run on the server."""
        data = prepared.dataset
        public = ""
        if prepared.sites.public is not None:
            public = examples_digest(prepared.sites.public)
        facts = Facts(
            classes=data.classes,
            shape=data.input_shape,
            mean=data.mean,
            std=data.std,
            public=public,
            start=Facts.of_trial(prepared).start,
        )
        about = data.about
        if about.kind == "image":
            return facts

        tokenizer = ""
        if about.kind == "text":
            tokenizer = _tokenizer_digest(prepared.settings.data.tokenizer)
        return replace(
            facts,
            mean=prepared.sites.inputs.mean,
            std=prepared.sites.inputs.std,
            kind=about.kind,
            vocabulary=about.vocabulary,
            tokenizer=tokenizer,
            columns=about.columns,
            features=about.features,
            marks=about.binary_features,
            origin=prepared.scaler.origin,
        )

    @staticmethod
    def of(values: Mapping[str, Any]) -> Facts:
        """Parse the facts in a request; raises Refused for malformed values."""
        try:
            facts = Facts(
                classes=_values(values, "classes", str),
                shape=_values(values, "shape", int),
                mean=_values(values, "mean", float),
                std=_values(values, "std", float),
                public=str(values.get("public", "")),
                kind=str(values.get("kind", "image")),  # type: ignore[arg-type]
                vocabulary=int(values.get("vocabulary", 0)),
                tokenizer=str(values.get("tokenizer", "")),
                columns=_values(values, "columns", str),
                features=_values(values, "features", str),
                marks=_values(values, "marks", int),
                origin=str(values.get("origin", "none")),  # type: ignore[arg-type]
                start=str(values.get("start", "")),
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
            raise ValueError(
                f"unknown kind {self.kind[:40]!r}, or unknown origin {self.origin[:40]!r}"
            )
        if self.kind == "image":
            of_images = {name: getattr(self, name) for name in OF_IMAGES}
            if self != Facts(**of_images):
                raise ValueError(f"images have no facts except {', '.join(OF_IMAGES)}")
            return
        width = 0
        if self.shape:
            width = self.shape[0]
        if self.features and len(self.features) != width:
            raise ValueError(f"{len(self.features)} names for {width} inputs")
        table = TableInputs.named_by(self.columns, self.features, self.marks)
        fits = table.info.features == self.features and set(table.marked) <= set(self.columns)
        if self.columns and not fits:
            raise ValueError("the names of the inputs are not those of the columns")
        if self.mean or self.std:
            are_finite = all(math.isfinite(value) for value in self.mean)
            are_positive = all(0 < value < math.inf for value in self.std)
            is_complete = {len(self.mean), len(self.std)} == {width}
            if not (are_finite and are_positive and is_complete):
                raise ValueError(
                    f"each of {width} columns or channels needs a finite mean, and a spread above 0"
                )

    def plain(self) -> dict[str, Any]:
        """The facts as JSON values."""
        values = asdict(self)
        if not self.start:
            del values["start"]
        if self.kind == "image":
            return {name: value for name, value in values.items() if name in OF_IMAGES}
        return values

    def acceptable(self) -> dict[str, Any]:
        """The facts that a site can accept before a run: all except the mean and standard deviation
        from the sites' sums.
        """
        values = {name: value for name, value in self.plain().items() if value or name == "origin"}
        if self.origin == "summed":
            values = {name: values[name] for name in values if name not in ("mean", "std")}
        return values

    def check_start(self, settings: Settings) -> None:
        """Raise Refused if the config and the facts disagree about a model to start from."""
        if bool(settings.start_from) != bool(self.start):
            raise Refused("the request's facts contradict start_from", "config")

    def check_config(self, settings: Settings) -> None:
        """Raise Refused for facts that contradict the run's config."""
        data = settings.data
        flower = settings.flower
        agreements = {
            "data.columns": not data.columns or set(self.columns) == set(data.columns),
            "data.kind": not data.kind or data.kind == self.kind,
            "flower.classes": not flower.classes or tuple(flower.classes) == self.classes,
            "flower.shape": not flower.shape or tuple(flower.shape) == self.shape,
            "flower.vocabulary": not flower.vocabulary or flower.vocabulary == self.vocabulary,
        }
        for key, agrees in agreements.items():
            if not agrees:
                raise Refused(f"the request's facts about data contradict {key}", "config")

    @property
    def about(self) -> DatasetInfo:
        """The form of the examples."""
        return DatasetInfo(
            self.kind,
            self.vocabulary,
            columns=self.columns,
            features=self.features,
            binary_features=self.marks,
        )

    def inputs(self, settings: Settings) -> Inputs:
        """The conversion of stored values to inputs, which is equal at all sites."""
        return Inputs(self.mean, self.std, tuple(settings.data.augment), self.about)


def accepted_text(config: str, facts: Mapping[str, Any]) -> str:
    """The text that a site accepts, as TOML: a run's config, and the facts about data in its
    requests.

    For a trial, which has no facts, it is only the config. Raises Refused for malformed facts.
    """
    if not facts:
        return config
    return f"{config}\n{tomli_w.dumps({'facts': Facts.of(facts).acceptable()})}"


def _values(values: Mapping[str, Any], name: str, convert: Callable[[Any], T]) -> tuple[T, ...]:
    """The list of values with a name; empty if it is missing."""
    return tuple(convert(value) for value in values.get(name, ()))


def _tokenizer_digest(tokenizer: str | None) -> str:
    """The SHA-256 of a tokenizer file; empty for words and bytes."""
    if not tokenizer or not tokenizer.endswith(".json"):
        return ""
    try:
        return digest(Path(tokenizer).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer = {tokenizer!r} cannot be read: {error.strerror}"
        ) from error
