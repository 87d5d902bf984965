"""Model files: the final model of a run, models with a description of their network, start models,
and frozen backbones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedstill.config.settings import Settings
from fedstill.core.capabilities import Need
from fedstill.core.errors import (
    ConfigError,
    CorruptFile,
    IncompatibleMethod,
    Refused,
    on_one_line,
)
from fedstill.core.files import (
    cache_folder,
    digest,
    open_to_read,
    read_file,
    replaced_file,
    write_whole,
)
from fedstill.core.records import Examples, ModelSpec, Tensors, matches
from fedstill.core.user_modules import code_named_by, trust_content
from fedstill.data.dataset import INPUT_FIELDS, Dataset, DatasetInfo, examples_digest
from fedstill.data.inputs import Inputs
from fedstill.engines.hardware import run_in_parallel, workers
from fedstill.engines.passes import ModelPasses
from fedstill.models import contract
from fedstill.models.building import held_entries, hold, is_added, sha256_of
from fedstill.models.functional import SHARD
from fedstill.models.predictors import predictor
from fedstill.running.journal import SUMMARY

log = logging.getLogger("fedstill.backbone")

# The final model in a run's directory, whose SHA-256 is in ``summary.json``.


FINAL = "model.safetensors"
"""The name of the file."""

MODEL_SHA256 = "model_sha256"
"""The key of the file's SHA-256 in ``summary.json``."""


def read_final(path: Path) -> bytes:
    """The bytes of a model file.

    Raises ValueError if the final model of a run has changed since the run wrote it, and OSError if
    the file cannot be read. Without a readable ``summary.json`` next to the file, the model is not
    checked.
    """
    data = read_file(path)
    try:
        expected_sha256 = json.loads(read_file(path.parent / SUMMARY)).get(MODEL_SHA256)
    except (OSError, ValueError, AttributeError, RecursionError):
        return data
    if path.name == FINAL and expected_sha256 not in (None, digest(data)):
        raise ValueError("its SHA-256 is not the one in summary.json")
    return data


# A model in a file: its parameters as safetensors, and its network in the file's header.


_KEY = "fedstill_model"


def save_model(path: Path, spec: ModelSpec, params: Tensors) -> None:
    """Write a model to a file, including the held entries of its network.

    The file is written completely or not at all. Raises DiskFull if it cannot be written.
    """
    entries = {**params, **held_entries(spec)}
    copies = {name: v.detach().cpu().contiguous().clone() for name, v in entries.items()}
    description = json.dumps(spec.to_dict())
    trust_content(description.encode())
    write_whole(path, safetensors.torch.save(copies, {_KEY: description}))


def read_model(path: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The network and the parameters in a file that :func:`save_model` wrote.

    The held entries of the network are stored for the modules of this process. Raises ConfigError
    for a file that is missing or does not describe its network, UnknownName for an unknown network,
    and CorruptFile for a damaged file and for parameters that do not fit the network.
    """
    if not path.is_file():
        raise ConfigError(f"there is no model file {path}")
    try:
        with safe_open(path, "pt") as file:
            description = (file.metadata() or {}).get(_KEY)
            params = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged, or not a safetensors file: {error}") from error
    if description is None:
        raise ConfigError(
            f"{path} does not describe its network; use a model that `fedstill query` wrote"
        )
    with code_named_by(path, description.encode()):
        return _checked_model(path, _spec(path, description), params)


def _checked_model(
    path: Path, spec: ModelSpec, params: dict[str, Tensor]
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The network and its parameters without held entries; raises CorruptFile if they do not
    fit.
    """
    if spec.held:
        fixed = {name: v for name, v in params.items() if not matches(name, spec.trains)}
        if sha256_of(fixed) != spec.held:
            raise CorruptFile(f"{path} lacks the held entries of its {spec.label}, or they differ")
        hold(fixed)
        params = {name: v for name, v in params.items() if name not in fixed}
    expected = contract.initial(spec, 0)
    misfits = _misfits(params, expected)
    if misfits:
        raise CorruptFile(
            f"{path} is not a {spec.label}: its entry {misfits[0]!r} is missing, unknown or has "
            "another shape or type"
        )
    return spec, {name: params[name] for name in expected}


def _spec(path: Path, description: str) -> ModelSpec:
    try:
        return ModelSpec.from_dict(json.loads(description))
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"{path}: the description of its network cannot be read: {error}"
        ) from error


# Start models: a run can start from the final model of another run, or from a model in a file,
# instead of random weights.


PICKLED = (".pt", ".pth")
"""The suffixes of files that torch.save wrote."""

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")
"""The keys under which training programs store the state dict in a checkpoint."""

