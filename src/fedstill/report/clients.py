"""The section on each client: its network and accuracy, as bars by client and as lines by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from fedstill.report.data_split import MAX_NAMES
from fedstill.report.figures import (
    PERCENT,
    Figure,
    Style,
    escaped,
    group_name,
    layout,
    line_colour,
    line_dash,
    new_trace,
    rounded,
    short_name,
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
        examples="the client's own held-out examples",
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

MAX_DRAWN = 40
"""The largest number of clients that are drawn individually."""

ABOUT_COURSES = (
    "Two values for each client and round: before and after it learns from other clients. The "
    "difference is the gain from other clients."
)


def clients(report: Report) -> Section | None:
    """Accuracy by client and architecture; None if no run measured it."""
    by_group = [last_accuracies(group) for group in report.groups if group.started]
    selection = _selection([accuracies for accuracies in by_group if accuracies.clients])
    blocks: list[Block] = []
    if selection.drawn:
        blocks += _drawn_clients(ComparedClients(selection.drawn), report.style)
    if selection.omitted:
        blocks.append(Paragraph(_about_omitted(selection.omitted)))
    if not blocks:
        return None
    return Section("clients", "Client by client", blocks)


@dataclass(frozen=True)
class Selection:
    """The groups whose clients are drawn, and those that have too many clients for it."""

    drawn: Sequence[ClientAccuracies]
    omitted: Sequence[ClientAccuracies]


def _selection(by_group: Iterable[ClientAccuracies]) -> Selection:
    """The first groups that have at most ``MAX_DRAWN`` clients together, and all others."""
    drawn = []
    omitted = []
    drawn_clients: set[int] = set()
    for accuracies in by_group:
        with_group = drawn_clients.union(accuracies.clients)
        if len(with_group) > MAX_DRAWN:
            omitted.append(accuracies)
        else:
            drawn.append(accuracies)
            drawn_clients = with_group
    return Selection(drawn, omitted)


def _drawn_clients(compared: ComparedClients, style: Style) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(_about(compared)),
        _table(compared),
        Gallery(_bar_charts(compared, style), "small"),
    ]
    traffic = _traffic(compared.groups)
    if traffic:
        blocks.append(Paragraph(traffic))
    courses = _course_charts(compared)
    if courses:
        blocks.append(Folded("Round by round", [Gallery(courses)]))
    return blocks


def _about_omitted(omitted: Sequence[ClientAccuracies]) -> str:
    """A paragraph that says where the numbers of groups are whose clients are not drawn."""
    labels = "; ".join(accuracies.group.label for accuracies in omitted)
    measured = [
        measure.key
        for measure in MEASURES
        if any(accuracies.by_measure[measure].accuracy for accuracies in omitted)
    ]
    return (
        f"This section has space for {MAX_DRAWN} clients. It leaves out {labels}. "
        f"fedstill.load_runs returns the accuracies of all clients: {', '.join(measured)}."
    )


ABOUT_OWN_MODELS = "Each client has its own model."
ABOUT_SERVER_MODELS = (
    "The server has several models; the column “model” names the one that a client uses after the "
    "last round."
)


def _about(compared: ComparedClients) -> str:
    """A description of the tested models and examples."""
    sentences = []
    with_server_models = [group for group in compared.groups if _has_server_models(group)]
    if with_server_models:
        sentences.append(ABOUT_SERVER_MODELS)
    only_answers = [measure.name for measure in compared.measures] == ["own_test"]
    if not only_answers and len(with_server_models) < len(compared.groups):
        sentences.append(ABOUT_OWN_MODELS)
    sentences += [
        f"{measure.title.capitalize()}: {measure.about}." for measure in compared.measures
    ]
    return " ".join([*sentences, "Values are means over seeds."])


# Accuracies and names of clients


@dataclass(frozen=True)
class LearningRound:
    """The accuracies of clients in a round, before and after they learned from other clients."""

    number: int
    accuracy_before: Mapping[int, float]
    accuracy: Mapping[int, float]


@dataclass(frozen=True)
class ClientAccuracies:
    """The accuracies of a group's clients in the last round, by measure; means over the runs."""

    group: Group
    by_measure: Mapping[ClientMeasure, LearningRound]

    @cached_property
    def clients(self) -> list[int]:
        """The clients with any accuracy, in the order of their numbers."""
        by_client = [last_round.accuracy for last_round in self.by_measure.values()]
        return sorted(set().union(*by_client))


def last_accuracies(group: Group) -> ClientAccuracies:
    """The accuracies of a group's clients in the last round."""
    return ClientAccuracies(group, {measure: _last_round(group, measure) for measure in MEASURES})


def _last_round(group: Group, measure: ClientMeasure) -> LearningRound:
    return LearningRound(
        number=max(run.numbers.last_round for run in group.started),
        accuracy_before=_in_last_round(group, measure.key_before),
        accuracy=_in_last_round(group, measure.key),
    )


def _in_last_round(group: Group, key: str) -> dict[int, float]:
    """The values by client in the last round, as means over the runs that have them."""
    last_rounds = []
    for run in group.started:
        rounds = run.numbers.by_client(key)
        last_rounds.append(rounds.get(run.numbers.last_round, {}))
    return _means(last_rounds)


