"""The report's sections on queries: the queried classes by client, gain against forgetting, and the
noise probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fedstill.core.reports import REASONS
from fedstill.methods.fit import FIT
from fedstill.querying.queries import because
from fedstill.report.blocks import (
    Block,
    Chart,
    Choice,
    Folded,
    Gallery,
    Paragraph,
    Section,
    Table,
    line_key,
)
from fedstill.report.figures import (
    COUNT_COLOURS,
    NOT_DOTTED,
    PERCENT,
    Figure,
    Line,
    Style,
    Trace,
    curves,
    escaped,
    faint,
    group_name,
    layout,
    line_colour,
    line_dash,
    lines,
    new_trace,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import Series, of_runs
from fedstill.running.numbers import ClientNumbers
from fedstill.running.runs import Group, Run

# Queries without a teacher: no peer's model reached the threshold in the noise probe.


def untaught(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence about queries without a teacher, by group; empty if all queries had a teacher.

    runs: the runs of a group, by the group's label.
    """
    parts = []
    for label, group_runs in runs.items():
        counts = list(chain.from_iterable(map(teacher_counts, group_runs)))
        without_teacher = counts.count(0)
        if without_teacher:
            parts.append(f"{label}, {without_teacher} of {len(counts)}")
    if not parts:
        return ""
    return f"Queries without a teacher (included in all results): {'; '.join(parts)}."


def teacher_counts(run: Run) -> list[float | None]:
    """The number of teachers of each query that a method answered by choosing teachers."""
    queries = {(report.round, report.client) for report in run.numbers.client_reports("query")}
    if not queries:
        return []
    teachers: dict[tuple[int, int], float | None] = {}
    for report in run.numbers.client_reports("teachers"):
        query = (report.round, report.client)
        if query in queries:
            (teachers[query],) = report.values
    return list(teachers.values())


# The queries of each client with their reasons, and results by round if clients query repeatedly.


MOST_QUERIES = 200
"""The largest number of queries in a table."""


def asks_again(group: Group) -> bool:
    """Whether clients make new queries in every round."""
    return "query.again" in group.settings


@dataclass(frozen=True)
class Query:
    """A client's query in a round: classes, and by class the reasons for it; empty if the journal
    has none.
    """

    round: int
    client: int
    classes: Sequence[int]
    reasons: Mapping[str, Mapping[str, float | None]]


def queries(run: Run) -> list[Query]:
    """The queries of a run that were answered, in the order of the journal."""
    return [
        Query(event["round"], answer["client"], answer["query"], answer.get(REASONS) or {})
        for event in run.rounds
        for answer in event.get("answers", ())
    ]


def query_rows(group: Group) -> list[list[str]]:
    """Round, client, classes and reasons of each query of a group's first run."""
    run = group.started[0]
    rows = []
    for query in queries(run):
        if asks_again(group) or query.round == run.numbers.rounds[-1]:
            classes = ", ".join(run.classes[label] for label in query.classes)
            rows.append([str(query.round), str(query.client), classes, _why(run, query)])
    return rows


@dataclass(frozen=True)
class QueryTable:
    """The queries of a seed, and the groups that share them."""

    seed: int
    rows: Sequence[Sequence[str]]
    labels: list[str]


def who_asked(groups: Sequence[Group]) -> list[Folded]:
    """A collapsed table with the queries of each group's first run; groups with equal queries share
    a table.
    """
    tables: dict[str, QueryTable] = {}
    for group in (group for group in groups if group.started):
        rows = query_rows(group)
        if rows:
            seed = group.started[0].seed
            table = tables.setdefault(str([seed, rows]), QueryTable(seed, rows, []))
            table.labels.append(group.label)
    return [_folded_queries(table, len(tables) > 1) for table in tables.values()]


