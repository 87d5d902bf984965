"""Whether what a client claims can be true, by what the server knows of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Truth:
    """What a server knows of a client's data, by class (C,): its own, the common test set, the
    public set.

    None where it does not know, as of real sites. ``tasks``: how many the run has.
    """

    own: Sequence[int] | None = None
    test: Sequence[int] | None = None
    public: Sequence[int] | None = None
    tasks: int = 0


def untrue(examples: int, fields: Mapping[str, Any], truth: Truth) -> str:
    """Why a client's number of examples and its counts cannot be true; empty if they can."""
    own, test = truth.own, truth.test
    if own is not None and examples > sum(own):
        return f"claims {examples} examples, and has {sum(own)}"
    if own is not None and "label_counts" in fields and list(fields["label_counts"]) != list(own):
        return "its report 'label_counts' is not what it has"
    for row in (fields.get("correct_by_class", ()), *fields.get("correct_by_epoch", ())):
        if test is not None and (
            len(row) not in (0, len(test)) or any(r > n for r, n in zip(row, test, strict=False))
        ):
            return "its report has more right answers than there are test examples"
    if truth.tasks and len(fields.get("site_by_task", ())) not in (0, truth.tasks):
        return (
            f"its report 'site_by_task' has {len(fields['site_by_task'])} numbers for "
            f"{truth.tasks} tasks"
        )
    for name, there in (("private", own), ("public", truth.public)):
        table = fields.get(name)
        said = table.get("counts", ()) if isinstance(table, Mapping) else ()
        if there is not None and any(n > of for n, of in zip(said, there, strict=False)):
            return f"its report {name!r} counts more examples than there are"
    return ""
