"""pfl-research as a contestant: a process of one thread on each core, by torchrun, its own training
loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.hyperparam.base import HyperParam
from pfl.internal.ops import get_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from benchmarks.peers.common import Rounds, Task, given


class InOrder(Dataset):
    """A client's examples, batch by batch in the task's order; pfl's own would keep one order in
    all epochs.
    """

    def __init__(self, task: Task, round: int, client: int) -> None:
        super().__init__(task.client(client), user_id=str(client))
        self.epochs = iter(task.order(round, client))

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        """One epoch."""
        for positions in next(self.epochs).split(batch_size):
            yield [tensor[positions] for tensor in self.raw_data]


class Course(HyperParam, TrainingProcessCallback):
    """What changes from round to round: whose turn it is, the learning rate, the clock."""

    def __init__(self, task: Task, rounds: Rounds) -> None:
        self.task, self.rounds, self.round = task, rounds, 1
        self.turn = iter(task.cohort(1))

    def value(self) -> float:
        """The learning rate."""
        return self.task.rate(self.round)

    def next_client(self) -> int:
        """Every process draws the users of all, so the last ones may find none left; theirs are not
        trained.
        """
        return next(self.turn, 0)

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The first round begins."""
        self.rounds.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended."""
        self.rounds.end()
        self.round += 1
        if self.round <= self.task.rounds:
            self.turn = iter(self.task.cohort(self.round))
            self.rounds.begin()
        return False, Metrics()


class TrainingAlone(FederatedAveraging):
    """pfl's federated averaging, without the evaluation that it would begin with."""

    def get_next_central_contexts(self, *given: Any) -> Any:
        """What to do next."""
        contexts, *others = super().get_next_central_contexts(*given)
        return contexts and tuple(replace(c, do_evaluation=False) for c in contexts), *others


def main() -> None:
    """Run every round of the task."""
    torch.set_num_threads(1)
    task, _, out = given()
    network = task.network()
    network.loss = lambda x, y: torch.nn.functional.cross_entropy(network.train()(x), y)
    network.metrics = lambda x, y: {}
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, lambda parameters, lr: task.optimiser(parameters, lr), central)
    course = Course(task, Rounds())
    data = FederatedDataset(lambda client: InOrder(task, course.round, client), course.next_client)
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    TrainingAlone().run(
        NNAlgorithmParams(task.rounds, task.rounds, len(task.cohort(1)), None),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=task.about["batch"],
            local_num_epochs=task.about["epochs"],
            local_learning_rate=course,
        ),
        NNEvalHyperParams(local_batch_size=None),
        [course],
    )
    if get_ops().distributed.global_rank == 0:
        how = f"torchrun, {get_ops().distributed.world_size} processes of one thread"
        course.rounds.report(out, network.state_dict(), how)


if __name__ == "__main__":
    main()
