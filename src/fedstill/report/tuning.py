"""What a search for good values has given: its table, its page, and what to report on which
seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.core.files import PAGE, write_over
from fedstill.metrics.classification import METRICS
from fedstill.report.blocks import Block, Chart, Paragraph, Section, Table
from fedstill.report.figures import Figure, layout
from fedstill.report.page import document
from fedstill.report.summary import NONE
from fedstill.running.runs import spread
from fedstill.running.tuning import Trial, Tuning

if TYPE_CHECKING:
    import plotly.graph_objects as go

REPORT_SEEDS = 5
"""On how many other seeds the chosen values are to be reported."""


def trial_lines(tuning: Tuning) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table, the best trial first."""
    unit = _unit_of(tuning.metric)
    goal = f"{tuning.goal or 'goal'} [{unit.name}]"
    head = ["trial", *(d.key for d in tuning.space), goal, "seeds", ""]
    return head, [_line(trial, tuning, unit) for trial in tuning.ranked()]


@dataclass(frozen=True)
class _Unit:
    """How a goal is shown: its unit, what it is multiplied by, and the decimals."""

    name: str
    scale: float
    digits: int


def _unit_of(name: str) -> _Unit:
    metric = METRICS.get(name)
    if metric is None:
        return _Unit("%", 100, 2)
    return _Unit(metric.unit, metric.scale, metric.digits)


def _line(trial: Trial, tuning: Tuning, unit: _Unit) -> list[str]:
    score = spread(list(trial.scores.values()))
    cells = [json.dumps(trial.values[d.key], ensure_ascii=False).strip('"') for d in tuning.space]
    return [
        str(trial.number),
        *cells,
        score.text(unit.scale, unit.digits) if score else NONE,
        str(len(trial.scores)),
        trial.problem,
    ]


def advice(tuning: Tuning, config: str, overrides: Sequence[str]) -> str:
    """What to report, and on which seeds, as a command: not on those that chose the values."""
    best = tuning.ranked()[0]
    if not best.scores:
        return "no trial finished, so there is nothing to report"
    other = [seed for seed in range(1, 10**6) if seed not in tuning.seeds][:REPORT_SEEDS]
    values = [f"{key}={_written(value)}" for key, value in best.values.items()]
    words = " ".join([config, *(f"-s '{v}'" for v in (*overrides, *values))]).strip()
    return (
        f"trial {best.number} is the best of {len(tuning.trials)}. Its number is the best of many, "
        "so it is too good: "
        f"report the values on seeds that did not choose them:\n"
        f"  fedstill compare {words} --seeds {','.join(map(str, other))}"
    )


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_tuning_page(tuning: Tuning, out: Path) -> Path:
    """Write a page with two figures, the goal by trial and over each key, to a file; it needs no
    network.
    """
    head, rows = trial_lines(tuning)
    seeds = ", ".join(map(str, tuning.seeds))
    about = (
        f"Each point is the mean over seeds {seeds}. Do not report these numbers: they chose the "
        "values."
    )
    blocks: list[Block] = [Paragraph(about)]
    if any(trial.scores for trial in tuning.trials):
        blocks += _charts(tuning)
    blocks.append(Table(head, rows, "numbers"))
    page = document("Tuning", [], [Section("tuning", "Tuning", blocks)])
    write_over(out, page.encode(), PAGE)
    return out


def _charts(tuning: Tuning) -> list[Chart]:
    """The goal by trial, and over each key, as Optuna draws them."""
    from optuna.visualization import plot_optimization_history, plot_slice

    history = _with_our_layout(plot_optimization_history(tuning.study, target_name=tuning.goal))
    slices = _with_our_layout(plot_slice(tuning.study, target_name=tuning.goal))
    return [
        Chart([history], "The line is the best so far.", "The goal by trial"),
        Chart([slices], "Darker points are later trials.", "The goal over each key"),
    ]


def _with_our_layout(drawn: go.Figure) -> Figure:
    """A figure of Optuna's with the layout of all our figures: the page gives it colours for light
    and dark.
    """
    figure = json.loads(drawn.to_json())
    settings: dict[str, Any] = figure["layout"]
    axes = {key: axis for key, axis in settings.items() if key.startswith(("xaxis", "yaxis"))}
    return Figure(figure["data"], layout(hovermode="closest", **axes))
