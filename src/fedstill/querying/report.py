"""The report's sections on queries: the queried classes by client, gain against forgetting, and the
noise probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedstill.core.errors import CorruptFile
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
    COLOURS,
    COUNTS,
    DASHES,
    PERCENT,
    Figure,
    Style,
    Trace,
    escaped,
    faint,
    group_name,
    layout,
    lines,
    new_trace,
    rounded,
)
from fedstill.report.page import Report
from fedstill.running.journal import Event
from fedstill.running.runs import JOURNAL, Group, Run

# Queries without a teacher: no peer's model reached the threshold in the noise probe.


def untaught(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence about queries without a teacher, by group; empty if all queries had a teacher.

    runs: the runs of a group, by the group's label.
    """
    parts = []
    for label, group_runs in runs.items():
        without_teacher = sum(run.query_count.without_teacher for run in group_runs)
        queries = sum(run.query_count.total for run in group_runs)
        if without_teacher:
            parts.append(f"{label}, {without_teacher} of {queries}")
    if not parts:
        return ""
    return f"Queries without a teacher (included in all results): {'; '.join(parts)}."


# The queries of each client with their reasons, and results by round if clients query repeatedly.


MOST_QUERIES = 200
"""The largest number of queries in a table."""


@contextmanager
def reading_queries(run: Run) -> Iterator[None]:
    """A context in which errors from damaged entries become CorruptFile with the journal's name."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CorruptFile(
            f"{run.folder / JOURNAL}: the entries on queries are damaged: {problem}"
        ) from error


def asks_again(group: Group) -> bool:
    """Whether clients make new queries in every round."""
    return "query.again" in group.settings


def query_rows(group: Group) -> list[list[str]]:
    """Round, client, classes and reasons of each query of a group's first run."""
    run = group.started[0]
    events = run.rounds[-1:]
    if asks_again(group):
        events = run.rounds
    rows = []
    with reading_queries(run):
        for event in events:
            for answer in event.get("answers") or []:
                classes = ", ".join(run.classes[c] for c in answer["query"])
                client = str(answer["client"])
                rows.append([str(event["round"]), client, classes, _why(run, answer)])
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
    "of the same round."
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
    loss = lines(groups, style, "query_forgetting", PERCENT)
    charts = [
        Chart([average], ABOUT_AVERAGE, "Average accuracy by round"),
        Chart([gain], ABOUT_GAIN, "Gain by round"),
        Chart([loss], ABOUT_LOSS, "Forgetting by round"),
    ]
    return Gallery(charts, "small")


def _why(run: Run, answer: Mapping[str, Any]) -> str:
    """The reasons for the classes of a query.

    Older journals contain no reasons. At that time, label counts were the only possible reason.
    """
    if run.settings.get("query.draw", "none") == "none":
        return "set in the configuration"
    reasons = answer.get(REASONS)
    if not reasons:
        counts: Sequence[int] = []
        if run.label_counts:
            counts = run.label_counts[answer["client"]]
        reasons = {str(c): {"lack": counts[c]} for c in answer["query"]}
    texts = []
    for label in answer["query"]:
        reason = because(reasons.get(str(label), {}))
        texts.append(f"{run.classes[label]}: {reason}")
    return "; ".join(texts)


# The effects of queries: gain against forgetting, accuracies by class, and the noise probe compared
# with label shares.


QUERY_HEIGHT = 380
MOST_CLIENTS = 20
NOT_DOTTED = [dash for dash in DASHES if dash != "dot"]

STAGE_TITLES = {FIT: "alone", "transfer": "phase 1", "refine": "phase 2"}
SHADES = ("#999999", "#56B4E9", "#D55E00", "#009E73")
"""The colours of the bars for each stage."""

