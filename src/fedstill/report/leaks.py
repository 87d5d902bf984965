"""How well members can be told from what clients send: by round, as curves at the end, and as a
table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.metrics.membership import GRID, RATES
from fedstill.report.figures import (
    MOST_IN_LEGEND,
    SHARE,
    Figure,
    Style,
    layout,
    lines,
    named,
    rounded,
)
from fedstill.report.knowledge import measured
from fedstill.report.markup import (
    Html,
    choice,
    figure,
    grid,
    html_table,
    key,
    labelled,
    section,
    sentence,
)
from fedstill.report.series import Look, looks, over_seeds, reading
from fedstill.running.groups import Group

ATTACKS = {"the loss": "loss", "the likelihood ratio": "likelihood_ratio"}
SIDES = {"what the server sees": "seen", "before privacy": "raw", "the global model": "global"}
HEAD = (
    "",
    "attack on",
    "by",
    "AUC [%]",
    *(f"found at {100 * rate:g} % false [%]" for rate in RATES),
)
LOWEST = 1e-3


def leaks(groups: Sequence[Group], style: Style) -> Html | None:
    """The attacks on what clients sent and on the global model; None if they were not measured."""
    if not any(measured(groups, f"leakage/{side}/loss/auc") for side in SIDES.values()):
        return None
    says = (
        "Which of two images of a class did a client train on? An attack guesses it from what the "
        "client sent. Area "
        "under the curve: 0.5 is a coin, 1 is certainty. Where logits are sent, it is on those "
        "that the client would "
        "send if the images that are asked about were public."
    )
    attacks = {name: k for name, k in ATTACKS.items() if measured(groups, f"leakage/seen/{k}/auc")}
    figures = []
    if attacks:
        by_round = (
            "What the server sees: area under the curve by round, all clients of a stage with one "
            "threshold."
        )
        drawn = [lines(groups, style, f"leakage/seen/{k}/auc", **SHARE) for k in attacks.values()]
        figures.append(figure(drawn, by_round, "Area under the curve by round", "attack"))
        curves = (
            "Members found against others taken for members, in the last measured round of the "
            "first seed; both "
            "axes are logarithmic. Dashed grey: a coin. Dotted: before privacy. What matters is "
            "the left end: who is "
            "found there is found almost for sure."
        )
        drawn = [_curves(groups, style, k) for k in attacks.values()]
        figures.append(figure(drawn, curves, "Members found", "attack"))
    parts = [
        choice("attack", "Attack by", list(attacks)),
        key(groups, style),
        grid(figures, "small"),
    ]
    table = (
        "The last measured round, mean ± one standard deviation over seeds; in brackets the 95 % "
        "interval of the "
        "first seed. It counts examples as independent, and takes thresholds as given."
    )
    return section(
        "What uploads leak",
        sentence(says),
        *parts,
        sentence(table),
        _table(groups, style),
        name="leakage",
    )


def leak_rows(groups: Sequence[Group], ends: bool = True) -> list[tuple[Group, list[str]]]:
    """Each attack on each group in the last measured round: on what, by what, area in %, members
    found in %.

    ends: with the interval of the first seed.
    """
    keys, out = ("auc", *(f"tpr_at_{rate}" for rate in RATES)), []
    for group in groups:
        for side, at in SIDES.items():
            for name, attack in ATTACKS.items():
                if over_seeds(group, f"leakage/{at}/{attack}/auc").rounds:
                    said = [_said(group, at, attack, number) for number in keys]
                    intervals = [
                        _interval(group, at, attack, number) if ends else "" for number in keys
                    ]
                    out.append(
                        (group, [side, name, *map("".join, zip(said, intervals, strict=True))])
                    )
    return out


def _table(groups: Sequence[Group], style: Style) -> Html:
    return html_table(
        HEAD,
        [[labelled(group, style), *cells] for group, cells in leak_rows(groups)],
        "numbers wide",
    )


def _said(group: Group, side: str, attack: str, number: str) -> str:
    return over_seeds(group, f"leakage/{side}/{attack}/{number}").values[-1].text(100)


def _interval(group: Group, side: str, attack: str, number: str) -> str:
    look = _last(group, side)
    if look is None:
        return ""
    with reading(look) as event:
        low, high = (100 * float(v) for v in event[side][attack][f"{number}_interval"])
    return f" ({low:.2f}–{high:.2f})"


def _last(group: Group, side: str) -> Look | None:
    """The last look of the first seed at what was sent, or at the global model."""
    of_first = [
        look for look in looks(group, "leakage") if isinstance(look.event.get(side), Mapping)
    ]
    return max((k for k in of_first if k.run is of_first[0].run), key=_when, default=None)


def _when(look: Look) -> int:
    return int(look.event["round"])


def _curves(groups: Sequence[Group], style: Style, attack: str) -> Figure:
    coin = {"color": "#999999", "width": 1, "dash": "dash"}
    ends = {"x": [LOWEST, 1], "y": [LOWEST, 1], "line": coin, "name": "a coin", "showlegend": False}
    data: list[dict[str, Any]] = [{"type": "scatter", "mode": "lines", **ends, "hoverinfo": "skip"}]
    for group in groups:
        for side in ("seen", "raw"):
            look = _last(group, side)
            if look is None or attack not in look.event[side]:
                continue
            with reading(look) as event:
                found_at = [float(v) for v in event[side][attack]["roc"]]
                points = list(zip(GRID, found_at, strict=True))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": named(group) if side == "seen" else f"{named(group)}, before privacy",
                    "showlegend": side == "seen",
                    "x": [x for x, _ in points],
                    "y": [rounded(max(y, LOWEST)) for _, y in points],
                    "line": {
                        "color": style.colour(group),
                        "width": 2 if side == "seen" else 1.5,
                        "dash": style.dash(group) if side == "seen" else "dot",
                    },
                    "hovertemplate": "%{y:.2%}",
                }
            )
    log = {"type": "log", "range": [-3, 0], "tickformat": ".1%"}
    axes = {
        "xaxis": {**log, "title": {"text": "others taken for members"}},
        "yaxis": {**log, "title": {"text": "members found"}},
    }
    return {"data": data, "layout": layout(showlegend=len(groups) <= MOST_IN_LEGEND, **axes)}
