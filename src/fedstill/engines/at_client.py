"""What a measure sees of one client after its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstill.core.records import SERVER, Examples, Stage, Tensors, View, World
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import correct_by_class
from fedstill.models.contract import predictor


@dataclass(frozen=True)
class AtClient:
    """A stage that is done, as a measure sees it at one client.

    ``start``, ``end``: the model's parameters before and after the client's work. ``by_epoch``:
    after each local epoch, where a measure with ``each_epoch`` asks for them and the client trained
    on its own data. ``test``: the common test set, None on real sites. ``public``: the public set
    with its labels, which no method may see. ``sent``: the groups of its reply.
    """

    stage: Stage
    view: View
    start: Tensors
    end: Tensors
    by_epoch: Sequence[Tensors]
    test: Examples | None
    public: Examples | None
    inputs: Inputs
    world: World
    sent: frozenset[str] = frozenset()

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.world.classes

    @property
    def is_server(self) -> bool:
        """Whether the client is the server, at work on public data."""
        return self.view.client == SERVER

    def correct_by_class(self, params: Tensors, examples: Examples) -> list[int]:
        """How many examples of each class (C,) these parameters of the client's network predict
        right.
        """
        predict = predictor(self.view.model, params)
        counts: list[int] = correct_by_class(predict, examples, self.inputs, self.classes).tolist()
        return counts
