"""The table of docs/papers.md on what goes together: every method on every topology, engine, with
networks that differ.

``tools.docs_check`` compares it with the page. Each cell is what preparing such a run says: it can
be done, or it is refused by name, and the refusal stands below the table.
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
from tools.fitting_runs import fitting_run

TOPOLOGIES = {
    "parallel": "parallel",
    "sequential": "chain",
    "public_logits": "public logits",
    "peer_to_peer": "peers",
}
SEVERAL = [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [8, 8]}]


def examples() -> Dataset:
    """Sixty pictures of noise, enough for every method to be prepared."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (90, 1, 4, 4), generator=draw, dtype=torch.uint8)
    return from_tensors(
        "noise", (pixels[:60], torch.arange(60) % 3), (pixels[60:], torch.arange(30) % 3)
    )


def refusal(method: str, data: Dataset, **changes: Any) -> str:
    """Why a run of a method is refused; empty if it is not."""
    try:
        prepare(resolve(fitting_run(method, **changes)), data)
    except FedstillError as error:
        return plain(str(error), method)
    return ""


def plain(text: str, method: str) -> str:
    """A refusal without the names of the method and the topology, so that equal reasons are one."""
    text = re.sub(rf"^method {re.escape(method)}(:| on topology \w+:)? ?", "", text)
    text = (
        re.sub(rf"(method )?\b{re.escape(method)}\b", "it", text, count=1)
        if "sends none" in text
        else text
    )
    return re.sub(r"; omit topology.kind to use its topology, \w+", "", text).strip()


def columns(method: str, data: Dataset) -> dict[str, str]:
    """The refusal of each column, empty where it goes."""
    own = registry.lookup("method", method).build().topology
    told = {
        title: refusal(method, data, topology={"kind": kind}) for kind, title in TOPOLOGIES.items()
    }
    told["vectorised"] = refusal(method, data, topology={"kind": own}, engine="vectorised")
    told["networks that differ"] = refusal(
        method, data, topology={"kind": own}, clients={"models": SEVERAL}
    )
    told["noise on logits"] = refusal(
        method, data, topology={"kind": own}, privacy={"noise": 0.5, "clip": 5.0}
    )
    return told


def table() -> str:
    """The table and the reasons, in Markdown."""
    data, reasons = examples(), dict[str, int]()
    lines: list[str] = []
    head: list[str] = []
    for method in registry.names("method"):
        if not registry.lookup("method", method).target.__module__.startswith("fedstill."):
            continue
        told = columns(method, data)
        head = head or ["method", *told]
        cells = []
        for why in told.values():
            number = reasons.setdefault(why, len(reasons) + 1) if why else 0
            cells.append(str(number) if number else "yes")
        lines.append(f"| {' | '.join([f'`{method}`', *cells])} |")
    said = [f"{number}. {why[:1].upper()}{why[1:]}." for why, number in reasons.items()]
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|---|{'---|' * (len(head) - 1)}", *lines, "", *said, ""]
    )
