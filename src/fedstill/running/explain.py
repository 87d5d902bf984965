"""What a run will do, computed before it starts: stages, steps, bytes, memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.config.named_tables import NAME_KEYS, NAMED
from fedstill.config.overrides import Origins, flat
from fedstill.config.settings import Settings
from fedstill.config.tables import StreamTable, TopKeys, record_tables
from fedstill.config.validation import descriptions
from fedstill.core import docstrings, registry
from fedstill.core.codec import encode
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Payload, Plan, Stage, World
from fedstill.core.rounds import expected_reply
from fedstill.core.stream import Stream
from fedstill.data.dataset import examples_text
from fedstill.measures.choice import measures
from fedstill.models import contract
from fedstill.running.evaluation import client_predictors_of
from fedstill.running.extensions import run_extensions
from fedstill.running.preparation import Prepared
from fedstill.running.world import choose_engine

# What the clients of a round do: examples, steps of the optimiser, bytes. Nothing is trained to
# know it.


@dataclass(frozen=True)
class RoundWork:
    """A round's clients, their examples, those trained on (each epoch counts), their steps, and
    what is sent.
    """

    clients: int
    examples: int
    trained: int
    steps: int
    bytes_down: int
    bytes_up: int


def round_work(prepared: Prepared, number: int = 1) -> RoundWork:
    """The work of a round, from 1. Rounds differ by who is drawn, and by whom the method addresses
    at the start.
    """
    settings, world = prepared.settings, prepared.world
    state = settings.method.initial_state(world)
    hooks = run_extensions(prepared).round_hooks
    bytes_down = bytes_up = steps = examples = trained = 0
    acting: set[int] = set()
    for stage in settings.schedule(number, world):
        for client in stage.clients:
            payload = settings.schedule.actor(stage).payload_for_client(state, client, stage, world)
            if payload is None:
                continue
            acting.add(client)
            if client != SERVER:  # what the server computes itself is not sent
                reply = expected_reply(client, stage, world, settings.schedule, hooks)
                bytes_down += payload.nbytes
                bytes_up += reply.nbytes
            count = _examples(prepared, client, stage)
            own_steps = local_steps(prepared, stage, count)
            examples += count
            steps += own_steps
            trained += _trained(prepared, stage, count, own_steps)
    clients = len(acting - {SERVER})
    return RoundWork(clients, examples, trained, steps, bytes_down, bytes_up)


def kept_update_bytes(prepared: Prepared) -> int:
    """The bytes of the files under ``updates/`` after the whole run; 0 if it keeps no updates.

    Exact if all clients reply, and if no reply holds bare numbers, whose digits are not known yet.
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
    """The size of each client's kept update. A reply is made once for a client and the stages of a
    name, and encoded once for all replies of the same form.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.schedule = prepared.settings.schedule
        self.world = prepared.world
        self.state = prepared.settings.method.initial_state(prepared.world)
        self.hooks = run_extensions(prepared).round_hooks
        self._by_client: dict[tuple[int, str], int] = {}
        self._by_form: dict[Hashable, int] = {}

    def size(self, client: int, stage: Stage) -> int:
        """The bytes of one file; 0 for the server, and for a client that has no work."""
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
            self._by_form[form] = len(encode(reply))
        return self._by_form[form]


def _form(payload: Payload) -> Hashable:
    """What the size of an encoded payload depends on: names, shapes and types, and scalars."""
    form: list[Hashable] = []
    for name, group in payload.items():
        if isinstance(group, Mapping):
            form += [(name, key, value.shape, value.dtype) for key, value in group.items()]
        elif isinstance(group, Tensor):
            form.append((name, group.shape, group.dtype))
        else:
            form.append((name, group))
    return tuple(form)


def local_steps(prepared: Prepared, stage: Stage, examples: int) -> int:
    """How many steps of the optimiser a client of so many examples does in a stage; 0 where nothing
    is trained.
    """
    plan = prepared.world.plans.get(stage.name)
    if plan is None:
        return 0
    return plan.steps or plan.epochs * math.ceil(examples / plan.batch)


def _examples(prepared: Prepared, client: int, stage: Stage) -> int:
    if stage.view == "public" or client == SERVER:
        return len(prepared.sites.public or Payload())
    return 0 if prepared.settings.on_sites else len(prepared.sites.view(client, stage).data)


def _trained(prepared: Prepared, stage: Stage, examples: int, steps: int) -> int:
    plan = prepared.world.plans.get(stage.name)
    return (
        0
        if plan is None
        else plan.epochs * examples
        if not plan.steps
        else steps * min(plan.batch, examples)
    )


@dataclass(frozen=True)
class Arithmetic(RoundWork):
    """One round's work, and what else a reader can check before hours are spent."""

    stages: tuple[str, ...]
    parameters: int
    data_bytes: int
    rounds: int
    engine: str
    answer: str
    rates: str
    many: str = "images"
    at_sites: bool = False
    kept_update_bytes: int = 0

    def lines(self) -> list[tuple[str, str]]:
        """Names and values, as a person reads them."""
        training = [
            ("examples a round", f"{self.examples:,}"),
            (f"{self.many} trained on a round", f"{self.trained:,}"),
            ("optimiser steps a round", f"{self.steps:,}"),
            (
                "optimiser steps in all",
                f"about {self.steps * self.rounds:,} in {self.rounds} rounds",
            ),
        ]
        data = human(self.data_bytes)
        if self.at_sites:
            training = []
            data = "known to the sites alone"
        kept_updates = []
        if self.kept_update_bytes:
            size = f"{human(self.kept_update_bytes)} ({self.kept_update_bytes:,} bytes)"
            kept_updates = [(f"updates kept in {self.rounds} rounds", size)]
        return [
            ("stages a round", " → ".join(self.stages)),
            ("answer", self.answer),
            ("clients a round", f"{self.clients}"),
            *training,
            ("learning rates", self.rates),
            ("parameters", f"{self.parameters:,}"),
            ("sent down a round", human(self.bytes_down)),
            ("sent up a round", human(self.bytes_up)),
            *kept_updates,
            ("training data", data),
            ("engine", self.engine),
            ("memory for models", f"about {human(4 * self.parameters * (self.clients + 6))}"),
        ]


