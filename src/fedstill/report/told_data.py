"""What the examples of runs are, whose mean and spread standardises them, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.data.inputs import examples_are
from fedstill.report.groups import Group
from fedstill.report.markup import Html, facts, section, sentence


def data_section(groups: Sequence[Group]) -> Html | None:
    """The notes of reading and splitting the data; None where there are none and examples are
    images.
    """
    told: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        for run in group.started:
            said = examples_are(run.start.get("inputs", {}))
            lines = tuple(filter(None, (said, *map(str, run.start.get("notes", ())))))
            if lines:
                told.setdefault(lines, []).append(group.label)
    if not told:
        return None
    parts = []
    for lines, labels in told.items():
        if len(told) > 1:
            parts.append(facts({"runs": ", ".join(dict.fromkeys(labels))}))
        parts += [sentence(f"{line[:1].upper()}{line[1:]}.") for line in lines]
    return section("Data", *parts, name="data")
