"""One query, answered from a finished run's models: teachers, gain and forgetting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.config.experiment import Experiment, from_tree
from fedstill.config.overrides import COMMAND_LINE, leaf_keys
from fedstill.config.resolve import settle
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.fields import as_table
from fedstill.core.files import digest, in_shell, read_file
from fedstill.core.method import Method
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Examples, ModelSpec, Payload, Stage, State, Tensors, many
from fedstill.core.rounds import run_round
from fedstill.data.dataset import Dataset
from fedstill.data.views import Division, SiteViews
from fedstill.engines.passes import correct_by_class
from fedstill.methods.fit import FIT, probed, queries_of
from fedstill.methods.qkt import QKT
from fedstill.metrics import class_accuracy
from fedstill.models.contract import predictor
from fedstill.models.model_file import read_model
from fedstill.querying.hooks import why_asked
from fedstill.querying.queries import QueryTable, Why, picked
from fedstill.querying.rules import rule_of, with_known_queries
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.directory import code_of_run, settings_of
from fedstill.running.extensions import Extensions, run_context
from fedstill.running.preparation import Prepared, prepare_again
from fedstill.running.world import RunWorld

# What a client is by now that asks after a run: its model, its new data, and for what it has reason
# to ask.


@dataclass(frozen=True)
class Later:
    """What is different when a client asks later: the file of the model that it has now, and its
    new data.
    """

    student: Path | None = None
    new: Dataset | None = None

    @property
    def examples(self) -> int:
        """How many new examples there are."""
        if self.new is None:
            return 0
        return len(self.new.train)


def by_now(
    prepared: Prepared, folder: Path, client: int, later: Later
) -> tuple[Prepared, dict[int, Tensors], dict[str, Any]]:
    """The run with a client's new data, all clients' models by now, and their numbers of examples
    when they trained.

    Raises ConfigError for a client that trained nothing, and for a student of another network.
    """
    models, sizes = _local_models(folder)
    if client not in models:
        raise ConfigError(f"client {client} trained no model in {folder}")
    if later.student is not None:
        if "accuracy" in prepared.settings.table(QueryTable).triggers and later.new is None:
            raise ConfigError(
                f"{later.student} was trained on all data of client {client}; its accuracy cannot "
                "be measured on them; "
                "give new data, of which some are held out, or name the classes"
            )
        spec, models[client] = read_model(later.student)
        if spec != prepared.world.model(client):
            raise ConfigError(
                f"{later.student} is a {spec}, client {client} has a {prepared.world.model(client)}"
            )
    if later.new is not None:
        prepared = with_new_data(prepared, client, later.new)
        models[client] = fitted_again(prepared, prepared.settings.method, models, sizes, client)
    return prepared, models, sizes


@dataclass(frozen=True)
class WithNewData(SiteViews):
    """Views in which one client, ``asker``, has ``new`` further examples, which stand at the end of
    its part.

    What it holds out is of the new ones alone: a model of before may have been trained on all
    others.
    """

    asker: int = 0
    new: int = 0

    def divided_indices(
        self, client: int, size: int, share: float, task: int = 0
    ) -> Division[Tensor]:
        if client != self.asker:
            return super().divided_indices(client, size, share, task)
        old = torch.arange(size - self.new)
        new = super().divided_indices(client, self.new, share)
        return Division(torch.cat([old, len(old) + new.train]), len(old) + new.held_out)


def with_new_data(prepared: Prepared, client: int, new: Dataset) -> Prepared:
    """The run in which a client also has a data set's training examples; raises ConfigError if they
    do not fit.
    """
    sites = prepared.sites
    classes = prepared.dataset.classes
    shape = tuple(new.train.values.shape[1:])
    run_shape = tuple(sites.train.values.shape[1:])
    if shape != run_shape:
        raise ConfigError(
            f"new data {new.name}: examples have shape {shape}, those of the run {run_shape}"
        )
    unknown = [c for c in new.classes if c not in classes]
    if unknown:
        raise ConfigError(
            f"new data {new.name}: the run has no class {unknown[0]!r}; its classes: "
            f"{', '.join(classes)}"
        )
    ids = torch.tensor([classes.index(c) for c in new.classes], dtype=torch.int64)
    further = Examples(new.train.values, ids[new.train.labels.cpu()])
    train = Examples(sites.train.values, sites.train.labels) + further
    assert sites.split is not None  # queries are answered in simulations
    split = sites.split.with_examples(client, len(sites.train) + np.arange(len(further)))

    views = {f.name: getattr(sites, f.name) for f in fields(SiteViews)}
    views |= {"train": train, "split": split}
    return replace(prepared, sites=WithNewData(**views, asker=client, new=len(further)))


def fitted_again(
    prepared: Prepared,
    method: Method,
    models: Mapping[int, Tensors],
    sizes: Mapping[str, Any],
    client: int,
) -> Tensors:
    """A client's model after it has trained alone on what it has now, from the model that it
    had.
    """
    unasked = replace(
        prepared,
        world=with_known_queries(prepared.world, queries_of(prepared.world)),
        settings=with_method(prepared.settings, method),
    )
    state = State({}, Payload({**many("model", models), **sizes}))
    with closing(unasked.engine(measured=False)) as engine:
        stages = [Stage(1, 0, FIT, (client,))]
        state = run_round(state, stages, run_context(unasked, engine, extensions=Extensions()))
    return state.extra.many("model")[client]


def with_method(settings: Settings, method: Method) -> Settings:
    """The settings with another method in their schedule."""
    return replace(settings, schedule=replace(settings.schedule, method=method))


def with_query_of(prepared: Prepared, client: int, query: tuple[int, ...]) -> Prepared:
    """The run in which one client asks, for these classes, and no other does."""
    queries = {client: query}
    return replace(
        prepared,
        world=with_known_queries(prepared.world, queries),
        sites=replace(prepared.sites, queries=queries),
    )


def raised_by(prepared: Prepared, client: int, params: Tensors) -> dict[int, Why]:
    """What a client has reason to ask for by the settings' rule, given its local model, and why.

    Raises ConfigError if it has none, or holds out no data to tell.
    """
    settings = prepared.settings
    rule = rule_of(settings, prepared.sites.all_counts())
    assert rule is not None
    view = prepared.sites.view(client, Stage(1, 0, FIT, (client,)))
    reasons_by_class = why_asked(rule, params, view)
    query = picked(rule, client, list(reasons_by_class))
    if not query:
        raise ConfigError(
            f"client {client} has no reason to ask: {_by(settings)}; name the classes with "
            "--classes"
        )
    return {c: reasons_by_class[c] for c in query}


def _by(settings: Settings) -> str:
    """Why no trigger of the settings applies to a client, in words."""
    table = settings.table(QueryTable)
    share = f"{100 * (table.accuracy_under or 0):g} %"
    reasons = {
        "lack": f"it has {table.fewer_than} examples or more of each class that another client has",
        "accuracy": f"its model is right on {share} or more of each class that it holds out",
        "need": "no class is named that it will need",
    }
    return " and ".join(reasons[trigger] for trigger in table.triggers)


def _local_models(folder: Path) -> tuple[dict[int, Tensors], dict[str, Any]]:
    if not (folder / "summary.json").is_file():
        raise ConfigError(
            f"{folder} is not finished; `fedstill resume {in_shell(folder)}`, then ask"
        )
    config = digest(read_file(folder / "config.toml"))
    restored = Checkpoints(folder / "checkpoints", config, folder / "memory").latest()
    models: dict[int, Tensors] = {}
    if restored is not None:
        models = restored.state.extra.many("model")
    if not models:
        raise ConfigError(
            f"{folder} keeps no models that clients trained alone; run method = 'local_only', then "
            "ask"
        )
    assert restored is not None
    return models, {k: v for k, v in restored.state.extra.items() if k.startswith("size.")}


# One query, answered from a finished run's models: which teachers know the classes, what is gained,
# what is lost.


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
        if client >= self.own > 0:
            return self.guests[client - self.own].model
        return super().model(client)

    def name(self, client: int) -> str:
        """What a client or guest is called."""
        if client >= self.own:
            return self.guests[client - self.own].name
        return f"client {client}"


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


@process_settings()
def ask(
    folder: Path,
    client: int,
    query: Sequence[int] | Mapping[str, Any],
    *,
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
    shape; CorruptFile for a file that is damaged; UntrustedCode for code that the user
    does not trust.
    """
    with code_of_run(folder):
        settings = settle(_experiment(folder, client, query, changes or {}))
        prepared = prepare_again(settings, folder, data)
        guests = tuple(_guest(path, prepared) for path in teachers)
        prepared, models, sizes = by_now(prepared, folder, client, later or Later())
    method = prepared.settings.method
    assert isinstance(method, QKT)
    reasons_by_class: dict[int, Why] = {}
    if isinstance(query, Mapping):
        reasons_by_class = raised_by(prepared, client, models[client])
    prepared = with_query_of(
        prepared, client, tuple(reasons_by_class) or queries_of(prepared.world)[client]
    )
    world = _world(prepared, guests)
    classes = queries_of(world)[client]

    all_models = dict(models)
    for index, guest in enumerate(guests):
        all_models[world.own + index] = guest.params
    probe = {
        teacher: probed(world.model(teacher), params, world, method.samples)
        for teacher, params in all_models.items()
        if teacher != client
    }
    used = [teacher for teacher, probe_mean in probe.items() if method.useful(probe_mean, classes)]
    params = models[client]
    if used:
        params = _learn(prepared, world, method, all_models, sizes)[client]

    spec = world.model(client)
    shares = {c: prepared.sites.label_shares(c) for c in range(world.own)}
    return Answer(
        client=client,
        query=classes,
        classes=prepared.dataset.classes,
        threshold=method.threshold,
        names={teacher: world.name(teacher) for teacher in probe},
        probe=probe,
        used=used,
        shares={c: share for c, share in shares.items() if c != client},
        own=shares[client],
        before=_accuracies(prepared, spec, models[client]),
        after=_accuracies(prepared, spec, params),
        model=spec,
        params=params,
        why=reasons_by_class,
        new=later.examples if later else 0,
    )


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
    query_keys: dict[str, Any] = {"classes": {str(client): tuple(query)}}
    if isinstance(query, Mapping):
        query_keys = {"draw": "all", **query}
    _check_changes(changes, query_keys)
    tree = {
        **run.tree,
        "rounds": 1,
        "method": {"name": "qkt"},
        "topology": {"kind": "peer_to_peer", "students": (client,), "clients": run.clients},
        "query": {"fewer_than": run.table(QueryTable).fewer_than, **query_keys},
        "plan": {FIT: as_table(run.plans[FIT])},
    }
    return from_tree(tree, {}, folder).with_values({"reuse": False, **changes}, COMMAND_LINE)