def arithmetic(prepared: Prepared) -> Arithmetic:
    """The arithmetic of round 1. The run is ``rounds`` times this, except for sampling."""
    settings, world = prepared.settings, prepared.world
    return Arithmetic(
        **vars(round_work(prepared)),
        stages=_shown(settings.schedule(1, world)),
        parameters=sum(v.numel() for v in world.initial(SERVER).values()),
        data_bytes=prepared.sites.train.values.numel() * prepared.sites.train.values.element_size(),
        rounds=settings.rounds,
        engine=_engine(prepared),
        answer=_answer(settings.method, world),
        rates=_rates(settings.plans, settings.rounds, world.stream),
        many=prepared.dataset.about.many_or_examples,
        at_sites=settings.on_sites,
        kept_update_bytes=kept_update_bytes(prepared),
    )


@dataclass(frozen=True)
class Cost:
    """What a measure costs: in how many rounds it looks, how many examples it runs through a
    network in each, and these as a share of the run's training, of which each example and epoch
    counts as three; None where sites know it alone.
    """

    name: str
    about: str
    rounds: int
    looked: int
    share: float | None

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """As a person reads it."""
        share = "–" if self.share is None else f"{100 * self.share:.0f} %"
        return self.name, self.about, f"{self.rounds}", f"{self.looked:,}", share


def costs(prepared: Prepared, one_round: Arithmetic) -> list[Cost]:
    """The cost of each measure of a run."""
    settings = prepared.settings
    test_set = prepared.sites.common_test
    test_examples = len(test_set) if test_set else 0
    epochs = one_round.trained // max(1, one_round.examples)
    # An example in training costs a forward pass and a backward pass, which takes twice as long.
    passes_in_training = 3 * one_round.trained * one_round.rounds
    result = []
    named = measures(settings.measure)
    for path, (name, measure) in zip(settings.measure, named.items(), strict=True):
        rounds = 1 if measure.only_last else len(settings.measured_in)
        examples = measure.examples(test_examples, one_round.clients, one_round.examples)
        if measure.each_epoch:
            examples *= 1 + epochs
        share = None
        if not one_round.at_sites:
            share = rounds * examples / max(1, passes_in_training)
        about = registry.lookup("measure", path).summary
        result.append(Cost(name, about, rounds=rounds, looked=examples, share=share))
    return result


def _engine(prepared: Prepared) -> str:
    """Which engine carries the run out, and what the cost model says."""
    own = prepared.settings.engine
    if prepared.settings.on_sites:
        return own
    choice = choose_engine(prepared.settings, prepared.world, len(prepared.sites.train))
    if own == choice.engine:
        return f"{own} ({choice.reason})"
    return f"{own} (auto would take {choice.engine}: {choice.reason})"


def resolved_values(settings: Settings) -> list[tuple[str, Any, str]]:
    """(dotted key, value, origin) of every resolved value; the origin is the default, the file or
    the command line.
    """
    return [(k, v, _origin(k, settings.origins)) for k, v in flat(settings.tree).items()]


def about_key(settings: Settings, key: str) -> str:
    """What a dotted key is, as the code says it below the field; empty where nothing is said of
    it.
    """
    table, _, field = key.partition(".")
    if table == "plan":
        return docstrings.sentences(Plan).get(field.partition(".")[2], "")
    if table in NAMED:
        if key == "topology.clients":  # no topology's own: a partition needs it too
            return "Clients in all."
        entry: registry.Entry = getattr(settings.named, table).entry
        if field == NAME_KEYS[table]:
            return entry.summary
        fields = entry.sentences
        if table == "stream":
            fields = descriptions(StreamTable) | fields
        return fields.get(field, "")
    if table not in record_tables():
        return docstrings.sentences(TopKeys).get(table, "")
    return descriptions(record_tables()[table]).get(field.partition(".")[0], "")


