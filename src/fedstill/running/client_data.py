"""The clients' data, the public set and the test sets of a run: first split, then scaled."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.tables import DataTable
from fedstill.core.errors import ConfigError, DataError
from fedstill.core.fields import nfc
from fedstill.core.files import counted, shortened_list
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.core.stream import Cut
from fedstill.data.client_split import ClientSplit
from fedstill.data.dataset import (
    IMAGE_INFO,
    PLURALS,
    Dataset,
    DatasetInfo,
    ReadingOptions,
    ReadRequest,
    stratified_positions,
)
from fedstill.data.encoding import TableInputs
from fedstill.data.partition import public_split
from fedstill.data.sources.catalog import KNOWN_FOLDERS
from fedstill.data.sources.files import check_size
from fedstill.data.sources.image_sets import images_in, read_unlabelled
from fedstill.data.sources.load import load_public_set
from fedstill.data.sources.verification import TEST_SHARE
from fedstill.data.views import concatenated
from fedstill.running.split_file import StoredSplit
from fedstill.running.splitting import (
    cut_into_tasks,
    draw_split,
    draw_split_by_task,
    partition_seed,
)
from fedstill.running.standardisation import UNSCALED, Moments, Scaler, fit_scaler

log = logging.getLogger("fedstill.run")

TRAIN = "train"
"""The value of ``data.public_from`` for a part of the training set."""

NOISE = "noise"
"""The value of ``data.public_from`` for noise."""

RESIZED_AT_ONCE = 1000
"""The number of images that are resized at once; meanwhile, each pixel takes four bytes."""


@dataclass(frozen=True)
class ExampleForm:
    """The form that public examples must have to match the examples of a run.

    shape: the shape of an example. classes: the names of the classes. mean, std: those of pixels.
    about: the kind of examples. reading: keywords of ``load_dataset`` for files without images.
    dtype: the type of the values; None if it is not known.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    about: DatasetInfo = IMAGE_INFO
    reading: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def plural(self) -> str:
        """A noun for the examples, such as "images"."""
        return PLURALS[self.about.kind]

    @property
    def are_images(self) -> bool:
        """Whether the examples are images."""
        return self.about.kind == "image"


@dataclass(frozen=True)
class PublicSplit:
    """A training set without the public examples, and the public examples, if there are any."""

    train: Examples
    public: Examples | None


def set_public_apart(settings: Settings, dataset: Dataset, train: Examples) -> PublicSplit:
    """Divide the training set into clients' examples and public examples, or read the public set
    from elsewhere, according to the keys ``data.public…``.

    A missing or hidden label is -1. Raises ConfigError or DataError if the public examples have
    another shape or other classes than the run's.
    """
    data = settings.data
    if data.public_from == TRAIN:
        split = _from_training_set(settings, train)
        return replace(split, public=_as_methods_see_it(settings, split.public))
    form = ExampleForm(
        shape=dataset.input_shape,
        classes=dataset.classes,
        mean=dataset.mean,
        std=dataset.std,
        about=dataset.about,
        reading=reading_like(data, dataset.about),
        dtype=train.values.dtype,
    )
    if data.public_from == NOISE:
        public = _noise(settings, form)
    else:
        public = _from_elsewhere(settings, form, data.public_from, data.folder)
    return PublicSplit(train, _as_methods_see_it(settings, public))


def public_copy(settings: Settings, copy: str, form: ExampleForm) -> Examples | None:
    """The public set at a site, read from the site's copy; None if the site has no copy.

    copy: a folder, or the name of a data set. Noise needs no copy, because the site draws it again.
    If the server takes the public set from its own training data, the copy is the public set.
    """
    source = settings.data.public_from
    public: Examples | None = None
    if source == NOISE:
        public = _noise(settings, form)
    elif copy and source == TRAIN:
        public = load_public_set(copy, **form.reading).train
    elif copy:
        public = _from_elsewhere(settings, form, copy, "")
    return _as_methods_see_it(settings, public)


