"""The section on membership inference, that is, how well an attacker recognises training examples
from what clients send: by round, as curves at the end, and as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.metrics.membership import GRID, RATES
from fedstill.report.blocks import (
    Block,
    Cell,
    Chart,
    Choice,
    Gallery,
    Paragraph,
    Section,
    Table,
    group_label,
    line_key,
)
from fedstill.report.figures import (
    MAX_IN_LEGEND,
    SHARE,
    Figure,
    Style,
    Trace,
    group_name,
    layout,
    lines,
    measured,
    new_trace,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import Measurement, first_run_measurements, measurements, over_seeds
from fedstill.running.runs import Group

ATTACKS = {"the loss": "loss", "the likelihood ratio": "likelihood_ratio"}
"""The statistic that an attack thresholds, and its key in the journal."""

TARGETS = {"what the server sees": "seen", "before privacy": "raw", "the global model": "global"}
"""The target of an attack, and its key in the journal."""

NUMBERS = ("auc", *(f"tpr_at_{rate}" for rate in RATES))
"""The results of an attack: the area under the curve, and the share of members found at fixed
false-positive rates.
"""

HEAD = (
    "",
    "attack on",
    "by",
    "AUC [%]",
    *(f"found at {100 * rate:g} % false positives [%]" for rate in RATES),
)
LOWEST = 1e-3
"""The lowest rate that the logarithmic axes show."""

ABOUT = (
    "From what a client sent, an attack guesses which of two examples of a class the client "
    "trained on. An area under the curve of 0.5 is random guessing, and 1 is certainty. If clients "
    "send logits on public examples, the attack uses the logits that the client would send on "
    "these two examples."
)
ABOUT_ROUNDS = "Attack on what the server sees. One threshold applies to all clients of a stage."
ABOUT_CURVES = (
    "True-positive rate against false-positive rate of the attack, for the last measured round of "
    "the first seed. Both axes are logarithmic. Dashed grey: random guessing. Dotted: before "
    "privacy. The left end matters most: there, nearly all examples that the attack selects are "
    "training examples."
)
ABOUT_TABLE = (
    "Last measured round: mean ± one standard deviation over seeds, with the 95 % interval of the "
    "first seed in brackets. The interval treats examples as independent and thresholds as fixed."
)


@dataclass(frozen=True)
class AttackRow:
    """The results of an attack on a group in the last measured round, in percent.

    target: the target of the attack. method: the statistic that it thresholds. numbers: mean ±
    standard deviation over seeds, for each of ``NUMBERS``. intervals: the 95 % intervals of the
    first seed; empty if unknown.
    """

    group: Group
    target: str
    method: str
    numbers: Sequence[str]
    intervals: Sequence[str]

    @property
    def plain_cells(self) -> list[str]:
        """The cells of a table row, without intervals."""
        return [self.target, self.method, *self.numbers]

    @property
    def cells(self) -> list[str]:
        """The cells of a table row, with intervals in brackets."""
        pairs = zip(self.numbers, self.intervals, strict=True)
        return [self.target, self.method, *(f"{number}{ends}" for number, ends in pairs)]


def leaks(report: Report) -> Section | None:
    """The attacks on uploads and on the global model; None if they were not measured."""
    groups = report.groups
    style = report.style
    if not any(measured(groups, f"leakage/{target}/loss/auc") for target in TARGETS.values()):
        return None
    attacks = {
        name: attack
        for name, attack in ATTACKS.items()
        if measured(groups, f"leakage/seen/{attack}/auc")
    }
    charts = _charts(groups, style, list(attacks.values()))
    rows: list[list[Cell]] = [
        [group_label(row.group, style), *row.cells] for row in leak_rows(groups)
    ]
    return Section(
        "leakage",
        "Membership inference",
        [
            Paragraph(ABOUT),
            Choice("attack", "Attack by", list(attacks)),
            line_key(groups, style),
            Gallery(charts, "small"),
            Paragraph(ABOUT_TABLE),
            Table(HEAD, rows, "numbers wide"),
        ],
    )


def _charts(groups: Sequence[Group], style: Style, attacks: Sequence[str]) -> list[Block]:
    if not attacks:
        return []
    by_round = [lines(groups, style, f"leakage/seen/{attack}/auc", SHARE) for attack in attacks]
    found = [_curves(groups, style, attack) for attack in attacks]
    return [
        Chart(by_round, ABOUT_ROUNDS, "Area under the curve by round", "attack"),
        Chart(found, ABOUT_CURVES, "Training examples found", "attack"),
    ]


def leak_rows(groups: Sequence[Group]) -> list[AttackRow]:
    """Each attack on each group in the last measured round."""
    rows = []
    for group in groups:
        for title, target in TARGETS.items():
            measurement = _last_measurement(group, target)
            for method, attack in ATTACKS.items():
                if not measured([group], f"leakage/{target}/{attack}/auc"):
                    continue
                key = f"{target}/{attack}"
                row = AttackRow(
                    group=group,
                    target=title,
                    method=method,
                    numbers=[_number(group, f"{key}/{number}") for number in NUMBERS],
                    intervals=[_interval(measurement, f"{key}/{number}") for number in NUMBERS],
                )
                rows.append(row)
    return rows


def _number(group: Group, key: str) -> str:
    series = over_seeds(group, f"leakage/{key}")
    return series.values[-1].text(100)


def _interval(measurement: Measurement | None, key: str) -> str:
    """The ends of the 95 % interval in brackets; empty if it is unknown."""
    if measurement is None:
        return ""
    ends = measurement.look.points(f"{key}_interval")
    if not ends:
        return ""
    low, high = (f"{100 * end:.2f}" for end in ends if end is not None)
    return f" ({low}–{high})"


def _last_measurement(group: Group, target: str) -> Measurement | None:
    """The first seed's last measurement of a target."""
    of_target = [
        measurement
        for measurement in measurements(group, "leakage")
        if target in measurement.look.names()
    ]
    if not of_target:
        return None
    return max(first_run_measurements(of_target), key=lambda measurement: measurement.look.round)


