"""The tables of a config as typed records: a new key is a field here, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len

from fedstill import manifest
from fedstill.config.named_tables import NAMED
from fedstill.core.errors import ConfigError
from fedstill.core.fields import (
    Count,
    CountOrZero,
    NonNegative,
    PackageTable,
    Positive,
    PositiveShare,
    Seed,
    Share,
    as_table,
)
from fedstill.core.screen import MAX_EXAMPLES, Failures, MostExamples, Rules
from fedstill.core.stream import Head
from fedstill.data.form import Broken, Kind, Missing, Mode, Value
from fedstill.engines.precision import Precision

# The table ``[stream]`` of a config: the clock of a run's tasks; the kind that it names cuts the
# data.


NO_STREAM = NAMED["stream"][1]
"""The kind of a run with one task."""

SITES = "sites"
"""The kind of a run whose sites have data of their own, by task."""


@dataclass(frozen=True)
class StreamTable:
    """``[stream]``, beside its kind's own keys: how many tasks, who is in which, and what a change
    leaves behind.
    """

    tasks: Count = 5
    """How many tasks there are, one after another."""
    rounds: tuple[Count, ...] = ()
    """The rounds of each task; empty: equal shares of the run's."""
    compose: Literal["tasks_first", "clients_first"] = "tasks_first"
    """Whether the partition splits each task's data, or all data once, each client's part then
    being cut by task.
    """
    past: Literal["gone", "kept"] = "gone"
    """Whether clients lose the data of earlier tasks, or train on all that they have had: the upper
    bound.
    """
    head: Head = "all"
    """Outputs that take part in training: all, those of the classes seen so far, or those of the
    task's own classes.
    """
    lr: Literal["restart", "go_on"] = "restart"
    """Whether the learning rate's schedule begins anew with each task, or goes on over the run."""
    lag: CountOrZero = 0
    """By how many rounds at most a client comes late to each task, drawn by key; 0: none does."""
    join: PositiveShare = 1.0
    """The share of clients that is there from the start; the others enter evenly over the tasks,
    drawn by key.
    """
    stay: Share = 0.0
    """The share of clients that stays with its task at a change, drawn by key for each change."""
    seed: Seed | None = None
    """What tasks, lags, entries and stays are drawn from; unset: the run's seed."""

    def starts(self, rounds: int) -> tuple[int, ...]:
        """The first round of each task; raises ConfigError where the run's rounds cannot be shared
        out so.
        """
        if not self.rounds:
            if rounds % self.tasks:
                raise ConfigError(
                    f"rounds = {rounds} cannot be shared by stream.tasks = {self.tasks}; set "
                    "rounds to a multiple, or "
                    "write the rounds of each task in stream.rounds"
                )
            return tuple(range(1, rounds + 1, rounds // self.tasks))
        if len(self.rounds) != self.tasks:
            raise ConfigError(
                f"stream.rounds has the rounds of {len(self.rounds)} tasks, and stream.tasks = "
                f"{self.tasks}"
            )
        if sum(self.rounds) != rounds:
            raise ConfigError(
                f"stream.rounds has {sum(self.rounds)} rounds in all, and rounds = {rounds}"
            )
        return tuple(accumulate(self.rounds[:-1], initial=1))

    def longest(self, rounds: int) -> int:
        """Over how many rounds a learning rate's schedule runs: those of the longest task, or of
        the run.
        """
        starts = (*self.starts(rounds), rounds + 1)
        lengths = [b - a for a, b in pairwise(starts)]
        return max(lengths) if self.lr == "restart" else rounds


# The tables of a config as typed records: a new key is a field here, and nothing else.
#
# The order of fields is the order of keys in a run's config.toml. A key that is unset (None) is not
# written there: so runs that were begun before there was such a key keep their bytes.


Side = Annotated[int, Interval(ge=1, le=4096)]
Engine = Literal["serial", "pooled", "vectorised", "auto", "flower"]
Attack = Literal["sign_flip", "scaled", "label_flip"]
Change = Literal["crop", "crop_reflect", "flip", "cutout", "rotation"]
"""A way in which training images vary."""


@dataclass(frozen=True)
class TopKeys:
    """The keys outside all tables."""

    seed: Seed = 0
    """Every random draw of the run comes from it."""
    rounds: Count = 20
    """How many rounds the run has."""
    engine: Engine = "pooled"
    """How the clients of a stage are trained: side by side, one after another, stacked, or over
    Flower.
    """
    threads: tuple[Count, Count] | Count | Literal["auto"] = "auto"
    """Torch threads for each client in a stage of several, and for a client that acts alone, a
    stack, and the server; auto: one.
    """
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where networks are trained; auto takes a CUDA card where there is one."""
    precision: Precision = "fp32"
    """The number format of training; weights, the optimiser and all evaluation stay float32."""
    reuse: bool = True
    """Take models that clients trained alone from the cache where they would be the same."""
    start_from: str = ""
    """A run's directory or a model file, with whose weights the run starts."""
    start_from_partial: bool = False
    """Whether weights of another network serve too: what fits is taken, the rest is drawn."""
    train_only: tuple[str, ...] = ()
    """Entries of the network that are trained and sent; all others stay as start_from has
    them; empty: all are.
    """
    measure: tuple[str, ...] = ("local",)
    """Measures beside those of the global model."""
    measure_every: Count = 10
    """Measures look every so many rounds, in the last one, and in the last of each task."""
    keep_checkpoints_every: Count | None = None
    """The state after every so many rounds is kept to the end, for `fedstill why`; unset: the last
    three stages.
    """
    keep_updates: bool = False
    """Whether every reply that was accepted is kept, under updates/ in the run's directory."""


@dataclass(frozen=True)
class DataTable:
    """``[data]``: which set, how training images vary, how much of it (0 = all); the public set;
    its pixels.
    """

    name: str = "digits"
    """The data set: a registered name, a folder, a file of yours, or owner/name on the Hugging Face
    hub.
    """
    folder: str = ""
    """The folder that holds folders of data sets; empty: the one that FEDSTILL_DATA names."""
    image_column: str = ""
    """The column that holds the images; empty: it is looked for."""
    label_column: str = ""
    """The column that holds the labels; empty: it is looked for."""
    size: Side | None = None
    """Images are resized to so many pixels a side; unset: they stay as they are, and must be
    alike.
    """
    mode: Mode | None = None
    """Whether images are converted to grey or to rgb; unset: they stay as they are, and must be
    alike.
    """
    broken: Broken | None = None
    """What is done about images that cannot be decoded: refuse the data (unset), or skip them."""
    augment: tuple[Change, ...] = ()
    """How training images are varied."""
    train_size: CountOrZero = 0
    """How many training examples are used, with the classes' shares kept; 0: all."""
    test_size: CountOrZero = 0
    """How many test examples are used, with the classes' shares kept; 0: all."""
    public: CountOrZero = 0
    """How many images are public: of the training set, which clients then lack, or of another
    source (0: all).
    """
    public_from: str = "train"
    """Where public images come from: train, noise, another data set, or a folder of images."""
    public_labels: bool = True
    """Whether the labels of public images are used: by measures, and in stages that say so (FedMD,
    FedGKD-VOTE).
    """
    public_resize: bool = False
    """Whether public images are brought to the size and channels of the run's images."""
    mean: Annotated[tuple[float, ...], Len(1, 100_000)] | None = None
    """What is subtracted: from pixels in [0, 1], a number a channel or one for all; else one a
    column or channel.
    """
    std: Annotated[tuple[Positive, ...], Len(1, 100_000)] | None = None
    """What they are divided by then; unset: the data set's spread, or what ``standardise`` says."""
    held_out: Literal["last"] | None = None
    """Which of its data a client holds out for validation: the last in the split's order; unset:
    drawn by seed.
    """
    test_from: Literal["held_out"] | None = None
    """What models are tested on: training examples that clients then lack, to choose fields
    by; unset: the test set.
    """
    kind: Kind | None = None
    """What examples are: image, table, vector, series or text; unset: told by the columns."""
    columns: Annotated[tuple[str, ...], Len(1, 100_000)] | None = None
    """The columns of a table; unset: all columns of numbers but the label and the owner."""
    categorical: Mapping[str, list[Value] | tuple[Value, ...]] | tuple[str, ...] | None = None
    """Columns whose values are names, each of which becomes a column of 0 and 1; and the names, if
    they are fixed.
    """
    input_column: str | None = None
    """The column that holds the texts, the vectors or the series; unset: it is looked for."""
    missing: Missing | None = None
    """What is done where a number is missing: refuse (unset), drop the row, or take the mean."""
    missing_marks: bool | None = None
    """Whether each column with missing numbers gets a column of 0 and 1 beside it that says
    where.
    """
    missing_values: Annotated[tuple[str | int | float, ...], Len(1, 1000)] | None = None
    """Texts and numbers that mean missing; they replace the marks of CSV files (NA, None, …) except
    the empty field.
    """
    unlabelled: Literal["refuse", "drop"] | None = None
    """What is done about examples without a label: refuse the data (unset), or leave them out."""
    split_column: str | None = None
    """The column of a table that says which split a row is in: train, validation or test."""
    decimal: Literal[".", ","] | None = None
    """The decimal mark of numbers in CSV files; unset: a point."""
    standardise: Literal["declared", "pooled", "summed", "server", "own", "none"] | None = None
    """Whose mean and spread a table or series is standardised by; unset: declared ones, or else all
    clients' pooled.
    """
    limits: Mapping[str, tuple[float, float] | Annotated[list[float], Len(2, 2)]] | None = None
    """Between which numbers each column's values are clipped in sums with noise,
    ``column = [low, high]``.
    """
    tokenizer: str | None = None
    """What makes token ids of texts: words (unset), bytes, or a tokenizer.json of Hugging Face's
    tokenizers.
    """
    vocabulary: Annotated[int, Interval(ge=2, le=10_000_000)] | None = None
    """How many token ids words are given; unset: 8,192."""
    length: Count | None = None
    """How many tokens of a text, or steps of a series, are read; unset: 64 tokens, and series as
    they are.
    """

    features_of: Mapping[str, Any] | None = None
    """A pretrained network, name, file and its fields, whose features are the examples, so that
    only a head trains.
    """

    @property
    def images(self) -> dict[str, Any]:
        """How encoded images are read: keywords of ``load_dataset``; without those that are
        unset.
        """
        keys = {"size": self.size, "mode": self.mode, "broken": self.broken}
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def form(self) -> dict[str, Any]:
        """What the keys say of what examples are made of, as fields of ``Form``; without those that
        are unset.
        """
        named = self.categorical
        both = named.items() if isinstance(named, Mapping) else ((name, ()) for name in named or ())
        keys = (
            "kind",
            "columns",
            "missing",
            "missing_values",
            "unlabelled",
            "split_column",
            "decimal",
            "tokenizer",
            "vocabulary",
            "length",
        )
        said = {
            **{key: getattr(self, key) for key in keys},
            "categorical": tuple((name, tuple(values)) for name, values in both) or None,
            "input": self.input_column,
            "marks": self.missing_marks,
        }
        return {key: value for key, value in said.items() if value is not None}


@dataclass(frozen=True)
class ClientsTable:
    """``[clients]``: which replies are accepted, how many are needed, who may fail, and who has
    another network.
    """

    quorum: PositiveShare = 0.5
    """The share of a stage's clients that must reply well; with fewer the run stops."""
    norm_limit: Positive = 10.0
    """A reply is refused if the norm of its parameters is over this many times that of the model
    sent.
    """
    models: tuple[str | dict[str, Any], ...] | dict[str, Any] = ()
    """The clients' networks where they are not the server's: in turn, by share, or by client."""

    max_examples: MostExamples = MAX_EXAMPLES
    """A reply is refused that claims more examples than this."""
    failures: Failures | None = None
    """Whether a client that fails stops the run; unset: it does, but is tolerated in a federation
    of machines.
    """
    attack: Attack | None = None
    """What hostile clients of a simulation do, to measure what it costs: turn or scale what they
    send, flip labels.
    """
    attackers: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """The share of clients that are hostile, drawn with the seed; unset: a tenth."""

    @property
    def rules(self) -> Rules:
        """Which replies the server accepts."""
        return Rules(self.quorum, self.norm_limit, self.max_examples, self.failures or "stop")

    @property
    def table(self) -> dict[str, Any]:
        """Its values; without ``max_examples`` where that is the default, as configs of before had
        none.
        """
        values = as_table(self)
        return {k: v for k, v in values.items() if k != "max_examples" or v != MAX_EXAMPLES}


@dataclass(frozen=True)
class FlowerTable:
    """``[flower]``, for ``engine = "flower"``: where clients are, whose data they train on, how
    long to wait.
    """

    federation: str = ""
    """The folder that fedstill deploy init made; empty: the clients are in this process."""
    grid: Literal["loopback", "ray"] = "loopback"
    """What carries messages where there is no federation: a loop in this process, or Ray."""
    data: Literal["partition", "sites"] = "partition"
    """Whose data clients train on: parts of the run's data set, or each site's own."""
    classes: tuple[str, ...] = ()
    """With data of the sites: the names of the classes."""
    shape: Annotated[tuple[Count, ...], Len(0, 3)] = ()
    """With data of the sites: an example's shape: an image's channels, height and width, or one or
    two numbers.
    """
    deadline: Positive = 600.0
    """Seconds that the server waits for the replies of a stage."""
    ttl: NonNegative = 0.0
    """Seconds that a message stays valid; 0: as long as the deadline."""
    retries: CountOrZero = 1
    """How often a message is sent again that was lost or not answered in time."""
    poll: Positive = 1.0
    """Seconds between two looks for replies."""
    max_mb: Count = 1024
    """The largest reply that the server takes, in megabytes."""
    vocabulary: Annotated[int, Interval(ge=2, le=10_000_000)] | None = None
    """With data of the sites: how many token ids a tokenizer's file gives; unset: told by
    data.tokenizer.
    """


# All tables that are records, those of outer packages among them, as the manifest lists them.


@functools.cache
def package_tables() -> Mapping[str, type[PackageTable]]:
    """The records of the tables that outer packages add, by the name of the table."""
    return {part.name: part.load() for part in manifest.config_tables()}


@functools.cache
def record_tables() -> Mapping[str, type[Any]]:
    """All tables that are records, in their order; the others name a registered thing, or are of
    stages.
    """
    inner: dict[str, type[Any]] = {
        "data": DataTable,
        "clients": ClientsTable,
        "flower": FlowerTable,
    }
    return with_package_tables(inner, package_tables())


def with_package_tables(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Values by table, with those of packages' tables behind the tables that they follow."""
    parts = [(part, outer[part.name]) for part in manifest.config_tables() if part.name in outer]
    return manifest.placed(inner, parts)
