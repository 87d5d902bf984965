"""A trained model for use: it takes examples as the data have them, normalises them and returns
logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from fedstill.core.errors import ConfigError, DataError, on_one_line
from fedstill.core.fields import kind_text
from fedstill.core.process_settings import process_settings
from fedstill.data.dataset import IMAGE_INFO, INPUT_FIELDS, DatasetInfo
from fedstill.data.encoding import MARK_SUFFIX, category_name, table_rows, with_marks
from fedstill.data.sources.tables import with_missing
from fedstill.data.tokens import token_ids
from fedstill.models.functional import channels_last
from fedstill.models.predictors import module_of
from fedstill.running.standardisation import NO_SPREAD

# ---- encoding rows and texts as the run encoded its data -----------------------------------------

ROWS = "the rows"
"""The place of an error, where files have their path."""


def encode(
    about: DatasetInfo,
    examples: Any,
    length: int,
    missing_values: Sequence[str | int | float] = (),
) -> Tensor:
    """Rows of a table as (n, features) float32, with NaN for missing values; texts as token ids
    (n, length) int64.

    examples: a data frame, {column: values} or a list of dicts for a table; a list of texts.
    missing_values: the marks of missing values in the run's data, such as -999. Raises ConfigError
    for other kinds, and if the run does not know how its examples were encoded; DataError for
    values that it cannot encode.
    """
    if about.kind == "table" and about.columns:
        return _encode_rows(about, examples, missing_values)
    if about.kind == "text" and about.tokenizer:
        return _encode_texts(about, examples, length)
    missing = {"table": "names of columns", "text": "a tokenizer"}
    if about.kind in missing:
        raise ConfigError(
            f"encode: the run's data were tensors without {missing[about.kind]}; pass such tensors "
            "to the model"
        )
    raise ConfigError(
        f"encode is for tables and texts, and the run's examples are {about.many}: pass them as a "
        "tensor"
    )


def _encode_texts(about: DatasetInfo, texts: Any, length: int) -> Tensor:
    if isinstance(texts, str):
        texts = [texts]
    # The list of a data frame or of a dict would contain the names of its columns.
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):
        raise ConfigError(
            "encode: the model takes texts; pass the texts of one column of the table"
        )
    ids = token_ids(list(texts), about.tokenizer, about.vocabulary, length)
    if ids.sha != about.tokenizer_sha:
        raise ConfigError(
            f"encode: {about.tokenizer} is not the file that the run was trained with; restore it"
        )
    return torch.from_numpy(ids.ids)


def _encode_rows(
    about: DatasetInfo, table: Any, missing_values: Sequence[str | int | float]
) -> Tensor:
    columns = {name: _column(name, values) for name, values in _by_column(about, table).items()}
    if missing_values:
        marked_table = with_missing(pa.table(columns), missing_values)
        columns = {name: marked_table[name] for name in columns}
    for name, categories in about.categories:
        _check_categories(name, columns[name], categories)
    rows = table_rows(ROWS, columns, about)
    marked = [name for name in about.columns if f"{name}{MARK_SUFFIX}" in about.features]
    if marked:
        rows = with_marks(rows, about, marked)
    return torch.from_numpy(rows)


def _check_categories(name: str, column: pa.ChunkedArray, categories: Sequence[str]) -> None:
    """Raise DataError for a category without an input."""
    for row, value in enumerate(column.to_pylist()):
        if value is not None and category_name(value) not in categories:
            raise DataError(
                f"{ROWS}: row {row} has {category_name(value)[:60]!r} in column {name!r}, and the "
                f"run knows {', '.join(categories)[:200]}; use one of these or None "
                "(missing), or train a run with data that contain it or with data.categorical"
            )


def _by_column(about: DatasetInfo, table: Any) -> dict[str, Any]:
    """The values of the run's columns by name, without other columns.

    A dict of single values is one row.
    """
    if isinstance(table, Mapping):
        if any(_is_list(values) for values in table.values()):
            return _columns_of(about, table, list(table))
        return _columns_of_rows(about, [table])
    if hasattr(table, "columns"):
        return _columns_of(about, table, [str(name) for name in table.columns])
    return _columns_of_rows(about, list(table))


def _columns_of(about: DatasetInfo, table: Any, names: Sequence[str]) -> dict[str, Any]:
    """The columns of a data frame or a dict."""
    missing = [name for name in about.columns if name not in names]
    if missing:
        raise DataError(
            f"{ROWS} lack column {missing[0]!r}; the run's columns: {', '.join(about.columns)}"
        )
    return {name: table[name] for name in about.columns}


def _columns_of_rows(about: DatasetInfo, rows: Sequence[Any]) -> dict[str, Any]:
    """The columns of a list of dicts."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {index} is {kind_text(row)}, not a dict; pass a data frame or a list of dicts"
            )
        missing = [name for name in about.columns if name not in row]
        if missing:
            raise DataError(f"row {index} lacks {missing[0]!r}; use None for an unknown value")
    return {name: [row[name] for row in rows] for name in about.columns}


