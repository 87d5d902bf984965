"""The content of ``fedstill explain``: every setting and its origin, the work of a round, the cost
of measures, the examples and the networks.

All numbers are computed from the prepared run, without training. Only one step is tried, to find
out whether clients can be stacked.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.config.named_tables import NAME_KEYS, NAMED
from fedstill.config.overrides import origin_text
from fedstill.config.settings import Settings
from fedstill.config.stages import held_out_share
from fedstill.config.tables import StreamTable, TopKeys, record_tables
from fedstill.config.validation import key_descriptions
from fedstill.core import registry
from fedstill.core.codec import encoded_parts
from fedstill.core.descriptions import plain_sentences, sentences, summary
from fedstill.core.files import counted, flat
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Payload, Plan, Stage, World
from fedstill.core.rounds import expected_reply
from fedstill.core.stream import Stream
from fedstill.data.dataset import examples_text
from fedstill.measures.choice import measures
from fedstill.models import contract
from fedstill.running.evaluation import client_predictors_of
from fedstill.running.extensions import run_extensions
from fedstill.running.model_files import inputs_description
from fedstill.running.preparation import Prepared, suited_engine_of
from fedstill.running.world import examples_trained_on, first_state, local_steps

BYTES_PER_PARAMETER = 4
"""Models are stored as float32."""

SERVER_MODELS = 6
"""The assumed number of models in memory in addition to those of a round's clients: the server's
model and temporary copies of it.
"""

COST_OF_TRAINING = 3
"""The cost of training on an example, in forward passes. A backward pass costs two."""

EXPENSIVE_SHARE = 0.25
"""A measure that costs more than this share of training causes a warning."""

# ---- the work of a round -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoundWork:
    """The work of all clients in one round."""

    clients: int
    """The number of clients that take part, without the server."""
    examples: int
    """The number of training examples, summed over clients and stages."""
    trained_examples: int
    """The same number, where each epoch counts."""
    steps: int
    """The number of steps of the optimisers."""
    bytes_down: int
    """The bytes that the server sends."""
    bytes_up: int
    """The bytes that the server receives."""


def round_work(prepared: Prepared) -> RoundWork:
    """The work of round 1.

    A client counts if the method sends it a payload in the initial state.
    """
    settings = prepared.settings
    world = prepared.world
    state = first_state(settings.method, world)
    hooks = run_extensions(prepared).round_hooks

    clients: set[int] = set()
    bytes_down = 0
    bytes_up = 0
    examples = 0
    trained_examples = 0
    steps = 0
    for stage in settings.schedule(1, world):
        actor = settings.schedule.actor(stage)
        for client in stage.clients:
            payload = actor.payload_for_client(state, client, stage, world)
            if payload is None:
                continue
            if client != SERVER:  # the server sends nothing to itself
                reply = expected_reply(client, stage, world, settings.schedule, hooks)
                clients.add(client)
                bytes_down += payload.nbytes
                bytes_up += reply.nbytes
            client_examples = _stage_examples(prepared, client, stage)
            examples += client_examples
            plan = world.plans.get(stage.name)
            if plan is not None:
                trained_examples += examples_trained_on(plan, client_examples)
                steps += local_steps(plan, client_examples)

    return RoundWork(
        clients=len(clients),
        examples=examples,
        trained_examples=trained_examples,
        steps=steps,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
    )


def _stage_examples(prepared: Prepared, client: int, stage: Stage) -> int:
    """The number of examples of a client in a stage; 0 if only its site knows it."""
    if stage.view == "public" or client == SERVER:
        public = prepared.sites.public
        if public is None:
            return 0
        return len(public)
    if prepared.settings.on_sites:
        return 0
    return len(prepared.sites.view(client, stage).data)


# ---- the size of kept updates --------------------------------------------------------------------


def kept_update_bytes(prepared: Prepared) -> int:
    """The bytes of all files under ``updates/`` at the end of the run; 0 if it keeps no updates.

    The number is exact if every client replies, unless replies contain single numbers, whose
    digits are unknown before the run.
    """
    if not prepared.settings.keep_updates:
        return 0
    sizes = _UpdateSizes(prepared)
    total = 0
    for number in range(prepared.settings.rounds + 1):
        for stage in prepared.settings.schedule(number, prepared.world):
            total += sum(sizes.size(client, stage) for client in stage.clients)
    return total


class _UpdateSizes:
    """The sizes of clients' kept updates, in bytes.

    Runs have many rounds, and encoding is slow. A reply is therefore made once for each client and
    name of a stage, and only one reply of each form is encoded.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.schedule = prepared.settings.schedule
        self.world = prepared.world
        self.state = first_state(prepared.settings.method, prepared.world)
        self.hooks = run_extensions(prepared).round_hooks
        self._by_client: dict[tuple[int, str], int] = {}
        self._by_form: dict[Hashable, int] = {}

    def size(self, client: int, stage: Stage) -> int:
        """The size of one file; 0 for the server, and for a client without work in the stage."""
        if client == SERVER:
            return 0
        key = (client, stage.name)
        if key not in self._by_client:
            actor = self.schedule.actor(stage)
            if actor.payload_for_client(self.state, client, stage, self.world) is None:
                return 0
            reply = expected_reply(client, stage, self.world, self.schedule, self.hooks)
            self._by_client[key] = self._encoded_size(reply)
        return self._by_client[key]

    def _encoded_size(self, reply: Payload) -> int:
        form = _form(reply)
        if form not in self._by_form:
            self._by_form[form] = sum(map(len, encoded_parts(reply)))
        return self._by_form[form]


