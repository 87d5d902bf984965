"""The page of the ranking: one file that needs no network, with a section for each suite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomli_w

from fedstill.experiment.ranking.suites import CHOOSING_SEEDS, TEST_SEEDS
from fedstill.experiment.ranking.where import Grid
from fedstill.files import make_folder
from fedstill.report import agreement
from fedstill.report.maps_shown import maps_section
from fedstill.report.markup import Html, escape, figure, folded, grid, html_table, section, sentence
from fedstill.report.page import document
from fedstill.report.ranking_figures import rank_figure, scatter, task_matrix
from fedstill.report.ranking_files import (
    about,
    cell_lines,
    chosen_where,
    joined,
    standing_head,
    standing_lines,
)
from fedstill.report.standings import Standings
from fedstill.written_over import PAGE, write_over

AGREEMENT = "agreement"
"""The section on how far tiers agree; the others have their suites' names."""

TITLE = "The ranking: who forgets, and who learns"

MEANS = (
    "What a rank does not mean. The columns are chosen, not drawn: nothing here reaches beyond "
    "them, and small settings"
    " rank small settings. Methods on one bar cannot be told apart. Every method had the same "
    "number of tries, which"
    " favours methods with few fields. A row below the one that differences are to stays: on these "
    "columns it did not"
    " help."
)
HOW = (
    f"Fields are chosen on seeds {', '.join(map(str, CHOOSING_SEEDS))}, on training images that "
    "clients lack; numbers"
    f" are of seeds {', '.join(map(str, TEST_SEEDS))} on the test set. Accuracy is a mean over "
    "classes; over tasks"
    " where these are permuted, over the clients that ask among peers. It is learned × kept: what "
    "was known of each at"
    " its best, and how much of it is left at the end. Both are taken from the ends of tasks where "
    "there are tasks,"
    " from before and after the exchange among peers, else from means of five successive rounds. "
    "CPU seconds are of"
    " whole runs, over those of the row in the head; MB go up and down. † a run diverged, and "
    "counts as far as it came."
)
INTERVALS = (
    "Intervals over columns resample seeds within columns, 10,000 times; p is of a sign-flip test "
    "over columns × seeds,"
    " Holm's over methods. In the table by column the interval is Student's, of differences paired "
    "by seed: five seeds"
    " allow no single cell a claim. Click on a head to sort."
)
BARS = (
    "Mean rank with its interval, 1 the best. Methods with a mark on the same grey bar cannot be "
    "told apart by rank."
)
PAIR = (
    "Right: more was learned. Up: more of it was kept. On a dotted curve the accuracy, the "
    "product, is the same."
)
MATRIX = (
    "Each row is a task, each column a task's end; the colour is the accuracy on that task then, "
    "mean over seeds."
)


def write_ranking_page(
    every: Sequence[Standings], out: Path, maps: Mapping[str, Grid] | None = None
) -> Path:
    """Write the page to a file; its path. ``maps``: by method; None: without a section on them."""
    make_folder(out.parent)
    write_over(out, ranking_page(every, maps).encode(), PAGE)
    return out


def ranking_page(every: Sequence[Standings], maps: Mapping[str, Grid] | None = None) -> str:
    """The page as text."""
    head = f"<header><h1>{escape(TITLE)}</h1></header>"
    parts = [
        Html(head),
        *map(sentence, (MEANS, HOW, INTERVALS)),
        *_agreement(every),
        *map(_section, every),
    ]
    parts += [] if maps is None else [maps_section(maps)]
    return document(TITLE, "\n".join(part.text for part in parts))


def _section(one: Standings) -> Html:
    suite = one.suite
    missing = [sentence(f"No entry yet: {', '.join(one.missing)}.")] if one.missing else []
    drawn = [figure([rank_figure(one)], BARS, "Ranks")] if len(one.placed) > 1 else []
    if any(not math.isnan(p.kept) for p in one.placed):
        drawn.append(figure([scatter(one)], PAIR, "Learned and kept"))
    groups = (
        [sentence(f"Cannot be told apart by rank: {'; '.join(joined(one))}.")] if one.bars else []
    )
    lines = [[line[1], line[0], *line[2:]] for line in standing_lines(one)]
    head = standing_head(one)
    return section(
        suite.title,
        sentence(f"{about(one)} Version {suite.version} of {suite.name}."),
        html_table([head[1], head[0], *head[2:]], lines, "numbers wide sortable"),
        *missing,
        grid(drawn, "top"),
        *groups,
        folded("By column", html_table(*cell_lines(one), "numbers wide sortable")),
        *_matrices(one),
        folded("The fields that were chosen, to copy", *_fields(one)),
        name=suite.name,
    )


def _matrices(one: Standings) -> Iterator[Html]:
    """The matrix of tasks of each row, column by column."""
    rows = [*(p.row for p in one.placed), *one.bounds]
    for column in one.columns:
        drawn = [(row.name, task_matrix(row, column)) for row in rows]
        maps = [
            figure([f], f"{name}, {column}: {MATRIX}", Html(escape(name)), "matrix")
            for name, f in drawn
            if f
        ]
        if maps:
            yield folded(
                f"The matrix of tasks by method: {column}", sentence(MATRIX), grid(maps, "small")
            )


def _fields(one: Standings) -> Iterator[Html]:
    """The settings of a row as a config's lines, for those who want them."""
    suite = one.suite
    yield sentence(
        f"Over the settings that all rows of {suite.name} have; chosen {chosen_where(suite)}."
    )
    for name in (p.row.name for p in one.placed):
        text = (
            f"<strong>{escape(name)}</strong></p><pre "
            f"class='copy'>{escape(copied_fields(one, name))}</pre>"
        )
        yield Html(f"<p>{text}")


def copied_fields(one: Standings, name: str) -> str:
    """A row's method, and what was chosen over the suite's settings, as tables of a config."""
    row = next(p.row for p in one.placed if p.row.name == name)
    tree: dict[str, dict[str, object]] = {"method": dict(one.suite.method(name))}
    for key, value in row.fields.items():
        table, _, field = key.partition(".")
        tree.setdefault(table, {})[field] = value
    return tomli_w.dumps(tree)


def _agreement(every: Sequence[Standings]) -> Iterator[Html]:
    if lines := agreement.agreement_lines(every):
        table = html_table(agreement.HEAD, lines, "numbers")
        yield section(agreement.TITLE, sentence(agreement.MEANS), table, name=AGREEMENT)
