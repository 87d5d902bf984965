"""The section on each client: its network and accuracy, as bars by client and as lines by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedstill.report.blocks import (
    Block,
    Cell,
    ChangeCell,
    Chart,
    Folded,
    Gallery,
    Paragraph,
    Section,
    Table,
)
from fedstill.report.data_split import MOST_NAMES
from fedstill.report.figures import (
    COLOURS,
    DASHES,
    PERCENT,
    Figure,
    Style,
    escaped,
    flat_range,
    group_name,
    layout,
    new_trace,
    rounded,
    short_name,
    y_values,
)
from fedstill.report.page import Report
from fedstill.report.summary import NONE
from fedstill.running.runs import Group, Run


@dataclass(frozen=True)
class ClientMeasure:
    """An accuracy of each client that the journal has by round.

    examples: the test examples, in words. about: a description for the section's text.
    """

    name: str
    title: str
    examples: str
    about: str

    @property
    def key(self) -> str:
        """The name of the metric."""
        return f"{self.name}_by_client"

    @property
    def key_before(self) -> str:
        """The name of the metric before a client learns from other clients."""
        return f"{self.name}_before_by_client"


MEASURES = (
    ClientMeasure(
        name="personal",
        title="personal data",
        examples="test examples in the client's proportions of classes",
        about="accuracy on test examples in the client's proportions of classes",
    ),
    ClientMeasure(
        name="private",
        title="private data",
        examples="its own held-out examples",
        about="accuracy on held-out examples of the client's own data",
    ),
    ClientMeasure(
        name="public",
        title="public data",
        examples="the public examples",
        about="accuracy on the public examples",
    ),
    ClientMeasure(
        name="own_test",
        title="own tests",
        examples="the client's own test set",
        about="accuracy of the client's model, or else of the global model, on the client's own "
        "test set",
    ),
)

MOST_DRAWN = 40
"""The largest number of clients that are drawn individually."""

ABOUT_COURSES = (
    "Two values for each client and round: before and after it learns from other clients. The "
    "difference is the gain from other clients."
)


def clients(report: Report) -> Section | None:
    """Accuracy by client and architecture; None if no run measured it."""
    groups = [group for group in report.groups if _measures([group])]
    if not groups or len(_ids(groups)) > MOST_DRAWN:
        return None
    blocks: list[Block] = [
        Paragraph(_about(groups)),
        _table(groups),
        Gallery(_bar_charts(groups, report.style), "small"),
    ]
    traffic = _traffic(groups)
    if traffic:
        blocks.append(Paragraph(traffic))
    courses = _course_charts(groups)
    if courses:
        blocks.append(Folded("Round by round", [Gallery(courses)]))
    return Section("clients", "Client by client", blocks)


ABOUT_OWN_MODELS = "Each client has its own model."
ABOUT_SERVER_MODELS = (
    "The server has several models; the column “model” names the one that a client uses after the "
    "last round."
)


def _about(groups: Sequence[Group]) -> str:
    """A description of the tested models and examples."""
    sentences = []
    measures = _measures(groups)
    with_server_models = [group for group in groups if _has_server_models(group)]
    if with_server_models:
        sentences.append(ABOUT_SERVER_MODELS)
    only_answers = [measure.name for measure in measures] == ["own_test"]
    if not only_answers and len(with_server_models) < len(groups):
        sentences.append(ABOUT_OWN_MODELS)
    sentences += [f"{measure.title.capitalize()}: {measure.about}." for measure in measures]
    return " ".join([*sentences, "Values are means over seeds."])


# Accuracies and names of clients


def _measures(groups: Iterable[Group]) -> list[ClientMeasure]:
    """The measures that any of the groups has in its last round."""
    compared = list(groups)
    return [
        measure
        for measure in MEASURES
        if any(_in_last_round(group, measure.key) for group in compared)
    ]


def _in_last_round(group: Group, key: str) -> dict[int, float]:
    """The values by client in the last round, as means over the runs that have them."""
    last_rounds = []
    for run in group.started:
        rounds = run.numbers.by_client(key)
        last_rounds.append(rounds.get(run.numbers.rounds[-1], {}))
    return _means(last_rounds)


def _means(values_of_runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean by client of some runs' values, over the runs that have a value of the client."""
    numbers_of_client: dict[int, list[float]] = {}
    for by_client in values_of_runs:
        for client, value in by_client.items():
            numbers_of_client.setdefault(client, []).append(value)
    return {client: fmean(numbers) for client, numbers in numbers_of_client.items()}