def _is_list(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes))


def _column(name: str, values: Any) -> pa.ChunkedArray:
    if not _is_list(values):
        raise DataError(
            f"{ROWS}: column {name!r} is {kind_text(values)}, and other columns are lists of values"
        )
    try:
        return pa.chunked_array([pa.array(list(values), from_pandas=True)])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{ROWS}: column {name!r} has values of several types: {on_one_line(error)}; correct it"
        ) from error


# ---- the model -----------------------------------------------------------------------------------

OWN = "own"
"""The value of ``data.standardise`` with which each client has its own mean and deviation."""

STANDARDISED_AT = "standardised_at"
"""The key of ``TrainedModel.about`` with the client whose mean and deviation the model contains."""


class Standardised(nn.Module):
    """Standardises the features of a backbone, (N, D), before a network takes them.

    mean, std: one number for each feature.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(tuple(mean), dtype=torch.float64))
        self.register_buffer("std", torch.tensor(tuple(std), dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        """Standardised features (N, D)."""
        return standardised(features, self.mean, self.std)


def standardised(numbers: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Numbers (N, …) as a run standardises them: computed in float64, returned as float32. NaN, a
    missing value, becomes 0, the mean.
    """
    scaled = (numbers.to(torch.float64) - mean) / std
    return scaled.to(torch.float32).nan_to_num(0.0)


RANGE_TOLERANCE = 0.5
"""How far float images may exceed 0 and 1: resizing overshoots a little, other scales by far."""


