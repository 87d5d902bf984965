"""Loads the model that a run trained, from a checkpoint and the run's journal; no data are read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedstill.config.settings import Settings
from fedstill.core.checks import in_hook
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.extensions import of_some_clients
from fedstill.core.fields import nfc, plain_value
from fedstill.core.files import digest, in_shell, named_path, read_file
from fedstill.core.process_settings import process_settings
from fedstill.core.records import NOTHING, SERVER, Payload, State
from fedstill.core.registry import short_name
from fedstill.core.reports import json_value
from fedstill.core.trees import same_bits
from fedstill.data.dataset import IMAGE_INFO, INPUT_FIELDS, PLURALS, DatasetInfo
from fedstill.engines.step import frozen
from fedstill.export.trained_model import (
    OWN,
    STANDARDISED_AT,
    Standardised,
    TrainedModel,
    network_of,
)
from fedstill.methods.fit import Queries, fitted_models, student_models
from fedstill.models.predictors import CombinedPredictor, Predictor, predictor
from fedstill.running import journal as journals
from fedstill.running.checkpoint import Checkpoints, StoredMemory
from fedstill.running.client_data import reading_like
from fedstill.running.directory import settings_of, trust_run
from fedstill.running.driver import remote_engine
from fedstill.running.journal import CONFIG, JOURNAL, STOP_REASON
from fedstill.running.model_files import FINAL, body_of, read_final
from fedstill.running.packs import SUFFIX, readable
from fedstill.running.result import Result
from fedstill.running.same_run import RunIdentity
from fedstill.running.selection import best_round_of
from fedstill.running.world import RunWorld, with_start_model, world_of

log = logging.getLogger("fedstill.trained")


@process_settings()
def load_model(
    run: Result | Path | str,
    client: int | str | None = None,
    round: int | Literal["best"] | None = None,
    *,
    trust_code: bool = False,
) -> TrainedModel:
    """The model that a run trained, in evaluation mode, with its normalisation or standardisation
    inside.

    run: a result, or the run's directory. For a run that was stopped, the model is that of its last
    checkpoint. client: a client's number or name, if the method has a model for each client; the
    name of a group such as "cluster 1", if it groups clients; otherwise None. round: the round
    after which the model is taken: "best", or the number of a round whose checkpoint the run kept
    (``keep_checkpoints_every``); by default the last one. trust_code: whether to trust the code
    that the run names, if the run was not made by this user on this machine.

    Returns a :class:`TrainedModel`, which takes uint8 images, raw numbers or token ids and returns
    logits. On the run's test set, in batches of 100, it has the accuracy that the run printed. If
    each client standardised its own columns, the model takes raw numbers with ``client``, and
    standardised numbers without it. With ``data.features_of`` it contains the backbone and takes
    the backbone's inputs. The data are not read. Raises ConfigError for a directory without models,
    for a packed run, for a client without a model, for a round that was not kept, and if a client
    must be named; CorruptFile for a damaged file; UntrustedCode for code of somebody else.
    """
    folder = run.directory if isinstance(run, Result) else named_path(run)
    _check_not_packed(folder)
    if trust_code:
        trust_run(folder)
    settings = settings_of(folder)
    events = journals.read_journal(folder / JOURNAL)
    if not events:
        raise ConfigError(
            f"{folder} has no model yet: it stopped before it began; run `fedstill resume "
            f"{in_shell(folder)}`"
        )
    start = events[0]
    owner = _owner(plain_value(client), start)
    client_number = None
    if isinstance(owner, int):
        client_number = owner
    _warn_of_changed_code(settings, start)

    inputs = stored_inputs(folder, start.get("inputs"), client_number)
    stored = _StoredRun(
        folder=folder,
        settings=settings,
        world=_world(settings, start, inputs),
        inputs=inputs,
        checkpoint=_checkpoint(folder, events, round),
    )
    answer = _answer(stored, owner)
    about = _description(stored, events, answer)
    if client_number is not None:
        about["own_after"] = sorted(settings.method.personal)
        if stored.inputs.by_client:
            about[STANDARDISED_AT] = f"client {client_number}"
    network = network_of(answer.predict)
    backbone = settings.data.features_of
    if backbone is not None:
        # The model takes the inputs of the backbone, whose features are those of the run.
        features = inputs
        inputs = _backbone_inputs(folder, start)
        body = body_of(
            backbone,
            inputs.shape,
            classes=len(start["classes"]),
            vocabulary=inputs.about.vocabulary,
            sha=start["features_of"],
        )
        network = _on_features(folder, features, body, network)
        about["network"] += f" on the features of {backbone['name']}"
    model = TrainedModel(
        network=network,
        classes=start["classes"],
        input_shape=inputs.shape,
        mean=inputs.mean,
        std=inputs.std,
        about=about,
        pixels=inputs.type,
        inputs=inputs.about,
    )
    model.missing_values = reading_like(settings.data, inputs.about).get("missing_values", ())
    return model


def _check_not_packed(folder: Path) -> None:
    is_packed = folder.name.endswith(SUFFIX) or (not folder.exists() and readable(folder).is_dir())
    if is_packed:
        raise ConfigError(
            f"{folder} is packed, and a pack contains measurements but no models; run it again"
        )


def _owner(client: Any, start: journals.Event) -> Any:
    """The owner of a model: a client's number, the name of a group, or None for all clients."""
    if isinstance(client, str):
        names = [nfc(str(name)) for name in start.get("client_names", ())]
        name = nfc(client)
        if name in names:
            return names.index(name)
    return client


