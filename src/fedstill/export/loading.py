"""The model that a run trained: from its last checkpoint, with what the run stored of its data; no
data are read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedstill.config.settings import Settings
from fedstill.core.checks import in_hook
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.extensions import of_some_clients
from fedstill.core.fields import plain_value
from fedstill.core.files import digest, in_shell, named_path
from fedstill.core.process_settings import process_settings
from fedstill.core.records import NOTHING, SERVER, Payload, State
from fedstill.core.reports import json_value
from fedstill.core.trees import same_bits
from fedstill.data.dataset import IMAGE_INFO, INPUT_FIELDS, PLURALS, DatasetInfo
from fedstill.engines.step import frozen
from fedstill.export.trained_model import TrainedModel, network_of
from fedstill.methods.fit import Queries, fitted_models, student_models
from fedstill.models.contract import Predictor, predictor
from fedstill.models.ensemble import Joined
from fedstill.models.model_file import FINAL, read_final
from fedstill.running import journal as journals
from fedstill.running.checkpoint import Checkpoints, StoredMemory
from fedstill.running.directory import SUFFIX, readable, settings_of
from fedstill.running.driver import remote_engine
from fedstill.running.result import Result
from fedstill.running.same_run import RunIdentity
from fedstill.running.selection import SELECTION, STOP_REASON, best_round
from fedstill.running.start_weights import body_of
from fedstill.running.world import RunWorld, started, world_of

# What a run's model takes, and what normalises it.


Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredInputs:
    """An example's shape, the type of its numbers, the mean and spread of each channel or column,
    and what it is.

    ``mean``, ``std``: none where numbers go in as they are, or where each client standardised its
    own.
    """

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    type: str = "uint8"
    about: DatasetInfo = IMAGE_INFO
    standardise: str = ""


def stored_inputs(folder: Path, stored: Any, client: int | None = None) -> StoredInputs:
    """The field of an event ``start`` that ``Inputs.description`` made; raises CorruptFile where it
    is malformed.
    """
    try:
        shape = tuple(int(n) for n in stored["shape"])
        fields = {name: stored[name] for name in ("kind", *INPUT_FIELDS) if name in stored}
        about = DatasetInfo.from_json(fields)
        own = stored.get("by_client", {}).get(str(client), stored)
        mean, std = (tuple(float(v) for v in own[k]) for k in ("mean", "std"))
        given = bool(mean or std) or about.kind == "image"
        if about.kind not in PLURALS or len(shape) != (
            3 if about.kind == "image" else len(shape) or 1
        ):
            raise ValueError(f"{about.kind!r} of shape {shape} is unknown")
        if (given and not len(mean) == len(std) == shape[0]) or min(*shape, *std, 1) <= 0:
            raise ValueError(
                f"a mean and a spread above 0 for each of {shape[0]} channels or columns are needed"
            )
        return StoredInputs(
            shape, mean, std, str(stored["pixels"]), about, str(stored.get("standardise", ""))
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"{folder / 'journal.jsonl'}: the start event's inputs are malformed: {error}"
        ) from error


log = logging.getLogger("fedstill.trained")

Versions = Mapping[int, tuple[str, str]]
"""Which file, with which SHA-256, holds what a client remembers."""


@process_settings()
def load_model(
    run: Result | Path | str,
    client: int | str | None = None,
    round: int | Literal["best"] | None = None,
) -> TrainedModel:
    """The model that a run trained, with its normalisation or standardisation inside, in evaluation
    mode.

    run: a result, or the run's directory; of a run that was stopped, the model of its last
    checkpoint. client: of a method that answers with a model for each client, whose, by number or
    by name; of one that groups clients, which, "cluster 1", as its predictors are named; else left
    out. round: the round after which the model is taken: "best", or the
    number of a round whose checkpoint the run kept (``keep_checkpoints_every``); by default the
    last one.

    Gives :class:`TrainedModel`: uint8 images, raw numbers or token ids in, logits out. On the run's
    test set, in batches of 100, it has the accuracy that the run printed. Where each client
    standardised its own columns, it takes raw numbers with ``client``, and without it numbers that
    are standardised. With ``data.features_of`` it takes what the backbone took, which is inside.
    The data are not read. Raises ConfigError for a directory without models, for a pack,
    for a client without a model, for a round that was not kept, and where a client must be named;
    CorruptFile for a file that is damaged.
    """
    folder = run.directory if isinstance(run, Result) else named_path(run)
    _refuse_pack(folder)
    client = plain_value(client)
    settings = settings_of(folder)
    events = journals.read_journal(folder / "journal.jsonl")
    start = events[:1]
    if not start:
        raise ConfigError(
            f"{folder} has no model yet: it stopped before it began; `fedstill resume "
            f"{in_shell(folder)}`"
        )
    if isinstance(client, str):
        number = journals.number_of_client(client, start[0])
        client = client if number is None else number
    _warn_of_changes(settings, start[0])
    one_client = client if isinstance(client, int) else None
    inputs = stored_inputs(folder, start[0].get("inputs"), one_client)
    world = _world(settings, start[0], inputs)
    if round is None:
        state, versions = _last(folder)
    else:
        number = _best(folder, events) if round == "best" else _number(round)
        state, versions = _after_round(folder, events, number)
    name, predict = _answer(_Trained(folder, settings, world, state, versions), client)
    about = {
        "model": name,
        "network": _networks(predict),
        **_about(settings, state, (folder / "summary.json").is_file()),
    }
    if one_client is not None:
        about["own_after"] = sorted(settings.method.personal)
    about |= _counted(start[0])
    if STOP_REASON in events[-1]:
        about["stopped_in_round"] = events[-1]["round"]
    if inputs.standardise:
        about["standardised"] = inputs.standardise
    about |= {key: start[0][key] for key in journals.VERSIONS if key in start[0]}
    network = network_of(predict)
    if settings.data.features_of is not None:
        inputs, body = _backbone(folder, settings, start[0])
        about["network"] = (
            f"{about['network']} on the features of {settings.data.features_of['name']}"
        )
        network = nn.Sequential(body, network)
    return TrainedModel(
        network=network,
        classes=start[0]["classes"],
        input_shape=inputs.shape,
        mean=inputs.mean,
        std=inputs.std,
        about=about,
        pixels=inputs.type,
        inputs=inputs.about,
    )


def _backbone(
    folder: Path, settings: Settings, start: Mapping[str, Any]
) -> tuple[StoredInputs, nn.Module]:
    """What the backbone of ``data.features_of`` takes, and its body."""
    if "backbone_inputs" not in start:
        raise ConfigError(
            f"{folder} was begun by a version that did not store what its backbone takes; run it "
            "again"
        )
    inputs = stored_inputs(folder, start["backbone_inputs"])
    body = body_of(
        settings.data.features_of or {},
        inputs.shape,
        classes=len(start["classes"]),
        vocabulary=inputs.about.vocabulary,
        sha=start["features_of"],
    )
    return inputs, body


@dataclass(frozen=True)
class _Trained:
    """What a run has of its models."""

    folder: Path
    settings: Settings
    world: RunWorld
    state: State
    versions: Versions


def _refuse_pack(folder: Path) -> None:
    packed = folder.name.endswith(SUFFIX) or (not folder.exists() and readable(folder).is_dir())
    if packed:
        raise ConfigError(
            f"{folder} is packed, and a pack keeps what runs measured, not their models; run it "
            "again"
        )


def _world(settings: Settings, start: Mapping[str, Any], inputs: StoredInputs) -> RunWorld:
    made = world_of(
        settings, inputs.shape, len(start["classes"]), settings.data.public, inputs.about.vocabulary
    )
    if settings.train_only:  # what stays as it is, is in that file alone
        made = started(settings, made)
    asked = start.get("queries", {})
    return made.extend(Queries({int(client): tuple(query) for client, query in asked.items()}))


def _last(folder: Path) -> tuple[State, Versions]:
    """The state of the last checkpoint; without one, the final model. Raises ConfigError if there
    is neither.
    """
    restored = _checkpoints(folder).latest()
    if restored is not None:
        if restored.state.round == 1 and restored.state.stage == 0:
            raise ConfigError(
                f"{folder} has trained nothing yet; go on with: fedstill resume {in_shell(folder)}"
            )
        return restored.state, restored.memory
    path = folder / FINAL
    if not path.is_file():
        done = (folder / "summary.json").is_file()
        todo = f"go on: fedstill resume {in_shell(folder)}"
        if done:
            todo = f"train it again: fedstill run {in_shell(folder / 'config.toml')}"
        raise ConfigError(
            f"{folder} holds no model, neither in checkpoints/ nor in {FINAL}; {todo}"
        )
    try:
        return State(safetensors.torch.load(read_final(path))), {}
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error


def _checkpoints(folder: Path) -> Checkpoints:
    """The checkpoints of a run. What clients remember is read only where their models are asked
    for: it may be on other machines.
    """
    return Checkpoints(folder / "checkpoints", digest((folder / "config.toml").read_bytes()))


def _best(folder: Path, events: Sequence[journals.Event]) -> int:
    """The number of the best round of a run."""
    rounds = [event for event in events if event["event"] == "round"]
    best = best_round(events[0], rounds)
    if best is not None:
        return best.round
    if SELECTION not in events[0]:
        raise ConfigError(
            f"{folder} did not compare its rounds, so none is the best one; run it anew with "
            "select_on = 'held_out' or with [stop]"
        )
    raise ConfigError(f"no round of {folder} has a score yet, so none is the best one")


def _number(round: object) -> int:
    """The number of a round that a caller gave."""
    number = plain_value(round)
    if type(number) is not int:
        raise ConfigError(f"round = {round!r} must be a whole number or 'best'")
    return number


def _after_round(
    folder: Path, events: Sequence[journals.Event], round: int
) -> tuple[State, Versions]:
    """The state after a finished round, from its checkpoint; raises ConfigError if the run kept
    none.
    """
    finished = {event["round"] for event in events if event["event"] == "round"}
    checkpoints = _checkpoints(folder)
    # Of a round, the last stage is kept if any is; positions are in order.
    last_by_round = {position.round: position for position in checkpoints.positions()}
    if round not in finished & last_by_round.keys():
        kept = ", ".join(str(number) for number in last_by_round if number in finished)
        raise ConfigError(
            f"{folder} has no checkpoint of round {round}; it kept those of rounds "
            f"{kept or 'none'} (keep_checkpoints_every keeps more)"
        )
    restored = checkpoints.at(last_by_round[round])
    return restored.state, restored.memory


def _answer(run: _Trained, client: int | str | None) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What a run answers with, for everybody or for one client, and what it is called."""
    method, world = run.settings.method, run.world
    name = run.settings.named.method.name
    if isinstance(client, int) and not 0 <= client < world.clients:
        raise ConfigError(
            f"client = {client} must be from 0 to {world.clients - 1}: {run.folder} has no other"
        )
    with in_hook(method, "predictors", f"after the last checkpoint of {run.folder}"):
        # Where clients have models of their own, the server's may be one that nobody trained.
        learned = not method.personal or not same_bits(run.state.params, world.initial(SERVER))
        named = dict(method.predictors(run.state, world)) if learned else {}
    everybody = next((n for n in named if not of_some_clients(n)), "")
    if client is None:
        if not everybody:
            who = f"name one from 0 to {world.clients - 1}, e.g. client = 0 (--client 0)"
            groups = "".join(f", or client = {n!r}" for n in named if not n.startswith("client "))
            raise ConfigError(f"{name} trains several models and none for all; {who}{groups}")
        return everybody, named[everybody]
    if isinstance(client, str):
        if client not in named:
            raise ConfigError(
                f"client = {client!r} is none of {name}'s models: "
                f"{', '.join(named) or 'it has none'}"
            )
        return client, named[client]
    with in_hook(method, "client_predictors", f"after the last checkpoint of {run.folder}"):
        answer_name = method.client_predictors(run.state, world).get(client, f"client {client}")
    if answer_name in named:
        return answer_name, named[answer_name]
    if not method.personal:
        raise ConfigError(f"{name} trains one model for all clients; leave client out")
    own = student_models(run.state).get(client, fitted_models(run.state).get(client))
    own = own or _remembered(run, client).get("params")
    if own is None:
        raise ConfigError(
            f"client {client} has no model of its own in {run.folder}: it has not trained one"
        )
    after = [s for s in run.settings.schedule(world.rounds, world) if s.name in method.personal]
    spec = world.model(client)
    answer = frozen(method.work(after[-1]).answer(own, spec) if after else own, spec)
    return f"client {client}", predictor(answer.spec, answer.params)


