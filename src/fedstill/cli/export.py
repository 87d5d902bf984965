"""The command that takes something out of a run: its model, as ONNX, as a program of torch, as a folder to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from fedstill.cli.app import app

Whose = Annotated[int | None, Parameter(validator=validators.Number(gte=0))]


@app.command(name="export")
def export_command(
    run: Path, *, onnx: Path | None = None, pt2: Path | None = None, folder: Path | None = None, client: Whose = None
) -> int:
    """Write a run's model so that it can be used without fedstill; the normalisation is inside.

    Args:
        run: The run's directory; of a run that was stopped, the model of its last checkpoint is taken.
        onnx: The file for the model as ONNX. It is compared with the model in onnxruntime, if that is installed.
        pt2: The file for the model as a program of torch.export, which torch.export.load reads.
        folder: A new folder to share: weights, a model card, and a script that needs torch and safetensors alone.
        client: Whose model, for methods that answer with a model for each client.
    """
    from fedstill.errors import ConfigError

    if not (onnx or pt2 or folder):
        raise ConfigError("export: say what to write: --onnx FILE, --pt2 FILE or --folder DIR")
    _write_model(run, onnx, pt2, folder, client)
    return 0


def _write_model(run: Path, onnx: Path | None, pt2: Path | None, folder: Path | None, client: int | None) -> None:
    from fedstill.experiment.trained import exporting
    from fedstill.experiment.trained.loading import load_model
    from fedstill.experiment.trained.upload_folder import write_folder

    model = load_model(run, client)
    if onnx:
        away = exporting.write_onnx(model, onnx)
        print(f"{onnx}: ONNX, {_compared('onnxruntime', away)}")
    if pt2:
        print(f"{pt2}: a program of torch.export, {_compared('torch', exporting.write_program(model, pt2))}")
    if folder:
        away = write_folder(model, run, folder)
        print(f"{folder}: a folder to share, {_compared('its model.py', away)}; state the licence in README.md")


def _compared(what: str, away: float | None) -> str:
    if away is None:
        return f"not compared with the model: {what} is not installed (pip install 'fedstill[onnx]')"
    return f"in {what} its logits differ by {away:.0e} of the largest" if away else f"in {what} its logits are the same"