def _form(payload: Payload) -> Hashable:
    """Names, shapes and types of a payload's tensors, and its scalars.

    Payloads of equal form are encoded in the same number of bytes.
    """
    form: list[Hashable] = []
    for name, group in payload.items():
        if isinstance(group, Mapping):
            form += [(name, key, value.shape, value.dtype) for key, value in group.items()]
        elif isinstance(group, Tensor):
            form.append((name, group.shape, group.dtype))
        else:
            form.append((name, group))
    return tuple(form)


# ---- the estimate of a run -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """The work of round 1, and other properties to check before a long run."""

    work: RoundWork
    """The work of round 1."""
    stages: tuple[str, ...]
    """Descriptions of the stages of round 1."""
    parameters: int
    """The number of parameters of the server's model."""
    data_bytes: int
    """The bytes of the training set."""
    rounds: int
    """The number of rounds of the run."""
    engine: str
    """The run's engine, and why it suits."""
    answer: str
    """Whose model answers for the clients."""
    learning_rates: str
    """The learning rates of each stage."""
    examples_noun: str
    """The noun for examples: "images" or "examples"."""
    at_sites: bool
    """Whether only sites know the data."""
    kept_update_bytes: int
    """The bytes of all kept updates; 0 if the run keeps none."""

    @property
    def memory_for_models(self) -> int:
        """The approximate size of the models in memory during a round, in bytes."""
        return BYTES_PER_PARAMETER * self.parameters * (self.work.clients + SERVER_MODELS)

    def lines(self) -> list[tuple[str, str]]:
        """Names and values for human readers."""
        data = "known to the sites only"
        if not self.at_sites:
            data = bytes_text(self.data_bytes)
        return [
            ("stages a round", " → ".join(self.stages)),
            ("answer", self.answer),
            ("clients a round", f"{self.work.clients}"),
            *self._training_lines(),
            ("learning rates", self.learning_rates),
            ("parameters", f"{self.parameters:,}"),
            ("sent down a round", bytes_text(self.work.bytes_down)),
            ("sent up a round", bytes_text(self.work.bytes_up)),
            *self._kept_update_lines(),
            ("training data", data),
            ("engine", self.engine),
            ("memory for models", f"about {bytes_text(self.memory_for_models)}"),
        ]

    def _training_lines(self) -> list[tuple[str, str]]:
        """Examples and steps; empty if only the sites know their numbers of examples."""
        if self.at_sites:
            return []
        total_steps = self.work.steps * self.rounds
        return [
            ("examples a round", f"{self.work.examples:,}"),
            (f"{self.examples_noun} trained on a round", f"{self.work.trained_examples:,}"),
            ("optimiser steps a round", f"{self.work.steps:,}"),
            ("optimiser steps in all", f"about {total_steps:,} in {counted(self.rounds, 'round')}"),
        ]

    def _kept_update_lines(self) -> list[tuple[str, str]]:
        """The size of the kept updates; no line if the run keeps none."""
        if not self.kept_update_bytes:
            return []
        size = f"{bytes_text(self.kept_update_bytes)} ({self.kept_update_bytes:,} bytes)"
        return [(f"updates kept in {counted(self.rounds, 'round')}", size)]


