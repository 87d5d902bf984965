"""A method in a file of its own, as a newcomer writes it. Tests insert mistakes."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import toys
from fedstill.config.experiment import Experiment

MINE = '''
from dataclasses import dataclass

from fedstill import TrainingStart, Payload
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.core.records import NOTHING
from fedstill.core.registry import method
from fedstill.core.method import ClientWork


@method("mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg, by a newcomer."""

    def work(self, stage):
        return LocalTraining(self)

{server}

@dataclass(frozen=True)
class LocalTraining(ClientWork):
    method: Mine

{client}
'''


def mine(
    folder: Path, client: str = "", server: str = "", **changes: Any
) -> tuple[Experiment, int]:
    """An experiment with this method, and the last line of its file that ends with ``# HERE``; 0
    without such a line.

    client, server: functions of the client's and of the server's part.
    """
    text = MINE.format(client=as_body(client), server=as_body(server))
    (folder / "mine.py").write_text(text)
    marked_line = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.endswith("# HERE"):
            marked_line = number
    experiment = toys.toy("mine.py", **{"topology": {"clients": 4}, "measure": (), **changes})
    return replace(experiment, base=folder), marked_line


def as_body(functions: str) -> str:
    """Functions, indented for the body of a class."""
    return textwrap.indent(textwrap.dedent(functions), "    ")


SHAPES = """
def terms(self, step, start):
    loss = step.logits() @ step.logits()  # HERE
    return {"ce": loss}
"""
"""A mistake at clients: a product of matrices whose shapes do not fit."""

SIGNATURES = {
    "incompatibility": "stages, world",
    "setting_warnings": "world",
    "initial_state": "world",
    "begin_round": "state, stages, world",
    "payload_for_client": "state, client, stage, world",
    "work": "stage",
    "expected_reply": "client, stage, world",
    "aggregate": "state, replies, stage, world",
    "predictors": "state, world",
}


def at_the_server(part: str, line: str) -> str:
    """A function of the server's part, with one line as its body."""
    return f"""
    def {part}(self, {SIGNATURES[part]}):
        {line}  # HERE
    """