def _check_changes(changes: Mapping[str, Any], query_keys: Iterable[str]) -> None:
    """Raise ConfigError for a change of anything but QKT, its plans and the rules of queries, and
    for keys of ``[query]`` that the query itself sets.
    """
    for key in leaf_keys(changes):
        table, _, field = key.partition(".")
        is_own = table in ("method", "plan", "query") and key != "method.name"
        if not is_own:
            raise ConfigError(
                f"-s {key}: a query sets fields of QKT and its plans (method.query_weight, "
                "plan.transfer.epochs); all else is as in the run"
            )
        if table == "query" and field.partition(".")[0] in query_keys:
            raise ConfigError(f"-s {key}: the other options set it; leave it out")


def _guest(path: Path, prepared: Prepared) -> Guest:
    spec, params = read_model(path)
    run_model = prepared.world.server_model
    if spec.classes != run_model.classes:
        raise ConfigError(
            f"teacher {path} knows {spec.classes} classes, the run has {run_model.classes}"
        )
    if spec.input_shape != run_model.input_shape:
        raise ConfigError(
            f"teacher {path} takes examples of {spec.input_shape}, the run's are "
            f"{run_model.input_shape}"
        )
    return Guest(path.name, spec, params)


def _world(prepared: Prepared, guests: tuple[Guest, ...]) -> WithGuests:
    w = prepared.world
    return WithGuests(
        clients=w.clients + len(guests),
        classes=w.classes,
        rounds=1,
        seed=w.seed,
        plans=w.plans,
        server_model=w.server_model,
        client_models=w.client_models,
        extensions=w.extensions,
        guests=guests,
        own=w.clients,
    )


def _learn(
    prepared: Prepared,
    world: WithGuests,
    method: QKT,
    models: Mapping[int, Tensors],
    sizes: Mapping[str, Any],
) -> Mapping[int, Tensors]:
    """The models of the clients that ask, after a round from the stage in which they learn."""
    state = State({}, Payload({**many("model", models), **sizes}), round=1, stage=1)
    stages = prepared.settings.schedule(1, prepared.world)  # guests do not act
    settings = with_method(prepared.settings, method)
    prepared = replace(prepared, world=world, settings=settings)
    with closing(prepared.engine(measured=False)) as engine:
        context = run_context(prepared, engine, extensions=Extensions())
        state = run_round(state, stages, context)
    return state.extra.many("student")


def _accuracies(prepared: Prepared, spec: ModelSpec, params: Tensors) -> list[float]:
    test = prepared.sites.common_test
    classes = prepared.world.classes
    if test is None:
        return [float("nan")] * classes
    right = correct_by_class(predictor(spec, params), test, prepared.sites.inputs, classes)
    accuracies: list[float] = class_accuracy(
        right, torch.bincount(test.labels.cpu(), minlength=classes)
    ).tolist()
    return accuracies
