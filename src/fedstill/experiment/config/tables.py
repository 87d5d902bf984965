"""The tables of a config as typed records: a new key is a field here, and nothing else.

The order of fields is the order of keys in a run's config.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedstill.engines.precision import Precision
from fedstill.fields import Count, CountOrZero, NonNegative, Positive, PositiveShare, Seed
from fedstill.wire.screen import Rules

Engine = Literal["serial", "pooled", "vectorised", "auto", "flower"]
Change = Literal["crop", "crop_reflect", "flip", "cutout", "rotation"]
"""A way in which training images vary."""


@dataclass(frozen=True)
class TopKeys:
    """The keys outside all tables."""

    seed: Seed = 0
    rounds: Count = 20
    engine: Engine = "pooled"
    threads: tuple[Count, Count] | Count | Literal["auto"] = "auto"
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Precision = "fp32"
    reuse: bool = True
    start_from: str = ""
    measure: tuple[str, ...] = ("local",)
    measure_every: Count = 10


@dataclass(frozen=True)
class DataTable:
    """``[data]``: which set, how training images vary, how much of it (0 = all), stratified; the public set."""

    name: str = "digits"
    folder: str = ""
    image_column: str = ""
    label_column: str = ""
    augment: tuple[Change, ...] = ()
    train_size: CountOrZero = 0
    test_size: CountOrZero = 0
    public: CountOrZero = 0
    public_from: str = "train"
    public_labels: bool = True
    public_resize: bool = False


@dataclass(frozen=True)
class ClientsTable:
    """``[clients]``: which replies are accepted, how many are needed, and which client has another network."""

    quorum: PositiveShare = 0.5
    norm_limit: Positive = 10.0
    models: tuple[str | dict[str, Any], ...] | dict[str, Any] = ()

    @property
    def rules(self) -> Rules:
        """Which replies the server accepts."""
        return Rules(self.quorum, self.norm_limit)


@dataclass(frozen=True)
class FlowerTable:
    """``[flower]``, for ``engine = "flower"``: where clients are, whose data they train on, how long to wait."""

    federation: str = ""
    grid: Literal["loopback", "ray"] = "loopback"
    data: Literal["partition", "sites"] = "partition"
    classes: tuple[str, ...] = ()
    shape: tuple[Count, Count, Count] | tuple[()] = ()
    deadline: Positive = 600.0
    ttl: NonNegative = 0.0
    retries: CountOrZero = 1
    poll: Positive = 1.0
    max_mb: Count = 1024


@dataclass(frozen=True)
class QueryTable:
    """``[query]``: which classes clients ask for, drawn, or written in ``[query.classes]`` as ``client = [classes]``.

    A class can be asked for by a client with ``fewer_than`` examples of it; a "multi" query has ``least`` to ``most``
    classes; ``seed``, unset, is the run's.
    """

    draw: Literal["none", "single", "multi"] = "none"
    fewer_than: Count = 50
    least: Count = 2
    most: Count = 3
    seed: Seed | None = None
    classes: Mapping[str, tuple[CountOrZero, ...]] = field(default_factory=dict)