def _warn_of_changed_code(settings: Settings, start: Mapping[str, Any]) -> None:
    """Warn of files of the user's code that have changed since the run started."""
    for path in RunIdentity.noted_in(start).changed_code(settings):
        log.warning(
            "%s has changed since the run began; the model may compute something else", path
        )


# ---- inputs --------------------------------------------------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredInputs:
    """The inputs of a model: the shape of an example, the type of its numbers, and its meaning.

    ``mean``, ``std``: of each channel or column; empty if numbers are not standardised, or if each
    client standardised its own. ``standardise``: the setting of the run.
    """

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    type: str = "uint8"
    about: DatasetInfo = IMAGE_INFO
    standardise: str = ""
    by_client: bool = False


def stored_inputs(folder: Path, stored: Any, client: int | None = None) -> StoredInputs:
    """The inputs in a run's event ``start``, as ``Inputs.description`` wrote them.

    ``client``: whose mean and deviation to take, if each client has its own. Raises CorruptFile.
    """
    try:
        return _parse_inputs(stored, client)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"{folder / 'journal.jsonl'}: the start event's inputs are malformed: {error}"
        ) from error


def _parse_inputs(stored: Any, client: int | None) -> StoredInputs:
    shape = tuple(int(size) for size in stored["shape"])
    fields = {name: stored[name] for name in ("kind", *INPUT_FIELDS) if name in stored}
    about = DatasetInfo.from_json(fields)
    is_image = about.kind == "image"
    has_valid_shape = len(shape) == 3 if is_image else len(shape) > 0
    if about.kind not in PLURALS or not has_valid_shape:
        raise ValueError(f"{about.kind!r} of shape {shape} is unknown")

    by_client = stored.get("by_client", {})
    scaling = by_client.get(str(client), stored)
    mean = tuple(float(value) for value in scaling["mean"])
    std = tuple(float(value) for value in scaling["std"])
    is_scaled = is_image or bool(mean or std)
    if is_scaled and not len(mean) == len(std) == shape[0]:
        raise ValueError(f"each of {shape[0]} channels or columns needs a mean and a deviation")
    if min(*shape, *std, 1) <= 0:
        raise ValueError("sizes and deviations must be above 0")
    return StoredInputs(
        shape=shape,
        mean=mean,
        std=std,
        type=str(stored["pixels"]),
        about=about,
        standardise=str(stored.get("standardise", "")),
        by_client=str(client) in by_client,
    )


def _backbone_inputs(folder: Path, start: Mapping[str, Any]) -> StoredInputs:
    if "backbone_inputs" not in start:
        raise ConfigError(
            f"{folder} was started by a version that did not store the inputs of its backbone; run "
            "it again"
        )
    inputs = stored_inputs(folder, start["backbone_inputs"])
    if inputs.about.kind == "image":
        return inputs
    # The backbone took other numbers than pixels as they are, whatever their mean.
    return replace(inputs, mean=(), std=())


def _on_features(
    folder: Path, features: StoredInputs, body: nn.Module, network: nn.Module
) -> nn.Module:
    """A network that takes a backbone's inputs: the backbone's body, the standardisation of its
    features if the run standardised them, and the network of the run.

    Raises ConfigError if each client standardised the features differently and none is named. The
    user cannot standardise them, because they are computed inside the model.
    """
    if features.mean:
        return nn.Sequential(body, Standardised(features.mean, features.std), network)
    if features.standardise == OWN:
        raise ConfigError(
            f"each client of {folder} standardised the features of its examples by its own mean "
            "and standard deviation; name the client whose examples the model will take, e.g. "
            "client = 0 (--client 0)"
        )
    return nn.Sequential(body, network)


# ---- checkpoints ---------------------------------------------------------------------------------

StateFiles = Mapping[int, tuple[str, str]]
"""The file with a client's state and its SHA-256, by client."""


@dataclass(frozen=True)
class _Checkpoint:
    """The server's state, and the files with the clients' states."""

    state: State
    client_states: StateFiles


