"""Queries in a terminal: the queries of a run for ``fedstill explain``, and the command ``fedstill
query``, which answers a query from the models of a finished run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from rich.console import Console, RenderableType
from rich.text import Text

from fedstill.cli.app import Flag, Names, Settings, parse_class_numbers, parse_client_number
from fedstill.core.errors import ConfigError
from fedstill.core.files import counted
from fedstill.data.views import Arrival
from fedstill.methods.fit import queries_of
from fedstill.metrics import (
    average_accuracy,
    query_accuracy_gain,
    query_forgetting,
    uniform_accuracy,
)
from fedstill.querying.answers import Answer
from fedstill.querying.queries import QueryRule, QueryTable, because
from fedstill.querying.rules import reasons_before
from fedstill.report.summary import NONE
from fedstill.report.terminal import SHADES, PlainTable, tell
from fedstill.running.preparation import Prepared

# ---- fedstill explain ----------------------------------------------------------------------------


WORDS = {
    "lack": "of which they have fewer than {few} examples",
    "accuracy": "on which the accuracy of their model is below {under}",
    "need": "that they will need",
}
"""The triggers in words."""
AMOUNTS = {"single": "one class", "multi": "several classes", "all": "all classes"}

MOST_QUERIES = 40
"""The most queries that are listed. Further ones are only counted."""


def explain_queries(screen: Console, prepared: Prepared) -> None:
    """Print the queries of a run for ``fedstill explain``, if there are any."""
    rule = prepared.world.get(QueryRule)
    if rule is not None:
        tell(screen, _rule_in_words(prepared, rule))
        screen.print()
        return
    queries = queries_of(prepared.world)
    if not queries:
        return
    screen.print(PlainTable(["client", "asks for", "why"], _query_rows(prepared, queries), words=3))
    omitted = len(queries) - MOST_QUERIES
    if omitted > 0:
        tell(screen, f"and {counted(omitted, 'more client')}")
    screen.print()


def _query_rows(
    prepared: Prepared, queries: Mapping[int, tuple[int, ...]]
) -> list[tuple[str, str, str]]:
    """Client, classes and reasons of each query that is known before the run."""
    reasons_by_client = reasons_before(prepared.settings, prepared.world, prepared.sites.all_counts)
    classes = prepared.dataset.classes
    rows = []
    for client, query in sorted(queries.items())[:MOST_QUERIES]:
        reason = "listed in the config"
        if reasons_by_client:
            reason = "; ".join(
                f"{classes[c]}: {because(reasons_by_client[client][c])}" for c in query
            )
        rows.append((f"{client}", ", ".join(classes[c] for c in query), reason))
    return rows


def _rule_in_words(prepared: Prepared, rule: QueryRule) -> str:
    """When clients raise queries in the run, and for which classes."""
    table = prepared.settings.package_table(QueryTable)
    triggers = " or ".join(WORDS[trigger] for trigger in rule.by)
    triggers = triggers.format(few=table.fewer_than, under=f"{table.accuracy_under or 0:g}")
    sentence = (
        "Clients raise their queries in the run, after the stage 'fit', for "
        f"{AMOUNTS[rule.draw]} {triggers}."
    )
    arrival = prepared.sites.arrival
    if arrival is None:
        return sentence
    return f"{sentence} {_arrival_in_words(arrival)}"


def _arrival_in_words(arrival: Arrival) -> str:
    first = f"{100 * arrival.share(1):.0f} %"
    return (
        f"They query in each round: in round 1 with {first} of their data, in round "
        f"{arrival.rounds} with all of their data."
    )


# ---- fedstill query ------------------------------------------------------------------------------


def answer_tables(answer: Answer) -> Iterator[RenderableType]:
    """The teachers of an answered query, the accuracies of classes, and the measures."""
    query_text = ", ".join(f"{c} ({answer.classes[c]})" for c in answer.query)
    yield Text(f"client {answer.client} asks for {query_text}", style="bold")
    for c, class_reasons in answer.why.items():
        yield Text(f"  {c} ({answer.classes[c]}): {because(class_reasons)}")
    if answer.new:
        yield Text(f"Before the query, it trained alone again, with {answer.new:,} new examples.")
    yield Text(
        f"\nA teacher is used if its mean prediction on noise is at least {answer.threshold:g} for "
        "a queried class. Each mark is a class; it is darker if the teacher predicts the class "
        "more often."
    )
    yield PlainTable(_head(answer), [_teacher(answer, c) for c in answer.probe], words=2)
    if not answer.teachers:
        yield Text(
            "\nNo teacher reaches the threshold: the local model is returned unchanged.",
            style="bold",
        )
    if all(map(math.isnan, answer.before)):
        yield Text(
            "\nThe run has no common test set, so the accuracies before and after the query are "
            "unknown."
        )
        return
    yield Text("\nClass accuracy on the common test set", style="bold")
    yield PlainTable(
        ("class", "role", "before", "after", "change"), list(_classes(answer)), words=2
    )
    yield Text()
    yield PlainTable(("measure", "before", "after"), _measures(answer))


def _head(answer: Answer) -> Sequence[str]:
    titles = ["teacher", "noise probe"]
    for c in answer.query:
        titles += [f"noise → {c}", f"share of {c}"]
    return [*titles, "used"]


def _teacher(answer: Answer, teacher: int) -> list[str]:
    probe = answer.probe[teacher].tolist()
    shares = answer.teacher_label_shares.get(teacher)
    cells = [answer.names[teacher], f"│{_shaded(probe, answer.threshold)}│"]
    for c in answer.query:
        cells.append(f"{probe[c]:.3f}")
        share = NONE
        if shares:
            share = f"{100 * shares[c]:.1f} %"
        cells.append(share)
    is_used = "no"
    if teacher in answer.teachers:
        is_used = "yes"
    return [*cells, is_used]


def _shaded(probe: Sequence[float], threshold: float) -> str:
    """A mark for each class: blank below the threshold, otherwise one of four shades."""
    largest = max(probe) or 1
    marks = ""
    for value in probe:
        shade = 0
        if value >= threshold:
            shade = min(4, math.ceil(4 * value / largest))
        marks += SHADES[shade]
    return marks


def _classes(answer: Answer) -> Iterator[list[str]]:
    for c, name in enumerate(answer.classes):
        if c in answer.query:
            role = "queried"
        elif answer.label_shares[c] > 0:
            role = "own"
        else:
            continue
        accuracy_before = answer.before[c]
        accuracy_after = answer.after[c]
        change = _points(accuracy_after - accuracy_before)
        yield [f"{c} {name}", role, _percent(accuracy_before), _percent(accuracy_after), change]


def _measures(answer: Answer) -> list[list[str]]:
    rows = []
    measures = {"average accuracy": average_accuracy, "uniform accuracy": uniform_accuracy}
    for name, measure in measures.items():
        accuracies = [
            measure(model, answer.label_shares, answer.query)
            for model in (answer.before, answer.after)
        ]
        rows.append([name, *map(_percent, accuracies)])
    gain = query_accuracy_gain(answer.before, answer.after, answer.query)
    forgetting = query_forgetting(answer.before, answer.after, answer.label_shares)
    return [
        *rows,
        ["gain on the queried classes", "", _points(gain)],
        ["forgetting", "", _points(forgetting)],
    ]


def _percent(value: float) -> str:
    if math.isnan(value):
        return NONE
    return f"{100 * value:.1f} %"


def _points(difference: float) -> str:
    if math.isnan(difference):
        return NONE
    return f"{100 * difference:+.1f}"


# ---- the file of the student's model -------------------------------------------------------------

MOST_CLASSES_IN_NAME = 10
"""The most classes that the default name of the file lists; of more, it contains their number."""

MOST_BYTES_OF_RUN = 150
"""The most bytes of the run's name in it. File systems allow 255 bytes for the whole name."""


