"""Answers a query from the models of a finished run: teachers, gain and forgetting."""

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
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.fields import as_table
from fedstill.core.files import digest, in_shell, read_file
from fedstill.core.method import Method
from fedstill.core.process_settings import process_settings
from fedstill.core.records import Examples, ModelSpec, Payload, Stage, State, Tensors, many
from fedstill.core.rounds import run_round
from fedstill.core.user_modules import split_name
from fedstill.data.dataset import INPUT_FIELDS, Dataset, DatasetInfo
from fedstill.data.sources import load_dataset
from fedstill.data.sources.load import load_public_set
from fedstill.data.views import Division, SiteViews
from fedstill.engines.passes import correct_by_class
from fedstill.methods.fit import FIT, probed, queries_of
from fedstill.methods.qkt import QKT
from fedstill.metrics import class_accuracy
from fedstill.models.predictors import predictor
from fedstill.querying.hooks import query_reasons
from fedstill.querying.queries import QueryTable, Why, picked
from fedstill.querying.rules import rule_of, with_known_queries
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.client_data import reading_like
from fedstill.running.directory import code_of_run, settings_of
from fedstill.running.extensions import Extensions, run_context
from fedstill.running.journal import CONFIG, is_finished
from fedstill.running.model_files import as_features, read_model
from fedstill.running.preparation import Prepared, prepare_again
from fedstill.running.world import RunWorld

# ---- the client at the time of the query ---------------------------------------------------------


@dataclass(frozen=True)
class ClientChanges:
    """What has changed at the client since the run.

    ``student``: the file of its current model; None for its model in the run. ``new_data``: a data
    set whose training examples it has in addition, not scaled; or its name or path, and then it is
    read like the data of the run.
    """

    student: Path | None = None
    new_data: Dataset | str | Path | None = None


@dataclass(frozen=True)
class LocalModels:
    """The models that clients trained alone, and the groups ``size.*`` of the state with their
    numbers of examples.
    """

    models: dict[int, Tensors]
    sizes: Mapping[str, Any]


def current_models(
    prepared: Prepared, folder: Path, client: int, changes: ClientChanges
) -> LocalModels:
    """The local models of a run, and the current model of a client.

    Raises ConfigError for a client without a model, and for a student with another network.
    """
    local = _local_models(folder)
    if client not in local.models:
        raise ConfigError(f"client {client} trained no model in {folder}")
    if changes.student is not None:
        local.models[client] = _student(prepared, client, changes)
    return local


def _student(prepared: Prepared, client: int, changes: ClientChanges) -> Tensors:
    """The parameters of the client's current model, from its file."""
    assert changes.student is not None
    by_accuracy = "accuracy" in prepared.settings.package_table(QueryTable).triggers
    if by_accuracy and changes.new_data is None:
        raise ConfigError(
            f"{changes.student} was trained on all data of client {client}, so its accuracy cannot "
            "be measured; pass new data, a part of which is held out, or name the classes"
        )
    spec, params = read_model(changes.student)
    client_spec = prepared.world.model(client)
    if spec != client_spec:
        raise ConfigError(
            f"{changes.student} has the network {spec}, but client {client} has {client_spec}"
        )
    return params


@dataclass(frozen=True)
class ViewsWithNewData(SiteViews):
    """Views in which ``changed_client`` has ``new_examples`` further examples, at the end of its
    part.

    It holds out new examples only, because its model may have been trained on all others.
    """

    changed_client: int = 0
    new_examples: int = 0

    def divided_indices(
        self, client: int, size: int, share: float, task: int = 0
    ) -> Division[Tensor]:
        if client != self.changed_client:
            return super().divided_indices(client, size, share, task)
        old = torch.arange(size - self.new_examples)
        new = super().divided_indices(client, self.new_examples, share)
        return Division(torch.cat([old, len(old) + new.train]), len(old) + new.held_out)


