"""The command ``fedstill export``: a run's model in several forms, and its numbers as tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fedstill.cli.app import Flag, check_contains_run, parse_client_number
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.files import counted

if TYPE_CHECKING:
    from fedstill.export.trained_model import TrainedModel


@dataclass(frozen=True)
class TableFolders:
    """The options of ``fedstill export`` that write a run's numbers as tables."""

    parquet: Annotated[
        Path | None,
        Parameter(
            name="--parquet",
            help="A folder for rounds.parquet and clients.parquet: a row for each round, and one "
            "for each client and stage.",
        ),
    ] = None
    csv: Annotated[
        Path | None, Parameter(name="--csv", help="A folder for the same tables as CSV.")
    ] = None


NO_TABLES = TableFolders()


def export_command(
    run: Path,
    *,
    onnx: Path | None = None,
    pt2: Path | None = None,
    folder: Path | None = None,
    client: str | None = None,
    round_: Annotated[str | None, Parameter(name="--round")] = None,
    tables: Annotated[TableFolders, Parameter(name="*")] = NO_TABLES,
    trust_code: Flag = False,
) -> int:
    """Write a run's model, with its normalisation, for use without fedstill; or write its numbers
    as tables.

    Args:
        run: The run's directory; for a run that was stopped, the model of its last checkpoint is
            written.
        onnx: The file for the model as ONNX. If onnxruntime is installed, its results are compared
            with the model's.
        pt2: The file for the model as a program of torch.export, which torch.export.load reads.
        folder: A new folder to share: weights, a model card, and a script that needs only torch and
            safetensors.
        client: The client whose model is written, by name or number, for methods with a model for
            each client, and for data that each client standardised by itself.
        round_: The round whose model is written: best, or the number of a round that was kept. By
            default, the last one.
        tables: Folders for the numbers as tables.
        trust_code: Trust the code that the run names, if it was not made on this machine.
    """
    from fedstill.running.directory import trust_run

    files = _ModelFiles(onnx, pt2, folder)
    if not (files or tables.parquet or tables.csv):
        raise ConfigError(
            "export: choose what to write: --onnx FILE, --pt2 FILE, --folder DIR, --parquet DIR or "
            "--csv DIR"
        )
    chooses_model = client is not None or round_ is not None
    if chooses_model and not files:
        option = "--client" if client is not None else "--round"
        raise ConfigError(
            f"{option} chooses a model, and none is written; add --onnx, --pt2 or --folder"
        )
    if trust_code:
        trust_run(run)
    if files:
        _write_models(run, client, round_, files)
    if tables.parquet:
        _write_tables(run, "parquet", tables.parquet)
    if tables.csv:
        _write_tables(run, "csv", tables.csv)
    return 0


@dataclass(frozen=True)
class _ModelFiles:
    """The files and the folder to write a model to; false if there are none."""

    onnx: Path | None
    pt2: Path | None
    folder: Path | None

    def __bool__(self) -> bool:
        return bool(self.onnx or self.pt2 or self.folder)

    def check_names(self) -> None:
        """Raise ConfigError if a file's name is that of a folder."""
        for option, file in (("--onnx", self.onnx), ("--pt2", self.pt2)):
            if file and file.is_dir():
                suggested = file / f"model.{option.removeprefix('--')}"
                raise ConfigError(
                    f"{option} {file} is a folder; name a file, e.g. {option} {suggested}"
                )


def _write_models(run: Path, client: str | None, round: str | None, files: _ModelFiles) -> None:
    from fedstill.export.upload_folder import check_new_folder

    files.check_names()
    if files.folder:
        check_new_folder(files.folder)
    model = _load(run, client, round)
    name = _model_name(model, client)
    # The folder comes first: it must be new, and the files may be in it.
    if files.folder:
        _write_folder(model, name, run, files.folder)
    if files.onnx:
        _write_onnx(model, name, files.onnx)
    if files.pt2:
        _write_program(model, name, files.pt2)
    _print_missing_standardisation(model)


def _load(run: Path, client: str | None, round: str | None) -> TrainedModel:
    from fedstill.export.loading import load_model

    owner = _owner(run, client)
    if round is None:
        return load_model(run, owner)
    if round == "best":
        return load_model(run, owner, round="best")
    if not round.isdecimal():
        raise ConfigError(f"--round {round} must be a whole number or best")
    return load_model(run, owner, round=int(round))


def _owner(run: Path, client: str | None) -> int | str | None:
    """The owner of a model: a client's number, or the name of a group such as "cluster 1"."""
    if client is None:
        return None
    try:
        return parse_client_number(run, client)
    except UnknownName:
        # load_model refuses a name that is not one of a group either.
        return client


def _model_name(model: TrainedModel, client: str | None) -> str:
    """The model in words. The option is repeated, because its text may be the name of a client with
    another number, or of a client that shares its model.
    """
    from fedstill.export.trained_model import name_in_words

    name = name_in_words(model.about)
    if client is None:
        return name
    return f"{name} (--client {client})"


def _print_missing_standardisation(model: TrainedModel) -> None:
    from fedstill.export.trained_model import lacks_standardisation

    if lacks_standardisation(model):
        print(
            "Each client standardised its data by its own mean and standard deviation, and this "
            "model contains none: standardise its inputs by those of the client whose data they are"
        )


def _write_onnx(model: TrainedModel, name: str, path: Path) -> None:
    from fedstill.export.programs import write_onnx

    error = write_onnx(model, path)
    if error is None:
        result = (
            "not compared with the model: onnxruntime is not installed "
            "(pip install 'fedstill[onnx]')"
        )
    else:
        result = _comparison("onnxruntime", error)
    print(f"{path}: {name} as ONNX; {result}")


def _write_program(model: TrainedModel, name: str, path: Path) -> None:
    from fedstill.export.programs import write_program

    error = write_program(model, path)
    print(f"{path}: {name} as a torch.export program; {_comparison('torch', error)}")


def _write_folder(model: TrainedModel, name: str, run: Path, folder: Path) -> None:
    from fedstill.export.upload_folder import write_folder

    error = write_folder(model, run, folder)
    print(
        f"{folder}: {name} as a folder to share; {_comparison('model.py', error)}; add a licence "
        "to its README.md before you share it"
    )


def _comparison(program: str, error: float) -> str:
    if not error:
        return f"the logits in {program} equal those of the run's model"
    return f"the logits in {program} differ by {error:.0e} of the largest one"


def _write_tables(run: Path, file_format: str, folder: Path) -> None:
    from fedstill.report.table_files import write_run_tables
    from fedstill.running.packs import readable

    is_packed = readable(run) != run
    if not is_packed:
        check_contains_run(run)
    for table in write_run_tables(run, file_format, folder):
        print(f"{table.path}: {counted(table.rows, 'row')}, {counted(table.columns, 'column')}")
