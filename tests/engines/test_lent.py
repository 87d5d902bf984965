"""Tensors that are shared cannot be changed in place, neither by a client nor by a measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import toys
from fedstill.core.errors import ChangedInPlace
from fedstill.core.extensions import StageResult
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    Payload,
    Stage,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import register
from fedstill.engines.client_measures import AtClient
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.methods.fedavg import FedAvg
from fedstill.running.runner import run

pytestmark = pytest.mark.usefixtures("with_threads")


@dataclass(frozen=True)
class Written(ClientWork):
    """A client that writes into received parameters in one of its functions."""

    place: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        self.write("begin", payload.params)
        return TrainingStart(payload.params, constants={"anchor": payload.params})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        self.write("terms", start["anchor"])
        return super().terms(step, start)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        self.write("end", start["anchor"])
        return Payload(params=params), NOTHING

    def write(self, place: str, tensors: Tensors) -> None:
        if self.place == place:
            for value in tensors.values():
                value.add_(1.0)


@dataclass(frozen=True)
class Writing(FedAvg):
    """Averaging whose clients write into what they were sent.

    place: begin, terms or end.
    """

    place: str = "begin"

    def work(self, stage: Stage) -> ClientWork:
        return Written(self.place)


@register("measure", "toy_writing")
class WritingMeasure(Measure):
    """Writes into the state."""

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers:
        for value in result.after.params.values():
            value.zero_()
        return {"none": 0}


@register("measure", "toy_writing_client")
class WritingAtClient(Measure):
    """Writes into a client's model."""

    gives = ("nothing",)

    def at_client(self, client: AtClient) -> Mapping[str, Any]:
        for value in client.end.values():
            value.zero_()
        return {"nothing": 0}


@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised"])
@pytest.mark.parametrize("place", ["begin", "terms", "end"])
@pytest.mark.parametrize("failures", ["stop", "tolerate"])
def test_a_client_that_writes_into_what_it_was_sent_ends_the_run(
    engine: str, place: str, failures: str, tmp_path: Path
) -> None:
    if (engine, place) == ("vectorised", "terms"):
        pytest.skip("there clients have what they were sent stacked, each its own")
    if (toys.DEVICE, place) == ("cuda", "terms"):
        pytest.skip("there training has a copy of its own, on the card")
    experiment = toys.toy(Writing(place=place), engine=engine, clients={"failures": failures})
    author = "Written"
    if engine == "pooled":
        # Another client that was sent the same tensors may notice it first, in its begin.
        author = r"Written(\.begin)?"
    elif place == "begin":
        author = r"Written\.begin"
    line = rf"^{author} changes params\.\S+ at client \d, "
    with pytest.raises(ChangedInPlace, match=line):
        run(experiment, tmp_path / "run", data=toys.blobs())


def test_a_measure_that_writes_into_the_run_ends_it(tmp_path: Path) -> None:
    line = (
        r"WritingMeasure\.look changes after\.params\.\S+, .* \(test_lent.py, "
        r"line \d+, in look\)$"
    )
    with pytest.raises(ChangedInPlace, match=line):
        run(toys.toy(measure=("toy_writing",)), tmp_path / "run", data=toys.blobs())


def test_so_does_one_that_writes_into_a_clients_model(tmp_path: Path) -> None:
    line = r"^WritingAtClient\.at_client changes end\.\S+ at client \d"
    with pytest.raises(ChangedInPlace, match=line):
        run(toys.toy(measure=("toy_writing_client",)), tmp_path / "run", data=toys.blobs())