def reading_like(data: DataTable, about: DatasetInfo) -> dict[str, Any]:
    """The keywords of ``load_dataset`` with which another file gives examples of the run's form;
    empty for images.

    They contain the columns, categories and marks of missing values of the run's examples, and the
    options of a known data set.
    """
    if about.kind == "image":
        return {}
    known_folder = KNOWN_FOLDERS.get(data.name)
    form = ReadingOptions()
    if known_folder is not None:
        form = known_folder.options
    form = replace(form, **data.form)
    form = replace(form, kind=about.kind, owner="")
    if about.kind == "table" and about.columns:
        table = TableInputs.named_by(about.columns, about.features, about.binary_features)
        form = replace(
            form,
            columns=table.columns,
            categorical=tuple(table.categories.items()),
            marks=table.marked or False,
        )
    return {field.name: getattr(form, field.name) for field in fields(form)}


def _as_methods_see_it(settings: Settings, public: Examples | None) -> Examples | None:
    """The public set without the examples that outer packages remove, and without labels if
    ``data.public_labels`` is false.
    """
    if public is None:
        return None
    for table in settings.packages.values():
        public = table.changed_public(public)
    if settings.data.public_labels:
        return public
    return _unlabelled(public.values)


def _from_training_set(settings: Settings, train: Examples) -> PublicSplit:
    size = settings.data.public
    if size == 0:
        return PublicSplit(train, None)
    if size >= len(train):
        raise ConfigError(f"data.public = {size} leaves nothing of {len(train)} training examples")
    pool, public = public_split(len(train), size, partition_seed(settings))
    return PublicSplit(train.take(torch.from_numpy(pool)), train.take(torch.from_numpy(public)))


def _noise(settings: Settings, form: ExampleForm) -> Examples:
    """Noise that is standard normal in the units of the network's inputs.

    Noise for images consists of pixels, so it is rounded and clipped to the range from black to
    white. Noise for texts consists of uniformly drawn token ids.
    """
    size = settings.data.public
    if size == 0:
        raise ConfigError(
            "data.public_from = 'noise' needs data.public, the number of examples to draw"
        )
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public noise"))
    if form.about.vocabulary:
        tokens = torch.randint(1, form.about.vocabulary, (size, *form.shape), generator=draw)
        return _unlabelled(tokens)
    numbers = torch.randn(size, *form.shape, generator=draw)
    if not form.are_images:
        return _unlabelled(numbers)
    mean = torch.tensor(form.mean).view(-1, 1, 1)
    std = torch.tensor(form.std).view(-1, 1, 1)
    pixels = (255 * (mean + std * numbers)).round().clamp(0, 255)
    return _unlabelled(pixels.to(torch.uint8))


def _from_elsewhere(settings: Settings, form: ExampleForm, source: str, folder: str) -> Examples:
    """The public examples from a folder of images, or all training examples of a data set.

    folder: the folder of the data set ``source``, if the settings name one.
    """
    data = settings.data
    classes: tuple[str, ...] | None = None
    if form.are_images and images_in(Path(source)):
        is_square = form.shape[1] == form.shape[2]
        side = None
        if data.public_resize and is_square:
            side = form.shape[1]
        request = ReadRequest(size=side, mode=data.mode, broken=data.broken or "refuse")
        unlabelled = read_unlabelled(Path(source), request)
        public = _unlabelled(unlabelled.images)
        for warning in unlabelled.warnings:
            log.warning("data.public_from: %s", warning)
    else:
        image_options: dict[str, Any] = {}
        if form.are_images and Path(source).is_dir():
            image_options = {"mode": data.mode, "broken": data.broken or "refuse"}
        with _naming_the_key(data.public_from == source):
            dataset = load_public_set(
                source, folder=folder or None, **form.reading, **image_options
            )
        _check_kind(form, source, dataset)
        public = dataset.train
        classes = dataset.classes

    if data.public_resize:
        bytes_resized = len(public) * math.prod(form.shape)
        check_size(f"data.public_from = {source!r}, resized,", bytes_resized)
        public = Examples(_resized(public.values, form.shape), public.labels)
    _check_shape(form, source, public)
    _check_scale(form, source, public)
    if data.public_labels and classes is not None:
        public = replace(public, labels=_labels_of_run(form, source, public.labels, classes))
    return _drawn(settings, form, source, public)