def _check_out(out: Path, models: Sequence[Path]) -> None:
    """Raise ConfigError if the student's model cannot be written to ``out``. This is checked before
    the training, whose result would be lost. ``models``: the files that the query reads.
    """
    from fedstill.core.files import MODEL, check_may_overwrite

    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory; name a file in it")
    check_may_overwrite(out, MODEL)
    if _is_one_of(out, models):
        raise ConfigError(
            f"--out {out} is also a file of --student or --teachers, which would be overwritten; "
            "name another file"
        )


def _default_out(run: Path, answer: Answer, models: Sequence[Path]) -> Path:
    """A file in the working directory for the student's model.

    Its name ends in a number if the query reads such a file, or if another kind of file is there.
    """
    from fedstill.core.files import MODEL, may_overwrite

    name = os.fsencode(run.resolve().name)[:MOST_BYTES_OF_RUN].decode(errors="ignore")
    classes = "-".join(map(str, answer.query))
    if len(answer.query) > MOST_CLASSES_IN_NAME:
        classes = f"{len(answer.query)}-classes"
    stem = f"{name}-client{answer.client}-asked-{classes}"
    path = Path(f"{stem}.safetensors")
    number = 1
    while path.is_dir() or _is_one_of(path, models) or not may_overwrite(path, MODEL):
        number += 1
        path = Path(f"{stem}-{number}.safetensors")
    return path