class TrainedModel(nn.Module):
    """A network with its normalisation, in evaluation mode; it returns logits (N, C).

    Images are (N, channels, height, width), uint8 from 0 to 255 or floats from 0 to 1. A model of a
    run with float images takes these as they are. Tables, vectors and series are numbers as the
    data have them, (N, features) in the order of ``inputs.features``, with categories as columns of
    0 and 1. The model standardises them, and NaN (a missing value) becomes the mean. Texts are
    token ids (N, length). ``encode`` makes such tensors from rows and texts.

    ``classes``: the names of the C classes. ``input_shape``: of one example. ``network``: the
    network alone, for normalised examples. ``mean``, ``std``: buffers, one number for each channel
    or column. ``inputs``: the meaning of an example. ``missing_values``: the marks of missing
    values in the run's data. ``about``: the training (method, data, seed, round, versions). Raises
    ConfigError for examples of another shape, type or range.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        input_shape: tuple[int, ...],
        mean: Sequence[float],
        std: Sequence[float],
        *,
        about: Mapping[str, Any],
        pixels: str = "uint8",
        inputs: DatasetInfo = IMAGE_INFO,
    ) -> None:
        super().__init__()
        self.network = network
        self.classes = tuple(classes)
        self.input_shape = input_shape
        self.about = dict(about)
        self.pixels = pixels
        self.inputs = inputs
        self.missing_values: tuple[str | int | float, ...] = ()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", self._scaling(mean))
        self.register_buffer("std", self._scaling(std))
        self.eval()

    def _scaling(self, values: Sequence[float]) -> Tensor:
        """A number for each channel or column, in the precision in which the run computed."""
        dtype = torch.float64
        if self.inputs.kind == "image":
            dtype = torch.float32
        scaling = torch.tensor(tuple(values), dtype=dtype)
        if not len(values):
            return scaling
        return scaling.view(-1, *[1] * (len(self.input_shape) - 1))

    @property
    def made_of(self) -> dict[str, Any]:
        """The meaning of an example, as far as it is known: kind, features, columns, categories,
        tokenizer.
        """
        fields = self.inputs.to_json()
        meaning = {name: fields[name] for name in ("kind", *INPUT_FIELDS) if fields[name]}
        if self.inputs.tokenizer:
            meaning["tokenizer"] = Path(self.inputs.tokenizer).name
        return meaning

    def forward(self, examples: Tensor) -> Tensor:
        """Logits (N, C) of examples, a tensor or a NumPy array."""
        if not torch.compiler.is_compiling():
            examples = self._as_tensor(examples)
            self._check(examples)
        return self.network(channels_last(self.normalised(examples)))  # type: ignore[no-any-return]

    @process_settings()
    def encode(self, examples: Any) -> Tensor:
        """Inputs of the model from a data frame, a list of dicts, or a list of texts.

        A table must have the run's columns; others are ignored. Categories become columns of 0 and
        1, marks of missing values (``data.missing_values``) become NaN, and texts become token ids,
        as in the run. Raises ConfigError for other kinds, and if the run's data were tensors;
        DataError for a missing column or an unknown category.
        """
        return encode(self.inputs, examples, self.input_shape[-1], self.missing_values)

    def normalised(self, examples: Tensor) -> Tensor:
        """Examples as inputs of the network."""
        if self.inputs.kind != "image":
            return self._standardised(examples)
        pixels = examples.to(torch.float32)
        if self.pixels != "uint8":
            return pixels
        if examples.dtype == torch.uint8:
            pixels = pixels / 255
        return (pixels - self.mean) / self.std

    @process_settings()
    def noise(self, count: int) -> Tensor:
        """Examples (count, …) of noise, the same ones each time, to test a model."""
        generator = torch.Generator().manual_seed(0)
        shape = (count, *self.input_shape)
        if self.inputs.vocabulary:
            return torch.randint(1, self.inputs.vocabulary, shape, generator=generator)
        if self.pixels == "uint8":
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        noise = torch.randn(shape, generator=generator)
        if self.inputs.kind == "image" or not len(self.mean):
            return noise
        std = self.std.cpu()
        # A column without any spread is constant.
        std = std.masked_fill(std >= NO_SPREAD, 0.0)
        return (noise * std + self.mean.cpu()).to(torch.float32)

    def _standardised(self, examples: Tensor) -> Tensor:
        if not examples.is_floating_point():
            return examples.to(torch.int64)
        numbers = examples.to(torch.float32)
        if len(self.mean):
            return standardised(numbers, self.mean, self.std)
        return numbers.nan_to_num(0.0)

    def _as_tensor(self, examples: Any) -> Tensor:
        if isinstance(examples, Tensor):
            return examples.to(self.mean.device)
        if isinstance(examples, np.ndarray):
            # Arrays of texts or objects cannot be converted.
            with contextlib.suppress(TypeError):
                return torch.from_numpy(np.array(examples)).to(self.mean.device)
        kind = kind_text(examples)
        if isinstance(examples, np.ndarray):
            kind = f"an array of {examples.dtype}"
        hint = ""
        if self.inputs.kind in ("table", "text"):
            hint = "; encode converts rows and texts"
        raise ConfigError(
            f"{self.inputs.many} are {kind}; pass a tensor or an array of numbers{hint}"
        )

    def _check(self, examples: Tensor) -> None:
        """Raise ConfigError for examples of another shape, type or range."""
        plural = self.inputs.many
        if tuple(examples.shape[1:]) != self.input_shape:
            shape = ", ".join(map(str, self.input_shape))
            noun = "example"
            if plural == "images":
                noun = "image"
            raise ConfigError(
                f"{plural} must be (N, {shape}), not {tuple(examples.shape)}; for a single {noun}, "
                f"pass {noun}[None]"
            )
        if self.inputs.vocabulary:
            self._check_token_ids(examples)
        elif self.pixels == "uint8":
            self._check_pixels(examples)
        elif not examples.is_floating_point():
            raise ConfigError(f"{plural} are {examples.dtype}; pass floats, as in the run's data")

    def _check_token_ids(self, ids: Tensor) -> None:
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ConfigError(
                f"texts are {ids.dtype}; pass token ids, whole numbers, as encode(texts) returns "
                "them"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.inputs.vocabulary:
            raise ConfigError(
                f"token ids must be from 0 to {self.inputs.vocabulary - 1}; 0 is padding"
            )

    def _check_pixels(self, images: Tensor) -> None:
        if images.dtype == torch.uint8:
            return
        if not images.is_floating_point():
            raise ConfigError(
                f"{self.inputs.many} are {images.dtype}; pass uint8, or floats from 0 to 1"
            )
        if not images.numel():
            return
        low, high = (float(end) for end in images.detach().aminmax())
        if not -RANGE_TOLERANCE <= low <= high <= 1 + RANGE_TOLERANCE:
            raise ConfigError(
                f"float images must be from 0 to 1, and these are from {low:.3g} to {high:.3g}; "
                "pass pixels as uint8 or divided by 255: the model normalises them"
            )


class OnlyCallable(nn.Module):
    """A predictor that is a function: it can be called but not exported."""

    def __init__(self, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of inputs."""
        return self.predict(x)


def network_of(predict: Callable[[Tensor], Tensor]) -> nn.Module:
    """A predictor as a module with its weights, or as one that can only be called."""
    module = module_of(predict)
    if module is None:
        return OnlyCallable(predict)
    return module


def lacks_standardisation(model: TrainedModel) -> bool:
    """Whether the model takes standardised numbers, because each client has its own mean and
    deviation and the model contains none.
    """
    return model.about.get("standardised") == OWN and STANDARDISED_AT not in model.about


def name_in_words(about: Mapping[str, Any]) -> str:
    """The name of a model in words. ``about``: ``TrainedModel.about``.

    >>> name_in_words({"model": "global"}), name_in_words({"model": "client 3"})
    ('the global model', 'the model of client 3')
    """
    names = {"global": "the global model", "ensemble": "the ensemble of all clients' models"}
    return names.get(about["model"], f"the model of {about['model']}")
