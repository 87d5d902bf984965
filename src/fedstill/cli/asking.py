"""The command that answers one query from a finished run's models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from fedstill.cli.app import Names, Settings, app

Client = Annotated[int, Parameter(validator=validators.Number(gte=0))]


@app.command
def query(
    run: Path, *, client: Client, classes: Names, teachers: Names = (), out: Path | None = None, set_: Settings = ()
) -> int:
    """Let one client of a finished local run ask its peers for classes; show what it gains and forgets, and from whom.

    Args:
        run: The run's directory; its clients must have trained alone (method local_only).
        client: The client that asks.
        classes: The classes that it asks for, by number or name, e.g. 7,9.
        teachers: Model files that may teach too, in addition to the run's clients.
        out: The file for the student's model. Unset, one in the working directory.
        set_: A value of QKT or its plans, e.g. -s method.query_weight=2 -s plan.transfer.epochs=10. May be repeated.
    """
    from fedstill.experiment.answering import ask, numbered
    from fedstill.experiment.config.overrides import parse_overrides
    from fedstill.models.model_files import save_model
    from fedstill.report import answer, terminal

    asked = numbered(run, classes)
    answered = ask(run, client, asked, parse_overrides(set_), [Path(t) for t in teachers])
    screen = terminal.console()
    for line in answer.answer_tables(answered):
        screen.print(line)
    path = out or Path(f"{run.name}-client{client}-asked-{'-'.join(map(str, answered.query))}.safetensors")
    save_model(path, answered.model, answered.params)
    screen.print(f"\nthe student's model: {path}")
    return 0