def _folded_queries(table: QueryTable, names_groups: bool) -> Folded:
    title = "Queries and their reasons"
    if names_groups:
        title += f", {', '.join(table.labels)}"
    title += f". From seed {table.seed}."
    if len(table.rows) > MOST_QUERIES:
        title += f" The first {MOST_QUERIES} of {len(table.rows)}."
    head = ["round", "client", "classes", "reason"]
    return Folded(title, [Table(head, table.rows[:MOST_QUERIES], "settings")])


ABOUT_AVERAGE = (
    "Average accuracy of the clients that sent a query in a round. Dotted: their accuracy before "
    "the query."
)
ABOUT_GAIN = (
    "Accuracy gained on the queried classes, compared with the client's model before the query of "
    "the same round."
)
ABOUT_LOSS = (
    "Accuracy lost on the client's own classes, compared with the client's model before the query "
    "of the same round. Lower is better."
)


def one_after_another(groups: Sequence[Group], style: Style) -> Gallery | None:
    """Gain, forgetting and average accuracy by round; None unless clients query repeatedly."""
    groups = [group for group in groups if asks_again(group)]
    if not groups:
        return None
    average = lines(
        groups,
        style,
        "query_average_accuracy",
        PERCENT,
        reference="query_average_accuracy_before",
    )
    gain = lines(groups, style, "query_gain", PERCENT)
    lost = [Line(group, _lost(group)) for group in groups]
    loss = curves(lost, style, "round", PERCENT)
    charts = [
        Chart([average], ABOUT_AVERAGE, "Average accuracy by round"),
        Chart([gain], ABOUT_GAIN, "Gain by round"),
        Chart([loss], ABOUT_LOSS, "Forgetting by round"),
    ]
    return Gallery(charts, "small")


def _lost(group: Group) -> Series:
    """The accuracy lost on the clients' own classes by round."""
    changes = [run.curve("query_forgetting") for run in group.started]
    return of_runs([{round: _loss(change) for round, change in run.items()} for run in changes])


def _loss(change: float) -> float:
    """A loss of accuracy; the journal has the change, which is negative for forgetting."""
    return 0.0 - change


def _why(run: Run, query: Query) -> str:
    """The reasons for the classes of a query.

    Older journals contain no reasons. At that time, label counts were the only possible reason.
    """
    if run.settings.get("query.draw", "none") == "none":
        return "set in the configuration"
    texts = []
    for label in query.classes:
        reasons = query.reasons.get(str(label), {})
        if not query.reasons:
            reasons = {"lack": _label_counts(run, query.client)[label]}
        texts.append(f"{run.classes[label]}: {because(reasons)}")
    return "; ".join(texts)


def _label_counts(run: Run, client: int) -> Sequence[int]:
    """A client's examples of each class, (C,); 0 if they are unknown."""
    if 0 <= client < len(run.label_counts):
        return run.label_counts[client]
    return [0] * len(run.classes)


# The effects of queries: gain against forgetting, accuracies by class, and the noise probe compared
# with label shares.


QUERY_HEIGHT = 380
MOST_CLIENTS = 20

STAGE_TITLES = {FIT: "alone", "transfer": "phase 1", "refine": "phase 2"}
SHADES = ("#999999", "#56B4E9", "#D55E00", "#009E73")
"""The colours of the bars for each stage."""

ABOUT = "Clients queried their peers for classes. Accuracy is measured on the common test set."
ABOUT_AGAIN = " If clients made several queries, points and bars show the last one."
ABOUT_TRADE = (
    "Large points are means over clients and seeds; small points are clients. Horizontal axis: "
    "accuracy gained on the queried classes, compared with the client's model before its query. "
    "Vertical axis: accuracy lost on the client's own classes; higher points forget more. The "
    "lower right corner is best."
)
ABOUT_PHASES = (
    "Average accuracy on the validation set after each epoch of phase 1 and then of phase 2, with "
    "one line per querying client. Dotted: its model before the query, on the test set."
)