SHARED = 4
"""The largest total size of a file's tensors, relative to the file. Tensors may share storage."""

REMEDY = "write torch.save(model.state_dict(), PATH)"  # of tensors, never a pickle of code
"""How to write a file that fedstill can read: a dictionary of tensors without other objects."""

PARALLEL_PREFIX = "module."
"""The prefix that torch's DataParallel adds to each name."""


def file_of(source: str) -> Path:
    """The model file that ``start_from`` names: a file, or the final model in a run's directory.

    Raises ConfigError if there is no such file.
    """
    path = Path(source)
    if path.is_dir():
        path = path / FINAL
    if not path.is_file():
        raise ConfigError(
            f"start_from = {source!r}: there is no model; name the directory of a finished run, or "
            "a .safetensors, .pt or .pth file"
        )
    return path


@dataclass(frozen=True)
class StartModel:
    """The initial model of a run that starts from a file.

    params: all parameters of its network. new: the names of entries that the file lacks. left_out:
    the names of entries in the file that the network lacks.
    """

    params: Tensors
    new: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        new = ", ".join(self.new) or "none"
        left_out = ", ".join(self.left_out) or "none"
        from_file = len(self.params) - len(self.new)
        total = len(self.params)
        return (
            f"{from_file} of {total} entries come from the file; new: {new}; left out: {left_out}"
        )


def start_model_of(
    source: str, spec: ModelSpec, drawn: Callable[[], Tensors], partial: bool = False
) -> StartModel:
    """The initial model of a run, from the file or directory that ``start_from`` names.

    drawn: returns random initial parameters. partial: whether to use only those entries of the file
    that match in name, shape and type, and random values for all others. Additions of a method to
    the network may be missing. Raises ConfigError for a model of another network, or a file without
    any matching entry; CorruptFile for a damaged file.
    """
    expected = contract.initial(spec, 0)
    added = {name: value for name, value in expected.items() if is_added(spec, name)}
    in_file = _stored(file_of(source))
    stored = {**added, **in_file}
    misfits = _misfits(stored, expected)
    if not misfits:
        return StartModel({name: stored[name] for name in expected})
    if not partial:
        name = misfits[0]
        raise ConfigError(
            f"start_from = {source!r} is not a model of {spec.label}: its {name!r} is "
            f"{_form(stored.get(name))}, not {_form(expected.get(name))}; set [model] to the "
            "network of that model, or start_from_partial = true to use the entries that match"
        )
    misfits = _misfits(in_file, expected)
    new = tuple(name for name in expected if name in misfits)
    left_out = tuple(name for name in in_file if name in misfits)
    if len(new) == len(expected):
        raise ConfigError(
            f"start_from = {source!r}: no entry matches {spec} in name, shape and type; the file "
            f"has {', '.join(list(in_file)[:3])}, the network {', '.join(list(expected)[:3])}"
        )
    initial = drawn()
    params = {}
    for name in expected:
        params[name] = initial[name] if name in new else stored[name]
    return StartModel(params, new, left_out)


def sent_start_model(params: Tensors, spec: ModelSpec) -> StartModel:
    """The initial model of a run that a server sent to a client.

    Raises Refused unless it has exactly the entries of the network, and all numbers are finite.
    """
    expected = contract.initial(spec, 0)
    misfits = _misfits(params, expected)
    if misfits:
        name = misfits[0]
        raise Refused(
            f"the start model is not a model of {spec.label}: its {name!r} is "
            f"{_form(params.get(name))}, not {_form(expected.get(name))}",
            "start",
        )
    for name, value in params.items():
        if not bool(value.isfinite().all()):
            raise Refused(
                f"the start model has numbers in {name!r} that are not finite",
                "start",
            )
    return StartModel({name: params[name] for name in expected})


def _misfits(params: Tensors, expected: Tensors) -> list[str]:
    """The names of tensors that only one of the models has, or that differ in shape or type."""
    return [
        name
        for name in sorted(params.keys() | expected.keys())
        if _form(params.get(name)) != _form(expected.get(name))
    ]


def model_sha256(source: str) -> str:
    """The SHA-256 of the model file. A resume compares it with the file."""
    return digest(read_file(file_of(source)))


