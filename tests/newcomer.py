"""A method in a file of its own, written by somebody new to it, into which tests put mistakes."""

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
    """FedAvg, by somebody new to it."""

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
    """An experiment with that method, and the line of its file that ends with ``# HERE``."""
    bodies = {"client": client, "server": server}
    text = MINE.format(
        **{k: textwrap.indent(textwrap.dedent(v), "    ") for k, v in bodies.items()}
    )
    (folder / "mine.py").write_text(text)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# HERE")]
    experiment = toys.toy("mine.py", **{"topology": {"clients": 4}, "measure": (), **changes})
    return replace(experiment, base=folder), marked[-1] if marked else 0


SHAPES = """
def terms(self, step, start):
    loss = step.logits() @ step.logits()  # HERE
    return {"ce": loss}
"""
"""A mistake at clients: what is multiplied does not fit."""

SIGNATURES = {
    "initial_state": "world",
    "begin_round": "state, stages, world",
    "payload_for_client": "state, client, stage, world",
    "work": "stage",
    "expected_reply": "client, stage, world",
    "aggregate": "state, replies, stage, world",
    "predictors": "state, world",
}


def at_the_server(part: str, line: str) -> str:
    return f"""
    def {part}(self, {SIGNATURES[part]}):
        {line}  # HERE
    """