def _remembered(run: _Trained, client: int) -> Payload:
    """What a client remembers, where its memory is on this machine."""
    version = run.versions.get(client)
    if version is None:
        return NOTHING
    remote = remote_engine(run.settings)
    if remote is None:
        return StoredMemory(run.folder / "memory", run.versions).load(client)
    return remote.client_memory(run.folder, client, version)


def _networks(predict: Callable[[Tensor], Tensor]) -> str:
    """The networks that a predictor consists of, in words."""
    each = (
        [predict]
        if isinstance(predict, Predictor)
        else predict.each
        if isinstance(predict, Joined)
        else []
    )
    kinds = Counter(str(one.spec) for one in each)
    return (
        ", ".join(f"{count} x {kind}" if len(each) > 1 else kind for kind, count in kinds.items())
        or "unknown"
    )


def _counted(start: Mapping[str, Any]) -> dict[str, int]:
    """How many examples clients had, and how many the test set, as far as the run knew."""
    train = start["split"]["examples"] if "split" in start else 0
    counted = {"train_examples": train, "test_examples": sum(start.get("test_counts", []))}
    return {name: count for name, count in counted.items() if count}


def _about(settings: Settings, state: State, finished: bool) -> dict[str, Any]:
    named = settings.named
    tables = {"method": named.method, "partition": named.partition, "topology": named.topology}
    names = {kind: without_folder(table.name) for kind, table in tables.items()}
    fields = {f"{kind}_fields": json_value(dict(table.values)) for kind, table in tables.items()}
    about = {
        **names,
        **fields,
        "dataset": without_folder(settings.data.name),
        "clients": settings.clients,
        "seed": settings.seed,
        "rounds": settings.rounds,
        # A state before its first stage is that of the round before.
        "round": state.round if state.stage else state.round - 1,
        "finished": finished,
    }
    if not finished:
        about["stages"] = state.stage
    return about


def without_folder(name: str) -> str:
    """A name as others may read it: of a file or folder of one's own, without where it lies.

    >>> without_folder("/home/me/mine.py:FedMine"), without_folder("owner/name")
    ('mine.py:FedMine', 'owner/name')
    """
    own = name.startswith(("/", "~", ".")) or ".py" in name
    return name.rstrip("/").rpartition("/")[2] if own else name


def _warn_of_changes(settings: Settings, start: Mapping[str, Any]) -> None:
    """Warn of a file of the user's own code that is not the one that the run was started with."""
    for path in RunIdentity.noted_in(start).changed_code(settings):
        log.warning(
            "%s has changed since the run began; the model may compute something else", path
        )
