"""What each client gets: a section with its network and accuracy, as bars by client and as lines by
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.report.data_split import NAMED
from fedstill.report.figures import (
    COLOURS,
    DASHES,
    PERCENT,
    Figure,
    Style,
    flat_range,
    layout,
    named,
    plain,
    rounded,
    short,
)
from fedstill.report.markup import Cell, Html, figure, folded, grid, html_table, section, sentence
from fedstill.report.summary import NONE
from fedstill.running.groups import Group, spread
from fedstill.running.runs import Run

MEASURED_ON = {
    "personal": "test examples in the client's proportions of classes",
    "private": "its own held-out examples",
    "public": "the public examples",
    "own_test": "the client's own test set",
}

SAYS = {
    "personal": "accuracy on test examples in the client's proportions of classes",
    "private": "on held-out examples of its own data",
    "public": "on the public examples",
    "own_test": "accuracy of the client's answer, its own model or else the global one, on its own "
    "test set",
}

MOST_DRAWN = 40
"""More clients than this are not drawn one by one."""


def clients(groups: Sequence[Group], style: Style) -> Html | None:
    """Accuracy by client and architecture; None if no run measured it."""
    some = [g for g in groups if any(_last(g, f"{k}_by_client") for k in MEASURED_ON)]
    if not some or len(_ids(some)) > MOST_DRAWN:
        return None
    bars = [
        figure(
            [_bars(some, style, kind)],
            f"After the last round, on {what}.",
            f"Accuracy on {_kind(kind)} by client",
        )
        for kind, what in MEASURED_ON.items()
        if any(_last(g, f"{kind}_by_client") for g in some)
    ]
    if any(g.values("accuracy") for g in some):
        bars.append(
            figure(
                [_server(some, style)],
                "After the last round, on the test set.",
                "Accuracy of the server",
            )
        )
    there = [kind for kind in MEASURED_ON if any(_last(g, f"{kind}_by_client") for g in some)]
    each = ". ".join(f"{_kind(kind).capitalize()}: {SAYS[kind]}" for kind in there)
    own = "Every client keeps a model of its own. " if there != ["own_test"] else ""
    says = f"{own}{each}. Values are means over seeds."
    saw = (
        "Two values of each client in each round: before and after it learns from the others. A "
        "step up is "
        "what it learned."
    )
    courses = [
        figure([_course(g, kind)], saw, f"{g.label}: accuracy on {_kind(kind)} by round")
        for g in some
        for kind in MEASURED_ON
        if _rounds(g, kind)
    ]
    head: list[Cell] = [
        "client",
        "network",
        *(f"{g.label}: {_kind(k)} [%]" for g in some for k in there),
    ]
    lines: list[list[Cell]] = [
        [_name(some, c), _network(some, c), *_cells(some, c, there)] for c in _ids(some)
    ]
    sent = _sent(some)
    parts = [
        html_table(head, lines, "numbers wide"),
        grid(bars, "small"),
        sentence(sent) if sent else None,
        folded("Round by round", grid(courses)) if courses else None,
    ]
    return section("Client by client", sentence(says), *parts, name="clients")


def _last(group: Group, key: str) -> dict[str, float]:
    """A mapping of the last round by client, mean over the runs that have it."""
    by_run = [r.rounds[-1].get(key) for r in group.started]
    return _means([f for f in by_run if isinstance(f, Mapping)])


def _means(mappings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    ids = dict.fromkeys(k for f in mappings for k in f)
    means = {k: spread([float(f[k]) for f in mappings if k in f]) for k in ids}
    return {k: m.mean for k, m in means.items() if m}


def _ids(groups: Sequence[Group]) -> list[str]:
    ids = {c for g in groups for k in MEASURED_ON for c in _last(g, f"{k}_by_client")}
    return sorted(ids, key=int)


def _kind(kind: str) -> str:
    return "own tests" if kind == "own_test" else f"{kind} data"


def _name(groups: Sequence[Group], client: str) -> str:
    """What a client is called in the data, or else by its number."""
    names: Sequence[str] = next(
        (n for g in groups for r in g.started if (n := r.start.get("client_names"))), ()
    )
    return str(names[int(client)]) if int(client) < len(names) else client


def _network(groups: Sequence[Group], client: str) -> str:
    networks = dict.fromkeys(_model(r, int(client)) for g in groups for r in g.started)
    return ", ".join(networks)


def _model(run: Run, client: int) -> str:
    return str(
        run.networks[client] if client < len(run.networks) else run.settings.get("model.name", NONE)
    )


def _cells(groups: Sequence[Group], client: str, kinds: Sequence[str]) -> list[Cell]:
    out: list[Cell] = []
    for group in groups:
        for kind in kinds:
            after, before = (
                _last(group, f"{kind}{b}_by_client").get(client) for b in ("", "_before")
            )
            small = "" if before is None else f"<small>{100 * before:.1f} → </small>"
            out.append(NONE if after is None else Html(f"{small}{100 * after:.1f}"))
    return out


def _bars(groups: Sequence[Group], style: Style, kind: str) -> Figure:
    ids = _ids(groups)
    called = [name if (name := _name(groups, c)) != c else f"client {c}" for c in ids]
    names = {plain(name): short(name) for name in called}
    data = [
        {
            "type": "bar",
            "name": named(g),
            "x": list(names),
            "y": [rounded(accuracies[c]) if c in accuracies else None for c in ids],
            "marker": {"color": style.colour(g)},
            "hovertemplate": "%{x}: %{y:.2%}",
        }
        for g in groups
        if (accuracies := _last(g, f"{kind}_by_client"))
    ]
    ticks = (
        {"tickmode": "array", "tickvals": list(names), "ticktext": list(names.values())}
        if len(ids) <= NAMED
        else {}
    )
    return {
        "data": data,
        "layout": layout(barmode="group", yaxis=PERCENT, xaxis={"type": "category", **ticks}),
    }


def _server(groups: Sequence[Group], style: Style) -> Figure:
    means = [(g, m) for g in groups if (m := g.mean_spread("accuracy"))]
    data = {
        "type": "bar",
        "x": [named(g) for g, _ in means],
        "y": [rounded(m.mean) for _, m in means],
        "marker": {"color": [style.colour(g) for g, _ in means]},
        "hovertemplate": "%{x}: %{y:.2%}<extra></extra>",
    }
    return {
        "data": [data],
        "layout": layout(yaxis=PERCENT, xaxis={"type": "category"}, showlegend=False),
    }


def _rounds(group: Group, kind: str) -> list[tuple[int, dict[str, float], dict[str, float]]]:
    """(round, before, after) by client, where both were measured; mean over the runs."""
    numbers = sorted(
        {e["round"] for r in group.started for e in r.rounds if f"{kind}_before_by_client" in e}
    )
    out = []
    for n in numbers:
        events = [e for r in group.started for e in r.rounds if e["round"] == n]
        before, after = (
            _means([e[k] for e in events if k in e])
            for k in (f"{kind}_before_by_client", f"{kind}_by_client")
        )
        out.append((n, before, after))
    return out


def _course(group: Group, kind: str) -> Figure:
    rounds, data = _rounds(group, kind), []
    for i, client in enumerate(_ids([group])):
        x = [v for n, _, _ in rounds for v in (n - 0.5, n)]
        y = [rounded(m[client]) if client in m else None for _, b, a in rounds for m in (b, a)]
        line = {
            "color": COLOURS[i % len(COLOURS)],
            "width": 2,
            "dash": DASHES[i // len(COLOURS) % len(DASHES)],
        }
        name = plain(f"client {client}, {_network([group], client)}")
        data.append(
            {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y, "line": line}
        )
    axis = {
        "title": {"text": "round (half-way: before learning from the others)"},
        "rangemode": "tozero",
    }
    return {"data": data, "layout": layout(xaxis=axis, yaxis=PERCENT | flat_range(data, PERCENT))}


def _sent(groups: Sequence[Group]) -> str:
    """What was sent beside what weights would have cost."""
    told = []
    for group in groups:
        pairs = [
            (
                sum(e["bytes_up"] + e["bytes_down"] for e in r.rounds),
                sum(e["bytes_as_weights"] for e in r.rounds),
            )
            for r in group.started
            if all("bytes_as_weights" in e for e in r.rounds)
        ]
        if pairs:
            sent, weights = (sum(p[i] for p in pairs) / len(pairs) / 1e6 for i in (0, 1))
            told.append(f"{group.label} {sent:.4g} MB (weights: {weights:.4g} MB)")
    if not told:
        return ""
    return (
        "Sent in the whole run and, in brackets, what the weights of the same clients would take, "
        "sent down and up "
        "once a round: " + "; ".join(told) + "."
    )