def run_estimate(prepared: Prepared) -> RunEstimate:
    """The estimate of a run from its first round; other rounds differ in the sampled clients."""
    settings = prepared.settings
    world = prepared.world
    values = prepared.sites.train.values
    return RunEstimate(
        work=round_work(prepared),
        stages=_stage_texts(settings.schedule(1, world)),
        parameters=_parameter_count(world.initial(SERVER)),
        data_bytes=values.numel() * values.element_size(),
        rounds=settings.rounds,
        engine=_engine_text(prepared),
        answer=_answer_text(settings.method, world),
        learning_rates=_learning_rates_text(settings.plans, settings.rounds, world.stream),
        examples_noun=prepared.dataset.about.many_or_examples,
        at_sites=settings.on_sites,
        kept_update_bytes=kept_update_bytes(prepared),
    )


def bytes_text(count: float) -> str:
    """A number of bytes for human readers.

    >>> bytes_text(2_500_000)
    '2.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _parameter_count(params: Mapping[str, Tensor]) -> int:
    return sum(entry.numel() for entry in params.values())


def _stage_texts(stages: Sequence[Stage]) -> tuple[str, ...]:
    """A description of each stage, without repetitions.

    The stages of a chain, which visit one client after another, have one description together.
    """
    chain = [stage.name for stage in stages if stage.sequential]
    texts = []
    for stage in stages:
        if stage.sequential:
            texts.append(f"{len(chain)} × {chain[0]}, one client after another")
        elif stage.clients == (SERVER,):
            texts.append(f"{stage.name} (server)")
        else:
            texts.append(f"{stage.name} ({counted(len(stage.clients), 'client')})")
    return tuple(dict.fromkeys(texts))


def _engine_text(prepared: Prepared) -> str:
    """The run's engine, and the engine that ``auto`` would choose."""
    engine = prepared.settings.engine
    if prepared.settings.on_sites:
        return engine
    if prepared.settings.engine_reason:
        return f"{engine} ({prepared.settings.engine_reason})"
    choice = suited_engine_of(prepared)
    if engine == choice.engine:
        return f"{engine} ({choice.reason})"
    return f"{engine} (auto would choose {choice.engine}: {choice.reason})"


def _answer_text(method: Method, world: World) -> str:
    """Which model is the clients' answer, according to the method in its initial state."""
    if method.personal:
        return f"each client's own model, after {' or '.join(sorted(method.personal))}"
    state = first_state(method, world)
    predictors = method.predictors(state, world)
    if not client_predictors_of(method, predictors, state, world):
        return "the server's"
    return f"one of the server's {len(predictors)} models for each client"


def _learning_rates_text(plans: Mapping[str, Plan], rounds: int, stream: Stream) -> str:
    """The learning rates of all stages that train."""
    texts = []
    for stage, plan in plans.items():
        rates = [plan.lr_at(stream.within(number)) for number in range(1, rounds + 1)]
        texts.append(f"{stage} {_rates_text(rates)}")
    return "; ".join(texts)