def asked(report: Report) -> Section | None:
    """Gain against forgetting, class accuracies of each client, and accuracy by epoch; None if
    there were no queries.
    """
    groups = [group for group in report.groups if any(_has_answers(run) for run in group.started)]
    if not groups:
        return None
    style = report.style
    charts = [Chart([_trade(groups, style)], ABOUT_TRADE, "Forgetting against gain")]
    with_scores = [group for group in groups if _scored_runs(group)]
    if with_scores:
        group = with_scores[0]
        run = _scored_runs(group)[0]
        about_run = f"{ABOUT_PHASES} Shown: {group.label}, seed {run.seed}."
        charts.append(Chart([_epochs(run)], about_run, "Accuracy by epoch"))

    about = ABOUT
    if any(asks_again(group) for group in groups):
        about += ABOUT_AGAIN
    blocks: list[Block | None] = [Paragraph(about)]
    without_teacher = untaught({group.label: group.started for group in groups})
    if without_teacher:
        blocks.append(Paragraph(without_teacher))
    blocks += [line_key(groups, style), Gallery(charts), one_after_another(groups, style)]
    blocks += [*_bars(groups), *who_asked(groups)]
    return Section("asked", "Queries: gain and forgetting", blocks)


def _has_answers(run: Run) -> bool:
    return any(query.round == run.numbers.rounds[-1] for query in queries(run))


def _scored_runs(group: Group) -> list[Run]:
    return [run for run in group.started if _phases(run, "scores")]


def noise_probes(report: Report) -> Section | None:
    """Predictions of models on noise, and their clients' labels; None if no model was probed."""
    groups = [group for group in report.groups if _probed_runs(group)]
    if not groups:
        return None
    group = groups[0]
    run = _probed_runs(group)[0]
    predictions_by_client = {
        probe.client: probe.values
        for probe in run.numbers.client_reports("probe")
        if probe.stage == FIT
    }
    shares = []
    predictions = []
    names = []
    for client, prediction in sorted(predictions_by_client.items()):
        client_shares = _shares(_label_counts(run, client))
        error = _mean_squared_error(client_shares, prediction)
        shares.append(client_shares)
        predictions.append(prediction)
        names.append(f"client {client} (error {error:.3f})")
    label_map = _map(shares, names, run.classes)
    probe_map = _map(predictions, names, run.classes)
    about = (
        "From a model's predictions on Gaussian noise, a peer estimates which classes the model "
        "has learned. Error: mean squared difference between label shares and predictions, over "
        f"classes. Shown: {group.label}, seed {run.seed}."
    )
    charts = [
        Chart([label_map], "Shares of labels in each client's data.", "Label shares"),
        Chart([probe_map], "Mean prediction of each client's model on noise.", "Noise probe"),
    ]
    blocks = [Paragraph(about), Gallery(charts)]
    return Section("probe", "Noise probe and label shares", blocks)


def _probed_runs(group: Group) -> list[Run]:
    return [run for run in group.started if run.numbers.client_reports("probe")]


def _shares(counts: Sequence[int]) -> list[float]:
    total = max(sum(counts), 1)
    return [count / total for count in counts]


def _mean_squared_error(shares: Sequence[float], predictions: Sequence[float | None]) -> float:
    pairs = zip(shares, predictions, strict=True)
    return sum((share - (predicted or 0.0)) ** 2 for share, predicted in pairs) / len(shares)


def _of_last_round(run: Run, metric: str) -> dict[int, float]:
    """A number of the answers in the last round, by client."""
    return run.numbers.by_client(f"answers/{metric}").get(run.numbers.rounds[-1], {})


def _answered(run: Run) -> list[int]:
    """The clients whose gain and forgetting are known in the last round."""
    gains = _of_last_round(run, "gain")
    forgetting = _of_last_round(run, "forgetting")
    return [client for client in gains if client in forgetting]


def _in_last(run: Run, metric: str) -> list[ClientNumbers]:
    """The numbers of clients in the last round.

    If clients query only once, they train alone in an earlier round, whose numbers are included.
    """
    examples = run.numbers.client_reports("examples")
    last = max((report.round for report in examples if report.stage == FIT), default=0)
    return [report for report in run.numbers.client_reports(metric) if report.round >= last]