@dataclass(frozen=True, kw_only=True)
class _StoredRun:
    """What a run's directory contains about its models."""

    folder: Path
    settings: Settings
    world: RunWorld
    inputs: StoredInputs
    checkpoint: _Checkpoint

    @property
    def state(self) -> State:
        """The server's state."""
        return self.checkpoint.state


def _checkpoint(
    folder: Path, events: Sequence[journals.Event], round: int | Literal["best"] | None
) -> _Checkpoint:
    if round is None:
        return _last_checkpoint(folder)
    if round == "best":
        return _checkpoint_after(folder, events, best_round_of(folder, events))
    number = plain_value(round)
    if type(number) is not int:
        raise ConfigError(f"round = {round!r} must be a whole number or 'best'")
    return _checkpoint_after(folder, events, number)


def _last_checkpoint(folder: Path) -> _Checkpoint:
    """The last checkpoint, or the final model. Raises ConfigError if there is neither."""
    restored = _checkpoints(folder).latest()
    if restored is not None:
        if restored.state.round == 1 and restored.state.stage == 0:
            raise ConfigError(
                f"{folder} has trained nothing yet; continue with: fedstill resume "
                f"{in_shell(folder)}"
            )
        return _Checkpoint(restored.state, restored.state_files)
    path = folder / FINAL
    if not path.is_file():
        remedy = f"continue with: fedstill resume {in_shell(folder)}"
        if journals.is_finished(folder):
            remedy = f"train it again with: fedstill run {in_shell(folder / 'config.toml')}"
        raise ConfigError(
            f"{folder} contains no model, neither in checkpoints/ nor in {FINAL}; {remedy}"
        )
    try:
        return _Checkpoint(State(safetensors.torch.load(read_final(path))), {})
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error


def _checkpoints(folder: Path) -> Checkpoints:
    """The checkpoints of a run, without the clients' states, which may be on other machines."""
    return Checkpoints(folder / "checkpoints", digest(read_file(folder / CONFIG)))


def _checkpoint_after(folder: Path, events: Sequence[journals.Event], round: int) -> _Checkpoint:
    """The checkpoint after a finished round. Raises ConfigError if the run did not keep it."""
    finished = {event["round"] for event in events if event["event"] == "round"}
    checkpoints = _checkpoints(folder)
    # Positions are in order, so the last one of a round is that of its last stage.
    last_by_round = {position.round: position for position in checkpoints.positions()}
    if round not in finished & last_by_round.keys():
        available = ", ".join(str(number) for number in last_by_round if number in finished)
        raise ConfigError(
            f"{folder} has no checkpoint of round {round}; it kept those of rounds "
            f"{available or 'none'} (keep_checkpoints_every keeps more)"
        )
    restored = checkpoints.at(last_by_round[round])
    return _Checkpoint(restored.state, restored.state_files)


def _world(settings: Settings, start: Mapping[str, Any], inputs: StoredInputs) -> RunWorld:
    world = world_of(
        settings, inputs.shape, len(start["classes"]), settings.data.public, inputs.about.vocabulary
    )
    if settings.train_only:
        # The parameters that are not trained are only in the file that the run started from.
        world = with_start_model(settings, world)
    queries = {int(client): tuple(query) for client, query in start.get("queries", {}).items()}
    return world.extend(Queries(queries))


# ---- the model of a client or of all clients -----------------------------------------------------

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Answer:
    """A model of a run and its name."""

    name: str
    predict: Predict


def _answer(run: _StoredRun, owner: int | str | None) -> _Answer:
    """The model of a client, of a group, or of all clients (None)."""
    method = run.settings.named.method.name
    predictors = _predictors(run)
    if owner is None:
        return _common_answer(run, predictors)
    if isinstance(owner, str):
        if owner not in predictors:
            names = ", ".join(predictors) or "it has none"
            raise ConfigError(f"client = {owner!r} is not one of {method}'s models: {names}")
        return _Answer(owner, predictors[owner])

    if not 0 <= owner < run.world.clients:
        raise ConfigError(
            f"client = {owner} must be from 0 to {run.world.clients - 1}, the clients of "
            f"{run.folder}"
        )
    with in_hook(run.settings.method, "client_predictors", _hook_place(run)):
        assigned = run.settings.method.client_predictors(run.state, run.world)
    name = assigned.get(owner, f"client {owner}")
    if name in predictors:
        return _Answer(name, predictors[name])
    if not run.settings.method.personal:
        if run.inputs.by_client:
            # All clients have the same network, and each has its own mean and deviation.
            return _common_answer(run, predictors)
        raise ConfigError(f"{method} trains one model for all clients; leave client out")
    return _personal_answer(run, owner)


