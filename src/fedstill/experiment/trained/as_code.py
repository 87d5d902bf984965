"""A network as lines of Python that need torch alone: what ``torch.export`` traced, with the
weights by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fedstill.errors import ConfigError
from fedstill.experiment.trained.exporting import exported

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
