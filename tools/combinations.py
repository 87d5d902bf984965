"""The table of docs/papers.md on methods and topologies, engines and other settings.

``tools.docs_check`` compares it with the page. Each cell is the result of preparing such a run: the
run is accepted, or refused for a reason that is listed below the table.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from fedstill import from_tensors
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import FedstillError
from fedstill.data.dataset import Dataset
from fedstill.running.preparation import prepare
from tools.fitting_runs import fitting_run, package_methods

TOPOLOGIES = {
    "parallel": "parallel",
    "sequential": "chain",
    "public_logits": "public logits",
    "peer_to_peer": "peers",
}
"""The topologies with the headings of their columns."""

DIFFERENT_NETWORKS = [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [8, 8]}]


def noise_images() -> Dataset:
    """Sixty training images of noise, which are enough to prepare any method."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (90, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.arange(90) % 3
    train = (images[:60], labels[:60])
    test = (images[60:], labels[60:])
    return from_tensors("noise", train, test)


def refusal(method: str, data: Dataset, **changes: Any) -> str:
    """Why fedstill refuses a run of a method; empty if it accepts the run."""
    try:
        prepare(resolve(fitting_run(method, **changes)), data)
    except FedstillError as error:
        return without_names(str(error), method)
    return ""


def without_names(message: str, method: str) -> str:
    """A message without the names of the method and its topology, so that methods share reasons."""
    name = re.escape(method)
    text = re.sub(rf"^method {name}(:| on topology \w+:)? ?", "", message)
    if "sends none" in text:
        text = re.sub(rf"(method )?\b{name}\b", "it", text, count=1)
    return re.sub(r"; omit topology.kind to use its topology, \w+", "", text).strip()


def refusals(method: str, data: Dataset) -> dict[str, str]:
    """The refusal of a method in each column of the table; empty where it is accepted."""
    columns = {}
    for kind, heading in TOPOLOGIES.items():
        columns[heading] = refusal(method, data, topology={"kind": kind})
    topology = {"kind": registry.lookup("method", method).build().topology}
    changes_by_heading: dict[str, dict[str, Any]] = {
        "vectorised": {"engine": "vectorised"},
        "networks that differ": {"clients": {"models": DIFFERENT_NETWORKS}},
        "noise on logits": {"privacy": {"noise": 0.5, "clip": 5.0}},
    }
    for heading, changes in changes_by_heading.items():
        columns[heading] = refusal(method, data, topology=topology, **changes)
    return columns


def table() -> str:
    """The table and the reasons, in Markdown."""
    data = noise_images()
    columns = {method: refusals(method, data) for method in package_methods()}
    headings = list(columns["fedavg"])
    numbers = dict[str, int]()
    rows = []
    for method, reasons in columns.items():
        cells = [f"`{method}`"]
        for reason in reasons.values():
            if reason:
                number = numbers.setdefault(reason, len(numbers) + 1)
                cells.append(str(number))
            else:
                cells.append("yes")
        rows.append(table_row(cells))
    notes = []
    for reason, number in numbers.items():
        sentence = reason[:1].upper() + reason[1:]
        notes.append(f"{number}. {sentence}.")
    head = [table_row(["method", *headings]), f"|---|{'---|' * len(headings)}"]
    return "\n".join([*head, *rows, "", *notes, ""])


def table_row(cells: list[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
