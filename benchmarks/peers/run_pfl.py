"""pfl-research as a contestant: a process with one thread for each core, started by torchrun, and
its own training loop.
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
from torch.nn.functional import cross_entropy

from benchmarks.peers.common import Assignment, RoundClock, Task


class TaskDataset(Dataset):
    """A client's examples in the batch order of the task. pfl's own data set keeps one order in all
    epochs.
    """

    def __init__(self, task: Task, round: int, client: int) -> None:
        examples = task.client(client)
        super().__init__((examples.images, examples.labels), user_id=str(client))
        self.epoch_orders = iter(task.order(round, client))

    def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
        """The batches of one epoch."""
        for positions in next(self.epoch_orders).split(batch_size):
            yield [tensor[positions] for tensor in self.raw_data]


class Course(HyperParam, TrainingProcessCallback):
    """What changes from round to round: the clients, the learning rate, and the clock."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.clock = RoundClock()
        self.round = 1
        self.clients = iter(task.cohort(1))

    def value(self) -> float:
        """The learning rate."""
        return self.task.rate(self.round)

    def next_client(self) -> int:
        """The next client of the round.

        Every process draws the clients of all processes. At the end, it may draw more than there
        are; those are not trained.
        """
        return next(self.clients, 0)

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The first round begins."""
        self.clock.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """A round has ended."""
        self.clock.end()
        self.round += 1
        if self.round <= self.task.rounds:
            self.clients = iter(self.task.cohort(self.round))
            self.clock.begin()
        return False, Metrics()


class TrainingOnly(FederatedAveraging):
    """pfl's federated averaging, without the evaluation at its start."""

    def get_next_central_contexts(self, *arguments: Any) -> Any:
        """The work of the next iteration."""
        contexts, model, metrics = super().get_next_central_contexts(*arguments)
        if contexts:
            contexts = tuple(replace(context, do_evaluation=False) for context in contexts)
        return contexts, model, metrics


def model_of(task: Task) -> PyTorchModel:
    """The network of a task with the loss and the optimisers that pfl expects."""
    network = task.network()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(network.train()(images), labels)

    def metrics(images: Tensor, labels: Tensor) -> dict[str, Any]:
        return {}

    network.loss = loss
    network.metrics = metrics
    central_optimiser = torch.optim.SGD(network.parameters(), lr=1.0)
    return PyTorchModel(network, task.optimiser, central_optimiser)


def main() -> None:
    """Run every round of the task."""
    torch.set_num_threads(1)
    assignment = Assignment.from_arguments()
    task = assignment.task()
    model = model_of(task)
    course = Course(task)

    def dataset_of(client: int) -> TaskDataset:
        return TaskDataset(task, course.round, client)

    dataset = FederatedDataset(dataset_of, course.next_client)
    backend = SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()])
    TrainingOnly().run(
        algorithm_params=NNAlgorithmParams(task.rounds, task.rounds, len(task.cohort(1)), None),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=task.about["batch"],
            local_num_epochs=task.about["epochs"],
            local_learning_rate=course,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[course],
    )
    distributed = get_ops().distributed
    if distributed.global_rank == 0:
        setup = f"torchrun, {distributed.world_size} processes of one thread"
        course.clock.report(assignment.report_folder, model.pytorch_model.state_dict(), setup)


if __name__ == "__main__":
    main()
