"""A stack: clients with the same structure that are trained together. Every tensor has a leading
client axis, and objectives run under ``vmap``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstill.core import trees
from fedstill.core.keys import to_device
from fedstill.core.records import Examples, ModelSpec, Plan, Tensors, TrainingStart, View
from fedstill.engines.clients import (
    STEP_FIELDS,
    Batch,
    Progress,
    TrainingClients,
    TrainingSetup,
    epoch_orders,
    examples_by_client,
    normalised_once,
    on_device,
    sees_every_example,
    stage_generator,
)
from fedstill.engines.passes import ModelPasses
from fedstill.engines.step import FrozenModel, StepInputs, build_modules, frozen
from fedstill.models import contract
from fedstill.models.network import MaxPool2d, Network, UnitVectors

# The layers of a network that runs for a stack of clients.
#
# Under ``torch.func.vmap``, a convolution with a weight for each client becomes a convolution with
# groups. On the CPU, the layers here do the same, but keep the memory order in which torch's
# kernels are fastest, (image, row, column, client, channel), from one layer to the next. torch's
# own rule would copy the input and the output of each layer into another order.
#
# On a GPU, a convolution with groups launches several kernels for each group. There, the layers
# multiply the windows of all images with the weights, one batched product for all clients.


STACKABLE_LAYERS = (
    nn.Sequential,
    Network,
    UnitVectors,
    nn.Conv2d,
    nn.MaxPool2d,
    MaxPool2d,
    nn.ReLU,
    nn.Flatten,
    nn.Unflatten,
    nn.Linear,
)
"""The layers of networks that ``use_stacked_layers`` changes. Other layers may need a memory order
that is unknown under ``vmap``.
"""


def use_stacked_layers(module: nn.Module) -> nn.Module:
    """Replace the layers of a module in place by those of a stack; return the module, which then
    only runs under ``vmap``.

    A module with a layer that is not in ``STACKABLE_LAYERS`` does not change, and torch's own rules
    apply to it.
    """
    layers = list(module.modules())
    if not all(_is_stackable(layer) for layer in layers):
        return module
    for layer in layers:
        # The new class adds no state to the old one, so the layer stays valid.
        if isinstance(layer, nn.Conv2d):
            layer.__class__ = _StackedConv2d
        elif isinstance(layer, nn.MaxPool2d):
            layer.__class__ = _StackedMaxPool2d
        elif isinstance(layer, nn.Linear):
            layer.__class__ = _StackedLinear
    return module


def _is_stackable(layer: nn.Module) -> bool:
    if type(layer) not in STACKABLE_LAYERS:
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros"
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    return True


class _StackedConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        def multiply(
            clients: int, x: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, int]:
            return convolved_by_products(self, x, weight, bias), 0

        def convolve(
            clients: int, x: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, int]:
            channels = functional.conv2d(
                _clients_as_channels(x),
                weight.flatten(0, 1),
                None if bias is None else bias.flatten(),
                stride=self.stride,
                padding=self.padding,
                dilation=self.dilation,
                groups=self.groups * clients,
            )
            return _split_by_client(channels, clients)

        rule = convolve
        if x.is_cuda and self.groups == 1:
            rule = multiply
        return _StackedLayer.apply(rule, x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


def convolved_by_products(
    layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A convolution without groups for each of K clients, as one batched matrix product.

    x: (K, B, C, H, W); weight: (K, O, C, height, width); bias: (K, O). The result is (K, B, O,
    rows, columns); in memory, the channels come last.
    """
    if torch.is_autocast_enabled(x.device.type):
        # The windows are larger than the images, so the images are converted.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    windows = functional.pad(x, layer._reversed_padding_repeated_twice)
    for axis, size, stride, dilation in zip(
        (3, 4), layer.kernel_size, layer.stride, layer.dilation, strict=True
    ):
        extent = dilation * (size - 1) + 1
        windows = windows.unfold(axis, extent, stride)[..., ::dilation]
    clients, images, _, rows, columns, *_ = windows.shape

    # (K, B * rows * columns, height * width * C)
    factors = windows.permute(0, 1, 3, 4, 5, 6, 2).flatten(4).flatten(1, 3)
    weights = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)
    if bias is None:
        products = factors @ weights
    else:
        products = torch.baddbmm(bias.unsqueeze(1), factors, weights)
    return products.view(clients, images, rows, columns, -1).permute(0, 1, 4, 2, 3)