def _phases(run: Run, metric: str) -> list[ClientNumbers]:
    """The numbers of clients in both phases of the last round."""
    return [report for report in _in_last(run, metric) if report.stage in ("transfer", "refine")]


# Forgetting against gain


@dataclass(frozen=True)
class Trade:
    """The gain and forgetting of a client through a query."""

    gain: float
    forgetting: float
    client: int
    seed: int


def _trade(groups: Sequence[Group], style: Style) -> Figure:
    traces: list[Trace] = []
    for group in groups:
        trades = [trade for run in group.started for trade in _trades(run)]
        if trades:
            traces += _trade_points(trades, group, style)
    axes = layout(
        xaxis={"title": {"text": "gain on queried classes"}, **PERCENT.ticks},
        yaxis={"title": {"text": "forgetting of own classes (lower is better)"}, **PERCENT.ticks},
        height=QUERY_HEIGHT,
        hovermode="closest",
    )
    return Figure(traces, axes)


def _trades(run: Run) -> list[Trade]:
    gains = _of_last_round(run, "gain")
    changes = _of_last_round(run, "forgetting")
    return [
        Trade(
            gain=gains[client],
            forgetting=_loss(changes[client]),
            client=client,
            seed=run.seed,
        )
        for client in _answered(run)
    ]


def _trade_points(trades: Sequence[Trade], group: Group, style: Style) -> list[Trace]:
    """A small point for each client and seed, and a large point for their mean."""
    colour = style.colour(group)
    marks = {"mode": "markers", "legendgroup": group.label, "name": group_name(group)}
    small = new_trace(
        "scatter",
        **marks,
        x=[rounded(trade.gain) for trade in trades],
        y=[rounded(trade.forgetting) for trade in trades],
        customdata=[f"client {trade.client}, seed {trade.seed}" for trade in trades],
        hovertemplate="%{customdata}: gain %{x:.1%}, forgetting %{y:.1%}",
        marker={"size": 6, "color": faint(colour, 0.35)},
        showlegend=False,
    )
    large = new_trace(
        "scatter",
        **marks,
        x=[rounded(sum(trade.gain for trade in trades) / len(trades))],
        y=[rounded(sum(trade.forgetting for trade in trades) / len(trades))],
        hovertemplate="mean: gain %{x:.1%}, forgetting %{y:.1%}",
        marker={"size": 13, "color": colour, "line": {"width": 1, "color": "white"}},
    )
    return [small, large]


# Bars by class, before and after each phase


def _bars(groups: Sequence[Group]) -> list[Block]:
    """Accuracy by class before and after the phases, for methods whose clients keep their own
    models; a selector chooses the client.

    All groups share the selector of the first group; groups with other clients are left out.
    """
    charts: list[Chart] = []
    chosen: list[int] = []
    for group in groups:
        run = _first_with_phases(group)
        if run is None:
            continue
        clients = _answered(run)[:MOST_CLIENTS]
        if not clients or (chosen and clients != chosen):
            continue
        chosen = clients
        about = (
            f"{group.label}: accuracy by class, before the query and after each phase. Seed "
            f"{run.seed}."
        )
        figures = [_client(run, client) for client in clients]
        charts.append(Chart(figures, about, escaped(group.label), "client"))
    if not charts:
        return []
    names = [f"client {client}" for client in chosen]
    return [Choice("client", "Show", names), Gallery(charts, "small")]


def _first_with_phases(group: Group) -> Run | None:
    for run in group.started:
        if _phases(run, "correct_by_class"):
            return run
    return None


