"""One query, answered from a finished run's models: which teachers know the classes, what is
gained, what is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.data.examples import Dataset
from fedstill.engines.passes import correct_by_class
from fedstill.errors import ConfigError, UnknownName
from fedstill.experiment.config.experiment import Experiment, from_tree
from fedstill.experiment.config.settle import settle
from fedstill.experiment.later_query import Later, by_now, raised_by, with_query_of
from fedstill.experiment.preparing.prepared import Prepared, prepare
from fedstill.experiment.preparing.run_world import RunWorld
from fedstill.experiment.run_directory import journal as journals
from fedstill.experiment.run_directory.begun import settings_of
from fedstill.experiment.run_directory.split_file import begun_split
from fedstill.fields import as_table
from fedstill.fitting import FIT, probed
from fedstill.methods.qkt import QKT
from fedstill.metrics import class_accuracy
from fedstill.models.contract import predictor
from fedstill.models.model_files import read_model
from fedstill.queries import Why
from fedstill.records import ModelSpec, Payload, State, Tensors, many
from fedstill.rounds import run_round
from fedstill.watch import Unwatched


@dataclass(frozen=True)
class Guest:
    """A teacher from a file: what it is called, its network, its parameters."""

    name: str
    model: ModelSpec
    params: Tensors


@dataclass(frozen=True)
class WithGuests(RunWorld):
    """A world with further teachers, from files; their ids follow those of the clients."""

    guests: tuple[Guest, ...] = ()
    own: int = 0

    def model(self, client: int) -> ModelSpec:
        return (
            self.guests[client - self.own].model
            if client >= self.own > 0
            else super().model(client)
        )

    def name(self, client: int) -> str:
        """What a client or guest is called."""
        return self.guests[client - self.own].name if client >= self.own else f"client {client}"


@dataclass(frozen=True)
class Answer:
    """The answer to a query, and what it changed.

    probe: each teacher's mean softmax (C,) on noise; used: those that taught; shares: label shares
    (C,) of the clients among the teachers; before, after: class accuracies (C,) on the common test
    set; own: the client's label shares;
    why: the reasons for what is asked, where they raised the query; new: the client's new examples,
    on which it trained before it asked.
    """

    client: int
    query: tuple[int, ...]
    classes: Sequence[str]
    threshold: float
    names: Mapping[int, str]
    probe: Mapping[int, Tensor]
    used: Sequence[int]
    shares: Mapping[int, Sequence[float]]
    own: Sequence[float]
    before: Sequence[float]
    after: Sequence[float]
    model: ModelSpec = field(repr=False)
    params: Tensors = field(repr=False)
    why: Mapping[int, Why] = field(default_factory=dict)
    new: int = 0


def ask(
    folder: Path,
    client: int,
    query: Sequence[int] | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    teachers: Sequence[Path] = (),
    data: Dataset | None = None,
    later: Later | None = None,
) -> Answer:
    """Answer one client's query by QKT, from the models that clients of a run trained alone.

    ``query``: classes by number; or what raises it, as keys of ``[query]``, e.g.
    ``{"by": ["lack"]}``: then the client asks for all classes for which it has reason. ``changes``:
    dotted keys of QKT or its plans (``method.query_weight``,
    ``plan.transfer.epochs``); ``teachers``: model files beside the run's own. ``later``: the client
    has another model by now, or new data. Where no teacher reaches the threshold, the local model
    is given back as it is. Raises ConfigError for a query without an answer, for a client without
    reason to ask, for a run without local models, or for a teacher of another class count or image
    shape; CorruptFile for a file that is damaged.
    """
    prepared = prepare(
        settle(_experiment(folder, client, query, changes or {})), data, begun_split(folder)
    )
    method = prepared.settings.method
    assert isinstance(method, QKT)
    guests = tuple(_guest(path, prepared) for path in teachers)
    prepared, models, sizes = by_now(prepared, folder, client, later or Later())
    why = raised_by(prepared, client, models[client]) if isinstance(query, Mapping) else {}
    prepared = with_query_of(prepared, client, tuple(why) or prepared.world.queries[client])
    world = _world(prepared, guests)
    everyone = {**models, **{world.own + i: g.params for i, g in enumerate(guests)}}
    probe = {
        c: probed(world.model(c), p, world, method.samples)
        for c, p in everyone.items()
        if c != client
    }
    used = [c for c, p in probe.items() if method.useful(p, world.queries[client])]
    params = _learn(prepared, world, method, everyone, sizes, client) if used else models[client]
    spec, shares = (
        world.model(client),
        {c: prepared.sites.label_shares(c) for c in range(world.own)},
    )
    return Answer(
        client,
        world.queries[client],
        prepared.dataset.classes,
        method.threshold,
        {c: world.name(c) for c in probe},
        probe,
        used,
        {c: own for c, own in shares.items() if c != client},
        shares[client],
        _accuracies(prepared, spec, models[client]),
        _accuracies(prepared, spec, params),
        spec,
        params,
        why,
        later.examples if later else 0,
    )


def numbered(folder: Path, names: Sequence[str]) -> list[int]:
    """Classes by number or by name, as numbers; raises UnknownName for one that the run does not
    have.
    """
    events = journals.read_journal(folder / "journal.jsonl") if folder.is_dir() else []
    known = [str(c) for e in events[:1] for c in e.get("classes", [])]
    for name in names:
        if not name.isdecimal() and name not in known:
            raise UnknownName("class", name, known)
    return [int(name) if name.isdecimal() else known.index(name) for name in names]


def _experiment(
    folder: Path, client: int, query: Sequence[int] | Mapping[str, Any], changes: Mapping[str, Any]
) -> Experiment:
    """The run's experiment with QKT for its method, one student and one query."""
    run = settings_of(folder)
    if FIT not in run.plans:
        raise ConfigError(
            f"{folder} has no models that clients trained alone; run method = 'local_only', then "
            "ask"
        )
    asked: dict[str, Any] = {"classes": {str(client): tuple(query)}}
    if isinstance(query, Mapping):
        asked = {"draw": "all", **query}
    tree = {
        **run.tree,
        "rounds": 1,
        "method": {"name": "qkt"},
        "topology": {"kind": "peer_to_peer", "students": (client,), "clients": run.clients},
        "query": {"fewer_than": run.query.fewer_than, **asked},
        "plan": {FIT: as_table(run.plans[FIT])},
    }
    return from_tree(tree, {}, folder).with_values({"reuse": False, **changes}, "command line")


