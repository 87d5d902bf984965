"""Generates docs/catalogue.md: everything that a config can name, with one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.core import descriptions, registry
from fedstill.core.registry import Entry

INTRODUCTION = """# Methods, partitions, models and more

This page lists everything that a config can name. `fedstill list method fedntd` shows the fields of
one of them, with their defaults and legal ranges. For a method it also shows the paper, the state
and what the method needs. In place of a name, a config can have [your own file](add_a_method.md).
"""

TITLES = {
    "method": "Methods",
    "topology": "Topologies",
    "partition": "Partitions",
    "stream": "Streams of tasks",
    "dataset": "Data sets",
    "model": "Models",
    "measure": "Measures",
}

NOTES = {
    "method": "The [ranking](ranking/index.md) compares methods, and the "
    "[results](results/methods.md) show what each gains over FedAvg. "
    "[From the papers to the code](papers.md) lists their symbols.",
    "topology": "A topology defines which clients act in which stage of a round. Each method has "
    "one by default.",
    "partition": "A partition splits the training data over the clients of a simulation.",
    "stream": "A [stream](tasks.md) changes the classes or the data during training.",
    "dataset": "You can also use [your own data](add_a_data_set.md).",
    "model": "The model must suit the kind of the data: images, vectors, series or texts.",
    "measure": "[Measures](measures.md) explains what they cost, and in which rounds they run.",
}


def page() -> str:
    """The text of docs/catalogue.md."""
    sections = [section(kind) for kind in TITLES]
    return "\n".join([INTRODUCTION, *sections])


def section(kind: str) -> str:
    """The entries of one kind as a table."""
    entries = [registry.lookup(kind, name) for name in registry.names(kind)]
    rows = table(entries)
    if kind == "method":
        rows = method_table(entries)
    return "\n".join([f"## {TITLES[kind]}", "", NOTES[kind], "", *rows, ""])


def method_table(entries: Sequence[Entry]) -> list[str]:
    """Names, default topologies and sentences of methods."""
    rows = ["| method | topology | description |", "|---|---|---|"]
    for entry in entries:
        topology = entry.build().topology
        rows.append(f"| `{entry.name}` | `{topology}` | {cell(descriptions.summary(entry))} |")
    return rows


def table(entries: Sequence[Entry]) -> list[str]:
    """Names and sentences of entries that are no methods."""
    rows = [f"| `{entry.name}` | {cell(descriptions.summary(entry))} |" for entry in entries]
    return ["| name | description |", "|---|---|", *rows]


def cell(text: str) -> str:
    """A sentence as the cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("*", "\\*")