def _client(run: Run, client: int) -> Figure:
    """A client's accuracy by class after each stage: queried classes first, then its own classes,
    then the remaining ones.
    """
    queried = [query.classes for query in queries(run) if query.client == client][-1]
    counts = _label_counts(run, client)
    order = sorted(range(len(counts)), key=lambda c: (c not in queried, counts[c] == 0, c))
    names = []
    for label in order:
        role = _class_role(label, queried, counts)
        names.append(f"{escaped(run.classes[label])} ({role})")

    totals: Sequence[int] = run.start.get("test_counts") or [0] * len(counts)
    reports = _in_last(run, "correct_by_class")
    traces = []
    for index, report in enumerate(each for each in reports if each.client == client):
        trace = new_trace(
            "bar",
            name=STAGE_TITLES.get(report.stage, report.stage),
            x=names,
            y=[_share(report.values[label], totals[label]) for label in order],
            marker={"color": SHADES[index % len(SHADES)]},
            hovertemplate="%{x}: %{y:.1%}",
        )
        traces.append(trace)
    axes = layout(
        xaxis={"type": "category"},
        yaxis={**PERCENT.ticks, "range": [0, 1]},
        height=QUERY_HEIGHT,
        barmode="group",
    )
    return Figure(traces, axes)


def _class_role(label: int, query: Sequence[int], counts: Sequence[int]) -> str:
    if label in query:
        return "asked for"
    if counts[label]:
        return "own"
    return "neither"


def _share(correct: float | None, total: int) -> float | None:
    if correct is None or not total:
        return None
    return rounded(correct / total)


# Accuracy by epoch


def _epochs(run: Run) -> Figure:
    """A line for each querying client, and a dotted line at its accuracy before the query."""
    traces: list[Trace] = []
    alone = _of_last_round(run, "average_accuracy_before")
    clients = sorted({report.client for report in _phases(run, "scores")})
    for index, client in enumerate(clients):
        traces += _epoch_lines(run, client, alone.get(client), index)
    axes = layout(
        xaxis={"title": {"text": "epoch of both phases"}}, yaxis=PERCENT.ticks, height=QUERY_HEIGHT
    )
    return Figure(traces, axes)


def _epoch_lines(run: Run, client: int, alone: float | None, index: int) -> list[Trace]:
    """A client's accuracy after each epoch, and a dotted line at its accuracy before the query, if
    known.

    index: the position of the client among those in the chart.
    """
    scores: list[float | None] = []
    for report in _phases(run, "scores"):
        if report.client == client:
            scores += report.values
    accuracy_alone = rounded(alone)
    colour = line_colour(index)
    dash = line_dash(index, NOT_DOTTED)
    name = f"client {client}"
    trained = new_trace(
        "scatter",
        mode="lines",
        legendgroup=name,
        hovertemplate="%{y:.1%}",
        name=name,
        x=list(range(1, len(scores) + 1)),
        y=[rounded(score) for score in scores],
        line={"color": colour, "dash": dash},
    )
    trained_alone = new_trace(
        "scatter",
        mode="lines",
        legendgroup=name,
        hovertemplate="%{y:.1%}",
        name=f"{name} alone",
        x=[1, len(scores)],
        y=[accuracy_alone, accuracy_alone],
        line={"color": colour, "dash": "dot", "width": 1},
        showlegend=False,
    )
    return [trained, trained_alone]


def _map(
    rows: Sequence[Sequence[float | None]], names: Sequence[str], classes: Sequence[str]
) -> Figure:
    """A heat map of shares by client and class."""
    trace = new_trace(
        "heatmap",
        x=[escaped(name) for name in classes],
        y=list(names),
        z=[[rounded(value) for value in row] for row in rows],
        zmin=0,
        zmax=1,
        colorscale=COUNT_COLOURS,
        showscale=False,
        hovertemplate="%{y}, class %{x}: %{z:.3f}<extra></extra>",
    )
    axes = layout(
        xaxis={"type": "category", "title": {"text": "class"}},
        yaxis={"type": "category", "autorange": "reversed"},
        height=80 + max(160, 24 * len(names)),
        showlegend=False,
    )
    return Figure([trace], axes)
