"""What a measure may access is what docs/add_a_measure.md lists, no less and no more."""

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
    part = re.split(r"^##", INTERFACE.partition(heading)[2], maxsplit=1, flags=re.MULTILINE)[0]
    first_cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    listed = {found for cell in first_cells for found in re.findall(rf"`{name}\.(\w+)", cell)}
    assert listed == public_names(kind)