def human(count: float) -> str:
    """A number of bytes as a person reads it.

    >>> human(2_500_000)
    '2.5 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _origin(key: str, origins: Origins) -> str:
    if key in origins:
        return str(origins[key])
    table = key.partition(".")[0]
    name_key = NAME_KEYS.get(table, "name")
    candidates = []
    if key == f"{table}.{name_key}":  # method = "fedntd" stands for method.name
        candidates.append(table)
    if key.startswith("plan."):  # plan.lr stands for that of every stage
        candidates.append("plan." + key.rpartition(".")[2])
    for candidate in candidates:
        if candidate in origins:
            return str(origins[candidate])
    return "default"


def _answer(method: Method, world: World) -> str:
    """Whose model answers for the clients, as the method says it of the state before round 1."""
    if method.personal:
        return f"each client's own model, after {' or '.join(sorted(method.personal))}"
    state = method.initial_state(world)
    predictors = method.predictors(state, world)
    if not client_predictors_of(method, predictors, state, world):
        return "the server's"
    return f"each client answers with one of {len(predictors)} server models"


def _rates(plans: Mapping[str, Plan], rounds: int, stream: Stream) -> str:
    """Each stage's learning rate in round 1, in the round where it is highest, and in the last."""
    said = []
    for stage, plan in plans.items():
        rates = [plan.lr_at(stream.within(r)) for r in range(1, rounds + 1)]
        turns = (
            dict.fromkeys((0, rates.index(max(rates)), rounds - 1)) if len(set(rates)) > 1 else ()
        )
        each = ", ".join(f"{rates[i]:.3g} in round {i + 1}" for i in turns)
        said.append(f"{stage} {each or f'{rates[0]:.3g}'}")
    return "; ".join(said)


def _shown(stages: list[Stage]) -> tuple[str, ...]:
    hops = [s.name for s in stages if s.sequential]
    chain = f"{len(hops)} × {hops[0]}, one client after another" if hops else ""
    who = [
        f"{s.name} ({'server' if s.clients == (SERVER,) else f'{len(s.clients)} clients'})"
        for s in stages
    ]
    return tuple(
        dict.fromkeys(chain if s.sequential else own for s, own in zip(stages, who, strict=True))
    )


@dataclass(frozen=True, kw_only=True)
class ExampleCounts:
    """How many of the training examples clients train on, and what the others are for.

    train: examples of the training set. own_tests: of these, clients' own tests. validation: those
    that clients hold out in every stage in which they train. unassigned: those that no client has.
    test: examples of the common test set.
    """

    train: int
    own_tests: int
    validation: int
    unassigned: int
    test: int

    @property
    def trained(self) -> int:
        """The number of examples that clients train on."""
        return self.train - self.own_tests - self.validation - self.unassigned

    @property
    def sentence(self) -> str:
        """As a person reads it.

        >>> ExampleCounts(train=900, own_tests=225, validation=0, unassigned=0, test=50).sentence
        "675 of 900 examples to train on, 50 to test on; 225 are clients' own tests"
        """
        count = f"{self.trained:,}"
        if self.trained < self.train:
            count += f" of {self.train:,}"
        parts = [f"{count} examples to train on"]
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
    """How many examples a run has; None where only the sites have them."""
    sites = prepared.sites
    if sites.split is None:
        return None
    train = len(sites.train)
    assigned = len(np.unique(sites.split.positions))
    own_tests = 0
    # Rows of the test split are no training examples.
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
    plans = {
        stage: plan for stage, plan in prepared.settings.plans.items() if plan.epochs or plan.steps
    }
    if not plans or not all(plan.validation for plan in plans.values()):
        return 0
    stage = min(plans, key=lambda name: plans[name].validation)
    sites = prepared.sites
    clients = range(prepared.settings.clients)
    return sum(sites.size(client) - sites.trains_on(client, stage) for client in clients)


def data_sentences(prepared: Prepared) -> list[str]:
    """What examples are, how many there are and what reading them left out, a sentence each."""
    data = prepared.dataset
    sites = prepared.sites
    sentences = [
        examples_text(sites.inputs.description(data.train.values)) or _pixels(data.input_shape)
    ]
    counts = example_counts(prepared)
    if counts is not None:
        sentences.append(counts.sentence)
    return [*sentences, *prepared.notes]


def _pixels(shape: Sequence[int]) -> str:
    channels, *sides = shape
    size = "×".join(map(str, sides))
    return f"examples are images of {size} pixels, {channels} channel{'s' * (channels != 1)}"


def models(prepared: Prepared) -> list[tuple[str, int, str]]:
    """(name, parameters, capabilities) of each architecture in a run."""
    world = prepared.world
    specs = dict.fromkeys((world.server_model, *world.client_models))
    return [
        (
            s.label,
            sum(v.numel() for v in contract.initial(s, 0).values()),
            ", ".join(contract.capabilities(s).words),
        )
        for s in specs
    ]
