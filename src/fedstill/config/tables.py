"""The tables of a config. A field is a key, with its type, range, default and description.

To add a key, add a field; ``config/compatibility.py`` says how the config.toml of other runs keeps
its bytes. The order of fields is the order of keys there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import Field

from fedstill import manifest
from fedstill.config.named_tables import NAMED
from fedstill.config.validation import PackageTable, Table, contradiction
from fedstill.core.fields import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    Seed,
    Share,
)
from fedstill.core.screen import MAX_EXAMPLES, Failures, MostExamples, Rules
from fedstill.core.stream import Head
from fedstill.data.form import Broken, Kind, Missing, Mode, Value
from fedstill.engines.precision import Precision
from fedstill.metrics.classification import ACCURACY

NO_STREAM = NAMED["stream"].default
"""The kind of a run with one task."""

SITES = "sites"
"""The kind of a run whose sites have data of their own, by task."""


class StreamTable(Table):
    """``[stream]``: the tasks of a run and their rounds, the clients in each, and what a change of
    task leaves behind. The kind that it names cuts the data.
    """

    tasks: Count = Field(default=5, description="How many tasks there are, one after another.")
    rounds: tuple[Count, ...] = Field(
        default=(),
        description="The rounds of each task; empty: equal shares of the run's.",
    )
    compose: Literal["tasks_first", "clients_first"] = Field(
        default="tasks_first",
        description="Whether the partition splits each task's data, or all data once, each "
        "client's part then being cut by task.",
    )
    past: Literal["gone", "kept"] = Field(
        default="gone",
        description="Whether clients lose the data of earlier tasks, or train on all that they "
        "have had: the upper bound.",
    )
    head: Head = Field(
        default="all",
        description="Outputs that take part in training: all, those of the classes seen so far, "
        "or those of the task's own classes.",
    )
    lr: Literal["restart", "go_on"] = Field(
        default="restart",
        description="Whether the learning rate's schedule begins anew with each task, or goes on "
        "over the run.",
    )
    lag: CountOrZero = Field(
        default=0,
        description="By how many rounds at most a client comes late to each task, drawn by key; "
        "0: none does.",
    )
    join: PositiveShare = Field(
        default=1.0,
        description="The share of clients that is there from the start; the others enter evenly "
        "over the tasks, drawn by key.",
    )
    stay: Share = Field(
        default=0.0,
        description="The share of clients that stays with its task at a change, drawn by key for "
        "each change.",
    )
    seed: Seed | None = Field(
        default=None,
        description="What tasks, lags, entries and stays are drawn from; unset: the run's seed.",
    )

    def starts(self, rounds: int) -> tuple[int, ...]:
        """The first round of each task. ``rounds``: those of the run. Raises WrongConfig if the
        tasks cannot share them.
        """
        if not self.rounds:
            if rounds % self.tasks:
                raise contradiction(
                    "rounds",
                    f"= {rounds} cannot be shared by stream.tasks = {self.tasks}",
                    "set rounds to a multiple, or write the rounds of each task in stream.rounds",
                )
            return tuple(range(1, rounds + 1, rounds // self.tasks))
        if len(self.rounds) != self.tasks:
            raise contradiction(
                "stream.rounds",
                f"has the rounds of {len(self.rounds)} tasks, and stream.tasks = {self.tasks}",
                "make them equal",
            )
        if sum(self.rounds) != rounds:
            raise contradiction(
                "stream.rounds",
                f"has {sum(self.rounds)} rounds in all, and rounds = {rounds}",
                "make them equal",
            )
        return tuple(accumulate(self.rounds[:-1], initial=1))

    def longest(self, rounds: int) -> int:
        """The rounds of a learning rate's schedule: those of the longest task if it restarts with
        each task, or else those of the run.
        """
        if self.lr != "restart":
            return rounds
        starts = (*self.starts(rounds), rounds + 1)
        return max(end - start for start, end in pairwise(starts))


Side = Annotated[int, Interval(ge=1, le=4096)]
Engine = Literal["serial", "pooled", "vectorised", "auto", "flower"]
Attack = Literal["sign_flip", "scaled", "label_flip"]
SelectionData = Literal["held_out", "public", "test"]
"""Data on which rounds are compared: held-out training examples, public ones with labels, tests."""
Change = Literal["crop", "crop_reflect", "flip", "cutout", "rotation"]
"""A way in which training images vary."""


@dataclass(frozen=True)
class TopKeys:
    """The keys outside all tables.

    Unlike the tables, this is a dataclass, since ``Experiment`` and ``Settings`` inherit from it.
    ``schema_of_record`` makes its schema, and the text below a field is its description.
    """

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
    metrics: tuple[str, ...] = ()
    """Metrics of models on test sets beside accuracy, such as auc or f1."""
    rank_by: str = ACCURACY
    """The metric by which comparisons are ordered, the best round is chosen and fields are
    tuned.
    """
    positive_class: str = ""
    """With two classes, the name of the positive one; empty: the last."""
    select_on: SelectionData | None = None
    """The data on which the best round is selected, and by which [stop] ends a run; unset: with
    [stop] held_out if clients hold data out, or else public, and without [stop] no round is.
    """


class DataTable(Table):
    """``[data]``: the data set and its columns, the sizes of its splits, the public set,
    normalisation and augmentation.
    """

    name: str = Field(
        default="digits",
        description="The data set: a registered name, a folder, a file of yours, or owner/name on "
        "the Hugging Face hub.",
    )
    folder: str = Field(
        default="",
        description="The folder that holds folders of data sets; empty: the one that "
        "FEDSTILL_DATA names.",
    )
    image_column: str = Field(
        default="",
        description="The column that holds the images; empty: it is looked for.",
    )
    label_column: str = Field(
        default="",
        description="The column that holds the labels; empty: it is looked for.",
    )
    size: Side | None = Field(
        default=None,
        description="Images are resized to so many pixels a side; unset: they stay as they are, "
        "and must be alike.",
    )
    mode: Mode | None = Field(
        default=None,
        description="Whether images are converted to grey or to rgb; unset: they stay as they "
        "are, and must be alike.",
    )
    broken: Broken | None = Field(
        default=None,
        description="What is done about images that cannot be decoded: refuse the data (unset), "
        "or skip them.",
    )
    augment: tuple[Change, ...] = Field(default=(), description="How training images are varied.")
    train_size: CountOrZero = Field(
        default=0,
        description="How many training examples are used, with the classes' shares kept; 0: all.",
    )
    test_size: CountOrZero = Field(
        default=0,
        description="How many test examples are used, with the classes' shares kept; 0: all.",
    )
    public: CountOrZero = Field(
        default=0,
        description="How many images are public: of the training set, which clients then lack, or "
        "of another source (0: all).",
    )
    public_from: str = Field(
        default="train",
        description="Where public images come from: train, noise, another data set, or a folder "
        "of images.",
    )
    public_labels: bool = Field(
        default=True,
        description="Whether the labels of public images are used: by measures, and in stages "
        "that say so (FedMD, FedGKD-VOTE).",
    )
    public_resize: bool = Field(
        default=False,
        description="Whether public images are brought to the size and channels of the run's "
        "images.",
    )
    mean: Annotated[tuple[float, ...], Len(1, 100_000)] | None = Field(
        default=None,
        description="What is subtracted: from pixels in [0, 1], a number a channel or one for "
        "all; else one a column or channel.",
    )
    std: Annotated[tuple[Positive, ...], Len(1, 100_000)] | None = Field(
        default=None,
        description="What they are divided by then; unset: the data set's spread, or what "
        "standardise says.",
    )
    held_out: Literal["last"] | None = Field(
        default=None,
        description="Which of its data a client holds out for validation: the last in the split's "
        "order; unset: drawn by seed.",
    )
    test_from: Literal["held_out"] | None = Field(
        default=None,
        description="What models are tested on: training examples that clients then lack, to "
        "choose fields by; unset: the test set.",
    )
    kind: Kind | None = Field(
        default=None,
        description="What examples are: image, table, vector, series or text; unset: told by the "
        "columns.",
    )
    columns: Annotated[tuple[str, ...], Len(1, 100_000)] | None = Field(
        default=None,
        description="The columns of a table; unset: all columns of numbers but the label and the "
        "owner.",
    )
    categorical: Mapping[str, tuple[Value, ...]] | tuple[str, ...] | None = Field(
        default=None,
        description="Columns whose values are names, each of which becomes a column of 0 and 1; "
        "and the names, if they are fixed.",
    )
    input_column: str | None = Field(
        default=None,
        description="The column that holds the texts, the vectors or the series; unset: it is "
        "looked for.",
    )
    missing: Missing | None = Field(
        default=None,
        description="What is done where a number is missing: refuse (unset), drop the row, or "
        "take the mean.",
    )
    missing_marks: bool | None = Field(
        default=None,
        description="Whether each column with missing numbers gets a column of 0 and 1 beside it "
        "that says where.",
    )
    missing_values: Annotated[tuple[str | int | float, ...], Len(1, 1000)] | None = Field(
        default=None,
        description="Texts and numbers that mean missing; they replace the marks of CSV files "
        "(NA, None, …) except the empty field.",
    )
    unlabelled: Literal["refuse", "drop"] | None = Field(
        default=None,
        description="What is done about examples without a label: refuse the data (unset), or "
        "leave them out.",
    )
    split_column: str | None = Field(
        default=None,
        description="The column of a table that says which split a row is in: train, validation "
        "or test.",
    )
    decimal: Literal[".", ","] | None = Field(
        default=None,
        description="The decimal mark of numbers in CSV files; unset: a point.",
    )
    standardise: Literal["declared", "pooled", "summed", "server", "own", "none"] | None = Field(
        default=None,
        description="Whose mean and spread a table or series is standardised by; unset: declared "
        "ones, or else all clients' pooled.",
    )
    limits: Mapping[str, tuple[float, float]] | None = Field(
        default=None,
        description="Between which numbers each column's values are clipped in sums with noise, "
        "column = [low, high].",
    )
    tokenizer: str | None = Field(
        default=None,
        description="What makes token ids of texts: words (unset), bytes, or a tokenizer.json of "
        "Hugging Face's tokenizers.",
    )
    vocabulary: Annotated[int, Interval(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="How many token ids words are given; unset: 8,192.",
    )
    length: Count | None = Field(
        default=None,
        description="How many tokens of a text, or steps of a series, are read; unset: 64 tokens, "
        "and series as they are.",
    )

    features_of: Mapping[str, Any] | None = Field(
        default=None,
        description="A pretrained network, name, file and its fields, whose features are the "
        "examples, so that only a head trains.",
    )

    @property
    def images(self) -> dict[str, Any]:
        """The keys about encoded images, as keywords of ``load_dataset``; without those that are
        unset.
        """
        values = {"size": self.size, "mode": self.mode, "broken": self.broken}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def categories(self) -> dict[str, tuple[Value, ...]]:
        """The names in each categorical column; none where the data decide them."""
        if self.categorical is None:
            return {}
        if isinstance(self.categorical, Mapping):
            return {column: tuple(names) for column, names in self.categorical.items()}
        return dict.fromkeys(self.categorical, ())

    @property
    def form(self) -> dict[str, Any]:
        """The keys about what examples are made of, as fields of ``Form``; without those that are
        unset.
        """
        values = {field: getattr(self, key) for field, key in _FORM_KEYS.items()}
        values["categorical"] = tuple(self.categories.items()) or None
        return {field: value for field, value in values.items() if value is not None}


_FORM_KEYS = {
    "kind": "kind",
    "columns": "columns",
    "input": "input_column",
    "missing": "missing",
    "marks": "missing_marks",
    "missing_values": "missing_values",
    "unlabelled": "unlabelled",
    "split_column": "split_column",
    "decimal": "decimal",
    "tokenizer": "tokenizer",
    "vocabulary": "vocabulary",
    "length": "length",
}
"""The key of ``[data]`` for each field of ``Form``; ``categorical`` has another type there."""


class ClientsTable(Table):
    """``[clients]``: the replies that the server accepts, how many it needs, clients that fail or
    attack, and their networks.
    """

    quorum: PositiveShare = Field(
        default=0.5,
        description="The share of a stage's clients that must reply well; with fewer the run "
        "stops.",
    )
    norm_limit: Positive = Field(
        default=10.0,
        description="A reply is refused if the norm of its parameters is over this many times "
        "that of the model sent.",
    )
    models: tuple[str | dict[str, Any], ...] | dict[str, Any] = Field(
        default=(),
        description="The clients' networks where they are not the server's: in turn, by share, or "
        "by client.",
    )

    max_examples: MostExamples = Field(
        default=MAX_EXAMPLES,
        description="A reply is refused that claims more examples than this.",
    )
    failures: Failures | None = Field(
        default=None,
        description="Whether a client that fails stops the run; unset: it does, but is tolerated "
        "in a federation of machines.",
    )
    attack: Attack | None = Field(
        default=None,
        description="What hostile clients of a simulation do, to measure what it costs: turn or "
        "scale what they send, flip labels.",
    )
    attackers: Annotated[float, Interval(gt=0, lt=1)] | None = Field(
        default=None,
        description="The share of clients that are hostile, drawn with the seed; unset: a tenth.",
    )

    @property
    def rules(self) -> Rules:
        """Which replies the server accepts."""
        return Rules(self.quorum, self.norm_limit, self.max_examples, self.failures or "stop")


class FlowerTable(Table):
    """``[flower]``: with ``engine = "flower"``, the places of clients, the data they train on, and
    how long to wait for them.
    """

    federation: str = Field(
        default="",
        description="The folder that fedstill deploy init made; empty: the clients are in this "
        "process.",
    )
    grid: Literal["loopback", "ray"] = Field(
        default="loopback",
        description="What carries messages where there is no federation: a loop in this process, "
        "or Ray.",
    )
    data: Literal["partition", "sites"] = Field(
        default="partition",
        description="Whose data clients train on: parts of the run's data set, or each site's own.",
    )
    classes: tuple[str, ...] = Field(
        default=(),
        description="With data of the sites: the names of the classes.",
    )
    shape: Annotated[tuple[Count, ...], Len(0, 3)] = Field(
        default=(),
        description="With data of the sites: an example's shape: an image's channels, height and "
        "width, or one or two numbers.",
    )
    deadline: Positive = Field(
        default=600.0,
        description="Seconds that the server waits for the replies of a stage.",
    )
    ttl: NonNegative = Field(
        default=0.0,
        description="Seconds that a message stays valid; 0: as long as the deadline.",
    )
    retries: CountOrZero = Field(
        default=1,
        description="How often a message is sent again that was lost or not answered in time.",
    )
    poll: Positive = Field(default=1.0, description="Seconds between two looks for replies.")
    max_mb: Count = Field(
        default=1024,
        description="The largest reply that the server takes, in megabytes.",
    )
    vocabulary: Annotated[int, Interval(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="With data of the sites: how many token ids a tokenizer's file gives; unset: "
        "told by data.tokenizer.",
    )


class StopTable(Table):
    """``[stop]``: when a run ends before its last round, by the metric ``rank_by`` on the data of
    ``select_on``.
    """

    patience: CountOrZero = Field(
        default=0,
        description="The number of rounds in a row without a better one after which the run "
        "stops; 0: it does not stop for this.",
    )
    min_delta: NonNegative = Field(
        default=0.0,
        description="By how much a round must be better to count as better for patience.",
    )
    target: float | None = Field(
        default=None,
        description="The value at which the run stops; unset: there is none.",
    )

    @property
    def is_active(self) -> bool:
        """Whether the run can end before its last round."""
        return self.patience > 0 or self.target is not None


@functools.cache
def package_tables() -> Mapping[str, type[PackageTable]]:
    """The classes of the tables that outer packages add, by the name of the table."""
    return {part.name: part.load() for part in manifest.config_tables()}


@functools.cache
def record_tables() -> Mapping[str, type[Table]]:
    """The classes of all tables with fixed keys, in their order. The other tables name a registered
    thing, which has keys of its own, or hold the plans of stages.
    """
    inner: dict[str, type[Table]] = {
        "data": DataTable,
        "clients": ClientsTable,
        "flower": FlowerTable,
        "stop": StopTable,
    }
    return with_package_tables(inner, package_tables())


def with_package_tables(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Values by table, with those of outer packages behind the tables that they follow."""
    parts = [(part, outer[part.name]) for part in manifest.config_tables() if part.name in outer]
    return manifest.placed(inner, parts)
