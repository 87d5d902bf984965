"""The interface of measures has exactly the names that docs/add_a_measure.md lists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fedstill.core.extensions import StageResult
from fedstill.engines.client_measures import AtClient
from fedstill.measures.base import EvaluationContext

PAGE = (Path(__file__).parents[2] / "docs/add_a_measure.md").read_text(encoding="utf-8")
INTERFACE = PAGE.partition("## What a measure may access")[2]


def public_names(kind: type) -> set[str]:
    """The fields, properties and methods of a record."""
    fields = {field.name for field in dataclasses.fields(kind)}
    return fields | {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("heading", "name", "kind"),
    [
        ("### `result`: the result of a stage", "result", StageResult),
        ("### `context`: what `look` may use", "context", EvaluationContext),
        ("### `visit`: what `at_client` may use", "visit", AtClient),
    ],
    ids=["StageResult", "EvaluationContext", "AtClient"],
)
def test_the_page_lists_every_public_name(heading: str, name: str, kind: type) -> None:
    after_heading = INTERFACE.partition(heading)[2]
    section = re.split(r"^##", after_heading, maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    first_cells = " ".join(row.split("|")[1] for row in rows)

    assert set(re.findall(rf"`{name}\.(\w+)", first_cells)) == public_names(kind)