def _stored(path: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file, or in a state dict that torch.save wrote. No code in the
    file is executed.
    """
    if path.suffix in PICKLED:
        return _state_dict(path)
    try:
        return safetensors.torch.load(read_final(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged, or not a safetensors file: {error}") from error


def _state_dict(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):
            content = _load_tensors(path)
    except Exception as error:  # a hostile file can cause any exception
        if "weights_only" in str(error):
            raise ConfigError(
                f"start_from = {str(path)!r} contains other objects than tensors, so loading it "
                f"could execute code; {REMEDY} where the model was trained, and use that file"
            ) from error
        raise CorruptFile(
            f"{path} is damaged, or was not written by torch.save: {on_one_line(error)[:120]}"
        ) from error
    tensors = _find_state_dict(content)
    problem = ""
    if not tensors:
        problem = f"it contains a {type(content).__name__}"
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            problem = f"its {name!r} is not a tensor"
            break
    if problem:
        raise ConfigError(
            f"start_from = {str(path)!r} is not a state dict (tensors by name): {problem}; {REMEDY}"
        )
    if all(name.startswith(PARALLEL_PREFIX) for name in tensors):
        tensors = {name.removeprefix(PARALLEL_PREFIX): value for name, value in tensors.items()}
    _check_sizes(path, tensors)
    return {name: _copied(value) for name, value in tensors.items()}


def _load_tensors(path: Path) -> Any:
    """The object in a file that torch.save wrote. Only tensors are read, and no code is executed.

    Raises ValueError for a compressed file. torch.save does not compress, and a small compressed
    file could have any size in memory.
    """
    with open_to_read(path) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("its content is compressed")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)  # never a pickle


def _check_sizes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CorruptFile for tensors that need far more memory than the size of the file.

    A tensor can repeat stored numbers, and several tensors can share them.
    """
    stored = path.stat().st_size
    total = 0
    for name, tensor in tensors.items():
        if not _is_dense(tensor):
            continue
        size = tensor.numel() * tensor.element_size()
        total += size
        if size > stored or total > SHARED * stored:
            raise CorruptFile(
                f"{path} has {stored:,} bytes, but its tensors up to {name!r} need {total:,} "
                f"bytes; {REMEDY}"
            )


def _find_state_dict(content: Any) -> Mapping[Any, Any]:
    """The state dict in the content of a file; empty if there is none."""
    if not isinstance(content, Mapping):
        return {}
    for key in STATE_DICT_KEYS:
        if isinstance(content.get(key), Mapping):
            state_dict: Mapping[Any, Any] = content[key]
            return state_dict
    return content


def _copied(tensor: Tensor) -> Tensor:
    """A copy that shares no memory with other tensors. A tensor that is not dense is not copied,
    because it matches no network.
    """
    detached = tensor.detach()
    if not _is_dense(detached):
        return detached
    return detached.clone(memory_format=torch.contiguous_format)


def _is_dense(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    )


def _form(tensor: Tensor | None) -> str:
    """The shape and type of a tensor in words; tensors match if these are equal."""
    if tensor is None:
        return "missing"
    form = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if _is_dense(tensor):
        return form
    return f"{form}, not dense"


# A frozen backbone changes the data set: the features of each example are computed once and stored,
# and only a head is trained.


def as_features(settings: Settings, dataset: Dataset) -> Dataset:
    """The data set with features of the network ``data.features_of`` as vectors; unchanged if the
    key is unset.

    The features are computed once and stored in the cache. Their key depends on the examples, the
    model file, the network and the version of torch. Raises ConfigError for data or a network
    without features.
    """
    backbone = settings.data.features_of
    if backbone is None:
        return dataset
    _check_data(settings, dataset)
    source = backbone["file"]
    spec = _network(backbone, dataset.input_shape, len(dataset.classes), dataset.vocabulary)
    params = _params(spec, source)
    passes = ModelPasses(spec, Inputs(dataset.mean, dataset.std, (), dataset.about))

    def features(examples: Examples) -> Examples:
        return replace(examples, values=_features(passes, params, examples, source))

    note = (
        f"examples are the features of {spec.label} with the weights of {Path(source).name}, "
        "computed once"
    )
    return replace(
        dataset,
        train=features(dataset.train),
        test=features(dataset.test),
        validation=dataset.validation and features(dataset.validation),
        mean=(),
        std=(),
        about=DatasetInfo(
            "vector", owners=dataset.about.owners, notes=(*dataset.about.notes, note)
        ),
        backbone_inputs=inputs_description(passes.inputs, dataset.train.values),
    )


def inputs_description(inputs: Inputs, values: Tensor) -> dict[str, Any]:
    """The description of inputs in a journal, which suffices to encode new examples.

    values: stored values (n, ...), whose shape and type are described. The other fields are mean
    and std; for other examples than images, also their kind and the non-empty fields of
    ``DatasetInfo``.
    """
    description = {
        "shape": list(values.shape[1:]),
        "pixels": str(values.dtype).removeprefix("torch."),
        "mean": inputs.mean,
        "std": inputs.std,
    }
    if inputs.about.kind == "image":
        return description
    fields = inputs.about.to_json()
    description["kind"] = inputs.about.kind
    description |= {name: fields[name] for name in INPUT_FIELDS if fields[name]}
    return description


def body_of(
    backbone: Mapping[str, Any], shape: tuple[int, ...], classes: int, vocabulary: int, sha: str
) -> nn.Module:
    """The body of ``data.features_of``: inputs (N, *shape) -> features (N, D), in evaluation mode.

    sha: the SHA-256 of the model file at the start of the run. Raises ConfigError if the file is
    missing, and CorruptFile if it contains another model.
    """
    source = backbone["file"]
    spec = _network(backbone, shape, classes, vocabulary)
    if not Path(source).exists():
        raise ConfigError(
            f"the examples of the run are features of the model {source}, which does not exist; "
            "restore the file"
        )
    if model_sha256(source) != sha:
        raise CorruptFile(
            f"{source} has changed since the start of the run, and the run's head needs the "
            "features of the original model; restore the file"
        )
    return predictor(spec, _params(spec, source)).as_module().get_submodule("body")


def _check_data(settings: Settings, dataset: Dataset) -> None:
    """Raise ConfigError for data that cannot be replaced by features."""
    data = settings.data
    if dataset.about.kind in ("table", "series"):
        raise ConfigError(
            f"data.features_of is for images, texts and vectors, but {dataset.name} contains "
            f"{dataset.many}"
        )
    if data.augment:
        raise ConfigError(
            "data.features_of computes features once, but data.augment varies examples in every "
            "epoch; leave out one of them"
        )
    if data.public_from not in ("train", "noise"):
        raise ConfigError(
            "with data.features_of, the public set can only consist of training examples or noise; "
            "leave out data.public_from, or set it to 'noise'"
        )
    if settings.on_sites:
        raise ConfigError(
            "data.features_of needs all examples in one place, but sites keep theirs; compute the "
            "features at the sites, and use them as data"
        )


def _network(
    backbone: Mapping[str, Any], shape: tuple[int, ...], classes: int, vocabulary: int
) -> ModelSpec:
    fields = {key: value for key, value in backbone.items() if key not in ("name", "file")}
    return contract.spec_for(backbone["name"], shape, classes, fields, vocabulary)


def _params(spec: ModelSpec, source: str) -> Mapping[str, Tensor]:
    """The weights in a model file. Its head may have another number of classes."""
    if Need.FEATURES not in contract.capabilities(spec):
        raise IncompatibleMethod(
            f"data.features_of: {spec.label} has no body, so it has no features; choose a network "
            "with a body and a head"
        )
    start = start_model_of(source, spec, lambda: contract.initial(spec, 0), partial=True)
    missing = [name for name in start.new if name.startswith("body.")]
    if missing:
        raise ConfigError(
            f"data.features_of: {Path(source).name} has no entry {missing[0]!r} that matches "
            f"{spec.label}"
        )
    return start.params


def _features(
    passes: ModelPasses, params: Mapping[str, Tensor], examples: Examples, source: str
) -> Tensor:
    """Features (n, D) of examples, from the cache if possible."""
    identity = [
        examples_digest(replace(examples, owners=None)),
        model_sha256(source),
        repr(passes.model),
        repr(passes.inputs),
        str(torch.__version__),
    ]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    path = cache_folder() / "features" / f"{key}.safetensors"
    # A missing or damaged file is written again.
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        cached = safetensors.torch.load_file(path)["features"]
        if len(cached) == len(examples):
            return cached
    log.info("features of %s examples are computed once", f"{len(examples):,}")
    features = _computed(passes, params, examples).cpu().contiguous()
    try:
        _write(path, features)
    except (OSError, SafetensorError) as error:
        log.warning("features cannot be stored in %s: %s", path.parent, on_one_line(error))
    return features


def _computed(passes: ModelPasses, params: Mapping[str, Tensor], examples: Examples) -> Tensor:
    """Features (n, D) of examples. On the CPU, each core computes a part. Parts consist of whole
    shards, so that the bits are the same as in one pass.
    """
    if examples.values.device.type != "cpu":
        return passes.features(params, examples)
    cores = workers()
    shards_a_core = math.ceil(len(examples) / SHARD / cores)
    size = SHARD * max(1, shards_a_core)
    parts = map(Examples, torch.split(examples.values, size), torch.split(examples.labels, size))
    jobs = [partial(passes.features, params, part) for part in parts]
    return torch.cat(run_in_parallel(jobs, cores))


def _write(path: Path, features: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as temporary:
        safetensors.torch.save_file({"features": features}, temporary)