def _ids(groups: Iterable[Group]) -> list[int]:
    """The clients with any accuracy, in the order of their numbers."""
    ids: set[int] = set()
    for group in groups:
        for measure in MEASURES:
            ids |= _in_last_round(group, measure.key).keys()
    return sorted(ids)


def _name(groups: Iterable[Group], client: int) -> str:
    """A client's name in the data, or its number if it has no name."""
    names = _client_names(groups)
    if client < len(names):
        return str(names[client])
    return str(client)


def _client_names(groups: Iterable[Group]) -> Sequence[str]:
    """The names of the clients in the first run that has names; empty if no run has."""
    for group in groups:
        for run in group.started:
            names: Sequence[str] = run.start.get("client_names", ())
            if names:
                return names
    return ()


def _network(groups: Iterable[Group], client: int) -> str:
    """The networks that a client has in any of the runs."""
    networks = [_network_in(run, client) for group in groups for run in group.started]
    return ", ".join(dict.fromkeys(networks))


def _network_in(run: Run, client: int) -> str:
    if client < len(run.networks):
        return run.networks[client]
    return str(run.settings.get("model.name", NONE))


def _has_server_models(group: Group) -> bool:
    """Whether the server has several models, and each client uses one of them."""
    return any("client_predictors" in run.rounds[-1] for run in group.started)


def _server_model(group: Group, client: int) -> str:
    """The name of the server's model that a client uses; by seed if seeds differ."""
    names = {}
    for run in group.started:
        by_client = run.rounds[-1].get("client_predictors", {})
        if str(client) in by_client:
            names[run.seed] = str(by_client[str(client)])
    distinct = list(dict.fromkeys(names.values()))
    if len(distinct) > 1:
        return ", ".join(f"seed {seed}: {name}" for seed, name in names.items())
    return ", ".join(distinct) or NONE


# The table


def _table(groups: Sequence[Group]) -> Table:
    measures = _measures(groups)
    head: list[Cell] = ["client", "network"]
    for group in groups:
        if _has_server_models(group):
            head.append(f"{group.label}: model")
        head += [f"{group.label}: {measure.title} [%]" for measure in measures]

    # Once for each group, because a row for each client needs them.
    last_rounds = [[_last_round(group, measure) for measure in measures] for group in groups]
    rows: list[list[Cell]] = []
    for client in _ids(groups):
        row: list[Cell] = [_name(groups, client), _network(groups, client)]
        for group, by_measure in zip(groups, last_rounds, strict=True):
            if _has_server_models(group):
                row.append(_server_model(group, client))
            row += [_cell(accuracies, client) for accuracies in by_measure]
        rows.append(row)
    return Table(head, rows, "numbers wide")


def _last_round(group: Group, measure: ClientMeasure) -> LearningRound:
    """The accuracies of clients in the last round, as means over the runs."""
    return LearningRound(
        number=max(run.numbers.rounds[-1] for run in group.started),
        accuracy_before=_in_last_round(group, measure.key_before),
        accuracy=_in_last_round(group, measure.key),
    )


def _cell(last_round: LearningRound, client: int) -> Cell:
    """The accuracy of a client in percent; with an arrow from the accuracy before learning, if it
    was measured.
    """
    accuracy = last_round.accuracy.get(client)
    accuracy_before = last_round.accuracy_before.get(client)
    if accuracy is None:
        return NONE
    text = f"{100 * accuracy:.1f}"
    if accuracy_before is None:
        return text
    return ChangeCell(f"{100 * accuracy_before:.1f}", text)


# Bars


def _bar_charts(groups: Sequence[Group], style: Style) -> list[Chart]:
    charts = []
    for measure in _measures(groups):
        about = f"After the last round, on {measure.examples}."
        title = f"Accuracy on {measure.title} by client"
        charts.append(Chart([_bars(groups, style, measure)], about, title))
    if any(group.values("accuracy") for group in groups):
        about = "After the last round, on the test set."
        charts.append(Chart([_server_bars(groups, style)], about, "Accuracy of the server"))
    return charts


def _bars(groups: Sequence[Group], style: Style, measure: ClientMeasure) -> Figure:
    """A bar for each client and group."""
    ids = _ids(groups)
    names = [_bar_name(groups, client) for client in ids]
    categories = [escaped(name) for name in names]
    traces = []
    for group in groups:
        accuracies = _in_last_round(group, measure.key)
        if not accuracies:
            continue
        trace = new_trace(
            "bar",
            name=group_name(group),
            x=categories,
            y=[_rounded(accuracies.get(client)) for client in ids],
            marker={"color": style.colour(group)},
            hovertemplate="%{x}: %{y:.2%}",
        )
        traces.append(trace)
    client_axis: dict[str, Any] = {"type": "category"}
    if len(ids) <= MOST_NAMES:
        client_axis["tickmode"] = "array"
        client_axis["tickvals"] = categories
        client_axis["ticktext"] = [short_name(name) for name in names]
    return Figure(traces, layout(barmode="group", yaxis=PERCENT, xaxis=client_axis))