def _rates_text(rates: Sequence[float]) -> str:
    """A stage's learning rate in round 1, in the round where it is highest, and in the last."""
    if len(set(rates)) == 1:
        return f"{rates[0]:.3g}"
    highest = rates.index(max(rates))
    indices = dict.fromkeys((0, highest, len(rates) - 1))  # in this order, without duplicates
    return ", ".join(f"{rates[index]:.3g} in round {index + 1}" for index in indices)


# ---- the cost of measures ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasureCost:
    """The cost of a measure."""

    name: str
    about: str
    """The measure's summary."""
    rounds: int
    """The number of measured rounds."""
    examples: int
    """The number of examples that it passes through a network in each measured round."""
    share: float | None
    """Its cost in the run, relative to the cost of training; None if only the sites know the cost
    of training.
    """

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """Its cells in the table for human readers."""
        share = "–"
        if self.share is not None:
            share = f"{100 * self.share:.0f} %"
        return self.name, self.about, f"{self.rounds}", f"{self.examples:,}", share

    @property
    def warning(self) -> str:
        """The warning about an expensive measure; empty if it is cheap."""
        if self.share is None or self.share <= EXPENSIVE_SHARE:
            return ""
        amount = f"{100 * self.share:.0f} % of the cost of training"
        if self.share > 1:
            amount = "more than training itself"
        remedy = "leave it out if you do not need it"
        if self.rounds > 1:
            remedy = "raise measure_every, or leave it out"
        return f"warning: measure {self.name} costs {amount}; {remedy}"


def measure_costs(prepared: Prepared, estimate: RunEstimate) -> list[MeasureCost]:
    """The cost of each measure of a run."""
    settings = prepared.settings
    work = estimate.work
    test_examples = len(prepared.sites.common_test or ())
    epochs = work.trained_examples // max(1, work.examples)
    training = COST_OF_TRAINING * work.trained_examples * estimate.rounds

    costs = []
    by_name = measures(settings.measure)
    for path, (name, measure) in zip(settings.measure, by_name.items(), strict=True):
        rounds = len(settings.measured_in)
        if measure.only_last:
            rounds = 1
        examples = measure.examples(test_examples, work.clients, work.examples)
        if measure.each_epoch:
            examples *= 1 + epochs  # also before the first epoch
        share = None
        if not estimate.at_sites:
            share = rounds * examples / max(1, training)
        about = summary(registry.lookup("measure", path))
        costs.append(
            MeasureCost(name=name, about=about, rounds=rounds, examples=examples, share=share)
        )
    return costs


# ---- settings and their origins ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResolvedValue:
    """A value of a run's settings."""

    key: str
    """The dotted key, such as ``method.beta``."""
    value: Any
    origin: str
    """``default``, a config file or ``command line``."""
    description: str
    """The description of the key; empty if there is none."""


def resolved_values(settings: Settings) -> list[ResolvedValue]:
    """All values of a run's settings."""
    return [
        ResolvedValue(
            key=key,
            value=value,
            origin=origin_text(key, settings.origins),
            description=key_description(settings, key),
        )
        for key, value in flat(settings.tree).items()
    ]


def key_description(settings: Settings, key: str) -> str:
    """The description of a dotted key: of a field, or of a table's key. Empty if there is none."""
    table, _, field = key.partition(".")
    if table == "plan":
        _, _, plan_field = field.partition(".")  # plan.STAGE.lr
        return sentences(Plan).get(plan_field, "")
    if table in NAMED:
        return _field_description(settings, table, field)
    tables = record_tables()
    if table not in tables:
        return sentences(TopKeys).get(table, "")
    record_field, _, _ = field.partition(".")
    return key_descriptions(tables[table]).get(record_field, "")


def _field_description(settings: Settings, table: str, field: str) -> str:
    """The description of a field in a table that names something registered, such as a method."""
    if table == "topology" and field == "clients":
        # The key belongs to no topology, because all topologies have it and partitions need it.
        return "The total number of clients."
    entry: registry.Entry = getattr(settings.named, table).entry
    if field == NAME_KEYS[table]:
        return summary(entry)
    fields = plain_sentences(entry.target)
    if table == "stream":
        fields = key_descriptions(StreamTable) | fields
    return fields.get(field, "")


