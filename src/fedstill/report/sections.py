"""The sections of the page of runs, in their order, and what each of them reports on.

A section is a function ``(report) -> Section | None`` in a file of its own or beside its relatives;
it returns None where its runs have measured nothing of it. To add one, write the function and enter
it in ``SECTIONS``. An outer package enters its sections in ``manifest.py``, with the same kind of
record and the name of the section that they follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedstill import manifest
from fedstill.manifest import Part
from fedstill.report.blocks import Section
from fedstill.report.figures import Style
from fedstill.report.table_files import group_named
from fedstill.running.runs import Group


@dataclass(frozen=True)
class Report:
    """What a page reports on: groups of runs, at least one.

    against: the label of the group that differences are to; empty: the first group.
    """

    groups: Sequence[Group]
    against: str = ""

    @cached_property
    def style(self) -> Style:
        """The colour and dash of each group."""
        return Style(self.groups)

    @cached_property
    def baseline(self) -> Group:
        """The group that differences are to; raises ConfigError if no group has that label."""
        return group_named(self.against, self.groups)


SECTIONS = (
    Part(
        "results",
        "All measures in one table, and the differences to one group.",
        "fedstill.report.results:results",
    ),
    Part(
        "boundaries",
        "Decision boundaries of clients that asked their peers.",
        "fedstill.report.class_regions:boundaries",
    ),
    Part(
        "rounds",
        "Accuracy and forgetting by round.",
        "fedstill.report.rounds:learning_and_forgetting",
    ),
    Part(
        "metrics",
        "Metrics beside accuracy by round.",
        "fedstill.report.metrics:metrics_by_round",
    ),
    Part(
        "confusion",
        "Which class is taken for which.",
        "fedstill.report.metrics:confusion",
    ),
    Part(
        "tasks",
        "Accuracy and forgetting over tasks.",
        "fedstill.report.tasks:over_tasks",
    ),
    Part(
        "heterogeneity",
        "Accuracy and forgetting over a parameter of the split.",
        "fedstill.report.heterogeneity:heterogeneity",
    ),
    Part(
        "sensitivity",
        "Accuracy and forgetting over a number of the method.",
        "fedstill.report.heterogeneity:sensitivity",
    ),
    Part(
        "classes",
        "Accuracy of each class by round.",
        "fedstill.report.rounds:remembered_classes",
    ),
    Part(
        "data",
        "What the examples are, and what reading them left out.",
        "fedstill.report.data_split:data_notes",
    ),
    Part(
        "split",
        "What each client has of each class.",
        "fedstill.report.data_split:split_maps",
    ),
    Part(
        "knowledge",
        "In-local and out-local accuracy, and prediction consistency.",
        "fedstill.report.knowledge:knowledge",
    ),
    Part(
        "epochs",
        "In-local and out-local accuracy within local training.",
        "fedstill.report.knowledge:epochs",
    ),
    Part(
        "clients",
        "Accuracy of each client.",
        "fedstill.report.clients:clients",
    ),
    Part(
        "personal",
        "Local, personalised and server accuracy.",
        "fedstill.report.weights:personal",
    ),
    Part(
        "weights",
        "Alignment, divergence and diversity of weights.",
        "fedstill.report.weights:weight_changes",
    ),
    Part(
        "own_measures",
        "What measures of the user's own gave, by round.",
        "fedstill.report.rounds:own_measures",
    ),
    Part(
        "units",
        "Which class each unit stands for.",
        "fedstill.report.class_regions:units",
    ),
    Part(
        "tsne",
        "Features of test examples on one plane.",
        "fedstill.report.features:tsne",
    ),
    Part(
        "joint",
        "Features of runs that started from one model.",
        "fedstill.report.features:joint",
    ),
    Part(
        "sphere",
        "Classes on the circle.",
        "fedstill.report.class_regions:sphere",
    ),
    Part(
        "landscape",
        "The loss around models.",
        "fedstill.report.landscape:landscape",
    ),
    Part(
        "chain",
        "Accuracy, consistency and drift along a chain of clients.",
        "fedstill.report.chain:chain",
    ),
    Part(
        "leakage",
        "How well training examples are told from what clients sent.",
        "fedstill.report.leaks:leaks",
    ),
    Part(
        "targets",
        "Seconds of training to target accuracies.",
        "fedstill.report.costs:targets",
    ),
    Part(
        "cost",
        "Seconds and bytes.",
        "fedstill.report.costs:cost",
    ),
    Part(
        "failures",
        "Replies that were refused.",
        "fedstill.report.run_details:failures",
    ),
    Part(
        "settings",
        "The settings in which groups differ, and all runs.",
        "fedstill.report.run_details:settings",
    ),
)
"""The sections of this package. Those of packages follow the ones that they name."""


def section_parts() -> list[Part]:
    """Where the sections of all packages are found, in the order of the page."""
    own_parts = {part.name: part for part in SECTIONS}
    package_parts = [(part, part) for part in manifest.report_sections()]
    return list(manifest.placed(own_parts, package_parts).values())


def sections(report: Report) -> list[Section]:
    """The sections that have something to show."""
    written = []
    for part in section_parts():
        make_section = part.load()
        section = make_section(report)
        if section is not None:
            written.append(section)
    return written