def _drawn(settings: Settings, form: ExampleForm, source: str, public: Examples) -> Examples:
    """``data.public`` of the public examples, drawn by key; all of them if it is 0."""
    size = settings.data.public
    if size > len(public):
        raise ConfigError(
            f"data.public = {size} is more than the {len(public)} public {form.plural} of {source}"
        )
    if not size:
        return public
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public images"))
    positions = torch.randperm(len(public), generator=draw)[:size]
    return public.take(positions.sort().values)


@contextmanager
def _naming_the_key(is_in_config: bool) -> Iterator[None]:
    """Add the config key to errors of reading data, if the config names the data."""
    try:
        yield
    except ConfigError as error:
        if not is_in_config:
            raise
        kind = ConfigError
        if isinstance(error, DataError):
            kind = type(error)
        raise kind(f"data.public_from: {error}") from error


def _check_kind(form: ExampleForm, source: str, dataset: Dataset) -> None:
    """Raise DataError for examples whose kind or vocabulary differs from the run's."""
    if dataset.about.kind != form.about.kind or dataset.vocabulary != form.about.vocabulary:
        raise DataError(
            f"the public examples of {source} are {dataset.many}, but the run's are {form.plural}; "
            f"set data.public_from to a source of {form.plural}"
        )


def _check_shape(form: ExampleForm, source: str, public: Examples) -> None:
    """Raise DataError for examples of another shape than the run's."""
    plural = form.plural
    shape = tuple(public.values.shape[1:])
    if shape != form.shape:
        remedy = ""
        if form.are_images:
            remedy = "set data.public_resize = true, or "
        raise DataError(
            f"the public {plural} of {source} have shape {shape}, but the run's have {form.shape}; "
            f"{remedy}set data.public_from to other {plural}"
        )


def _check_scale(form: ExampleForm, source: str, public: Examples) -> None:
    """Raise DataError for images whose pixels have another type than the run's. Pixels in uint8 are
    normalised, and others are inputs as they are.
    """
    dtype = public.values.dtype
    if form.are_images and form.dtype is not None and dtype != form.dtype:
        raise DataError(
            f"the public images of {source} are {dtype}, but the run's are {form.dtype}, so their "
            "pixels would have different scales; convert one of them"
        )


def _labels_of_run(
    form: ExampleForm, source: str, labels: Tensor, classes: tuple[str, ...]
) -> Tensor:
    """The labels of public examples as class ids of the run. They are mapped by class name, unless
    the classes of the run or of the public examples are only numbered.

    classes: the names of the public examples' classes. Raises DataError if the run's classes are
    others.
    """
    public_names = [nfc(name) for name in classes]
    run_names = [nfc(name) for name in form.classes]
    unknown = [name for name in public_names if name not in run_names]
    difference = ""
    if len(public_names) != len(run_names):
        difference = f"{len(public_names)} classes, but the run's data have {len(run_names)}"
    elif _are_numbers(public_names) or _are_numbers(run_names):
        return labels
    elif unknown:
        difference = f"a class {unknown[0]!r}, which the run's data do not have"
    if difference:
        raise DataError(
            f"the public {form.plural} of {source} have {difference}; set data.public_labels = "
            f"false to use the {form.plural} without labels"
        )
    ids = torch.tensor([run_names.index(name) for name in public_names], dtype=torch.int64)
    return ids[labels]


def _are_numbers(classes: Sequence[str]) -> bool:
    """Whether classes have no names, but only their numbers."""
    return all(name == str(index) for index, name in enumerate(classes))


def _unlabelled(values: Tensor) -> Examples:
    return Examples(values, torch.full((len(values),), -1, dtype=torch.int64))


def _resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Resize images bilinearly; grey becomes RGB by repetition, RGB becomes grey by the mean."""
    starts = range(0, max(1, len(images)), RESIZED_AT_ONCE)
    return torch.cat([_block_resized(images[i : i + RESIZED_AT_ONCE], shape) for i in starts])


def _block_resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    block = images.float()
    if block.shape[1] != channels:
        block = block.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if tuple(block.shape[2:]) != (height, width):
        block = torch.nn.functional.interpolate(
            block, (height, width), mode="bilinear", antialias=True
        )
    if images.dtype != torch.uint8:
        return block
    return block.round().clamp(0, 255).to(torch.uint8)


OWN_TEST = "own test"
"""The purpose for which clients' own test examples are drawn."""


