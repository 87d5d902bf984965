"""A frozen backbone is a data set: its features are computed once an example and kept, and only a
head is trained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedstill.data.cache_folder import cache_folder
from fedstill.data.examples import Dataset, examples_digest
from fedstill.data.form import About
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import ModelPasses
from fedstill.errors import ConfigError, CorruptFile, IncompatibleMethod
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.start_weights import seal, start_of
from fedstill.models import contract
from fedstill.records import Examples, ModelSpec

log = logging.getLogger("fedstill.backbone")


def as_features(settings: Settings, dataset: Dataset) -> Dataset:
    """The data set as vectors, the features that ``data.features_of`` gives; as it is where that is
    unset.

    The passes go over the whole set once; what they give is kept on disk, under the SHA-256 of the
    examples and of the model's file, the network and torch's version. Raises ConfigError for data
    or a file that have no features.
    """
    asked = settings.data.features_of
    if asked is None:
        return dataset
    _refuse(settings, dataset)
    spec, place = _network(asked, dataset.input_shape, len(dataset.classes), dataset.vocabulary)
    params = _params(spec, place)
    passes = ModelPasses(spec, Inputs(dataset.mean, dataset.std, (), dataset.about))

    def seen(examples: Examples) -> Examples:
        return replace(examples, values=_kept(passes, params, examples, place))

    note = (
        f"examples are the features of {spec.label} with the weights of {Path(place).name}, "
        "computed once"
    )
    return replace(
        dataset,
        train=seen(dataset.train),
        test=seen(dataset.test),
        validation=dataset.validation and seen(dataset.validation),
        mean=(),
        std=(),
        about=About("vector", owners=dataset.about.owners, notes=(*dataset.about.notes, note)),
        before=passes.inputs.stored(dataset.train.values),
    )


def body_of(
    asked: Mapping[str, Any], shape: tuple[int, ...], classes: int, vocabulary: int, sha: str
) -> nn.Module:
    """The body of ``data.features_of``: inputs (N, *shape) -> features (N, D), in evaluation mode.

    sha: the seal that the run noted of its file. Raises ConfigError where the file is not here,
    CorruptFile where it holds another model.
    """
    spec, place = _network(asked, shape, classes, vocabulary)
    if not Path(place).exists():
        raise ConfigError(
            f"the run's examples are features of {place}, which is not here; put it back"
        )
    if seal(place) != sha:
        raise CorruptFile(
            f"{place} holds another model than when the run was started, whose features its head "
            "takes"
        )
    return contract.predictor(spec, _params(spec, place)).as_module().get_submodule("body")


def _refuse(settings: Settings, dataset: Dataset) -> None:
    data = settings.data
    if dataset.about.kind in ("table", "series"):
        raise ConfigError(
            f"data.features_of is for images, texts and vectors; {dataset.name} holds "
            f"{dataset.many}"
        )
    if data.augment:
        raise ConfigError(
            "data.features_of computes features once, and data.augment would vary examples; leave "
            "one out"
        )
    if data.public_from not in ("train", "noise"):
        raise ConfigError(
            "with data.features_of the public set can only come from the training set or from "
            "noise; "
            "leave data.public_from out"
        )
    if settings.on_sites:
        raise ConfigError(
            "data.features_of needs the examples here, and sites keep theirs; give sites features "
            "as data"
        )


def _network(
    asked: Mapping[str, Any], shape: tuple[int, ...], classes: int, vocabulary: int
) -> tuple[ModelSpec, str]:
    fields = {key: value for key, value in asked.items() if key not in ("name", "file")}
    return contract.spec_for(asked["name"], shape, classes, fields, vocabulary), asked["file"]


def _params(spec: ModelSpec, place: str) -> Mapping[str, Tensor]:
    """The weights of a file, whose head may be of other classes."""
    if "features" not in contract.capabilities(spec):
        raise IncompatibleMethod(
            f"data.features_of: {spec.label} has no body, whose output features are"
        )
    start = start_of(place, spec, lambda: contract.initial(spec, 0), partial=True)
    if absent := [name for name in start.new if name.startswith("body.")]:
        raise ConfigError(
            f"data.features_of: {Path(place).name} has no {absent[0]!r} that fits {spec.label}"
        )
    return start.params


def _kept(
    passes: ModelPasses, params: Mapping[str, Tensor], examples: Examples, place: str
) -> Tensor:
    """Features (n, D) of examples, from the cache folder or else computed."""
    told = [
        examples_digest(replace(examples, owners=None)),
        seal(place),
        repr(passes.model),
        repr(passes.inputs),
    ]
    key = hashlib.sha256(json.dumps([*told, str(torch.__version__)]).encode()).hexdigest()[:24]
    path = cache_folder() / "features" / f"{key}.safetensors"
    try:
        stored = safetensors.torch.load_file(path)["features"]
        if len(stored) == len(examples):
            return stored
    except (OSError, SafetensorError, KeyError):
        pass  # not there yet, or damaged: it is made again
    log.info("features of %s examples are computed once", f"{len(examples):,}")
    made = passes.features(params, examples).cpu().contiguous()
    try:
        _write(path, made)
    except OSError as error:
        log.warning("features cannot be kept in %s: %s", path.parent, error.strerror)
    return made


def _write(path: Path, made: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        safetensors.torch.save_file({"features": made}, aside)
        Path(aside).replace(path)
    finally:
        Path(aside).unlink(missing_ok=True)
