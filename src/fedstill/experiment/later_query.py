"""What a client is by now that asks after a run: its model, its new data, and for what it has
reason to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.data.examples import Dataset
from fedstill.data.partition.flat import FlatParts
from fedstill.data.views import SiteViews
from fedstill.errors import ConfigError
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.preparing.querying import rule_of
from fedstill.experiment.run_directory.checkpoint import Checkpoints
from fedstill.files import digest, in_shell
from fedstill.fitting import FIT, why_asked
from fedstill.method import Method
from fedstill.models.model_files import read_model
from fedstill.queries import Why, picked
from fedstill.records import Examples, Payload, Stage, State, Tensors, many
from fedstill.rounds import run_round
from fedstill.watch import Unwatched


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
        return len(self.new.train) if self.new else 0


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
        if "accuracy" in prepared.settings.query.triggers and later.new is None:
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

    def _held_apart(
        self, client: int, size: int, share: float, task: int = 0
    ) -> tuple[Tensor, Tensor]:
        if client != self.asker:
            return super()._held_apart(client, size, share, task)
        old = torch.arange(size - self.new)
        own, held = super()._held_apart(client, self.new, share)
        return torch.cat([old, len(old) + own]), len(old) + held


def with_new_data(prepared: Prepared, client: int, new: Dataset) -> Prepared:
    """The run in which a client also has a data set's training examples; raises ConfigError if they
    do not fit.
    """
    sites, classes = prepared.sites, prepared.dataset.classes
    shape, wanted = tuple(new.train.values.shape[1:]), tuple(sites.train.values.shape[1:])
    if shape != wanted:
        raise ConfigError(
            f"new data {new.name}: examples have shape {shape}, those of the run {wanted}"
        )
    unknown = [c for c in new.classes if c not in classes]
    if unknown:
        raise ConfigError(
            f"new data {new.name}: the run has no class {unknown[0]!r}; its classes: "
            f"{', '.join(classes)}"
        )
    ids = torch.tensor([classes.index(c) for c in new.classes], dtype=torch.int64)
    device, old = str(sites.train.labels.device), len(sites.train)
    more = Examples(new.train.values, ids[new.train.labels.cpu()]).to(device)
    both = Examples(
        *(torch.cat([getattr(e, k) for e in (sites.train, more)]) for k in ("values", "labels"))
    )
    assert isinstance(sites.parts, FlatParts)  # queries are answered in simulations
    parts = sites.parts.with_more(client, old + torch.arange(len(more)))
    known = {f.name: getattr(sites, f.name) for f in fields(SiteViews)}
    grown = WithNewData(**{**known, "train": both, "parts": parts}, asker=client, new=len(more))
    return replace(prepared, sites=grown)


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
    settings, world = prepared.settings, replace(prepared.world, asking=None)
    state = State({}, Payload({**many("model", models), **sizes}))
    with closing(replace(prepared, world=world).engine(measured=False)) as engine:
        stages = [Stage(1, 0, FIT, (client,))]
        state = run_round(method, state, stages, world, engine, Unwatched(), settings.rules)
    return state.extra.many("model")[client]


def with_query_of(prepared: Prepared, client: int, query: tuple[int, ...]) -> Prepared:
    """The run in which one client asks, for these classes, and no other does."""
    queries = {client: query}
    world, sites = (
        replace(prepared.world, queries=queries, asking=None),
        replace(prepared.sites, queries=queries),
    )
    return replace(prepared, world=world, sites=sites)


def raised_by(prepared: Prepared, client: int, params: Tensors) -> dict[int, Why]:
    """What a client has reason to ask for by the settings' rule, given its local model, and why.

    Raises ConfigError if it has none, or holds out no data to tell.
    """
    settings = prepared.settings
    rule = rule_of(settings, prepared.sites.all_counts())
    assert rule is not None
    view = prepared.sites.view(client, Stage(1, 0, FIT, (client,)))
    why = why_asked(rule, params, view)
    asked = picked(rule, client, list(why))
    if not asked:
        raise ConfigError(
            f"client {client} has no reason to ask: {_by(settings)}; name the classes with "
            "--classes"
        )
    return {c: why[c] for c in asked}


def _by(settings: Settings) -> str:
    table, told = settings.query, dict[str, str]()
    told["lack"] = (
        f"it has {table.fewer_than} examples or more of each class that another client has"
    )
    share = f"{100 * (table.accuracy_under or 0):g} %"
    told["accuracy"] = f"its model is right on {share} or more of each class that it holds out"
    told["need"] = "no class is named that it will need"
    chosen: Sequence[str] = table.triggers
    return " and ".join(told[name] for name in chosen)


def _local_models(folder: Path) -> tuple[dict[int, Tensors], dict[str, Any]]:
    if not (folder / "summary.json").is_file():
        raise ConfigError(
            f"{folder} is not finished; `fedstill resume {in_shell(folder)}`, then ask"
        )
    config = digest((folder / "config.toml").read_bytes())
    restored = Checkpoints(folder / "checkpoints", config, folder / "memory").latest()
    models = restored.state.extra.many("model") if restored else {}
    if not models:
        raise ConfigError(
            f"{folder} keeps no models that clients trained alone; run method = 'local_only', then "
            "ask"
        )
    assert restored is not None
    return models, {k: v for k, v in restored.state.extra.items() if k.startswith("size.")}