@dataclass(frozen=True)
class ClientData:
    """The data of a run, divided among clients, server and tests.

    train: the examples that clients train on. split: the examples of each client; None if sites
    keep their data. full_split: the split before outer packages removed examples from it; it
    determines the clients that take part in a task. public: the public set. test: the common test
    set. client_tests: the clients' own test sets. client_names: the names of clients in the data.
    tasks: the tasks of the training examples. task_tests: a real site's test sets by task. scaler:
    the transformation that was applied to all values.
    """

    train: Examples
    split: ClientSplit | None
    full_split: ClientSplit | None = None
    public: Examples | None = None
    test: Examples | None = None
    client_tests: Mapping[int, Examples] = field(default_factory=dict)
    client_names: tuple[str, ...] = ()
    tasks: Cut | None = None
    task_tests: Mapping[int, Examples] = field(default_factory=dict)
    scaler: Scaler = UNSCALED

    def label_table(self, classes: int) -> Tensor:
        """Label counts (clients, C); (0, C) if sites keep their data."""
        if self.split is None:
            return torch.zeros(0, classes, dtype=torch.int64)
        return self.split.label_table(self.train.labels, classes)


def split_data(
    settings: Settings, dataset: Dataset, stored: StoredSplit | None = None
) -> ClientData:
    """Split a data set into the clients' training and test examples, the public set and the common
    test set.

    stored: the split of a run that is resumed; it replaces a new split. Raises ConfigError,
    DataError or InfeasiblePartition.
    """
    trainable, tests = training_and_test_sets(settings, dataset)
    trainable = subset(trainable, settings.data.train_size, "train_size")
    public_split = set_public_apart(settings, dataset, trainable)
    train = public_split.train
    common_test = subset(tests, settings.data.test_size, "test_size")

    owners = client_owners(settings, dataset, train)
    tasks = cut_into_tasks(settings, train, len(dataset.classes))
    data = ClientData(
        train=train,
        split=None,
        public=public_split.public,
        test=common_test,
        client_names=tuple(dataset.about.owners[owner] for owner in owners),
        tasks=tasks,
    )
    if settings.on_sites:
        return data

    if stored is not None and not stored.fits(train.labels.numpy(), settings.clients):
        raise DataError(
            "the training data have changed since the run began: their labels differ from those of "
            "the stored split; restore the data, or start a new run"
        )
    if settings.named.partition.values.get("own_test") is None:
        return _without_client_tests(settings, data, stored)
    return _with_client_tests(settings, data, tests, owners, stored)


def scale_data(
    settings: Settings, dataset: Dataset, data: ClientData, moments: Moments | None = None
) -> ClientData:
    """Scale the values of all examples according to ``data.standardise``.

    moments: the mean and standard deviation from the sums of real sites. Raises ConfigError for a
    public set if each client has its own mean and standard deviation.
    """
    # Noise is drawn in the units of the network's inputs, so it is never scaled.
    is_noise = settings.data.public_from == NOISE
    unscaled = data.public
    if is_noise:
        unscaled = None
    scaler = fit_scaler(settings, dataset, data.train, data.split, public=unscaled, moments=moments)
    if unscaled is not None and scaler.by_client is not None:
        raise ConfigError(
            "data.standardise = 'own' gives each client its own units, so nothing can scale the "
            "public set: set data.public_from = 'noise', or data.standardise = 'server' (the mean "
            "and standard deviation of the public set)"
        )
    public = data.public
    if unscaled is not None:
        public = scaler.transform(unscaled)
    client_tests = {
        client: scaler.transform_client(client, examples)
        for client, examples in data.client_tests.items()
    }
    test = None
    if data.test is not None and len(data.test) and scaler.by_client is None:
        test = scaler.transform(data.test)
    return replace(
        data,
        train=scaler.transform_clients(data.train, data.split),
        public=public,
        test=test,
        client_tests=client_tests,
        scaler=scaler,
    )


