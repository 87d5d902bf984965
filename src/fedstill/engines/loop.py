"""The training loop: it trains one client, or a stack of clients, for one stage.

All engines use this loop. ``Training.run`` iterates over the batches, and ``Training.step``
executes a step: it computes the terms of the method's objective and their gradient, updates the
parameters, and calls the functions that the method overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.checks import bad_return, terms_of
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.method import ClientWork
from fedstill.core.records import Step, Tensors, TrainingResult, TrainingStart, View
from fedstill.engines.clients import (
    Batch,
    LoneClient,
    Progress,
    TrainingClients,
    TrainingSetup,
    stage_examples,
    stage_generator,
    uses_scores,
    with_network_of,
)
from fedstill.engines.hardware import Precision, may_record_steps
from fedstill.engines.optimiser import optimiser
from fedstill.engines.step import BatchStep, Networks, StepInputs
from fedstill.models import contract
from fedstill.models.contract import draws_random_numbers, freeze_norms

if TYPE_CHECKING:
    from fedstill.core.extensions import GradientRule
    from fedstill.engines.cuda_graphs import StepRecorder

Terms = dict[str, Tensor]
"""The terms of an objective by name, each averaged over a batch."""

Objective = Callable[[Step, TrainingStart], Mapping[str, Tensor]]
"""``ClientWork.terms`` or ``ClientWork.ascent_terms``."""

DETACHED = (
    "returns terms that do not depend on the trained parameters, so nothing would be trained: a "
    "tensor may be detached, created with .item() or NumPy, or under torch.no_grad()"
)
"""The message about terms without a gradient."""

UNWEIGHTED = (
    "reads labels but does not weight losses by class: call step.weighted(losses), or remove "
    "class_weights from the stage's plan"
)
"""The message about terms that ignore class weights."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of one client's training."""

    params: Tensors
    """All entries of the network, buffers included."""
    result: TrainingResult
    losses: Mapping[str, float]
    """The mean of each term over the examples of the last epoch."""
    steps: int = 0
    """All steps. ``result`` has those of the best epoch, if the plan keeps its parameters."""
    epochs: int = 0
    scores: tuple[float, ...] = ()
    """A score for each epoch, if the plan uses scores."""
    by_epoch: tuple[Tensors, ...] = ()
    """The parameters after each epoch, if the setup asks for them."""


def train(work: ClientWork, start: TrainingStart, view: View, setup: TrainingSetup) -> Trained:
    """Train one client for one stage.

    The outcome only depends on the arguments: all random numbers are drawn from the run's seed by
    key.
    """
    view, inputs = with_network_of(start, view, setup.inputs)
    setup = replace(setup, inputs=inputs)
    device = stage_examples(view, setup.stage).labels.device
    with (
        on_gpu(device, setup.precision),
        _dropout_by_key(view, setup),
        closing(Training(work, LoneClient(start, view, setup))) as training,
    ):
        return training.run()[0]


@contextmanager
def on_gpu(device: torch.device, precision: Precision) -> Iterator[None]:
    """A separate CUDA stream with products of a precision; no effect on the CPU."""
    if device.type != "cuda":
        yield
        return
    from fedstill.engines.cuda_graphs import on_own_stream
    from fedstill.engines.devices import tf32_if_chosen

    with on_own_stream(device), tf32_if_chosen(precision, device):
        yield


def _dropout_by_key(view: View, setup: TrainingSetup) -> AbstractContextManager[None]:
    """Seed torch's global generator for this client if its network draws from it, as dropout
    does.
    """
    if not draws_random_numbers(view.model):
        return nullcontext()
    stage = setup.stage
    return drawing_from(seed_for(setup.seed, stage.round, stage.index, view.client, "dropout"))