def _bar_name(groups: Sequence[Group], client: int) -> str:
    name = _name(groups, client)
    if name == str(client):
        return f"client {client}"
    return name


def _server_bars(groups: Sequence[Group], style: Style) -> Figure:
    tested_groups = [group for group in groups if group.values("accuracy")]
    trace = new_trace(
        "bar",
        x=[group_name(group) for group in tested_groups],
        y=[rounded(fmean(group.values("accuracy"))) for group in tested_groups],
        marker={"color": [style.colour(group) for group in tested_groups]},
        hovertemplate="%{x}: %{y:.2%}<extra></extra>",
    )
    return Figure([trace], layout(yaxis=PERCENT, xaxis={"type": "category"}, showlegend=False))


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return rounded(value)


# Round by round


@dataclass(frozen=True)
class LearningRound:
    """The accuracies of clients in a round, before and after they learned from other clients."""

    number: int
    accuracy_before: Mapping[int, float]
    accuracy: Mapping[int, float]


def _course_charts(groups: Iterable[Group]) -> list[Chart]:
    """A chart for each group and measure that was taken before and after learning."""
    charts = []
    for group in groups:
        for measure in MEASURES:
            rounds = _rounds(group, measure)
            if rounds:
                title = f"{group.label}: accuracy on {measure.title} by round"
                charts.append(Chart([_course(group, rounds)], ABOUT_COURSES, title))
    return charts


def _rounds(group: Group, measure: ClientMeasure) -> list[LearningRound]:
    """The rounds with a value before learning; the values are means over the runs."""
    runs_before = [run.numbers.by_client(measure.key_before) for run in group.started]
    runs_after = [run.numbers.by_client(measure.key) for run in group.started]
    rounds = []
    for number in sorted({number for run in runs_before for number in run}):
        values_before = [run.get(number, {}) for run in runs_before]
        values = [run.get(number, {}) for run in runs_after]
        rounds.append(LearningRound(number, _means(values_before), _means(values)))
    return rounds


def _course(group: Group, rounds: Sequence[LearningRound]) -> Figure:
    """A line for each client, with two points for each round: the accuracy before learning is half
    a round to the left of the accuracy after it.
    """
    x: list[float] = []
    for learning_round in rounds:
        x += [learning_round.number - 0.5, learning_round.number]
    traces = []
    for index, client in enumerate(_ids([group])):
        y = []
        for learning_round in rounds:
            y.append(_rounded(learning_round.accuracy_before.get(client)))
            y.append(_rounded(learning_round.accuracy.get(client)))
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        trace = new_trace(
            "scatter",
            mode="lines+markers",
            name=escaped(f"client {client}, {_network([group], client)}"),
            x=x,
            y=y,
            line={"color": COLOURS[index % len(COLOURS)], "width": 2, "dash": dash},
        )
        traces.append(trace)
    round_axis = {
        "title": {"text": "round (half-way: before learning from other clients)"},
        "rangemode": "tozero",
    }
    accuracy_axis = {**PERCENT, **flat_range(y_values(traces), PERCENT)}
    return Figure(traces, layout(xaxis=round_axis, yaxis=accuracy_axis))


# Communication

AS_WEIGHTS = "bytes_as_weights"
"""The metric with the size of the clients' weights, sent down and up once."""


def _traffic(groups: Iterable[Group]) -> str:
    """A sentence that compares the bytes sent with the size of weights; empty if unknown."""
    parts = []
    for group in groups:
        runs = [run for run in group.started if _knows_weights(run)]
        if runs:
            megabytes = fmean(_bytes_sent(run) for run in runs) / 1e6
            weight_megabytes = fmean(run.numbers.summary[AS_WEIGHTS] for run in runs) / 1e6
            parts.append(f"{group.label} {megabytes:.4g} MB (weights: {weight_megabytes:.4g} MB)")
    if not parts:
        return ""
    return (
        "Sent bytes in the complete run; in brackets, the size of the same clients' weights, sent "
        f"down and up once a round: {'; '.join(parts)}."
    )


def _knows_weights(run: Run) -> bool:
    return run.curve(AS_WEIGHTS).keys() == set(run.numbers.rounds)


def _bytes_sent(run: Run) -> float:
    summary = run.numbers.summary
    return summary["bytes_up"] + summary["bytes_down"]
