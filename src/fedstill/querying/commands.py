"""The command that answers one query from a finished run's models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from fedstill.cli.app import Names, Settings
from fedstill.core.errors import ConfigError

Client = Annotated[int, Parameter(validator=validators.Number(gte=0))]
Under = Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))]


def query(
    run: Path,
    *,
    client: Client,
    classes: Names = (),
    by: Names = (),
    under: Under | None = None,
    need: Names = (),
    student: Path | None = None,
    new_data: str | None = None,
    teachers: Names = (),
    out: Path | None = None,
    set_: Settings = (),
) -> int:
    """Let one client of a finished local run ask its peers for classes; show what it gains and
    forgets, and from whom.

    Args:
        run: The run's directory; its clients must have trained alone (method local_only).
        client: The client that asks.
        classes: The classes that it asks for, by number or name, e.g. 7,9.
        by: Instead of classes, what is reason to ask: lack (too few examples), accuracy (its model
            is too often wrong), need (it will need the class).
        under: By accuracy: it asks for classes on which its model is less accurate, on examples
            that it holds out.
        need: By need: the classes that it will need and asks for, whatever it has of them, by
            number or name, e.g. 7,9.
        student: The file of the model that the client has by now, e.g. of an earlier query; unset,
            the run's.
        new_data: A data set or folder with new examples of the client, on which it first trains
            alone again.
        teachers: Model files that may teach too, in addition to the run's clients.
        out: The file for the student's model. Unset, one in the working directory.
        set_: A value of QKT or its plans, e.g. -s method.query_weight=2 -s plan.transfer.epochs=10.
            May be repeated.
    """
    from fedstill.config.overrides import parse_overrides
    from fedstill.core.files import MODEL, refuse_other_kind
    from fedstill.data.sources import load_dataset
    from fedstill.models.model_file import save_model
    from fedstill.querying import terminal as answer
    from fedstill.querying.answers import Later, ask
    from fedstill.report import terminal
    from fedstill.running.journal import class_numbers

    if bool(by) == bool(classes):
        raise ConfigError(
            "say which classes the client asks for (--classes 7,9), or why it asks (--by lack)"
        )
    if ("accuracy" in by) != (under is not None):
        raise ConfigError("--by accuracy and --under go together, e.g. --by accuracy --under 0.6")
    if ("need" in by) != bool(need):
        raise ConfigError("--by need and --need go together, e.g. --by need --need 7,9")
    refuse_other_kind(out, MODEL)
    reason = {"by": by, **({"accuracy_under": under} if under else {})}
    reason |= {"needs": {str(client): tuple(class_numbers(run, need))}} if need else {}
    asked = reason if by else class_numbers(run, classes)
    later = Later(student, load_dataset(new_data) if new_data else None)
    answered = ask(
        run, client, asked, parse_overrides(set_), [Path(t) for t in teachers], later=later
    )
    screen = terminal.console()
    for line in answer.answer_tables(answered):
        screen.print(line)
    path = out or Path(
        f"{run.name}-client{client}-asked-{'-'.join(map(str, answered.query))}.safetensors"
    )
    save_model(path, answered.model, answered.params)
    screen.print(f"\nthe student's model: {path}")
    return 0