def read_new_data(prepared: Prepared, new_data: Dataset | str | Path) -> Dataset:
    """A client's new data; a name or a path is read with the columns, categories and other options
    of the run's data. With ``data.features_of``, they become features of the same backbone.

    Raises ConfigError if the backbone takes examples of another form.
    """
    form = _form_of_raw_data(prepared)
    new = _raw_data(prepared, form, new_data)
    if prepared.dataset.backbone_inputs is None:
        return new
    _check_form(new, form)
    # The backbone takes pixels that are normalised with the moments of the run's data.
    moments = prepared.dataset.backbone_inputs
    normalised = replace(new, mean=tuple(moments["mean"]), std=tuple(moments["std"]))
    return as_features(prepared.settings, normalised)


@dataclass(frozen=True)
class _Form:
    """The form of examples: the shape of one, and its description."""

    shape: tuple[int, ...]
    about: DatasetInfo


def _form_of_raw_data(prepared: Prepared) -> _Form:
    """The form of the run's data, before a backbone replaces them by features."""
    inputs = prepared.dataset.backbone_inputs
    if inputs is None:
        return _Form(prepared.dataset.input_shape, prepared.dataset.about)
    fields = {name: inputs[name] for name in ("kind", *INPUT_FIELDS) if name in inputs}
    return _Form(tuple(inputs["shape"]), DatasetInfo.from_json(fields))


def _raw_data(prepared: Prepared, form: _Form, new_data: Dataset | str | Path) -> Dataset:
    """A client's new data before a backbone replaces them by features."""
    if isinstance(new_data, Dataset):
        return new_data
    name = str(new_data)
    if split_name(name).is_code:
        # A user's function has no reading options.
        return load_dataset(name)
    data = prepared.settings.data
    reading = reading_like(data, form.about)
    if reading and data.label_column:
        reading["label_column"] = data.label_column
    # Like a public set, the client's data are not tested on.
    return load_public_set(name, **reading, **data.images)


def with_new_data(prepared: Prepared, client: int, new: Dataset) -> Prepared:
    """The run with the training examples of a data set added to a client's data, scaled like them.

    Raises ConfigError if their form or classes do not match the run.
    """
    sites = prepared.sites
    classes = prepared.dataset.classes
    run_shape = tuple(prepared.sites.train.values.shape[1:])
    _check_form(new, _Form(run_shape, prepared.dataset.about))
    unknown = [c for c in new.classes if c not in classes]
    if unknown:
        raise ConfigError(
            f"new data {new.name}: the run has no class {unknown[0]!r}; its classes: "
            f"{', '.join(classes)}"
        )
    ids = torch.tensor([classes.index(c) for c in new.classes], dtype=torch.int64)
    unscaled = Examples(new.train.values, ids[new.train.labels.cpu()])
    further = prepared.scaler.transform_client(client, unscaled)
    train = Examples(sites.train.values, sites.train.labels) + further
    assert sites.split is not None  # queries are answered in simulations
    split = sites.split.with_examples(client, len(sites.train) + np.arange(len(further)))

    views = {f.name: getattr(sites, f.name) for f in fields(SiteViews) if f.init}
    views |= {"train": train, "split": split}
    changed = ViewsWithNewData(**views, changed_client=client, new_examples=len(further))
    return replace(prepared, sites=changed)


def _check_form(new: Dataset, form: _Form) -> None:
    """Raise ConfigError if new data have another shape, kind or vocabulary, or other inputs, than
    the data of the run. ``form``: that of the run's data.
    """
    shape = new.input_shape
    if shape != form.shape:
        raise ConfigError(
            f"new data {new.name}: the examples have shape {shape}, but those of the run have "
            f"{form.shape}"
        )
    about = form.about
    remedy = "pass the path of their file, which is read like the data of the run"
    if (new.about.kind, new.vocabulary) != (about.kind, about.vocabulary):
        raise ConfigError(
            f"new data {new.name}: the examples are {_kind_in_words(new.about)}, but those of the "
            f"run are {_kind_in_words(about)}; {remedy}"
        )
    # Data from tensors have no names of inputs.
    if about.features and new.about.features != about.features:
        raise ConfigError(
            f"new data {new.name}: the inputs are {_names_of_inputs(new.about)}, but those of the "
            f"run are {_names_of_inputs(about)}; {remedy}"
        )


def _kind_in_words(about: DatasetInfo) -> str:
    if about.vocabulary:
        return f"{about.many} of {about.vocabulary:,} token ids"
    return about.many


