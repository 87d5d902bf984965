"""The tables of a config. A field is a key, with its type, range, default and description.

To add a key, add a field; ``config/settings.py`` says how the config.toml of other runs keeps
its bytes. The order of fields is the order of keys there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval, Len
from pydantic import Field

from fedstill import manifest
from fedstill.config.named_tables import NAMED
from fedstill.config.validation import Table, wrong_value
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
from fedstill.data.dataset import (
    CONFIG_KEYS,
    Broken,
    Kind,
    Missing,
    Mode,
    ReadingOptions,
    Side,
    Value,
)
from fedstill.engines.hardware import Precision
from fedstill.metrics.classification import ACCURACY, SelectionData

if TYPE_CHECKING:
    from torch import Tensor

    from fedstill.core.records import Examples, Plan
    from fedstill.core.rounds import Schedule
    from fedstill.data.client_split import ClientSplit

NO_STREAM = NAMED["stream"].default
"""The kind of a run with one task."""

SITES = "sites"
"""The kind of a run whose sites have data of their own, by task."""


class StreamTable(Table):
    """``[stream]``: the tasks of a run, such as their rounds, their clients, and what remains of
    earlier tasks. The key ``kind`` selects how the data are divided.
    """

    tasks: Count = Field(default=5, description="The number of tasks.")
    rounds: tuple[Count, ...] = Field(
        default=(),
        description="The number of rounds of each task. Empty: equal shares of the run's rounds.",
    )
    compose: Literal["tasks_first", "clients_first"] = Field(
        default="tasks_first",
        description="Whether the partition splits the data of each task, or splits all data once "
        "before each client's part is divided by task.",
    )
    past: Literal["gone", "kept"] = Field(
        default="gone",
        description="Whether clients lose the data of earlier tasks, or keep them (the upper "
        "bound).",
    )
    head: Head = Field(
        default="all",
        description="The outputs that are trained: all, those of all classes so far, or those of "
        "the task's classes.",
    )
    lr: Literal["restart", "go_on"] = Field(
        default="restart",
        description="Whether the learning-rate schedule restarts with each task, or continues "
        "over the run.",
    )
    lag: CountOrZero = Field(
        default=0,
        description="The largest delay of a client at the start of a task, in rounds; delays are "
        "drawn for each client. 0: no delay.",
    )
    join: PositiveShare = Field(
        default=1.0,
        description="The share of clients that take part from the start. The others join evenly "
        "over the tasks, in random order.",
    )
    stay: Share = Field(
        default=0.0,
        description="The share of clients that keep their old task at a change of task, drawn for "
        "each change.",
    )
    seed: Seed | None = Field(
        default=None,
        description="The seed of tasks, lag, join and stay. Unset: the run's seed.",
    )

    def starts(self, rounds: int) -> tuple[int, ...]:
        """The first round of each task. ``rounds``: the number of rounds of the run. Raises
        WrongConfig if it cannot be divided by the number of tasks.
        """
        if not self.rounds:
            if rounds % self.tasks:
                raise wrong_value(
                    "rounds",
                    f"= {rounds} is not a multiple of stream.tasks = {self.tasks}",
                    "set a multiple, or set the rounds of each task in stream.rounds",
                )
            return tuple(range(1, rounds + 1, rounds // self.tasks))
        if len(self.rounds) != self.tasks:
            raise wrong_value(
                "stream.rounds",
                f"has the rounds of {len(self.rounds)} tasks, but stream.tasks = {self.tasks}",
                "make them equal",
            )
        if sum(self.rounds) != rounds:
            raise wrong_value(
                "stream.rounds",
                f"has {sum(self.rounds)} rounds in total, but rounds = {rounds}",
                "make them equal",
            )
        return tuple(accumulate(self.rounds[:-1], initial=1))

    def lr_schedule_rounds(self, rounds: int) -> int:
        """The number of rounds of the learning-rate schedule: that of the longest task if the
        schedule restarts with each task, or that of the run.
        """
        if self.lr != "restart":
            return rounds
        starts = (*self.starts(rounds), rounds + 1)
        return max(end - start for start, end in pairwise(starts))


Engine = Literal["serial", "pooled", "vectorised", "auto", "flower"]
Attack = Literal["sign_flip", "scaled", "label_flip"]
Change = Literal["crop", "crop_reflect", "flip", "cutout", "rotation"]
"""A step of augmentation."""


@dataclass(frozen=True)
class TopKeys:
    """The keys outside all tables.

    Unlike the tables, this is a dataclass, since ``Experiment`` and ``Settings`` inherit from it.
    ``schema_of_record`` makes its schema, and the text below a field is its description.
    """

    seed: Seed = 0
    """The seed of all random numbers of the run."""
    rounds: Count = 20
    """The number of rounds."""
    engine: Engine = "auto"
    """How the clients of a stage are trained: in parallel threads, one after another, stacked, or
    over Flower; auto: in threads or stacked, by the cost of a step.
    """
    threads: tuple[Count, Count] | Count | Literal["auto"] = "auto"
    """The number of torch threads of each client in a stage with several clients, and of a single
    client, a stack and the server; auto: one.
    """
    device: str = "cpu"
    """The device on which networks are trained: `cpu`, `cuda`, `cuda:1` (the second GPU), or `mps`
    (untested); auto: a CUDA card if there is one.
    """
    precision: Precision = "fp32"
    """The number format of training. Weights, the optimiser and evaluation use float32."""
    teacher_precision: Literal["bf16"] | None = None
    """The number format of frozen teachers' passes; by default, that of training. With bf16, the
    weights and the loss stay in float32.
    """
    reuse: bool = True
    """Whether fedstill takes models that clients train alone from a cache, if training would give
    the same bits.
    """
    start_from: str = ""
    """The directory of a run, or a model file, whose weights the run starts from."""
    start_from_partial: bool = False
    """Whether start_from may name a model of another network: matching entries are loaded, and the
    others are initialised.
    """
    train_only: tuple[str, ...] = ()
    """The entries of the network that are trained and sent. All others keep their values from
    start_from. Empty: all are trained.
    """
    measure: tuple[str, ...] = ("local",)
    """The measures of the run, in addition to accuracy and forgetting."""
    measure_every: Count = 10
    """The number of rounds between two measurements. The last round of the run, and of each task,
    is also measured.
    """
    keep_checkpoints_every: Count | None = None
    """The number of rounds between two checkpoints that are kept until the end, for `fedstill
    why`. Unset: only those of the last three stages are kept.
    """
    keep_updates: bool = False
    """Whether every accepted reply is stored, in updates/ of the run directory."""
    metrics: tuple[str, ...] = ()
    """Metrics on test sets in addition to accuracy, such as auc or f1."""
    rank_by: str = ACCURACY
    """The metric that orders comparisons, selects the best round, and is optimised in tuning."""
    positive_class: str = ""
    """The name of the positive class, with two classes. Empty: the last class."""
    engine_reason: str = ""
    """Why auto chose the engine; fedstill writes it to a run's config.toml."""
    select_on: SelectionData | None = None
    """The data on which rounds are compared, to select the best round and for [stop]. Unset: with
    [stop], held_out if clients hold out data, else public. Unset without [stop]: no round is
    selected.
    """


