"""The report's section on queries: who asked for what, gain against forgetting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedstill.core.errors import CorruptFile
from fedstill.core.reports import WHY
from fedstill.methods.fit import FIT
from fedstill.querying.queries import because
from fedstill.report.figures import (
    COLOURS,
    COUNTS,
    DASHES,
    PERCENT,
    Figure,
    Style,
    faint,
    layout,
    lines,
    named,
    plain,
    rounded,
)
from fedstill.report.markup import (
    Cell,
    Html,
    choice,
    figure,
    folded,
    grid,
    html_table,
    key,
    section,
    sentence,
)
from fedstill.running.groups import Group
from fedstill.running.journal import Event
from fedstill.running.runs import JOURNAL, Run

# Queries that nobody answered: no peer's model reached the threshold on noise, so the client had no
# teacher.


def untaught(runs: Mapping[str, Sequence[Run]]) -> str:
    """A sentence on them, by what the runs are called; empty if every query had a teacher."""
    told = []
    for name, own in runs.items():
        without, asked = (
            (sum(numbers) for numbers in zip(*(r.untaught for r in own), strict=True))
            if own
            else (0, 0)
        )
        if without:
            told.append(f"{name}, {without} of {asked}")
    return (
        f"Queries that had no teacher, and count in all numbers: {'; '.join(told)}." if told else ""
    )


# Who asked for what, and why; and, where clients ask again, how query follows query.


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


# What clients asked for: gain against forgetting, classes before and after, the noise probe beside
# label shares.


QUERY_HEIGHT = 380
MOST_CLIENTS = 20
NOT_DOTTED = [d for d in DASHES if d != "dot"]


def asked(groups: Sequence[Group], style: Style) -> Html | None:
    """Gain against forgetting, class accuracies of each client, epochs of its phases; None if no
    client asked.
    """
    some = [g for g in groups if any(_last(r).get("answers") for r in g.started)]
    if not some:
        return None
    trade = (
        "Large points are means over clients and seeds; small points are clients. Further right: "
        "more "
        "accuracy gained on the classes asked for, compared with the client alone. Further down: "
        "more "
        "forgotten of its own classes. The upper right corner is best."
    )
    figures = [figure([_trade(some, style)], trade, "Forgetting against gain")]
    curves = [r for g in some for r in g.started if any("scores" in e for e in _phases(r))]
    if curves:
        says = (
            "Average accuracy on the validation set after each epoch, first of phase 1, then of "
            "phase 2: a line "
            "for each client that asked. Dotted: its model before, on the test set."
        )
        figures.append(figure([_epochs(curves[0])], says, "Phases, epoch by epoch"))
    parts = [
        key(some, style),
        grid(figures),
        one_after_another(some, style),
        *_bars(some),
        *who_asked(some),
    ]
    says = "Clients asked their peers for classes. Accuracy is on the common test set."
    if any(asks_again(g) for g in some):
        says += " Where they asked again, points and bars are of their last query."
    without = untaught({g.label: g.started for g in some})
    notes = [sentence(said) for said in (says, without) if said]
    return section("Queries: what clients gained and forgot", *notes, *parts, name="asked")


def noise_probes(groups: Sequence[Group], _: Style) -> Html | None:
    """What models predict on noise beside what their clients hold; None if no model was probed."""
    run = next((r for g in groups for r in g.started if any("probe" in e for e in r.clients)), None)
    if run is None:
        return None
    with reading_queries(run):
        events = {e["client"]: e for e in run.clients if e["name"] == FIT and "probe" in e}
        clients = sorted(events)
        counts = [run.label_counts[c] for c in clients]
        shares = [[n / max(sum(row), 1) for n in row] for row in counts]
        seen = [[float(p) for p in events[c]["probe"]] for c in clients]
        errors = [
            sum((a - b) ** 2 for a, b in zip(s, p, strict=True)) / len(s)
            for s, p in zip(shares, seen, strict=True)
        ]
        names = [f"client {c} (error {e:.3f})" for c, e in zip(clients, errors, strict=True)]
        left = figure(
            [_map(shares, names, run.classes)],
            "Label shares of each client's data.",
            "Label shares",
        )
        right = figure(
            [_map(seen, names, run.classes)],
            "Mean prediction of its model on noise.",
            "Noise probe",
        )
    says = (
        "A peer guesses which classes a model knows from its predictions on Gaussian noise. Error: "
        "the mean squared "
        f"difference between label shares and predictions, over classes. From seed {run.seed}."
    )
    return section(
        "The noise probe and the label shares", sentence(says), grid([left, right]), name="probe"
    )


def _last(run: Run) -> Event:
    return run.rounds[-1] if run.rounds else {}


def _answers(run: Run) -> list[dict[str, Any]]:
    return [
        a
        for a in _last(run).get("answers") or []
        if a["gain"] is not None and a["forgetting"] is not None
    ]


def _in_last(run: Run) -> list[Event]:
    """What clients did in the last round; what those that asked but once did before it, too."""
    last = max((e["round"] for e in run.clients if e.get("name") == FIT), default=0)
    return [e for e in run.clients if e["round"] >= last]


def _phases(run: Run) -> list[Event]:
    return [e for e in _in_last(run) if e.get("name") in ("transfer", "refine")]


def _trade(groups: Sequence[Group], style: Style) -> Figure:
    data = []
    for group in groups:
        points = []
        for run in group.started:
            with reading_queries(run):
                points += [
                    (a["gain"], a["forgetting"], a["client"], run.seed) for a in _answers(run)
                ]
        if not points:
            continue
        colour = style.colour(group)
        mean = [sum(p[i] for p in points) / len(points) for i in (0, 1)]
        usual = {
            "type": "scatter",
            "mode": "markers",
            "legendgroup": group.label,
            "name": named(group),
        }
        data.append(
            {
                **usual,
                "x": [rounded(p[0]) for p in points],
                "y": [rounded(p[1]) for p in points],
                "customdata": [f"client {p[2]}, seed {p[3]}" for p in points],
                "hovertemplate": "%{customdata}: gain %{x:.1%}, forgetting %{y:.1%}",
                "marker": {"size": 6, "color": faint(colour, 0.35)},
                "showlegend": False,
            }
        )
        data.append(
            {
                **usual,
                "x": [rounded(mean[0])],
                "y": [rounded(mean[1])],
                "hovertemplate": "mean: gain %{x:.1%}, forgetting %{y:.1%}",
                "marker": {"size": 13, "color": colour, "line": {"width": 1, "color": "white"}},
            }
        )
    x = {"title": {"text": "gain on classes asked for"}, **PERCENT}
    y = {"title": {"text": "forgetting of own classes"}, **PERCENT}
    return {
        "data": data,
        "layout": layout(xaxis=x, yaxis=y, height=QUERY_HEIGHT, hovermode="closest"),
    }


def _bars(groups: Sequence[Group]) -> list[Html | None]:
    """For each method whose clients end with models of their own: classes before and after, a
    client at a time.
    """
    drawn: list[Html | None] = []
    names: list[str] = []
    for group in groups:
        run = next(
            (r for r in group.started if any(e.get("correct_by_class") for e in _phases(r))), None
        )
        if run is None:
            continue
        with reading_queries(run):
            clients = [a["client"] for a in _answers(run)][:MOST_CLIENTS]
            if not clients or (names and [f"client {c}" for c in clients] != names):
                continue
            names = [f"client {c}" for c in clients]
            says = (
                f"{group.label}: accuracy by class, alone and after each phase. From seed "
                f"{run.seed}."
            )
            drawn.append(
                figure([_client(run, c) for c in clients], says, plain(group.label), "client")
            )
    if not drawn:
        return []
    return [choice("client", "Show", names), grid([d for d in drawn if d is not None], "small")]


def _client(run: Run, client: int) -> Figure:
    query = {a["client"]: a["query"] for a in _answers(run)}[client]
    counts = run.label_counts[client]
    order = sorted(range(len(counts)), key=lambda c: (c not in query, counts[c] == 0, c))
    role = ["asked for" if c in query else "own" if counts[c] else "neither" for c in order]
    labels = [f"{plain(run.classes[c])} ({r})" for c, r in zip(order, role, strict=True)]
    stages = [e for e in _in_last(run) if e["client"] == client and e.get("correct_by_class")]
    totals = _totals(run)
    shades = ("#999999", "#56B4E9", "#D55E00", "#009E73")
    data = [
        {
            "type": "bar",
            "name": {FIT: "alone", "transfer": "phase 1", "refine": "phase 2"}.get(
                e["name"], e["name"]
            ),
            "x": labels,
            "y": [
                rounded(e["correct_by_class"][c] / totals[c]) if totals[c] else None for c in order
            ],
            "marker": {"color": shades[i % len(shades)]},
            "hovertemplate": "%{x}: %{y:.1%}",
        }
        for i, e in enumerate(stages)
    ]
    axes = {"xaxis": {"type": "category"}, "yaxis": {**PERCENT, "range": [0, 1]}}
    return {"data": data, "layout": {**layout(**axes, height=QUERY_HEIGHT), "barmode": "group"}}


def _totals(run: Run) -> list[int]:
    return [int(n) for n in run.start["test_counts"]]


def _epochs(run: Run) -> Figure:
    data: list[Figure] = []
    with reading_queries(run):
        alone = {a["client"]: a["average_accuracy_before"] for a in _last(run).get("answers") or []}
        for client in sorted({e["client"] for e in _phases(run) if e.get("scores")}):
            scores = [s for e in _phases(run) if e["client"] == client for s in e.get("scores", [])]
            turn, place = divmod(len(data) // 2, len(COLOURS))
            name, colour, dash = (
                f"client {client}",
                COLOURS[place],
                NOT_DOTTED[turn % len(NOT_DOTTED)],
            )
            line = {
                "type": "scatter",
                "mode": "lines",
                "legendgroup": name,
                "hovertemplate": "%{y:.1%}",
            }
            epochs, before = list(range(1, len(scores) + 1)), alone.get(client)
            drawn = {
                "x": epochs,
                "y": [rounded(s) for s in scores],
                "line": {"color": colour, "dash": dash},
            }
            data.append({**line, "name": name, **drawn})
            level = [None if before is None else rounded(before)] * 2
            dots = {"color": colour, "dash": "dot", "width": 1}
            data.append(
                {
                    **line,
                    "name": f"{name} alone",
                    "x": [1, len(scores)],
                    "y": level,
                    "line": dots,
                    "showlegend": False,
                }
            )
    x, y = {"title": {"text": "epoch of both phases"}}, PERCENT
    return {"data": data, "layout": layout(xaxis=x, yaxis=y, height=QUERY_HEIGHT)}


def _map(rows: Sequence[Sequence[float]], names: Sequence[str], classes: Sequence[str]) -> Figure:
    trace = {
        "type": "heatmap",
        "x": [plain(c) for c in classes],
        "y": list(names),
        "z": [[rounded(v) for v in row] for row in rows],
        "zmin": 0,
        "zmax": 1,
        "colorscale": COUNTS,
        "showscale": False,
        "hovertemplate": "%{y}, class %{x}: %{z:.3f}<extra></extra>",
    }
    axes = {
        "xaxis": {"type": "category", "title": {"text": "class"}},
        "yaxis": {"type": "category", "autorange": "reversed"},
    }
    return {
        "data": [trace],
        "layout": layout(**axes, height=80 + max(160, 24 * len(names)), showlegend=False),
    }