def _hook_place(run: _StoredRun) -> str:
    return f"after the last checkpoint of {run.folder}"


def _predictors(run: _StoredRun) -> dict[str, Predict]:
    """The method's predictors by name.

    If clients have personal models, the server's may be untrained; then there are none.
    """
    method = run.settings.method
    with in_hook(method, "predictors", _hook_place(run)):
        if method.personal and same_bits(run.state.params, run.world.initial(SERVER)):
            return {}
        return dict(method.predictors(run.state, run.world))


def _common_answer(run: _StoredRun, predictors: Mapping[str, Predict]) -> _Answer:
    """The model of all clients. Raises ConfigError if there are only models of some."""
    for name, predict in predictors.items():
        if not of_some_clients(name):
            return _Answer(name, predict)
    method = run.settings.named.method.name
    hint = f"name a client from 0 to {run.world.clients - 1}, e.g. client = 0 (--client 0)"
    groups = [name for name in predictors if not name.startswith("client ")]
    if groups:
        hint += f", or a model: {', '.join(map(repr, groups))}"
    raise ConfigError(
        f"{short_name(method)} trains several models, and none of them is for all clients; {hint}"
    )


def _personal_answer(run: _StoredRun, client: int) -> _Answer:
    """A client's personal model, from the server's state or from the client's."""
    params = student_models(run.state).get(client)
    params = params or fitted_models(run.state).get(client)
    params = params or _client_state(run, client).get("params")
    if params is None:
        raise ConfigError(
            f"client {client} has no personal model in {run.folder}: it has not trained one"
        )
    method = run.settings.method
    spec = run.world.model(client)
    schedule = run.settings.schedule(run.world.rounds, run.world)
    personal_stages = [stage for stage in schedule if stage.name in method.personal]
    answer = frozen(params, spec)
    if personal_stages:
        answer = frozen(method.work(personal_stages[-1]).answer(params, spec), spec)
    return _Answer(f"client {client}", predictor(answer.spec, answer.params))


def _client_state(run: _StoredRun, client: int) -> Payload:
    """A client's state, if it is on this machine; else an empty one."""
    version = run.checkpoint.client_states.get(client)
    if version is None:
        return NOTHING
    remote = remote_engine(run.settings)
    if remote is None:
        return StoredMemory(run.folder / "memory", run.checkpoint.client_states).load(client)
    return remote.client_memory(run.folder, client, version)


# ---- the description of a model ------------------------------------------------------------------


def _description(
    run: _StoredRun, events: Sequence[journals.Event], answer: _Answer
) -> dict[str, Any]:
    """The facts in ``TrainedModel.about``."""
    settings = run.settings
    start = events[0]
    is_finished = journals.is_finished(run.folder)
    about: dict[str, Any] = {"model": answer.name, "network": _network_names(answer.predict)}
    components = settings.named
    tables = {
        "method": components.method,
        "partition": components.partition,
        "topology": components.topology,
    }
    about |= {kind: without_folder(table.name) for kind, table in tables.items()}
    about |= {f"{kind}_fields": json_value(dict(table.values)) for kind, table in tables.items()}
    # A state before the first stage of a round is that after the round before.
    last_round = run.state.round
    if not run.state.stage:
        last_round -= 1
    about |= {
        "dataset": without_folder(settings.data.name),
        "clients": settings.clients,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "round": last_round,
        "finished": is_finished,
    }
    if not is_finished:
        about["stages"] = run.state.stage
    about |= _example_counts(start)
    if STOP_REASON in events[-1]:
        about["stopped_in_round"] = events[-1]["round"]
    if run.inputs.standardise:
        about["standardised"] = run.inputs.standardise
    return about | {key: start[key] for key in journals.VERSIONS if key in start}


def _network_names(predict: Predict) -> str:
    """The networks that a predictor consists of, as text."""
    members: Sequence[Any] = []
    if isinstance(predict, Predictor):
        members = [predict]
    elif isinstance(predict, CombinedPredictor):
        members = predict.predictors
    counts = Counter(str(member.spec) for member in members)
    if len(members) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "unknown"


def _example_counts(start: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of training and test examples, if the run knew them."""
    train_count = start.get("split", {}).get("examples", 0)
    counts = {"train_examples": train_count, "test_examples": sum(start.get("test_counts", []))}
    return {name: count for name, count in counts.items() if count}


def without_folder(name: str) -> str:
    """A name for others to read: the name of a user's file or folder without its place.

    >>> without_folder("/home/me/mine.py:FedMine"), without_folder("owner/name")
    ('mine.py:FedMine', 'owner/name')
    """
    is_path = name.startswith(("/", "~", ".")) or ".py" in name
    if is_path:
        return name.rstrip("/").rpartition("/")[2]
    return name