def _names_of_inputs(about: DatasetInfo) -> str:
    return ", ".join(about.features)[:200] or "without names"


def retrained(prepared: Prepared, method: Method, local: LocalModels, client: int) -> Tensors:
    """A client's model after it has trained alone on its current data, from its current model."""
    without_rule = replace(
        prepared,
        world=with_known_queries(prepared.world, queries_of(prepared.world)),
        settings=with_method(prepared.settings, method),
    )
    state = State({}, Payload({**many("model", local.models), **local.sizes}))
    with closing(without_rule.engine(measured=False)) as engine:
        stages = [Stage(1, 0, FIT, (client,))]
        context = run_context(without_rule, engine, extensions=Extensions())
        state = run_round(state, stages, context)
    return state.extra.many("model")[client]


def with_method(settings: Settings, method: Method) -> Settings:
    """The settings with another method in their schedule."""
    return replace(settings, schedule=replace(settings.schedule, method=method))


def with_query(prepared: Prepared, client: int, query: tuple[int, ...]) -> Prepared:
    """The run in which this client alone asks, for these classes."""
    queries = {client: query}
    return replace(
        prepared,
        world=with_known_queries(prepared.world, queries),
        sites=replace(prepared.sites, queries=queries),
    )


def query_by_rule(prepared: Prepared, client: int, params: Tensors) -> dict[int, Why]:
    """The classes that a client asks for by the rule of the settings, and the reasons.

    params: its local model. Raises ConfigError if no class is eligible, or if the client holds out
    no examples.
    """
    settings = prepared.settings
    rule = rule_of(settings, prepared.sites.all_counts())
    assert rule is not None
    view = prepared.sites.view(client, Stage(1, 0, FIT, (client,)))
    reasons_by_class = query_reasons(rule, params, view)
    query = picked(rule, client, list(reasons_by_class))
    if not query:
        raise ConfigError(
            f"client {client} has no reason for a query: {_missing_reasons(settings)}; "
            f"{_other_query(settings)}"
        )
    return {c: reasons_by_class[c] for c in query}


def _missing_reasons(settings: Settings) -> str:
    """Why no trigger of the settings applies to a client, in words."""
    table = settings.package_table(QueryTable)
    share = f"{100 * (table.accuracy_under or 0):g} %"
    reasons = {
        "lack": f"it has {table.fewer_than} examples or more of each class that another client has",
        "accuracy": f"the accuracy of its model is {share} or higher on each held-out class",
        "need": "the config lists no class that it will need",
    }
    return " and ".join(reasons[trigger] for trigger in table.triggers)


def _other_query(settings: Settings) -> str:
    """What a client without a reason can do, in words."""
    if "lack" in settings.package_table(QueryTable).triggers:
        # No class can be named either: a query has only classes of which there are fewer examples.
        return "name another reason with --by, or raise query.fewer_than with -s"
    return "name the classes with --classes"


def _local_models(folder: Path) -> LocalModels:
    """The local models of a finished run."""
    if not is_finished(folder):
        raise ConfigError(
            f"{folder} is not finished; run `fedstill resume {in_shell(folder)}` before the query"
        )
    config = digest(read_file(folder / CONFIG))
    restored = Checkpoints(folder / "checkpoints", config, folder / "memory").latest()
    models: dict[int, Tensors] = {}
    if restored is not None:
        models = restored.state.extra.many("model")
    if not models:
        raise ConfigError(f"{folder} contains no local models; {NEEDS_LOCAL_RUN}")
    assert restored is not None
    sizes = {k: v for k, v in restored.state.extra.items() if k.startswith("size.")}
    return LocalModels(models, sizes)


NEEDS_LOCAL_RUN = "queries are answered from a run with method = 'local_only'"
"""What to do if a run has no local models."""


# ---- the answer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExternalTeacher:
    """A teacher from a file: its name, network and parameters."""

    name: str
    model: ModelSpec
    params: Tensors