def _is_one_of(path: Path, models: Sequence[Path]) -> bool:
    """Whether a path is one of some files, under any name."""
    return path.exists() and any(model.exists() and path.samefile(model) for model in models)


# ---- the command ---------------------------------------------------------------------------------


def _check_options(*, classes: Names, by: Names, under: float | None, need: Names) -> None:
    """Raise ConfigError for options of the command that contradict each other."""
    if bool(by) == bool(classes):
        raise ConfigError(
            "set either the queried classes (--classes 7,9) or the reasons for a query (--by lack)"
        )
    if ("accuracy" in by) != (under is not None):
        raise ConfigError("--by accuracy and --under go together, e.g. --by accuracy --under 0.6")
    if ("need" in by) != bool(need):
        raise ConfigError("--by need and --need go together, e.g. --by need --need 7,9")


Under = Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))]


def query(  # noqa: PLR0913 - the options of the command query
    run: Path,
    *,
    client: str,
    classes: Names = (),
    by: Names = (),
    under: Under | None = None,
    need: Names = (),
    student: Path | None = None,
    new_data: str | None = None,
    teachers: Names = (),
    out: Path | None = None,
    set_: Settings = (),
    trust_code: Flag = False,
) -> int:
    """Let a client of a finished local run query its peers for classes, and show what it gains and
    forgets.

    Args:
        run: The run's directory; its clients must have trained alone (method local_only).
        client: The client that queries, by name or number.
        classes: The classes that it queries, by name or number, e.g. 7,9.
        by: Instead of classes, the reasons to query a class: lack (too few examples), accuracy (low
            accuracy of its model), need (the class will be needed).
        under: For the reason accuracy: it queries classes on which its model has a lower accuracy
            than this, on held-out examples.
        need: For the reason need: the classes that it will need, by name or number, e.g. 7,9.
        student: The file of the client's current model, e.g. from an earlier query. By default, its
            model in the run.
        new_data: A data set, file or folder with new examples of the client, on which it first
            trains alone. They are read and standardised like the data of the run.
        teachers: Files of further models that can be teachers, in addition to the run's clients.
        out: The file for the student's model. By default, one in the working directory.
        set_: A value of QKT, of its plans or of the rules for queries, e.g. -s
            method.query_weight=2 -s plan.transfer.epochs=10 -s query.fewer_than=20. May be
            repeated.
        trust_code: Trust the code that the run and these models name, if they were not made on this
            machine.
    """
    from fedstill.config.overrides import parse_overrides
    from fedstill.core.files import make_folder
    from fedstill.querying.answers import ClientChanges, answer_query
    from fedstill.report import terminal
    from fedstill.running.directory import trust_run
    from fedstill.running.model_files import save_model

    _check_options(classes=classes, by=by, under=under, need=need)
    teacher_files = [Path(teacher) for teacher in teachers]
    models = list(teacher_files)
    if student is not None:
        models.append(student)
    if out is not None:
        _check_out(out, models)
    if trust_code:
        trust_run(run)
    student_number = parse_client_number(run, client)
    request: Sequence[int] | dict[str, Any]
    if by:
        request = {"by": by}
        if under:
            request["accuracy_under"] = under
        if need:
            request["needs"] = {str(student_number): tuple(parse_class_numbers(run, need))}
    else:
        request = parse_class_numbers(run, classes)
    if out is not None:
        make_folder(out.absolute().parent)
    answer = answer_query(
        run,
        student_number,
        request,
        changes=parse_overrides(set_),
        teachers=teacher_files,
        client_changes=ClientChanges(student, new_data),
    )
    screen = terminal.console()
    for renderable in answer_tables(answer):
        screen.print(renderable)
    path = out
    if path is None:
        path = _default_out(run, answer, models)
    save_model(path, answer.model, answer.params)
    screen.print(f"\nthe student's model: {path}")
    return 0