# ---- examples and networks -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExampleCounts:
    """The numbers of training examples by their use, and the size of the common test set."""

    train: int
    """The size of the training set."""
    own_tests: int
    """The number of examples in clients' own test sets."""
    validation: int
    """The number of examples that clients hold out in every stage in which they train."""
    unassigned: int
    """The number of examples that no client has."""
    test: int
    """The size of the common test set."""

    @property
    def trained(self) -> int:
        """The number of examples that clients train on."""
        return self.train - self.own_tests - self.validation - self.unassigned

    @property
    def sentence(self) -> str:
        """The counts for human readers.

        >>> ExampleCounts(train=900, own_tests=225, validation=0, unassigned=0, test=50).sentence
        "675 of 900 examples to train on, 50 to test on; 225 are clients' own tests"
        """
        examples = counted(self.train, "example")
        if self.trained < self.train:
            examples = f"{self.trained:,} of {examples}"
        parts = [f"{examples} to train on"]
        if self.test:
            parts[0] += f", {self.test:,} to test on"
        if self.own_tests:
            parts.append(f"{self.own_tests:,} are clients' own tests")
        if self.validation:
            parts.append(f"{self.validation:,} are held out for validation")
        if self.unassigned:
            parts.append(f"{self.unassigned:,} belong to no client")
        return "; ".join(parts)


def example_counts(prepared: Prepared) -> ExampleCounts | None:
    """The examples of a run; None if only the sites know them."""
    sites = prepared.sites
    if sites.split is None:
        return None
    train = len(sites.train)
    assigned = len(np.unique(sites.split.positions))
    own_tests = 0
    # With own_test = "column", clients' tests are rows of the test split, not of the training set.
    if prepared.settings.named.partition.values.get("own_test") != "column":
        own_tests = sum(len(tests) for tests in sites.own_tests.values())
    return ExampleCounts(
        train=train,
        own_tests=own_tests,
        validation=_held_out(prepared),
        unassigned=train - assigned - own_tests,
        test=len(sites.common_test or ()),
    )


def _held_out(prepared: Prepared) -> int:
    """The number of examples that clients hold out in every stage in which they train."""
    plans = prepared.settings.plans
    share = held_out_share(plans)
    if not share:
        return 0
    stage = next(
        stage
        for stage, plan in plans.items()
        if (plan.epochs or plan.steps) and plan.validation == share
    )
    sites = prepared.sites
    clients = range(prepared.settings.clients)
    return sum(sites.size(client) - sites.training_size(client, stage) for client in clients)


def data_sentences(prepared: Prepared) -> list[str]:
    """Sentences about the form and number of the examples, and about omitted ones."""
    data = prepared.dataset
    description = inputs_description(prepared.sites.inputs, data.train.values)
    lines = [examples_text(description) or _image_sentence(data.input_shape)]
    counts = example_counts(prepared)
    if counts is not None:
        lines.append(counts.sentence)
    return [*lines, *prepared.notes]


def _image_sentence(shape: Sequence[int]) -> str:
    channels, *sides = shape
    size = "×".join(map(str, sides))
    return f"examples are images of {size} pixels, {counted(channels, 'channel')}"


@dataclass(frozen=True)
class NetworkSummary:
    """An architecture in a run."""

    label: str
    parameters: int
    """The number of parameters."""
    capabilities: str
    """Its capabilities, such as "features"."""


def network_summaries(prepared: Prepared) -> list[NetworkSummary]:
    """A summary of each architecture in a run, the server's first."""
    world = prepared.world
    specs = dict.fromkeys((world.server_model, *world.client_models))
    return [
        NetworkSummary(
            label=spec.label,
            parameters=_parameter_count(contract.initial(spec, 0)),
            capabilities=", ".join(contract.capabilities(spec).words),
        )
        for spec in specs
    ]
