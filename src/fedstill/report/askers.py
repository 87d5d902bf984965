"""Who asked for what, and why; and, where clients ask again, how query follows query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedstill.errors import CorruptFile
from fedstill.queries import because
from fedstill.report.figures import PERCENT, Style, lines
from fedstill.report.groups import Group
from fedstill.report.markup import Cell, Html, figure, folded, grid, html_table
from fedstill.report.runs import JOURNAL, Run
from fedstill.wire.reports import WHY

MOST_QUERIES = 200
"""More lines than these are not shown."""


@contextmanager
def reading_queries(run: Run) -> Iterator[None]:
    """Damaged entries raise CorruptFile with the journal's name."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise CorruptFile(
            f"{run.folder / JOURNAL}: the entries on queries are damaged: {said}"
        ) from error


def asks_again(group: Group) -> bool:
    """Whether each round of a group's runs is a query of its own."""
    return "query.again" in group.settings


def query_rows(group: Group) -> list[list[Cell]]:
    """Round, client, classes and why, of each query of a group's first run."""
    run, rows = group.started[0], list[list[Cell]]()
    with reading_queries(run):
        for event in run.rounds if asks_again(group) else run.rounds[-1:]:
            for answer in event.get("answers") or []:
                names = ", ".join(run.classes[c] for c in answer["query"])
                rows.append([str(event["round"]), str(answer["client"]), names, _why(run, answer)])
    return rows


def who_asked(groups: Sequence[Group]) -> list[Html]:
    """A folded table of the queries of each group's first run; groups with the same queries share
    one.
    """
    by_rows: dict[str, tuple[list[str], list[list[Cell]], int]] = {}
    for group in groups:
        if group.started and (rows := query_rows(group)):
            seed = group.started[0].seed
            by_rows.setdefault(str([seed, rows]), ([], rows, seed))[0].append(group.label)
    head: list[Cell] = ["round", "client", "asks for", "why"]
    shown = []
    for labels, rows, seed in by_rows.values():
        whose = "" if len(by_rows) == 1 else f", {', '.join(labels)}"
        more = f" The first {MOST_QUERIES} of {len(rows)}." if len(rows) > MOST_QUERIES else ""
        title = f"Who asked for what, and why{whose}. From seed {seed}.{more}"
        shown.append(folded(title, html_table(head, rows[:MOST_QUERIES], "settings")))
    return shown


def one_after_another(groups: Sequence[Group], style: Style) -> Html | None:
    """Gain, forgetting and average accuracy by round; None if no client asked again."""
    some = [g for g in groups if asks_again(g)]
    if not some:
        return None
    gain = (
        "Accuracy gained on the classes asked for in a round, compared with the client alone in "
        "that round."
    )
    average = (
        "Average accuracy of clients that asked in a round. Dotted: of the client alone, before "
        "its peers answered."
    )
    lost = (
        "Accuracy lost on the client's own classes by asking, compared with the client alone in "
        "that round."
    )
    return grid(
        [
            figure(
                [
                    lines(
                        some,
                        style,
                        "query_average_accuracy",
                        "query_average_accuracy_before",
                        **PERCENT,
                    )
                ],
                average,
                "Average accuracy, query after query",
            ),
            figure([lines(some, style, "query_gain", **PERCENT)], gain, "Gain, query after query"),
            figure(
                [lines(some, style, "query_forgetting", **PERCENT)],
                lost,
                "Forgetting, query after query",
            ),
        ],
        "small",
    )


def _why(run: Run, answer: Mapping[str, Any]) -> str:
    """What spoke for the classes of a query; journals of before say of label counts only."""
    if run.settings.get("query.draw", "none") == "none":
        return "written in the config"
    counts = run.label_counts[answer["client"]] if run.label_counts else []
    known = answer.get(WHY) or {str(c): {"lack": counts[c]} for c in answer["query"]}
    return "; ".join(f"{run.classes[c]}: {because(known.get(str(c), {}))}" for c in answer["query"])
