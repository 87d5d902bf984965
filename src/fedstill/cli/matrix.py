"""The command that takes every number people call forgetting over time from accuracy matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fedstill.cli.app import Seeds

Numbers = Annotated[tuple[float, ...], *Seeds.__metadata__[:1], Parameter(metavar="10,10,...")]
ClassTasks = Annotated[tuple[int, ...], *Seeds.__metadata__[:1], Parameter(metavar="0,0,1,...")]
MatrixUnit = Literal["percent", "share"]


def forgetting_command(
    *matrices: Path,
    unit: MatrixUnit | None = None,
    initial: Numbers = (),
    class_tasks: ClassTasks = (),
) -> int:
    """What a model forgot over tasks, by everybody's definition, and how these differ; any matrix
    or run will do.

    A CSV file has a row for each task's end and a column for each task: the accuracy on it, blank
    for tasks to come. Where the first column counts the rows, a first row 0 is the untrained model.

    Args:
        matrices: At least one: CSV files of accuracies, directories of runs with tasks, or both.
        unit: Whether a file's accuracies are percentages or shares. Unset, percentages where one is
            above 1.
        initial: The untrained model's accuracy in each column, for forward transfer.
        class_tasks: Where columns are classes: the task of each, counted from 0 or from 1.
    """
    from fedstill.core.errors import ConfigError
    from fedstill.report import accuracy_matrix, terminal
    from fedstill.report.accuracy_matrix import read_matrix, run_matrices

    if not matrices:
        raise ConfigError(
            "forgetting: give a CSV file, a row for each task's end and a column for each task, or "
            "a run"
        )
    each = [
        run_matrices(p) if p.is_dir() else [read_matrix(p, unit, initial, class_tasks)]
        for p in matrices
    ]
    read = [matrix for some in each for matrix in some]
    screen = terminal.console(sentences=True)
    for matrix in read:
        for note in matrix.notes:
            terminal.tell(screen, f"{matrix.name}: {note}")
        if rows := accuracy_matrix.matrix_rows(matrix):
            screen.print(terminal.table([matrix.name, *matrix.columns], rows))
        screen.print()
    heads, numbers = accuracy_matrix.definition_heads(read), len(accuracy_matrix.in_units(read))
    rows = [
        [row[0], *row[-2:], *row[1 : 1 + numbers]] for row in accuracy_matrix.definition_rows(read)
    ]
    screen.print(terminal.table([heads[0], *heads[-2:], *heads[1 : 1 + numbers]], rows, words=3))
    for matrix in read:
        of = f" for {matrix.name}" if len(read) > 1 else ""
        terminal.tell(screen, f"\nBeside average_forgetting, Chaudhry's{of}:")
        for line in accuracy_matrix.how_they_differ(matrix):
            terminal.tell(screen, f"  {line}")
    return 0