def _guest(path: Path, prepared: Prepared) -> Guest:
    spec, params = read_model(path)
    own = prepared.world.server_model
    if spec.classes != own.classes:
        raise ConfigError(f"teacher {path} knows {spec.classes} classes, the run has {own.classes}")
    if spec.input_shape != own.input_shape:
        raise ConfigError(
            f"teacher {path} takes examples of {spec.input_shape}, the run's are {own.input_shape}"
        )
    return Guest(path.name, spec, params)


def _world(prepared: Prepared, guests: tuple[Guest, ...]) -> WithGuests:
    w = prepared.world
    number = w.clients + len(guests)
    return WithGuests(
        number,
        w.classes,
        1,
        w.seed,
        w.plans,
        w.server_model,
        w.client_models,
        w.queries,
        guests=guests,
        own=w.clients,
    )


def _learn(
    prepared: Prepared,
    world: WithGuests,
    method: QKT,
    models: Mapping[int, Tensors],
    sizes: Mapping[str, Any],
    client: int,
) -> Tensors:
    state = State({}, Payload({**many("model", models), **sizes}), round=1, stage=1)
    stages = prepared.settings.topology(1, prepared.world)
    with closing(replace(prepared, world=world).engine(measured=False)) as engine:
        state = run_round(
            method, state, stages, world, engine, Unwatched(), prepared.settings.rules
        )
    return state.extra.many("student")[client]


def _accuracies(prepared: Prepared, spec: ModelSpec, params: Tensors) -> list[float]:
    test, classes = prepared.sites.common_test, prepared.world.classes
    if test is None:
        return [float("nan")] * classes
    right = correct_by_class(predictor(spec, params), test, prepared.sites.inputs, classes)
    accuracies: list[float] = class_accuracy(
        right, torch.bincount(test.labels.cpu(), minlength=classes)
    ).tolist()
    return accuracies