def training_and_test_sets(settings: Settings, dataset: Dataset) -> tuple[Examples, Examples]:
    """The examples for the clients, and the examples for the common test set.

    ``partition.pool`` combines both splits of the data set, so that only clients have test sets.
    ``data.test_from = "held_out"`` tests on a stratified sample of the training examples:
    ``test_size`` of them, or a fifth. The sample is the same for every seed and ``train_size``.
    Raises ConfigError if no training examples are left, and for keys that contradict each other.
    """
    pool = settings.named.partition.values.get("pool")
    if settings.data.test_from is None:
        if pool:
            if settings.data.test_size:
                raise ConfigError(
                    f"data.test_size = {settings.data.test_size} has no effect with partition.pool "
                    "= true, which tests on the clients' own tests; leave one of them out"
                )
            nothing = dataset.test.take(torch.arange(0))
            return concatenated([dataset.train, dataset.test]), nothing
        return dataset.train, dataset.test

    if settings.on_sites or pool:
        key = "partition.pool = true"
        if settings.on_sites:
            key = "flower.data = 'sites'"
        raise ConfigError(
            f"data.test_from = 'held_out' has no effect with {key}; leave one of them out"
        )
    labels = dataset.train.labels
    size = settings.data.test_size or round(TEST_SHARE * len(labels))
    if not 0 < size < len(labels):
        raise ConfigError(
            f"data.test_from = 'held_out': data.test_size = {size} leaves nothing of {len(labels)} "
            "training examples"
        )
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out = stratified_positions(labels, size, seed=seed_for(0, 0, 0, SERVER, "held out"))
    is_held_out[held_out] = True
    train = dataset.train.take((~is_held_out).nonzero().flatten())
    test = dataset.train.take(is_held_out.nonzero().flatten())
    return train, test


def subset(examples: Examples, size: int, key: str) -> Examples:
    """A stratified sample of ``size`` examples; all examples if ``size`` is 0.

    Raises ConfigError with the name ``data.KEY`` if there are fewer examples.
    """
    if size == 0:
        return examples
    if size > len(examples.labels):
        raise ConfigError(
            f"data.{key} = {size}, but there are only {counted(len(examples.labels), 'example')}"
        )
    return examples.take(stratified_positions(examples.labels, size, seed=0))


def client_owners(settings: Settings, dataset: Dataset, train: Examples) -> list[int]:
    """The numbers of the owners that are clients 0, 1, …: those with enough training examples.

    Empty if no column names owners. Raises ConfigError if the number of owners differs from the
    number of clients.
    """
    fields = settings.named.partition.values
    if train.owners is None or "column" not in fields:
        return []
    counts = torch.bincount(train.owners, minlength=len(dataset.about.owners))
    least = max(1, int(fields.get("least", 1)))
    owners: list[int] = (counts >= least).nonzero().flatten().tolist()
    if len(owners) != settings.clients:
        names = dataset.about.owners
        too_small = [names[owner] for owner in (counts < least).nonzero().flatten().tolist()]
        exception = ""
        if too_small:
            exception = f" (all except {shortened_list(too_small, 3)})"
        remedy = f"topology.clients = {len(owners)}"
        if not owners:
            remedy = f"partition.least to {int(counts.max())} or less"
        raise ConfigError(
            f"partition.column = {fields['column']!r} has {len(owners)} values with enough "
            f"training examples{exception}, and topology.clients is {settings.clients}; set "
            f"{remedy}"
        )
    return owners


def _draw(settings: Settings, data: ClientData) -> ClientSplit:
    if data.tasks is None:
        return draw_split(settings, data.train)
    return draw_split_by_task(settings, data.train, data.tasks)


def _changed(settings: Settings, split: ClientSplit, train: Examples) -> ClientSplit:
    """The split after the changes of outer packages."""
    for table in settings.packages.values():
        split = table.changed_split(split, train.labels)
    return split