@dataclass(frozen=True)
class WorldWithTeachers(RunWorld):
    """A world with teachers from files. Their ids follow those of the ``run_clients`` clients of
    the run.
    """

    external: tuple[ExternalTeacher, ...] = ()
    run_clients: int = 0

    def model(self, client: int) -> ModelSpec:
        if client >= self.run_clients > 0:
            return self.external[client - self.run_clients].model
        return super().model(client)

    def name(self, client: int) -> str:
        """The name of a client or of a teacher from a file."""
        if client >= self.run_clients:
            return self.external[client - self.run_clients].name
        return f"client {client}"


@dataclass(frozen=True)
class Answer:
    """The answer to a query.

    ``query``: the queried classes. ``classes``: the names of all classes. ``threshold``: of QKT's
    noise filter. ``names``: the names of all candidates for teachers. ``probe``: the mean softmax
    (C,) of each candidate on noise. ``teachers``: the candidates that taught. ``label_shares``: the
    client's label shares, (C,). ``teacher_label_shares``: those of other clients of the run.
    ``before``, ``after``: class accuracies (C,) on the common test set. ``model``, ``params``: the
    student. ``why``: the reasons for each class of a query by rule. ``new``: the number of new
    examples on which the client trained before the query.
    """

    client: int
    query: tuple[int, ...]
    classes: Sequence[str]
    threshold: float
    names: Mapping[int, str]
    probe: Mapping[int, Tensor]
    teachers: Sequence[int]
    label_shares: Sequence[float]
    teacher_label_shares: Mapping[int, Sequence[float]]
    before: Sequence[float]
    after: Sequence[float]
    model: ModelSpec = field(repr=False)
    params: Tensors = field(repr=False)
    why: Mapping[int, Why] = field(default_factory=dict)
    new: int = 0


@process_settings()
def answer_query(
    folder: Path,
    client: int,
    query: Sequence[int] | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    teachers: Sequence[Path] = (),
    data: Dataset | None = None,
    client_changes: ClientChanges | None = None,
) -> Answer:
    """Answer a client's query by QKT, from the local models of a finished run.

    ``query``: classes by number; or a rule as keys of ``[query]``, e.g. ``{"by": ["lack"]}``, by
    which the client asks for all eligible classes. ``changes``: dotted keys of QKT or its plans
    (``method.query_weight``, ``plan.transfer.epochs``). ``teachers``: model files, in addition to
    the models of the run. ``data``: the data set of the run, if it was in memory.
    ``client_changes``: the client's current model and new data.

    If no teacher reaches the threshold, the answer contains the unchanged local model. Raises
    ConfigError for a query that cannot be answered, a client without a reason, a run without local
    models, and a teacher with another number of classes or shape of inputs; CorruptFile for a
    damaged file; UntrustedCode for code that the user does not trust.
    """
    client_changes = client_changes or ClientChanges()
    with code_of_run(folder):
        settings = resolve(_experiment(folder, client, query, changes or {}))
        prepared = prepare_again(settings, folder, data)
        external = tuple(_external_teacher(path, prepared) for path in teachers)
        local = current_models(prepared, folder, client, client_changes)
    method = prepared.settings.method
    assert isinstance(method, QKT)

    # The user names the new data, so their code may run even if the run's code may not.
    new_examples = 0
    if client_changes.new_data is not None:
        new_data = read_new_data(prepared, client_changes.new_data)
        new_examples = len(new_data.train)
        prepared = with_new_data(prepared, client, new_data)
        local.models[client] = retrained(prepared, method, local, client)

    reasons_by_class: dict[int, Why] = {}
    classes = queries_of(prepared.world).get(client, ())
    if isinstance(query, Mapping):
        reasons_by_class = query_by_rule(prepared, client, local.models[client])
        classes = tuple(reasons_by_class)
    prepared = with_query(prepared, client, classes)
    world = _world(prepared, external)

    all_models = dict(local.models)
    for index, teacher in enumerate(external):
        all_models[world.run_clients + index] = teacher.params
    probe = {
        candidate: probed(world.model(candidate), params, world, method.samples)
        for candidate, params in all_models.items()
        if candidate != client
    }
    used = [candidate for candidate, mean in probe.items() if method.useful(mean, classes)]
    student = local.models[client]
    if used:
        candidates = LocalModels(all_models, local.sizes)
        student = _student_models(prepared, world, method, candidates)[client]

    spec = world.model(client)
    shares = {c: prepared.sites.label_shares(c) for c in range(world.run_clients)}
    return Answer(
        client=client,
        query=classes,
        classes=prepared.dataset.classes,
        threshold=method.threshold,
        names={candidate: world.name(candidate) for candidate in probe},
        probe=probe,
        teachers=used,
        label_shares=shares[client],
        teacher_label_shares={c: share for c, share in shares.items() if c != client},
        before=_accuracies(prepared, spec, local.models[client]),
        after=_accuracies(prepared, spec, student),
        model=spec,
        params=student,
        why=reasons_by_class,
        new=new_examples,
    )