class Training:
    """The training of one client or of a stack in a stage.

    Functions that a method does not override are not called.
    """

    def __init__(self, work: ClientWork, clients: TrainingClients) -> None:
        self.work = work
        self.clients = clients
        self.setup = clients.setup
        self.plan = clients.setup.plan
        self.adjusts_gradients = _overrides(work, "adjust_gradients")
        self.acts_after_step = _overrides(work, "after_step")
        self.perturbs = _overrides(work, "perturb")
        self.has_ascent_terms = _overrides(work, "ascent_terms")

        self.params = clients.params
        # The trained entries of params: the leaves of autograd's graph.
        self.leaves = self._trained_entries()
        self.trace = clients.trace
        self.optimiser = optimiser(self.plan, list(self.leaves.values()), self.setup.lr)
        self.networks = self._make_networks()
        self.rule_draws = stage_generator(clients.view.client, self.setup, "noise")
        self.recorder = self._make_recorder()

        self.sums = TermSums()
        # The parameters after each epoch, by the client's index in the stack.
        self.epoch_params: dict[int, list[Tensors]] = {}

    def _trained_entries(self) -> dict[str, Tensor]:
        trainable = contract.trainable_names(self.clients.view.model)
        leaves = {}
        for name, value in self.params.items():
            if name in trainable and self.work.trainable(name):
                leaves[name] = value.requires_grad_()
        return leaves

    def _make_networks(self) -> Networks:
        clients = self.clients
        module = clients.module().train()
        if self.plan.norm == "frozen":
            freeze_norms(module)
        return Networks(
            model=clients.view.model,
            module=module,
            teacher_table=clients.teacher_table,
            precision=self.setup.precision,
            teacher_precision=self.setup.teacher_precision,
            device=clients.device,
            teacher_on_batch=clients.teacher_on_batch,
        )

    def _make_recorder(self) -> StepRecorder | None:
        """The recorder of steps as CUDA graphs; None if steps are not recorded."""
        clients = self.clients
        if not may_record_steps(clients.device):
            return None
        # Batches of a rule vary in size, and after_step creates a new trace in every step.
        if self.setup.rule is not None or self.acts_after_step:
            return None
        from fedstill.engines.cuda_graphs import StepRecorder, whole_batches

        return StepRecorder(
            execute=self._gradient_step,
            state=lambda: [*self.params.values(), *self.optimiser.state()],
            reads_epoch=lambda: self.networks.epoch_was_read,
            batches=whole_batches(self.plan, max(clients.sizes)),
            kind=(
                type(self.work),
                clients.view.model,
                len(clients.sizes),
                self.plan,
                self.setup.precision,
                self.setup.teacher_precision,
            ),
        )

    def close(self) -> None:
        """Delete the recordings, before the garbage collector does so while another thread
        records, which would break its recording.
        """
        self.recorder = None

    def run(self) -> list[Trained]:
        """Train, and return each client's outcome."""
        best = BestEpoch(self.plan.patience)
        batch = None
        for batch in self.clients.batches():
            self.step(batch)
            if not batch.ending:
                continue
            if self.setup.by_epoch:
                self._store_params(batch.ending)
            if uses_scores(self.plan):
                score = self.work.validation_score(self.params, self.clients.view)
                result = self._result(batch.progress[0], self.clients.copies(self.trace)[0])
                best.add(score, self.params, result)
                if best.is_out_of_patience:
                    break
        return self._outcomes(best, batch)

    def _result(self, progress: Progress, trace: Tensors) -> TrainingResult:
        return TrainingResult(progress.steps, self.setup.lr, trace)

    def _store_params(self, ending: Sequence[int]) -> None:
        """Copy the parameters of the clients whose epoch ends."""
        params_by_client = self.clients.copies(self.params)
        for client_index in ending:
            self.epoch_params.setdefault(client_index, []).append(params_by_client[client_index])

    def _outcomes(self, best: BestEpoch, last_batch: Batch | None) -> list[Trained]:
        params = self.params
        traces = self.clients.copies(self.trace)
        count = len(traces)
        losses = self.sums.means(count)
        progress: Sequence[Progress] = [Progress(steps=0, epochs=0)] * count
        if last_batch is not None:
            progress = last_batch.progress
        results = [self._result(progress[i], traces[i]) for i in range(count)]
        if self.plan.keep == "best" and best.result is not None:
            params = best.params
            results = [best.result]
        params_by_client = self.clients.copies(params)
        return [
            Trained(
                params=params_by_client[i],
                result=results[i],
                losses=losses[i],
                steps=progress[i].steps,
                epochs=progress[i].epochs,
                scores=tuple(best.scores),
                by_epoch=tuple(self.epoch_params.get(i, ())),
            )
            for i in range(count)
        ]

    def step(self, batch: Batch) -> None:
        """Execute one step of every client that is still training.

        The host needs no value from the device, so it can run ahead of a GPU.
        """
        inputs = self.clients.step_inputs(batch)
        if self.setup.rule is not None:
            terms = self._step_by_rule(inputs, self.setup.rule)
        elif self.recorder is not None:
            terms = self.recorder(inputs, batch.running)
        else:
            terms = self._gradient_step(inputs, batch.running)
        self.sums.add(terms, batch)

    def _gradient_step(self, inputs: StepInputs, running: Tensor | None = None) -> Terms:
        """Update the trained entries by the gradient of the objective; return its terms.

        running: whether each client of a stack is still training; None if all are.
        """
        params = self.params
        leaves = self.leaves
        if self.perturbs:
            leaves = self._perturbed_leaves(inputs)
            params = self._params_with(leaves)
        terms = self._terms(self.work.terms, params, inputs)
        has_gradient = backward(terms, leaves)
        # A method that overrides these functions may update entries without a gradient.
        may_update_anyway = self.adjusts_gradients or self.acts_after_step
        if not has_gradient and self.leaves and not may_update_anyway:
            raise bad_return(self.work.terms, DETACHED)

        # The gradient is taken at the perturbed point, but the step starts from the leaves.
        for name, leaf in self.leaves.items():
            leaf.grad = leaves[name].grad
        if running is None:
            self._update()
        else:
            self._update_only(running)
        return terms

    def _step_by_rule(self, inputs: StepInputs, rule: GradientRule) -> Terms:
        """Update the trained entries by a rule that combines the gradients of single examples;
        return the mean terms, or no terms if the step has no examples.
        """
        from fedstill.engines.stack import example_gradients  # lazy, because few runs need it

        def example_terms(entries: Tensors, example: StepInputs) -> Terms:
            return self._terms(self.work.terms, {**self.params, **entries}, example)

        by_example: dict[str, Tensor] = {}
        terms: Terms = {}
        if len(inputs.y):
            by_example, terms = example_gradients(example_terms, self.leaves, inputs)
        size = min(self.plan.batch, self.clients.sizes[0])
        combined = rule.combined(by_example, self.leaves, size, self.rule_draws)
        for name, gradient in combined.items():
            self.leaves[name].grad = gradient
        self._update()
        return {name: values.mean() for name, values in terms.items()}

    def _terms(self, objective: Objective, params: Tensors, inputs: StepInputs) -> Terms:
        """The terms of an objective for each client."""

        def client_terms(start: TrainingStart, params: Tensors, inputs: StepInputs) -> Terms:
            step = BatchStep(self.networks, start, params, inputs)
            terms = terms_of(objective, objective(step, start), len(inputs.y))
            if objective == self.work.terms and step.ignores_class_weights:
                raise bad_return(objective, UNWEIGHTED)
            return {name: _averaged(value, step) for name, value in terms.items()}

        return self.clients.per_client(client_terms, params, inputs)

    def _perturbed_leaves(self, inputs: StepInputs) -> dict[str, Tensor]:
        """New leaves: the trained entries at the point that ``perturb`` returns."""
        ascent_terms: Terms = {}
        if self.has_ascent_terms:
            ascent_terms = self._terms(self.work.ascent_terms, self.params, inputs)
        backward(ascent_terms, self.leaves)

        def perturb(start: TrainingStart, params: Tensors, gradients: Tensors) -> Tensors:
            return self.work.perturb(params, gradients, start)

        values = {name: leaf.detach() for name, leaf in self.leaves.items()}
        point = self.clients.per_client(perturb, values, gradients_of(self.leaves))
        return {
            name: point[name].detach().to(leaf.dtype).requires_grad_()
            for name, leaf in self.leaves.items()
        }

    def _params_with(self, leaves: Tensors) -> dict[str, Tensor]:
        """All entries, with ``leaves`` as the trained ones.

        After a pass for the ascent terms, the other entries are copies, because the second pass
        must not update the statistics of batch normalisation again.
        """
        params = {**self.params, **leaves}
        if self.has_ascent_terms:
            for name, value in self.params.items():
                if name not in leaves:
                    params[name] = value.clone()
        return params

    def _update(self) -> None:
        """The optimiser's step, and the method's functions before and after it."""
        if self.adjusts_gradients:
            self._adjust_gradients()
        if self.plan.clip_norm > 0:
            self.clients.clip(self.leaves, self.plan.clip_norm)
        if self.acts_after_step:
            self._step_and_call_after_step()
        else:
            self.optimiser.step()

    def _adjust_gradients(self) -> None:
        def adjust(start: TrainingStart, gradients: Tensors) -> Tensors:
            return self.work.adjust_gradients(gradients, start)

        adjusted = self.clients.per_client(adjust, gradients_of(self.leaves))
        for name, leaf in self.leaves.items():
            leaf.grad = adjusted[name].to(leaf.dtype)

    def _step_and_call_after_step(self) -> None:
        """The optimiser's step, followed by the method's ``after_step``."""

        def after_step(
            start: TrainingStart, before: Tensors, grads: Tensors, after: Tensors, trace: Tensors
        ) -> tuple[Tensors, Tensors]:
            return self.work.after_step(before, grads, after, trace, start)

        before = trees.clone(self.leaves)
        gradients = gradients_of(self.leaves)
        self.optimiser.step()
        with torch.no_grad():
            after = trees.clone(self.leaves)
            params, self.trace = self.clients.per_client(
                after_step, before, gradients, after, self.trace
            )
            for name, leaf in self.leaves.items():
                leaf.copy_(params[name])

    def _update_only(self, running: Tensor) -> None:
        """Update the clients that are still training. The other clients take part in the step and
        are restored afterwards, because momentum and weight decay would change them.
        """
        before = trees.clone(self.leaves)
        trace = self.trace
        self._update()
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(_where_running(running, leaf, before[name]))
            if self.acts_after_step:
                self.trace = {
                    name: _where_running(running, value, trace[name])
                    for name, value in self.trace.items()
                }


