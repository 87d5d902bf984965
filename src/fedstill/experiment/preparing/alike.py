"""How a further file is read, so that its examples are like the run's: a public set's, or a site's
own.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fedstill.data.form import About, Form
from fedstill.data.sources.catalog import FOLDERS
from fedstill.data.table_inputs import TableInputs
from fedstill.experiment.config.tables import DataTable


def form_like(data: DataTable, about: About) -> dict[str, Any]:
    """Keywords of ``load_dataset``, as ``[data]`` says, with the columns, names and marks that the
    run's examples have.

    None for images, which are read as they are. What is known of a data set by its name counts,
    too.
    """
    if about.kind == "image":
        return {}
    known = FOLDERS.get(data.name)
    form = replace(known.form if known else Form(), **data.form)
    form = replace(form, kind=about.kind, owner="")
    if about.kind == "table" and about.columns:
        table = TableInputs.named_by(about.columns, about.features, about.marks)
        form = replace(
            form,
            columns=table.columns,
            categorical=tuple(table.categories.items()),
            marks=table.marked or False,
        )
    return {field.name: getattr(form, field.name) for field in fields(form)}
