"""A trained model as a program that does not need fedstill: ``torch.export``, ONNX or Python code.

Every program is compared with the model before it is written.
"""

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
from fedstill.core.files import ONNX, PROGRAM, check_may_overwrite, make_folder, replace_file
from fedstill.export.trained_model import OnlyCallable, TrainedModel

# ---- torch.export and ONNX -----------------------------------------------------------------------

TRIED = (1, 7)
"""The sizes of the batches of noise on which an exported program is compared with the model."""

NEAR = 1e-3
"""The largest allowed difference of logits between a program and the model, relative to the largest
logit.
"""


def exported(network: nn.Module, example: Tensor) -> ExportedProgram:
    """A network traced by ``torch.export``, for batches of any size.

    Raises ConfigError if it cannot be traced.
    """
    if any(isinstance(module, OnlyCallable) for module in network.modules()):
        raise ConfigError(
            "this method's predictors() returns a function without weights; to export the model, "
            "return a torch.nn.Module or an object with as_module()"
        )
    try:
        with quiet():
            return torch.export.export(
                network, (example,), dynamic_shapes=({0: Dim("batch")},), strict=False
            )
    except Exception as error:
        raise ConfigError(f"torch.export cannot trace the network: {on_one_line(error)}") from error


def write_program(model: TrainedModel, path: Path) -> float:
    """Write a model as a program of ``torch.export``, which ``torch.export.load`` reads.

    Returns the largest difference of its logits, as ``furthest`` does. Raises ConfigError if
    another kind of file is in the way.
    """
    check_may_overwrite(path, PROGRAM)
    program = exported(model, model.noise(2))
    difference = furthest(model, program.module())
    out = io.BytesIO()
    with quiet():
        torch.export.save(program, out)
    make_folder(path.absolute().parent)
    replace_file(path, out.getvalue(), PROGRAM)
    return difference


def write_onnx(model: TrainedModel, path: Path) -> float | None:
    """Write a model as ONNX, for batches of any size. Its input is called ``images``, or ``values``
    for other data; its output is called ``logits``.

    The metadata contain the names of the classes, as JSON, and ``TrainedModel.about``. Returns the
    largest difference of its logits in onnxruntime, or None if that is not installed. Raises
    ConfigError without onnx and onnxscript, and if another kind of file is in the way.
    """
    check_may_overwrite(path, ONNX)
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs more packages: pip install 'fedstill[onnx]' ({error})"
        ) from error
    program = exported(model, model.noise(2))
    try:
        with quiet():
            onnx_program: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[_input_name(model)],
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:
        raise ConfigError(
            f"torch.onnx cannot translate the network: {on_one_line(error)}"
        ) from error
    metadata: dict[str, Any] = {"classes": model.classes}
    if model.inputs.kind != "image":
        metadata["inputs"] = model.made_of
    data = _with_metadata(onnx_program.model_proto, {**metadata, **model.about})
    difference = _difference_in_onnxruntime(model, data)
    make_folder(path.absolute().parent)
    replace_file(path, data, ONNX)
    return difference


def _with_metadata(proto: Any, metadata: Mapping[str, Any]) -> bytes:
    """The bytes of an ONNX model with metadata; its first axis is called ``batch``."""
    for name, value in metadata.items():
        text = value
        if not isinstance(value, str):
            text = json.dumps(value)
        entry = proto.metadata_props.add()
        entry.key = name
        entry.value = text
    graph = proto.graph
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            # Fixed sizes have no name and must not get one.
            if symbol and dim.dim_param:
                dim.dim_param = dim.dim_param.replace(symbol, "batch")
    data: bytes = proto.SerializeToString()
    return data


def furthest(model: TrainedModel, program: Any) -> float:
    """The largest difference between the logits of another program and the model's on noise,
    relative to the largest logit.

    Raises FedstillError if it is too large: the program then computes something else.
    """
    largest = 0.0
    for count in TRIED:
        noise = model.noise(count)
        with torch.no_grad():
            expected = model(noise)
            logits = torch.as_tensor(program(noise))
        finite = expected.isfinite()
        if logits.shape != expected.shape or not torch.equal(finite, logits.isfinite()):
            raise FedstillError(
                f"the exported program returns other logits for {count} {model.inputs.many} of "
                "noise; it was not written"
            )
        scale = max([1.0, *expected[finite].abs().tolist()])
        differences = (expected - logits)[finite].abs() / scale
        largest = max([largest, *differences.tolist()])
    if largest > NEAR:
        raise FedstillError(
            f"the exported program's logits differ by {largest:.1e} of the largest; it was not "
            "written"
        )
    return largest


def _difference_in_onnxruntime(model: TrainedModel, data: bytes) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def logits(noise: Tensor) -> Any:
        return session.run(["logits"], {_input_name(model): noise.numpy()})[0]

    return furthest(model, logits)


def _input_name(model: TrainedModel) -> str:
    if model.inputs.kind == "image":
        return "images"
    return "values"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the messages and warnings that torch prints for its developers during an export."""
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


# ---- Python code ---------------------------------------------------------------------------------

STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def as_code(network: nn.Module, example: Tensor) -> tuple[str, dict[str, Tensor]]:
    """The body of a Python function of ``weights`` and ``examples`` that returns ``(logits,)``, and
    its weights by name.

    example: two normalised examples (2, …). Raises ConfigError for a network that cannot be traced,
    or whose trace contains more than calls of torch's functions.
    """
    program = exported(network, example)
    tensors = {**program.state_dict, **program.constants}
    lines: list[str] = []
    weights: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        argument: Any = spec.arg
        if spec.kind in STORED:
            name = str(spec.target)
            weights[name] = tensors[name].detach().cpu().contiguous().clone()
            lines.append(f"{argument.name} = weights[{name!r}]")
        elif spec.kind is not InputKind.USER_INPUT:
            raise _not_as_code(f"it takes {spec.kind.name}")
        elif argument.name != "examples":
            lines.append(f"{argument.name} = examples")
    if [spec.kind for spec in program.graph_signature.output_specs] != [OutputKind.USER_OUTPUT]:
        raise _not_as_code("it changes its buffers, or returns more than logits")
    lines += _calls(program)
    return "\n".join(f"    {line}" for line in lines), weights


def _calls(program: ExportedProgram) -> Iterator[str]:
    """The traced calls, one per line, on the device of the examples; assertions are left out."""
    code = program.graph_module.graph.python_code("self")
    _, _, body = code.src.partition("def forward(")
    for line in map(str.strip, body.splitlines()[1:]):
        if "self." in line:
            raise _not_as_code("it has parts that only torch.export can run")
        if line and "torch.ops.aten._assert" not in line:
            yield line.replace("device(type='cpu')", "examples.device")


def _not_as_code(reason: str) -> ConfigError:
    return ConfigError(
        f"the network cannot be written as Python code: {reason}; export it as ONNX or with --pt2"
    )