def _without_client_tests(
    settings: Settings, data: ClientData, stored: StoredSplit | None
) -> ClientData:
    """The data for clients without own test sets."""
    if settings.named.partition.values.get("pool"):
        raise ConfigError(
            "partition.pool = true needs partition.own_test, the share of each client's examples "
            "for its own test set; set partition.own_test = 0.25, for example"
        )
    # Some splits take minutes to draw, so a resumed run uses the split in its directory. That split
    # lacks the removed examples, which also determine the clients that take part in a task.
    is_needed = data.tasks is not None and _removes_examples(settings)
    if stored is not None and not is_needed:
        return replace(data, split=stored.clients, full_split=stored.clients)
    split = _draw(settings, data)
    return replace(data, split=_changed(settings, split, data.train), full_split=split)


def _removes_examples(settings: Settings) -> bool:
    """Whether an outer package removes examples from the split."""
    return any(table.removes_examples for table in settings.packages.values())


def _with_client_tests(
    settings: Settings,
    data: ClientData,
    tests: Examples,
    owners: Sequence[int],
    stored: StoredSplit | None,
) -> ClientData:
    """The data for clients with own test sets."""
    fields = settings.named.partition.values
    split = _draw(settings, data)
    if fields["own_test"] == "column":
        if fields.get("pool") or tests.owners is None:
            raise ConfigError(
                "partition.own_test = 'column' needs a test split with that column; set a share "
                "instead, such as partition.own_test = 0.25"
            )
        client_tests = _tests_by_owner(tests, owners)
    else:
        held_out = _hold_out_tests(
            split, share=float(fields["own_test"]), take_last=fields.get("own_test_take") == "last"
        )
        split = held_out.train
        client_tests = {
            client: data.train.take(positions) for client, positions in held_out.tests.items()
        }

    full_split = split
    split = _changed(settings, split, data.train)
    # A client without any training examples left is not tested either.
    client_tests = {client: test for client, test in client_tests.items() if split.sizes[client]}
    # The split file of a run only contains training examples, so a resume draws both parts again.
    if stored is not None and not np.array_equal(stored.clients.positions, split.positions):
        raise DataError(
            "the training data are not those that the run began with: the split differs"
        )
    test = data.test
    if fields.get("pool"):
        if not client_tests:
            raise ConfigError(
                "partition.pool and partition.own_test: no client has two examples, so there are "
                "no test examples; choose another partition.column, or set pool = false"
            )
        test = concatenated(list(client_tests.values()))
    return replace(data, split=split, full_split=full_split, client_tests=client_tests, test=test)


def _tests_by_owner(tests: Examples, owners: Sequence[int]) -> dict[int, Examples]:
    """The rows of the test split by client, for clients whose owner has any."""
    assert tests.owners is not None
    codes = tests.owners.numpy()
    highest = max([*owners, *codes.tolist()])
    by_owner = ClientSplit.of_owners(np.arange(len(codes)), codes, highest + 1)
    positions = {client: by_owner[owner] for client, owner in enumerate(owners)}
    return {
        client: tests.take(torch.from_numpy(rows))
        for client, rows in positions.items()
        if len(rows)
    }


@dataclass(frozen=True)
class _HeldOut:
    """A split without the clients' own test examples, and the positions of these by client."""

    train: ClientSplit
    tests: Mapping[int, Tensor]


def _hold_out_tests(split: ClientSplit, share: float, take_last: bool) -> _HeldOut:
    """Hold out a share of each client's examples for tests: random examples, or the last ones.

    Each client keeps at least one example for training.
    """
    train = []
    tests = {}
    for client, positions in enumerate(split.tensors()):
        size = len(positions)
        count = min(max(1, round(share * size)), size - 1)
        order = torch.arange(size)
        if not take_last:
            # The same test examples for every seed of a run, so that runs can be compared.
            draw = generator(seed_for(0, 0, 0, client, OWN_TEST))
            order = torch.randperm(size, generator=draw)
        border = size - count
        train.append(positions[order[:border].sort().values].numpy())
        if count:
            tests[client] = positions[order[border:].sort().values]
    return _HeldOut(ClientSplit.of_parts(train), tests)