def _experiment(
    folder: Path, client: int, query: Sequence[int] | Mapping[str, Any], changes: Mapping[str, Any]
) -> Experiment:
    """The run's experiment with the method QKT, one student and one query."""
    run = settings_of(folder)
    if FIT not in run.plans:
        raise ConfigError(f"{folder} contains no local models; {NEEDS_LOCAL_RUN}")
    query_keys: dict[str, Any] = {"classes": {str(client): tuple(query)}}
    if isinstance(query, Mapping):
        query_keys = {"draw": "all", **query}
    _check_changes(changes, query_keys)
    tree = {
        **run.tree,
        "rounds": 1,
        "method": {"name": "qkt"},
        "topology": {"kind": "peer_to_peer", "students": (client,), "clients": run.clients},
        "query": {"fewer_than": run.package_table(QueryTable).fewer_than, **query_keys},
        "plan": {FIT: as_table(run.plans[FIT])},
    }
    return from_tree(tree, {}, folder).with_values({"reuse": False, **changes}, COMMAND_LINE)


def _check_changes(changes: Mapping[str, Any], query_keys: Iterable[str]) -> None:
    """Raise ConfigError for changes of anything except QKT, its plans and the rules of queries, and
    for keys of ``[query]`` that the query itself sets.
    """
    for key in leaf_keys(changes):
        table, _, field = key.partition(".")
        may_change = table in ("method", "plan", "query") and key != "method.name"
        if not may_change:
            raise ConfigError(
                f"-s {key}: a query can only change fields of QKT, its plans and [query] "
                "(method.query_weight, plan.transfer.epochs); leave it out"
            )
        if table == "query" and field.partition(".")[0] in query_keys:
            raise ConfigError(f"-s {key}: another option of the command sets it; leave it out")


def _external_teacher(path: Path, prepared: Prepared) -> ExternalTeacher:
    spec, params = read_model(path)
    run_model = prepared.world.server_model
    if spec.classes != run_model.classes:
        raise ConfigError(
            f"teacher {path} has {spec.classes} classes, but the run has {run_model.classes}"
        )
    if spec.input_shape != run_model.input_shape:
        raise ConfigError(
            f"teacher {path} takes inputs of shape {spec.input_shape}, but those of the run have "
            f"{run_model.input_shape}"
        )
    return ExternalTeacher(path.name, spec, params)


def _world(prepared: Prepared, external: tuple[ExternalTeacher, ...]) -> WorldWithTeachers:
    world = prepared.world
    return WorldWithTeachers(
        clients=world.clients + len(external),
        classes=world.classes,
        rounds=1,
        seed=world.seed,
        plans=world.plans,
        server_model=world.server_model,
        client_models=world.client_models,
        extensions=world.extensions,
        external=external,
        run_clients=world.clients,
    )


def _student_models(
    prepared: Prepared, world: WorldWithTeachers, method: QKT, local: LocalModels
) -> Mapping[int, Tensors]:
    """The models of the students after the stages of QKT that follow local training."""
    extra = Payload({**many("model", local.models), **local.sizes})
    state = State({}, extra, round=1, stage=1)
    stages = prepared.settings.schedule(1, prepared.world)  # teachers from files do not act
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
    correct = correct_by_class(predictor(spec, params), test, prepared.sites.inputs, classes)
    totals = torch.bincount(test.labels.cpu(), minlength=classes)
    accuracies: list[float] = class_accuracy(correct, totals).tolist()
    return accuracies