ABOUT = "Clients queried their peers for classes. Accuracy is measured on the common test set."
ABOUT_AGAIN = " If clients made several queries, points and bars show the last one."
ABOUT_TRADE = (
    "Large points are means over clients and seeds; small points are clients. Horizontal axis: "
    "accuracy gained on the queried classes, compared with the client's model before its query. "
    "Vertical axis: forgetting of the client's own classes; lower points forget more. The upper "
    "right corner is best."
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
    runs = [run for group in groups for run in group.started if _has_scores(run)]
    if runs:
        charts.append(Chart([_epochs(runs[0])], ABOUT_PHASES, "Accuracy by epoch"))

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
    return bool(_last(run).get("answers"))


def _has_scores(run: Run) -> bool:
    return any("scores" in event for event in _phases(run))


def noise_probes(report: Report) -> Section | None:
    """Predictions of models on noise, and their clients' labels; None if no model was probed."""
    run = _first_probed(report.groups)
    if run is None:
        return None
    with reading_queries(run):
        probe_of_client = {
            event["client"]: event["probe"]
            for event in run.clients
            if event["name"] == FIT and "probe" in event
        }
        shares = []
        predictions = []
        names = []
        for client, probe in sorted(probe_of_client.items()):
            client_shares = _shares(run.label_counts[client])
            prediction = [float(share) for share in probe]
            error = _mean_squared_error(client_shares, prediction)
            shares.append(client_shares)
            predictions.append(prediction)
            names.append(f"client {client} (error {error:.3f})")
        label_map = _map(shares, names, run.classes)
        probe_map = _map(predictions, names, run.classes)
    about = (
        "From a model's predictions on Gaussian noise, a peer estimates which classes the model "
        "has learned. Error: mean squared difference between label shares and predictions, over "
        f"classes. Seed {run.seed}."
    )
    charts = [
        Chart([label_map], "Shares of labels in each client's data.", "Label shares"),
        Chart([probe_map], "Mean prediction of each client's model on noise.", "Noise probe"),
    ]
    blocks = [Paragraph(about), Gallery(charts)]
    return Section("probe", "Noise probe and label shares", blocks)


def _first_probed(groups: Sequence[Group]) -> Run | None:
    for group in groups:
        for run in group.started:
            if any("probe" in event for event in run.clients):
                return run
    return None


def _shares(counts: Sequence[int]) -> list[float]:
    total = max(sum(counts), 1)
    return [count / total for count in counts]


def _mean_squared_error(shares: Sequence[float], predictions: Sequence[float]) -> float:
    pairs = zip(shares, predictions, strict=True)
    return sum((share - predicted) ** 2 for share, predicted in pairs) / len(shares)


def _last(run: Run) -> Event:
    if not run.rounds:
        return {}
    return run.rounds[-1]


def _answers(run: Run) -> list[dict[str, Any]]:
    """The answers of the last round for which gain and forgetting are known."""
    answers = _last(run).get("answers") or []
    return [
        answer
        for answer in answers
        if answer["gain"] is not None and answer["forgetting"] is not None
    ]


def _in_last(run: Run) -> list[Event]:
    """The clients' events of the last round.

    If clients query only once, they train alone in an earlier round, whose events are included.
    """
    last = max((event["round"] for event in run.clients if event.get("name") == FIT), default=0)
    return [event for event in run.clients if event["round"] >= last]


def _phases(run: Run) -> list[Event]:
    return [event for event in _in_last(run) if event.get("name") in ("transfer", "refine")]


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
        xaxis={"title": {"text": "gain on queried classes"}, **PERCENT},
        yaxis={"title": {"text": "forgetting of own classes"}, **PERCENT},
        height=QUERY_HEIGHT,
        hovermode="closest",
    )
    return Figure(traces, axes)


def _trades(run: Run) -> list[Trade]:
    with reading_queries(run):
        return [
            Trade(
                gain=answer["gain"],
                forgetting=answer["forgetting"],
                client=answer["client"],
                seed=run.seed,
            )
            for answer in _answers(run)
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
        with reading_queries(run):
            clients = [answer["client"] for answer in _answers(run)][:MOST_CLIENTS]
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
        if any(event.get("correct_by_class") for event in _phases(run)):
            return run
    return None


def _client(run: Run, client: int) -> Figure:
    """A client's accuracy by class after each stage: queried classes first, then its own classes,
    then the remaining ones.
    """
    queries = [answer["query"] for answer in _answers(run) if answer["client"] == client]
    query = queries[-1]
    counts = run.label_counts[client]
    order = sorted(range(len(counts)), key=lambda c: (c not in query, counts[c] == 0, c))
    names = []
    for label in order:
        role = _class_role(label, query, counts)
        names.append(f"{escaped(run.classes[label])} ({role})")

    totals = [int(total) for total in run.start["test_counts"]]
    stages = [event for event in _in_last(run) if event["client"] == client]
    tested_stages = [event for event in stages if event.get("correct_by_class")]
    traces = []
    for index, event in enumerate(tested_stages):
        correct = event["correct_by_class"]
        trace = new_trace(
            "bar",
            name=STAGE_TITLES.get(event["name"], event["name"]),
            x=names,
            y=[_share(correct[label], totals[label]) for label in order],
            marker={"color": SHADES[index % len(SHADES)]},
            hovertemplate="%{x}: %{y:.1%}",
        )
        traces.append(trace)
    axes = layout(
        xaxis={"type": "category"},
        yaxis={**PERCENT, "range": [0, 1]},
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


def _share(correct: float, total: int) -> float | None:
    if not total:
        return None
    return rounded(correct / total)


# Accuracy by epoch


def _epochs(run: Run) -> Figure:
    """A line for each querying client, and a dotted line at its accuracy before the query."""
    traces: list[Trace] = []
    with reading_queries(run):
        answers = _last(run).get("answers") or []
        alone = {answer["client"]: answer["average_accuracy_before"] for answer in answers}
        clients = sorted({event["client"] for event in _phases(run) if event.get("scores")})
        for index, client in enumerate(clients):
            traces += _epoch_lines(run, client, alone.get(client), index)
    axes = layout(
        xaxis={"title": {"text": "epoch of both phases"}}, yaxis=PERCENT, height=QUERY_HEIGHT
    )
    return Figure(traces, axes)


def _epoch_lines(run: Run, client: int, alone: float | None, index: int) -> list[Trace]:
    """A client's accuracy after each epoch, and a dotted line at its accuracy before the query, if
    known.

    index: the position of the client among those in the chart.
    """
    scores: list[float] = []
    for event in _phases(run):
        if event["client"] == client:
            scores += event.get("scores", [])
    accuracy_alone = None
    if alone is not None:
        accuracy_alone = rounded(alone)
    colour = COLOURS[index % len(COLOURS)]
    # Clients with the same colour have different dashes.
    dash = NOT_DOTTED[index // len(COLOURS) % len(NOT_DOTTED)]
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


def _map(rows: Sequence[Sequence[float]], names: Sequence[str], classes: Sequence[str]) -> Figure:
    """A heat map of shares by client and class."""
    trace = new_trace(
        "heatmap",
        x=[escaped(name) for name in classes],
        y=list(names),
        z=[[rounded(value) for value in row] for row in rows],
        zmin=0,
        zmax=1,
        colorscale=COUNTS,
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