class DataTable(Table):
    """``[data]``: the data set and its columns, the sizes of its splits, the public set,
    normalisation and augmentation.
    """

    name: str = Field(
        default="digits",
        description="The data set: a registered name, a folder, a file, or owner/name on the "
        "Hugging Face hub.",
    )
    folder: str = Field(
        default="",
        description="The folder that contains the folders of data sets. Empty: the value of the "
        "environment variable FEDSTILL_DATA.",
    )
    image_column: str = Field(
        default="",
        description="The column of images. Empty: the only column with images.",
    )
    label_column: str = Field(
        default="",
        description="The column of labels. Empty: label, or a column that declares classes.",
    )
    size: Side | None = Field(
        default=None,
        description="The number of pixels per side to which images are resized. Unset: images are "
        "not resized, and must have the same size.",
    )
    mode: Mode | None = Field(
        default=None,
        description="The mode to which images are converted, grey or rgb. Unset: images are not "
        "converted, and must have the same mode.",
    )
    broken: Broken | None = Field(
        default=None,
        description="How to treat images that cannot be decoded. Unset: they are an error; skip: "
        "they are left out.",
    )
    augment: tuple[Change, ...] = Field(
        default=(), description="The augmentations of training images."
    )
    train_size: CountOrZero = Field(
        default=0,
        description="The number of training examples that are used, stratified by class; 0: all.",
    )
    test_size: CountOrZero = Field(
        default=0,
        description="The number of test examples that are used, stratified by class; 0: all.",
    )
    public: CountOrZero = Field(
        default=0,
        description="The number of public images. They are removed from the training set, or come "
        "from another source (0: all of them).",
    )
    public_from: str = Field(
        default="train",
        description="The source of public images: train, noise, another data set, or a folder of "
        "images.",
    )
    public_labels: bool = Field(
        default=True,
        description="Whether measures and the stages that need them (FedMD, FedGKD-VOTE) may use "
        "the labels of public images.",
    )
    public_resize: bool = Field(
        default=False,
        description="Whether public images are converted to the size and the channels of the "
        "run's images.",
    )
    mean: Annotated[tuple[float, ...], Len(1, 100_000)] | None = Field(
        default=None,
        description="The numbers that are subtracted from inputs: for images (pixels in [0, 1]) "
        "one per channel or one for all, otherwise one per column or channel.",
    )
    std: Annotated[tuple[Positive, ...], Len(1, 100_000)] | None = Field(
        default=None,
        description="The numbers by which inputs are then divided. Unset: the standard deviation "
        "of the data set, or the one that standardise computes.",
    )
    held_out: Literal["last"] | None = Field(
        default=None,
        description="The examples that a client holds out for validation. last: the last ones in "
        "the order of the split; unset: random ones.",
    )
    test_from: Literal["held_out"] | None = Field(
        default=None,
        description="The examples on which models are tested. held_out: training examples that "
        "are taken from the clients, for tuning; unset: the test set.",
    )
    kind: Kind | None = Field(
        default=None,
        description="The kind of examples: image, table, vector, series or text. Unset: inferred "
        "from the columns.",
    )
    columns: Annotated[tuple[str, ...], Len(1, 100_000)] | None = Field(
        default=None,
        description="The input columns of a table. Unset: all columns of numbers except the label "
        "and the owner.",
    )
    categorical: Mapping[str, tuple[Value, ...]] | tuple[str, ...] | None = Field(
        default=None,
        description="The columns whose values are categories; each category becomes a column of 0 "
        "and 1. A table also lists the categories.",
    )
    input_column: str | None = Field(
        default=None,
        description="The column of texts, vectors or series. Unset: the only suitable column.",
    )
    missing: Missing | None = Field(
        default=None,
        description="How to treat missing values. Unset: they are an error; drop: the row is left "
        "out; mean: they are replaced by the mean.",
    )
    missing_marks: bool | None = Field(
        default=None,
        description="Whether a column of 0 and 1 is added for each column with missing values, to "
        "mark them.",
    )
    missing_values: Annotated[tuple[str | int | float, ...], Len(1, 1000)] | None = Field(
        default=None,
        description="The texts and numbers that mark missing values. They replace the usual marks "
        "in CSV files (NA, None, …), except the empty field. Numbers do not apply to the columns "
        "of labels, owners and splits.",
    )
    unlabelled: Literal["refuse", "drop"] | None = Field(
        default=None,
        description="How to treat examples without a label. Unset: they are an error; drop: they "
        "are left out.",
    )
    split_column: str | None = Field(
        default=None,
        description="The column of a table that contains the split of each row: train, validation "
        "or test.",
    )
    decimal: Literal[".", ","] | None = Field(
        default=None,
        description="The decimal mark of numbers in CSV files. Unset: a point.",
    )
    standardise: Literal["declared", "pooled", "summed", "server", "own", "none"] | None = Field(
        default=None,
        description="The source of the mean and standard deviation that standardise tables and "
        "series. Unset: declared values if there are any, else pooled over all clients.",
    )
    limits: Mapping[str, tuple[float, float]] | None = Field(
        default=None,
        description="The limits to which values are clipped in sums with noise, for each column: "
        "column = [low, high].",
    )
    tokenizer: str | None = Field(
        default=None,
        description="The tokenizer of texts: words (the default), bytes, or a tokenizer.json of "
        "Hugging Face's tokenizers.",
    )
    vocabulary: Annotated[int, Interval(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="The number of token ids of the tokenizer words. Unset: 8,192.",
    )
    length: Count | None = Field(
        default=None,
        description="The number of tokens of a text, or of steps of a series, that fedstill "
        "reads. Unset: 64 tokens, and all steps.",
    )

    features_of: Mapping[str, Any] | None = Field(
        default=None,
        description="A pretrained network (name, file and its fields) that replaces the examples "
        "by its features, so that only a head is trained.",
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
        """The categories of each categorical column; empty if they are read from the data."""
        if self.categorical is None:
            return {}
        if isinstance(self.categorical, Mapping):
            return {column: tuple(names) for column, names in self.categorical.items()}
        return dict.fromkeys(self.categorical, ())

    @property
    def form(self) -> dict[str, Any]:
        """The set keys about the form of examples, as fields of ``ReadingOptions``."""
        values = {}
        for field in fields(ReadingOptions):
            key = CONFIG_KEYS.get(field.name, field.name)
            values[field.name] = self.table.get(key)
        values["categorical"] = tuple(self.categories.items()) or None
        return {field: value for field, value in values.items() if value is not None}


class ClientsTable(Table):
    """``[clients]``: which replies the server accepts, how many it needs, clients that fail or
    attack, and the clients' networks.
    """

    quorum: PositiveShare = Field(
        default=0.5,
        description="The share of a stage's clients whose replies must be accepted. With fewer, "
        "the run stops.",
    )
    norm_limit: Positive = Field(
        default=10.0,
        description="The server refuses a reply if the norm of its parameters exceeds the norm of "
        "the sent model by more than this factor.",
    )
    models: tuple[str | dict[str, Any], ...] | dict[str, Any] = Field(
        default=(),
        description="The networks of clients that differ from the server's: assigned in turn, by "
        "share, or by client.",
    )

    max_examples: MostExamples = Field(
        default=MAX_EXAMPLES,
        description="The server refuses a reply that claims more examples than this.",
    )
    failures: Failures | None = Field(
        default=None,
        description="Whether a failing client stops the run or is tolerated. Unset: it is "
        "tolerated only in a deployment.",
    )
    attack: Attack | None = Field(
        default=None,
        description="The attack of hostile clients in a simulation: they flip the sign of their "
        "change, scale it, or flip labels.",
    )
    attackers: Annotated[float, Interval(gt=0, lt=1)] | None = Field(
        default=None,
        description="The share of hostile clients, which are drawn with the seed. Unset: a tenth.",
    )

    @property
    def rules(self) -> Rules:
        """Which replies the server accepts."""
        return Rules(self.quorum, self.norm_limit, self.max_examples, self.failures or "stop")


class FlowerTable(Table):
    """``[flower]``: settings of ``engine = "flower"``, such as where clients run, their data, and
    timeouts.
    """

    federation: str = Field(
        default="",
        description="The folder that `fedstill deploy init` created. Empty: clients run in this "
        "process.",
    )
    grid: Literal["loopback", "ray"] = Field(
        default="loopback",
        description="The transport of messages without a federation: a loop in this process, or "
        "Ray.",
    )
    data: Literal["partition", "sites"] = Field(
        default="partition",
        description="The data of clients: parts of the run's data set, or the data of their sites.",
    )
    classes: tuple[str, ...] = Field(
        default=(),
        description="The names of the classes, if sites have data of their own.",
    )
    shape: Annotated[tuple[Count, ...], Len(0, 3)] = Field(
        default=(),
        description="The shape of an example, if sites have data of their own: an image's "
        "channels, height and width, or one or two numbers.",
    )
    deadline: Positive = Field(
        default=600.0,
        description="The seconds that the server waits for the replies of a stage.",
    )
    ttl: NonNegative = Field(
        default=0.0,
        description="The seconds for which a message is valid. 0: as long as the deadline.",
    )
    retries: CountOrZero = Field(
        default=1,
        description="How often the server repeats a message that is lost or not answered in time.",
    )
    poll: Positive = Field(default=1.0, description="The seconds between two requests for replies.")
    max_mb: Count = Field(
        default=1024,
        description="The maximum size of a reply, in megabytes. Usually, the expected size of the "
        "reply is a smaller limit.",
    )
    test_every: CountOrZero = Field(
        default=1,
        description="The number of rounds between two tests of the global model on the sites' own "
        "test sets, if sites have data of their own. The last round is also tested. 0: no tests.",
    )
    vocabulary: Annotated[int, Interval(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="The number of token ids of a tokenizer file, if sites have data of their "
        "own. Unset: that of data.tokenizer.",
    )

    def is_deployed(self, engine: str) -> bool:
        """Whether the clients are machines of a federation, not parts of a simulation."""
        return engine == "flower" and bool(self.federation)

    def is_on_sites(self, engine: str) -> bool:
        """Whether each client trains on data of its site."""
        return engine == "flower" and self.data == "sites"


class StopTable(Table):
    """``[stop]``: when a run stops early, by the metric ``rank_by`` on the data of
    ``select_on``.
    """

    patience: CountOrZero = Field(
        default=0,
        description="The number of successive rounds without improvement after which the run "
        "stops. 0: this rule is disabled.",
    )
    min_delta: NonNegative = Field(
        default=0.0,
        description="Only an improvement larger than this counts for patience.",
    )
    target: float | None = Field(
        default=None,
        description="The value of the metric at which the run stops. Unset: no target.",
    )

    @property
    def is_active(self) -> bool:
        """Whether the run can end before its last round."""
        return self.patience > 0 or self.target is not None


class PackageTable(Table):
    """A table of a config that belongs to an outer package. With its defaults, a run is as it
    would be without the package.
    """

    @property
    def top_defaults(self) -> Mapping[str, Any]:
        """The defaults that this table gives to keys outside all tables."""
        return {}

    @property
    def exchange_each_round(self) -> bool:
        """Whether every round is a complete exchange between clients, which is measured."""
        return False

    @property
    def hides_client_models(self) -> bool:
        """Whether the server sees no single client's model."""
        return False

    @property
    def is_optional(self) -> bool:
        """Whether a run's config leaves this table out, because it has its defaults.

        The table of a package that is newer than stored runs does so: it must not change their
        configs.
        """
        return False

    def check_new_run(self) -> None:
        """Raise WrongConfig for a table with which no run can begin at its first round."""

    @property
    def stage_plans(self) -> Mapping[str, Plan]:
        """The default plans of the stages that the package adds to the schedule."""
        return {}

    def changed_schedule(self, schedule: Schedule) -> Schedule:
        """The schedule of a run, with the stages that the package adds or leaves out."""
        return schedule

    @property
    def removes_examples(self) -> bool:
        """Whether ``changed_split`` removes examples."""
        return False

    def changed_split(self, split: ClientSplit, labels: Tensor) -> ClientSplit:
        """Which client has which training examples. ``labels``: (n,), of all training examples."""
        return split

    def changed_public(self, public: Examples) -> Examples:
        """The public set. Labels are -1 where they are unknown."""
        return public


@functools.cache
def package_tables() -> Mapping[str, type[PackageTable]]:
    """The classes of the tables that outer packages add, by the name of the table."""
    return {part.name: part.load() for part in manifest.config_tables()}


@functools.cache
def record_tables() -> Mapping[str, type[Table]]:
    """The classes of all tables with fixed keys, in order. Other tables name a registered object
    with its own keys, or contain the plans of stages.
    """
    inner: dict[str, type[Table]] = {
        "data": DataTable,
        "clients": ClientsTable,
        "flower": FlowerTable,
        "stop": StopTable,
    }
    return with_package_tables(inner, package_tables())


def with_package_tables(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Values by table, with each table of an outer package behind the table that it follows."""
    parts = [(part, outer[part.name]) for part in manifest.config_tables() if part.name in outer]
    return manifest.placed(inner, parts)
