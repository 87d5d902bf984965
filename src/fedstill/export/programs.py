"""A trained model as a program without fedstill: ``torch.export``, ONNX, or lines of Python."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fedstill.core.errors import ConfigError, FedstillError, on_one_line
from fedstill.core.files import ONNX, PROGRAM, make_folder, refuse_other_kind, write_over
from fedstill.export.trained_model import OnlyCalled, TrainedModel

# A trained model as a program that needs no fedstill, of ``torch.export`` or ONNX; it is tried
# before it is kept.


TRIED = (1, 7)
"""How many examples of noise an exported program is tried on, one batch after the other."""

NEAR = 1e-3
"""How far the logits of an exported program may be from the model's, relative to the largest."""


def exported(network: nn.Module, example: Tensor) -> ExportedProgram:
    """A network traced by ``torch.export`` with a batch of any size; raises ConfigError if it
    cannot be traced.
    """
    if any(isinstance(m, OnlyCalled) for m in network.modules()):
        raise ConfigError(
            "this method's predictors() gives a function, whose weights nobody can see; to export "
            "its model, "
            "let it give a torch.nn.Module, or an object with as_module()"
        )
    try:
        with quiet():
            return torch.export.export(
                network, (example,), dynamic_shapes=({0: Dim("batch")},), strict=False
            )
    except Exception as error:
        raise ConfigError(f"torch.export cannot trace the network: {on_one_line(error)}") from error


def write_program(model: TrainedModel, path: Path) -> float:
    """Write a model as a program of ``torch.export``, which ``torch.export.load`` reads; how far
    its logits are off.

    Raises ConfigError over a file that is no such program.
    """
    refuse_other_kind(path, PROGRAM)
    program = exported(model, model.noise(2))
    away = furthest(model, program.module())
    out = io.BytesIO()
    with quiet():
        torch.export.save(program, out)
    make_folder(path.absolute().parent)
    write_over(path, out.getvalue(), PROGRAM)
    return away


def write_onnx(model: TrainedModel, path: Path) -> float | None:
    """Write a model as ONNX: ``images`` in, as the model takes them, ``logits`` out, a batch of any
    size.

    What is no image goes in as ``values``.

    The names of the classes, as JSON, and what was trained on what stand in its metadata. Gives how
    far its logits are off in onnxruntime; None if that is not installed. Raises ConfigError without
    onnx and onnxscript, and over a file that is no ONNX model.
    """
    refuse_other_kind(path, ONNX)
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs packages that are not here: pip install 'fedstill[onnx]' ({error})"
        ) from error
    program = exported(model, model.noise(2))
    try:
        with quiet():
            made: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[_name_of(model)],
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:
        raise ConfigError(
            f"torch.onnx cannot translate the network: {on_one_line(error)}"
        ) from error
    data = _described(
        made.model_proto, {"classes": model.classes, **_made_of(model), **model.about}
    )
    away = _in_onnxruntime(model, data)
    make_folder(path.absolute().parent)
    write_over(path, data, ONNX)
    return away


def _described(proto: Any, facts: Mapping[str, Any]) -> bytes:
    """An ONNX model's bytes, its first axis called ``batch``, with facts in its metadata."""
    for name, value in facts.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = name, value if isinstance(value, str) else json.dumps(value)
    graph = proto.graph
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if symbol and dim.dim_param:  # a size that is fixed has none, and must not get one
                dim.dim_param = dim.dim_param.replace(symbol, "batch")
    data: bytes = proto.SerializeToString()
    return data


def furthest(model: TrainedModel, other: Any) -> float:
    """How far the logits of another program are from the model's on noise, relative to the largest.

    Raises FedstillError if they are too far: the program then computes something else.
    """
    away = 0.0
    for count in TRIED:
        noise = model.noise(count)
        with torch.no_grad():
            ours, theirs = model(noise), torch.as_tensor(other(noise))
        finite = ours.isfinite()
        if theirs.shape != ours.shape or not torch.equal(finite, theirs.isfinite()):
            raise FedstillError(
                f"the exported program gives other logits on {count} {model.inputs.many} of noise; "
                "it is not kept"
            )
        scale = max(1.0, float(ours[finite].abs().max()) if bool(finite.any()) else 1.0)
        away = max([away, *((ours - theirs)[finite].abs() / scale).tolist()])
    if away > NEAR:
        raise FedstillError(
            f"the exported program's logits are off by {away:.1e} of the largest; it is not kept"
        )
    return away


def _in_onnxruntime(model: TrainedModel, data: bytes) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return furthest(
        model, lambda noise: session.run(["logits"], {_name_of(model): noise.numpy()})[0]
    )


def _name_of(model: TrainedModel) -> str:
    return "images" if model.inputs.kind == "image" else "values"


def _made_of(model: TrainedModel) -> dict[str, Any]:
    """What an example is made of, where it is no image: for whoever makes examples without
    fedstill.
    """
    return {} if model.inputs.kind == "image" else {"inputs": model.made_of}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says to its own developers while it exports."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# A network as lines of Python that need torch alone: what ``torch.export`` traced, with the weights
# by name.


STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def as_code(network: nn.Module, example: Tensor) -> tuple[str, dict[str, Tensor]]:
    """The lines of a function of ``weights`` and ``examples`` that gives ``(logits,)``, and its
    weights by name.

    example: two normalised examples (2, …). Raises ConfigError for a network that cannot be traced,
    or whose trace is more than calls of torch's own functions.
    """
    program = exported(network, example)
    tensors = {**program.state_dict, **program.constants}
    lines: list[str] = []
    kept: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        argument: Any = spec.arg
        if spec.kind in STORED:
            name = str(spec.target)
            kept[name] = tensors[name].detach().cpu().contiguous().clone()
            lines.append(f"{argument.name} = weights[{name!r}]")
        elif spec.kind is not InputKind.USER_INPUT:
            raise _refused(f"it takes {spec.kind.name}")
        elif argument.name != "examples":
            lines.append(f"{argument.name} = examples")
    if [spec.kind for spec in program.graph_signature.output_specs] != [OutputKind.USER_OUTPUT]:
        raise _refused("it changes its own buffers, or gives more than logits")
    return "\n".join(f"    {line}" for line in [*lines, *_calls(program)]), kept


def _calls(program: ExportedProgram) -> Iterator[str]:
    """The traced calls, one a line, on the device of the examples; without those that only
    check.
    """
    code = program.graph_module.graph.python_code("self")
    _, _, body = code.src.partition("def forward(")
    for line in map(str.strip, body.splitlines()[1:]):
        if "self." in line:
            raise _refused("it has parts that torch.export alone can run")
        if line and "torch.ops.aten._assert" not in line:
            yield line.replace("device(type='cpu')", "examples.device")


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"the network cannot be written down as plain code: {why}; export it as ONNX or with --pt2"
    )