def _means(values_of_runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean by client of some runs' values, over the runs that have a value of the client."""
    numbers_of_client: dict[int, list[float]] = {}
    for by_client in values_of_runs:
        for client, value in by_client.items():
            numbers_of_client.setdefault(client, []).append(value)
    return {client: fmean(numbers) for client, numbers in numbers_of_client.items()}


class ComparedClients:
    """The clients of groups that measured any of their accuracies.

    measures: those that any group has in its last round. names: by client, its name in the data, or
    its number if it has no name or if the runs do not name their clients alike.
    """

    def __init__(self, accuracies: Sequence[ClientAccuracies]) -> None:
        self.accuracies = accuracies
        self.groups = [accuracies.group for accuracies in self.accuracies]
        self.measures = [measure for measure in MEASURES if self._has(measure)]
        self.names = self._names()

    def _has(self, measure: ClientMeasure) -> bool:
        return any(accuracies.by_measure[measure].accuracy for accuracies in self.accuracies)

    def _names(self) -> dict[int, str]:
        clients = sorted(set().union(*(accuracies.clients for accuracies in self.accuracies)))
        names_in_data = _client_names(self.groups)
        names = {}
        for client in clients:
            names[client] = str(client)
            if client < len(names_in_data):
                names[client] = names_in_data[client]
        return names


def _client_names(groups: Iterable[Group]) -> Sequence[str]:
    """The names of the clients in the data; empty if not all runs have the same names.

    Runs with other splits have other clients of the same number.
    """
    names_of_runs = [run.client_names for group in groups for run in group.started]
    first = names_of_runs[0]
    if any(names != first for names in names_of_runs):
        return ()
    return first


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


def _table(compared: ComparedClients) -> Table:
    head: list[Cell] = ["client", "network"]
    for group in compared.groups:
        if _has_server_models(group):
            head.append(f"{group.label}: model")
        head += [f"{group.label}: {measure.title} [%]" for measure in compared.measures]

    rows: list[list[Cell]] = []
    for client, name in compared.names.items():
        row: list[Cell] = [name, _network(compared.groups, client)]
        for accuracies in compared.accuracies:
            if _has_server_models(accuracies.group):
                row.append(_server_model(accuracies.group, client))
            row += [_cell(accuracies.by_measure[measure], client) for measure in compared.measures]
        rows.append(row)
    return Table(head, rows, "numbers wide")


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


def _bar_charts(compared: ComparedClients, style: Style) -> list[Chart]:
    charts = []
    for measure in compared.measures:
        about = f"After the last round, on {measure.examples}."
        title = f"Accuracy on {measure.title} by client"
        charts.append(Chart([_bars(compared, style, measure)], about, title))
    if any(group.values("accuracy") for group in compared.groups):
        about = "After the last round, on the test set."
        figure = _server_bars(compared.groups, style)
        charts.append(Chart([figure], about, "Accuracy of the server"))
    return charts


def _bars(compared: ComparedClients, style: Style, measure: ClientMeasure) -> Figure:
    """A bar for each client and group."""
    names = [_bar_name(client, name) for client, name in compared.names.items()]
    categories = [escaped(name) for name in names]
    traces = []
    for accuracies in compared.accuracies:
        by_client = accuracies.by_measure[measure].accuracy
        if not by_client:
            continue
        trace = new_trace(
            "bar",
            name=group_name(accuracies.group),
            x=categories,
            y=[rounded(by_client.get(client)) for client in compared.names],
            marker={"color": style.colour(accuracies.group)},
            hovertemplate="%{x}: %{y:.2%}",
        )
        traces.append(trace)
    client_axis: dict[str, Any] = {"type": "category"}
    if len(names) <= MAX_NAMES:
        client_axis["tickmode"] = "array"
        client_axis["tickvals"] = categories
        client_axis["ticktext"] = [short_name(name) for name in names]
    return Figure(traces, layout(barmode="group", yaxis=PERCENT.ticks, xaxis=client_axis))


def _bar_name(client: int, name: str) -> str:
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
    axes = layout(yaxis=PERCENT.ticks, xaxis={"type": "category"}, showlegend=False)
    return Figure([trace], axes)


# Round by round


def _course_charts(compared: ComparedClients) -> list[Chart]:
    """A chart for each group and measure that was taken before and after learning."""
    charts = []
    for accuracies in compared.accuracies:
        for measure in MEASURES:
            rounds = _rounds(accuracies.group, measure)
            if rounds:
                title = f"{accuracies.group.label}: accuracy on {measure.title} by round"
                charts.append(Chart([_course(accuracies, rounds)], ABOUT_COURSES, title))
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


def _course(accuracies: ClientAccuracies, rounds: Sequence[LearningRound]) -> Figure:
    """A line for each client, with two points for each round: the accuracy before learning is half
    a round to the left of the accuracy after it.
    """
    x: list[float] = []
    for learning_round in rounds:
        x += [learning_round.number - 0.5, learning_round.number]
    traces = []
    for index, client in enumerate(accuracies.clients):
        y = []
        for learning_round in rounds:
            y.append(rounded(learning_round.accuracy_before.get(client)))
            y.append(rounded(learning_round.accuracy.get(client)))
        trace = new_trace(
            "scatter",
            mode="lines+markers",
            name=escaped(f"client {client}, {_network([accuracies.group], client)}"),
            x=x,
            y=y,
            line={"color": line_colour(index), "width": 2, "dash": line_dash(index)},
        )
        traces.append(trace)
    round_axis = {
        "title": {"text": "round (half a round earlier: before learning from other clients)"},
        "rangemode": "tozero",
    }
    return Figure(traces, layout(xaxis=round_axis, yaxis=PERCENT.fitted(traces)))


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
        "Bytes sent in the whole run; in brackets, the size of the weights of the same clients, "
        f"sent down and up once per round: {'; '.join(parts)}."
    )


def _knows_weights(run: Run) -> bool:
    return run.curve(AS_WEIGHTS).keys() == set(run.numbers.rounds)


def _bytes_sent(run: Run) -> float:
    summary = run.numbers.summary
    return summary["bytes_up"] + summary["bytes_down"]