def _overrides(work: ClientWork, name: str) -> bool:
    """Whether a method overrides a function."""
    return getattr(type(work), name) is not getattr(ClientWork, name)


def _averaged(term: Tensor, step: Step) -> Tensor:
    """The mean of a term over the real examples; a term that is one number does not change."""
    if term.dim() == 0:
        return term
    return step.mean(term)


def _where_running(running: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """New values (K, ...) of the clients that are training, and old values of the others."""
    ones = [1] * (new.dim() - 1)
    return torch.where(running.view(-1, *ones), new, old)


def backward(terms: Mapping[str, Tensor], leaves: Tensors) -> bool:
    """Compute the gradient of the sum of all terms. Leaves on which no term depends have none.

    Returns False if no term depends on any leaf.
    """
    for leaf in leaves.values():
        leaf.grad = None
    if not terms:
        return False

    loss = _sum(terms)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.requires_grad


def _sum(terms: Mapping[str, Tensor]) -> Tensor:
    values = [_at_least_float32(term) for term in terms.values()]
    if len(values) == 1:
        return values[0].sum()
    return torch.stack(values).sum()


def _at_least_float32(term: Tensor) -> Tensor:
    if term.dtype == torch.float64:
        return term
    return term.float()


def gradients_of(leaves: Tensors) -> dict[str, Tensor]:
    """Copies of the gradients of the leaves; zeros for leaves without a gradient."""
    gradients = {}
    for name, leaf in leaves.items():
        if leaf.grad is None:
            gradients[name] = torch.zeros_like(leaf)
        else:
            gradients[name] = leaf.grad.detach().clone()
    return gradients


@dataclass
class BestEpoch:
    """The score of each epoch, and the parameters of the best one."""

    patience: int
    """The number of successive epochs without improvement after which training stops; 0: never."""
    scores: list[float] = field(default_factory=list)
    best_score: float = float("-inf")
    params: dict[str, Tensor] = field(default_factory=dict)
    result: TrainingResult | None = None
    epochs_since_best: int = 0

    def add(self, score: float | None, params: Tensors, result: TrainingResult) -> None:
        """Add an epoch. The score is None for a client without validation examples."""
        if score is None:
            return
        self.scores.append(score)
        if score > self.best_score:
            self.best_score = score
            self.params = trees.clone(params)
            self.result = result
            self.epochs_since_best = 0
        else:
            self.epochs_since_best += 1

    @property
    def is_out_of_patience(self) -> bool:
        """Whether training should stop."""
        return 0 < self.patience <= self.epochs_since_best


class TermSums:
    """The sums of an epoch's terms by client, as tensors, so that no step waits for the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: int | Tensor = 0

    def add(self, terms: Mapping[str, Tensor], batch: Batch) -> None:
        """Add the terms of a step. The sums are reset at the start of every epoch."""
        if isinstance(batch.begins_epoch, Tensor):
            self._reset_where(batch.begins_epoch)
        elif batch.begins_epoch:
            self.sums = {}
            self.counts = 0

        for name, mean in terms.items():
            total = mean.detach() * batch.sizes
            if batch.running is not None:
                # The term of a client that has ended may be infinite, and 0 times that is NaN.
                total = torch.where(batch.running, total, 0.0)
            if name in self.sums:
                total = self.sums[name] + total
            self.sums[name] = total
        self.counts = self.counts + batch.sizes

    def _reset_where(self, begins_epoch: Tensor) -> None:
        """Reset the sums of those stacked clients whose epoch begins."""
        for name, value in self.sums.items():
            self.sums[name] = torch.where(begins_epoch, 0.0, value)
        self.counts = torch.where(begins_epoch, 0, self.counts)

    def means(self, clients: int) -> list[dict[str, float]]:
        """The mean of each term over the examples of the latest epoch, for each client."""
        means = {name: (v / self.counts).reshape(-1).tolist() for name, v in self.sums.items()}
        return [{name: values[i] for name, values in means.items()} for i in range(clients)]
