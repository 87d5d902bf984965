"""The command that takes something out of a run: its model in several forms, and its numbers as
tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fedstill.core.errors import ConfigError

if TYPE_CHECKING:
    from fedstill.export.trained_model import TrainedModel


def export_command(
    run: Path,
    *,
    onnx: Path | None = None,
    pt2: Path | None = None,
    folder: Path | None = None,
    client: str | None = None,
    round_: Annotated[str | None, Parameter(name="--round")] = None,
    parquet: Path | None = None,
    csv: Path | None = None,
) -> int:
    """Write a run's model so that it can be used without fedstill, normalisation inside; or its
    numbers as tables.

    Args:
        run: The run's directory; of a run that was stopped, the model of its last checkpoint is
            taken.
        onnx: The file for the model as ONNX. It is compared with the model in onnxruntime, if that
            is installed.
        pt2: The file for the model as a program of torch.export, which torch.export.load reads.
        folder: A new folder to share: weights, a model card, and a script that needs torch and
            safetensors alone.
        client: Whose model, by number or name, for methods that answer with a model for each
            client.
        round_: The round whose model is written: best, or the number of a round that was kept.
            Unset, the last one.
        parquet: A folder for rounds.parquet and clients.parquet: one row a round, and one for each
            client and stage.
        csv: A folder for the same tables as CSV.
    """
    if not (onnx or pt2 or folder or parquet or csv):
        raise ConfigError(
            "export: say what to write: --onnx FILE, --pt2 FILE, --folder DIR, --parquet DIR or "
            "--csv DIR"
        )
    if onnx or pt2 or folder:
        model = _loaded(run, client, round_)
        _write_model(run, model, onnx, pt2, folder)
    elif client is not None or round_ is not None:
        option = "--client" if client is not None else "--round"
        raise ConfigError(
            f"{option} chooses a model, and none is written; add --onnx, --pt2 or --folder"
        )
    for kind, tables in (("parquet", parquet), ("csv", csv)):
        if tables is not None:
            _write_tables(run, kind, tables)
    return 0


def _write_tables(run: Path, kind: str, folder: Path) -> None:
    from fedstill.running.frame import write_run_tables

    for path, rows, columns in write_run_tables(run, kind, folder):
        print(f"{path}: {rows} rows, {columns} columns")


def _loaded(run: Path, client: str | None, round: str | None) -> TrainedModel:
    from fedstill.export.loading import load_model

    whose = int(client) if client is not None and client.isdecimal() else client
    if round is None:
        return load_model(run, whose)
    if round == "best":
        return load_model(run, whose, round="best")
    if not round.isdecimal():
        raise ConfigError(f"--round {round} must be a whole number or best")
    return load_model(run, whose, round=int(round))


def _write_model(
    run: Path, model: TrainedModel, onnx: Path | None, pt2: Path | None, folder: Path | None
) -> None:
    from fedstill.export import programs
    from fedstill.export.upload_folder import write_folder

    if onnx:
        away = programs.write_onnx(model, onnx)
        print(f"{onnx}: ONNX, {_compared('onnxruntime', away)}")
    if pt2:
        print(
            f"{pt2}: a program of torch.export, "
            f"{_compared('torch', programs.write_program(model, pt2))}"
        )
    if folder:
        away = write_folder(model, run, folder)
        print(
            f"{folder}: a folder to share, {_compared('its model.py', away)}; state the licence in "
            "README.md"
        )


def _compared(what: str, away: float | None) -> str:
    if away is None:
        return (
            f"not compared with the model: {what} is not installed (pip install 'fedstill[onnx]')"
        )
    return (
        f"in {what} its logits differ by {away:.0e} of the largest"
        if away
        else f"in {what} its logits are the same"
    )