class _StackedMaxPool2d(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        def pool(clients: int, x: Tensor) -> tuple[Tensor, int]:
            if x.is_cuda:
                # The memory order of ``convolved_by_products``
                images = self._pooled(x.flatten(0, 1))
                return images.view(clients, -1, *images.shape[1:]), 0
            return _split_by_client(self._pooled(_clients_as_channels(x)), clients)

        return _StackedLayer.apply(pool, x)  # type: ignore[no-any-return, no-untyped-call]

    def _pooled(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(
            x,
            self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            ceil_mode=self.ceil_mode,
        )


class _StackedLinear(nn.Linear):
    """Computes W x instead of x W', so that the gradient of W has the memory order of W."""

    def forward(self, x: Tensor) -> Tensor:
        def multiply(
            clients: int, x: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, int]:
            columns = x.transpose(1, 2)
            if bias is None:
                outputs = weight @ columns
            else:
                outputs = torch.baddbmm(bias.unsqueeze(2), weight, columns)
            return outputs.transpose(1, 2), 0

        if x.dim() != 2:
            return super().forward(x)
        return _StackedLayer.apply(multiply, x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


def _clients_as_channels(x: Tensor) -> Tensor:
    """Clients' images (K, B, C, H, W) as (B, K C, H, W), channels next to each other in memory."""
    return x.movedim(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _split_by_client(x: Tensor, clients: int) -> tuple[Tensor, int]:
    """Images (B, K C, H, W) as (B, K, C, H, W), without a copy, and the position of the client
    axis.
    """
    return x.view(len(x), clients, -1, *x.shape[2:]), 1


class _StackedLayer(torch.autograd.Function):
    """Registers a function of stacked tensors (K, ...) with ``vmap`` as the rule of a layer. The
    function returns a tensor and the position of its client axis.
    """

    @staticmethod
    def forward(*_: Any) -> Tensor:
        """Called only outside of ``vmap``."""
        raise RuntimeError("a layer of a stack runs under torch.func.vmap only")

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Save nothing, because autograd records the operations of the rule."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        rule: Callable[..., tuple[Tensor, int]],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, int]:
        """The layer for all clients at once."""
        clients = info.batch_size
        # The first entry of in_dims belongs to the rule.
        axes = in_dims[1:]
        stacks = [
            _with_client_axis(tensor, axis, clients)
            for tensor, axis in zip(tensors, axes, strict=True)
        ]
        return rule(clients, *stacks)


def _with_client_axis(tensor: Tensor | None, axis: int | None, clients: int) -> Tensor | None:
    """A tensor with its client axis first. A tensor without a client axis is expanded along one,
    without a copy.
    """
    if tensor is None:
        return None
    if axis is None:
        return tensor.expand(clients, *tensor.shape)
    return tensor.movedim(axis, 0)


T = TypeVar("T")


class Structures:
    """Decides which clients can be stacked: their tensors must have the same names, shapes and
    types.
    """

    def __init__(self) -> None:
        # The structure of a mapping that was sent to many clients is computed once. The mapping is
        # stored with it, because after its deletion, another mapping could have the same id.
        self._by_id: dict[int, tuple[Mapping[Any, Any], Any]] = {}

    def of(self, start: TrainingStart, view: View) -> Any:
        """The structure of a client, for comparison with other clients."""
        fields = [self._structure(value) for value in step_fields(start).values()]
        return view.model, *fields, self._structure(start.only)

    def _structure(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        if isinstance(value, Mapping):
            return self._structure_of_mapping(value)
        if isinstance(value, tuple):
            return tuple(map(self._structure, value))
        if isinstance(value, (bool, int, float)):
            # Numbers may differ, because a stack stores them as a tensor.
            return type(value)
        if isinstance(value, (str, ModelSpec, type(None))):
            return value
        return id(value)

    def _structure_of_mapping(self, mapping: Mapping[Any, Any]) -> Any:
        if id(mapping) not in self._by_id:
            entries = tuple((key, self._structure(mapping[key])) for key in sorted(mapping))
            self._by_id[id(mapping)] = (mapping, entries)
        return self._by_id[id(mapping)][1]


def step_fields(start: TrainingStart) -> dict[str, Any]:
    """The fields of a start that are stacked. They are in a dictionary because ``vmap`` does not
    look into records.
    """
    return {name: getattr(start, name) for name in STEP_FIELDS}


@dataclass(frozen=True)
class StackedStart:
    """The starts of K clients with the same structure, combined in one ``TrainingStart``.

    ``TrainingStart.only``, which selects a client's examples, is not part of it.
    """

    start: TrainingStart
    """Tensors have a leading client axis (K, ...), except those that are one object for all
    clients. A number that differs between clients is a tensor (K,).
    """
    axes: TrainingStart
    """A start of the same form that contains the position of each value's client axis: 0, or None
    if it has none.
    """

    @staticmethod
    def of(starts: Sequence[TrainingStart], device: torch.device) -> StackedStart:
        """Combine several starts on a device."""
        values, axes = _stacked([step_fields(start) for start in starts])
        return StackedStart(TrainingStart(**on_device(values, device)), TrainingStart(**axes))

    def of_client(self, k: int) -> TrainingStart:
        """The start of the k-th client."""
        fields = _part_of_client(step_fields(self.start), step_fields(self.axes), k)
        return TrainingStart(**fields)


class _Stacked(NamedTuple):
    """The combined values of K clients, and the position of each tensor's client axis."""

    value: Any
    axes: Any


def _stacked(values: Sequence[Any]) -> _Stacked:
    """Stack values with the same structure."""
    first = values[0]
    if isinstance(first, Mapping):
        entries = {key: _stacked([value[key] for value in values]) for key in first}
        return _Stacked(
            {key: entry.value for key, entry in entries.items()},
            {key: entry.axes for key, entry in entries.items()},
        )
    if isinstance(first, tuple):
        items = [_stacked(items) for items in zip(*values, strict=True)]
        return _Stacked(tuple(i.value for i in items), tuple(i.axes for i in items))

    if all(value is first for value in values):
        # If one object was sent to all clients, it is not copied.
        return _Stacked(first, None)
    if isinstance(first, Tensor):
        return _Stacked(torch.stack([value.detach() for value in values]), 0)
    if all(value == first for value in values):
        return _Stacked(first, None)
    dtype = None
    if isinstance(first, float):
        # torch's default would round Python's numbers to float32.
        dtype = torch.float64
    return _Stacked(torch.tensor(values, dtype=dtype), 0)


def _part_of_client(value: Any, axes: Any, k: int) -> Any:
    """The k-th client's part of a stacked value."""
    if isinstance(axes, Mapping):
        return {key: _part_of_client(value[key], axis, k) for key, axis in axes.items()}
    if isinstance(axes, tuple):
        return tuple(_part_of_client(v, axis, k) for v, axis in zip(value, axes, strict=True))
    if axes is None:
        return value
    return value[k]


def is_shared(axes: Any) -> bool:
    """Whether no part of a value has a client axis."""
    if isinstance(axes, Mapping):
        return all(is_shared(axis) for axis in axes.values())
    if isinstance(axes, tuple):
        return all(is_shared(axis) for axis in axes)
    return axes is None


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """The schedule of K clients with examples over T steps. Each client takes the same steps as it
    would alone, so some clients finish earlier than others.

    In this example, two clients train for one epoch on 3 and 5 examples, unshuffled, with a batch
    size of two. The first client finishes after two steps and the second one after three; the last
    batch of each has one real example.

    >>> plan = Plan(epochs=1, batch=2, shuffle=False)
    >>> table = Timetable.of([3, 5], plan, [torch.Generator(), torch.Generator()])
    >>> for step in range(3):
    ...     columns = table.positions, table.sizes, table.ends
    ...     print(*[column[step].tolist() for column in columns])
    [[0, 1], [0, 1]] [2, 2] [False, False]
    [[2, 2], [2, 3]] [1, 2] [True, False]
    [[0, 0], [4, 4]] [0, 1] [False, True]
    >>> table.progress
    (Progress(steps=2, epochs=1), Progress(steps=3, epochs=1))
    """

    positions: Tensor
    """The positions in each client's examples, (T, K, B). A short batch is padded with its first
    position; finished clients have zeros.
    """
    sizes: Tensor
    """The numbers of real examples, (T, K); 0 for finished clients."""
    epoch: Tensor
    """The epochs, counted from 0, (T, K)."""
    ends: Tensor
    """Whether a client's epoch ends with the step, (T, K)."""
    progress: tuple[Progress, ...]
    """The total steps and epochs of each client."""

    @classmethod
    def of(cls, sizes: Sequence[int], plan: Plan, orders: Sequence[torch.Generator]) -> Timetable:
        """The timetable of clients with ``sizes`` examples (at least one each), and a generator for
        the order of each client's examples.
        """
        n = torch.tensor(sizes)
        batches_per_epoch = -(-n // plan.batch)
        steps = plan.epochs * batches_per_epoch
        if plan.steps:
            steps = torch.full_like(n, plan.steps)
        # plan.steps may cut the last epoch short
        epochs = -(-steps // batches_per_epoch)

        # (T, 1), to be compared with (K,)
        time = torch.arange(int(steps.max())).unsqueeze(1)
        running = time < steps
        # Only the last batch of an epoch may be short.
        is_last = time % batches_per_epoch + 1 == batches_per_epoch
        last_size = n - (batches_per_epoch - 1) * plan.batch
        batch_sizes = torch.where(is_last, last_size, plan.batch)

        positions = [
            _padded_batches(size, plan, order) for size, order in zip(sizes, orders, strict=True)
        ]
        return cls(
            positions=_padded_to_widest(positions, steps=len(time)),
            sizes=batch_sizes * running,
            epoch=time // batches_per_epoch * running,
            ends=running & (is_last | (time + 1 == steps)),
            progress=tuple(map(Progress, steps.tolist(), epochs.tolist())),
        )


def _padded_batches(n: int, plan: Plan, order: torch.Generator) -> Tensor:
    """The batches of one client (steps, largest batch); short batches are padded with their first
    position.
    """
    orders = torch.stack(list(epoch_orders(n, plan, order)))  # (epochs, n)
    width = min(plan.batch, n)
    missing = -n % width
    if missing:
        last_begin = n + missing - width
        padding = orders[:, last_begin : last_begin + 1].expand(-1, missing)
        orders = torch.cat([orders, padding], dim=1)
    # Every epoch consists of full batches now, so batches can be numbered across epochs.
    batches = orders.view(-1, width)
    if plan.steps:
        return batches[: plan.steps]
    return batches


def _padded_to_widest(positions: Sequence[Tensor], steps: int) -> Tensor:
    """The batches of all clients (steps, K, largest batch); smaller batches are padded with their
    first position.
    """
    if all(batches.shape == (steps, positions[0].shape[1]) for batches in positions):
        return torch.stack(list(positions), dim=1)
    width = max(batches.shape[1] for batches in positions)
    index = torch.zeros(steps, len(positions), width, dtype=torch.int64)
    for k, batches in enumerate(positions):
        index[: len(batches), k] = batches[:, :1]
        index[: len(batches), k, : batches.shape[1]] = batches
    return index


class Stack(TrainingClients):
    """K clients with examples. Their examples are concatenated, and short batches are padded with
    their first example.
    """

    # Teachers run on a batch under ``vmap``, because each client may have a different one.
    teacher_on_batch = None

    def __init__(
        self, starts: Sequence[TrainingStart], views: Sequence[View], setup: TrainingSetup
    ) -> None:
        self.view = views[0]
        self.setup = setup
        examples = examples_by_client(starts, views, setup.stage)
        self.device = examples[0].values.device
        self.sizes = [len(e) for e in examples]
        # Clients that train on the same public examples share them in memory.
        self.has_common_examples = all(e is examples[0] for e in examples)
        stored_examples = examples[0]
        if not self.has_common_examples:
            stored_examples = _concatenated(examples)
        self.examples = normalised_once(stored_examples, setup.inputs)
        self.augments = bool(setup.inputs.steps)

        self.stacked = StackedStart.of(starts, self.device)
        self._start_is_shared = is_shared(step_fields(self.stacked.axes))
        # Trained entries have a client axis even if all clients start from the same tensors.
        self.params = {
            name: value.detach().to(self.device)
            for name, value in trees.stack([start.params for start in starts]).items()
        }
        self.trace: Tensors = {
            name: value.to(self.device)
            for name, value in trees.stack([start.trace for start in starts]).items()
        }

        self.orders = [stage_generator(view.client, setup, "order") for view in views]
        self.pixel_draws: list[torch.Generator] = []
        if self.augments:
            self.pixel_draws = [stage_generator(view.client, setup, "pixels") for view in views]

        build_modules(self.stacked.start.teachers, self.view.model)
        self._all_see_every_example = all(sees_every_example(setup.plan, e) for e in examples)
        self._teacher_tables: dict[tuple[str, str], Tensor] = {}

    def module(self) -> nn.Module:
        return use_stacked_layers(contract.module(self.view.model, "stacked"))

    def batches(self) -> Iterator[Batch]:
        """The combined batches of all clients, each in its client's own order."""
        plan = self.setup.plan
        if not (plan.epochs or plan.steps):
            return
        table = Timetable.of(self.sizes, plan, self.orders)
        running = table.sizes > 0
        begins_epoch = torch.ones_like(running)
        begins_epoch[1:] = table.epoch[1:] > table.epoch[:-1]

        # The start of each client's examples in the concatenated examples.
        offsets = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        rows = table.positions + offsets.view(1, -1, 1)

        mask = _mask(table)

        # All steps are copied to the device at once, and values for the host remain on the host, so
        # that no step waits for a copy.
        positions = to_device(table.positions, self.device)
        rows = to_device(rows, self.device)
        mask = to_device(mask, self.device)
        epoch = to_device(table.epoch, self.device)
        sizes = to_device(table.sizes, self.device)
        begins_epoch = to_device(begins_epoch, self.device)
        running_on_device = to_device(running, self.device)
        counts = table.sizes.tolist()
        ends = table.ends.tolist()
        all_are_running = running.all(1).tolist()

        for t in range(len(counts)):
            still_running = None
            if not all_are_running[t]:
                still_running = running_on_device[t]
            yield Batch(
                positions=positions[t],
                rows=rows[t],
                mask=mask[t],
                epoch=epoch[t],
                sizes=sizes[t],
                begins_epoch=begins_epoch[t],
                counts=tuple(counts[t]),
                progress=table.progress,
                ending=tuple(k for k, epoch_ends in enumerate(ends[t]) if epoch_ends),
                running=still_running,
            )

    def step_inputs(self, batch: Batch) -> StepInputs:
        """The inputs (K, B, …) and labels (K, B) of a batch. Clients draw random numbers only for
        their real examples.
        """
        positions = batch.rows
        if self.has_common_examples:
            positions = batch.positions
        examples = self.examples.take(positions.flatten())
        x = examples.values.view(*positions.shape, *examples.values.shape[1:])
        y = examples.labels.view(*positions.shape, *examples.labels.shape[1:])
        if self.augments:
            x = self._augmented(x, batch.counts)
        return StepInputs(
            x=x,
            y=y,
            positions=batch.positions,
            rows=batch.rows,
            mask=batch.mask,
            epoch=batch.epoch,
        )

    def _augmented(self, stored: Tensor, counts: Sequence[int]) -> Tensor:
        """Stored values (K, B, ...) as inputs; the first ``counts`` values of each client, which
        are real, are augmented.
        """
        batches = []
        for k, (images, count) in enumerate(zip(stored, counts, strict=True)):
            if count:
                x = self.setup.inputs.trained_on(images[:count], self.pixel_draws[k])
            else:
                x = self.setup.inputs.plain(images)
            padding = x[:1].expand(len(images) - len(x), *x.shape[1:])
            batches.append(torch.cat([x, padding]))
        return torch.stack(batches)

    def teacher_table(self, name: str, kind: str) -> Tensor | None:
        if self.augments or not self._all_see_every_example:
            return None
        key = (name, kind)
        if key not in self._teacher_tables:
            self._teacher_tables[key] = self._run_teacher(name, kind)
        return self._teacher_tables[key]

    def _run_teacher(self, name: str, kind: str) -> Tensor:
        """A teacher's outputs for the concatenated examples of all clients."""
        if is_shared(self.stacked.axes.teachers[name]):
            teacher = frozen(self.stacked.start.teachers[name], self.view.model)
            outputs = self._outputs(teacher, kind, self.examples)
            if self.has_common_examples:
                return outputs.repeat(len(self.sizes), 1)
            return outputs

        outputs_by_client = []
        for k, examples in enumerate(self._examples_of_clients()):
            teacher = frozen(self.stacked.of_client(k).teachers[name], self.view.model)
            outputs_by_client.append(self._outputs(teacher, kind, examples))
        return torch.cat(outputs_by_client)

    def _examples_of_clients(self) -> list[Examples]:
        if self.has_common_examples:
            return [self.examples] * len(self.sizes)
        values = torch.split(self.examples.values, self.sizes)
        labels = torch.split(self.examples.labels, self.sizes)
        return [Examples(*pair) for pair in zip(values, labels, strict=True)]

    def _outputs(self, teacher: FrozenModel, kind: str, examples: Examples) -> Tensor:
        passes = ModelPasses(teacher.spec, self.setup.inputs, self.setup.teacher_precision)
        if kind == "logits":
            return passes.logits(teacher.params, examples)
        return passes.features(teacher.params, examples)

    def per_client(self, function: Callable[..., T], *values: Any) -> T:
        if self._start_is_shared:
            # This spares vmap from traversing the start in every step.
            return torch.func.vmap(functools.partial(function, self.stacked.start))(*values)

        def run(fields: dict[str, Any], *client_values: Any) -> T:
            return function(TrainingStart(**fields), *client_values)

        in_dims = (step_fields(self.stacked.axes), *(0 for _ in values))
        return torch.func.vmap(run, in_dims=in_dims)(step_fields(self.stacked.start), *values)

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        if not gradients:
            return
        # (K, n) each; the gradient of a scalar is (K,)
        flat = [gradient.unsqueeze(-1).flatten(1) for gradient in gradients]
        norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in flat])
        client_norms = norms.norm(dim=0)
        # The same formula as in torch.nn.utils.clip_grad_norm_, which a single client uses.
        factors = (norm / (client_norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            ones = [1] * (gradient.dim() - 1)
            gradient.mul_(factors.to(gradient.dtype).view(-1, *ones))

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        if not tree:
            return [{} for _ in self.sizes]
        on_cpu = {name: v.detach().contiguous() for name, v in trees.on_cpu(tree).items()}
        by_entry = [torch.unbind_copy(v) for v in on_cpu.values()]  # type: ignore[func-returns-value]  # torch's stub
        return [dict(zip(on_cpu, tensors, strict=True)) for tensors in zip(*by_entry, strict=True)]


def _mask(table: Timetable) -> Tensor:
    """A mask of the real examples in every step, (steps, K, B) float."""
    width = table.positions.shape[2]
    # A finished client repeats its first example, and this step is undone. Its examples count as
    # real, because the mean over no examples would be 0 / 0.
    real = torch.where(table.sizes > 0, table.sizes, width)
    return (torch.arange(width) < real.unsqueeze(2)).float()


def _concatenated(examples: Sequence[Examples]) -> Examples:
    return Examples(
        torch.cat([e.values for e in examples]), torch.cat([e.labels for e in examples])
    )


# ---- single examples under vmap ------------------------------------------------------------------


def example_gradients(
    example_terms: Callable[[Tensors, StepInputs], dict[str, Tensor]],
    leaves: Tensors,
    inputs: StepInputs,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradient of each example by trained entry, (B, ...), and its terms, (B,).

    example_terms: maps the trained entries and a batch of one example to its terms.
    """

    def loss(
        entries: Tensors, x: Tensor, y: Tensor, positions: Tensor, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        example = StepInputs(
            x=x.unsqueeze(0),
            y=y.unsqueeze(0),
            positions=positions.unsqueeze(0),
            rows=rows.unsqueeze(0),
            mask=None,
            epoch=inputs.epoch,
        )
        terms = example_terms(entries, example)
        return torch.stack(list(terms.values())).sum(), terms

    entries = {name: leaf.detach() for name, leaf in leaves.items()}
    gradient = torch.func.grad(loss, has_aux=True)
    of_each_example = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0, 0))
    gradients, terms = of_each_example(entries, inputs.x, inputs.y, inputs.positions, inputs.rows)
    return gradients, terms