# Curves of members found


def _curves(groups: Sequence[Group], style: Style, attack: str) -> Figure:
    coin = new_trace(
        "scatter",
        mode="lines",
        x=[LOWEST, 1],
        y=[LOWEST, 1],
        line={"color": "#999999", "width": 1, "dash": "dash"},
        name="random guessing",
        showlegend=False,
        hoverinfo="skip",
    )
    traces = [coin]
    for group in groups:
        for target in ("seen", "raw"):
            measurement = _last_measurement(group, target)
            if measurement is not None and attack in measurement.look.names(target):
                traces.append(_curve(measurement, style, target, attack))
    axis = {
        "type": "log",
        "range": [math.log10(LOWEST), 0],
        "tickvals": [0.001, 0.01, 0.1, 1],
        "ticktext": ["0.1%", "1%", "10%", "100%"],
    }
    axes = layout(
        showlegend=len(groups) <= MAX_IN_LEGEND,
        xaxis={**axis, "title": {"text": "false positives"}},
        yaxis={**axis, "title": {"text": "training examples found"}},
    )
    return Figure(traces, axes)


def _curve(measurement: Measurement, style: Style, target: str, attack: str) -> Trace:
    """The share of members found at each false-positive rate; dotted before privacy."""
    rates = measurement.look.points(f"{target}/{attack}/roc")
    name = group_name(measurement.group)
    colour = style.colour(measurement.group)
    line = {"color": colour, "width": 2, "dash": style.dash(measurement.group)}
    if target == "raw":
        name = f"{name}, before privacy"
        line = {**line, "width": 1.5, "dash": "dot"}
    return new_trace(
        "scatter",
        mode="lines",
        name=name,
        showlegend=target == "seen",
        x=list(GRID),
        y=[rounded(max(rate, LOWEST)) for rate in rates if rate is not None],
        line=line,
        hovertemplate="%{y:.2%}",
    )
