"""A trained model as people use it: examples as they are go in, logits come out; the normalisation
is inside.
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
from fedstill.core.fields import of_kind
from fedstill.core.process_settings import process_settings
from fedstill.data.dataset import IMAGE_INFO, INPUT_FIELDS, DatasetInfo
from fedstill.data.encoding import MISSING, category_name, encoded, table_rows, with_marks
from fedstill.models.ensemble import module_of
from fedstill.models.functional import channels_last
from fedstill.running.standardisation import NO_SPREAD

# Rows and texts as people have them, as the tensor that a run's model takes: as the run made its
# own.


GIVEN = "the rows"


def as_taken(about: DatasetInfo, given: Any, length: int) -> Tensor:
    """Rows of a table (n, features) float32, NaN where a value is missing; texts as ids (n, length)
    int64.

    given: of a table a data frame, {column: values}, or a list of dicts; of texts a list. Raises
    ConfigError for other kinds, and where the run does not know how its examples were made;
    DataError for values that it cannot take.
    """
    if about.kind == "table" and about.columns:
        return _rows(about, given)
    if about.kind == "text" and about.tokenizer:
        return _texts(about, given, length)
    if about.kind in ("table", "text"):
        made = "names of columns" if about.kind == "table" else "a tokenizer"
        raise ConfigError(
            f"encode: the run's data were tensors without {made}; give the model such tensors"
        )
    raise ConfigError(
        f"encode is for tables and texts; the run's examples are {about.many}: give them as a "
        "tensor"
    )


def _texts(about: DatasetInfo, given: Any, length: int) -> Tensor:
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given] if isinstance(given, str) else list(given)
    ids = encoded(given, about.tokenizer, about.vocabulary, length)
    if ids.sha != about.tokenizer_sha:
        raise ConfigError(
            f"encode: {about.tokenizer} is not the file that the run was trained with; put that "
            "one back"
        )
    return torch.from_numpy(ids.ids)


def _rows(about: DatasetInfo, given: Any) -> Tensor:
    columns = {name: _column(name, values) for name, values in _by_column(about, given).items()}
    for name, known in about.categories:
        _refuse_unknown(name, columns[name], known)
    rows = table_rows(GIVEN, columns, about)
    gaps = [name for name in about.columns if f"{name}{MISSING}" in about.features]
    return torch.from_numpy(with_marks(rows, about, gaps) if gaps else rows)


def _refuse_unknown(name: str, column: pa.ChunkedArray, known: Sequence[str]) -> None:
    """Raise DataError for a name that the run had no input for."""
    for row, value in enumerate(column.to_pylist()):
        if value is not None and category_name(value) not in known:
            raise DataError(
                f"{GIVEN}: row {row} has {category_name(value)[:60]!r} in column {name!r}, and the "
                "run knew "
                f"{', '.join(known)[:200]}; give one of these, or None, which counts as missing; "
                "to have it known, "
                "train a run whose data have it, or whose data.categorical names it"
            )


def _by_column(about: DatasetInfo, given: Any) -> dict[str, Any]:
    """The values of each column of a run's table, by name; others are left out. A dict of single
    values is one row.
    """
    if isinstance(given, Mapping) and not any(_several(values) for values in given.values()):
        given = [given]
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        has = list(given) if isinstance(given, Mapping) else [str(name) for name in given.columns]
        if lacking := [name for name in about.columns if name not in has]:
            raise DataError(
                f"{GIVEN} lack column {lacking[0]!r}; the run's columns: {', '.join(about.columns)}"
            )
        return {name: given[name] for name in about.columns}
    rows = list(given)
    for at, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {at} is {of_kind(row)}, not a dict; give a data frame, or a list of dicts"
            )
        if lacking := [name for name in about.columns if name not in row]:
            raise DataError(f"row {at} lacks {lacking[0]!r}; write None where a value is not known")
    return {name: [row[name] for row in rows] for name in about.columns}


def _several(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes))


def _column(name: str, values: Any) -> pa.ChunkedArray:
    if not _several(values):
        raise DataError(
            f"{GIVEN}: column {name!r} is {of_kind(values)}, not a list of values, as others are"
        )
    try:
        return pa.chunked_array([pa.array(list(values), from_pandas=True)])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{GIVEN}: column {name!r} is not of one type: {on_one_line(error)}; correct it"
        ) from error


SLACK = 0.5
"""How far beyond 0 and 1 floats may be: enlarging a picture overshoots a little, other scales are
far off.
"""


class TrainedModel(nn.Module):
    """A network with its normalisation inside, in evaluation mode. Gives logits (N, C).

    Of images (N, channels, height, width), uint8 from 0 to 255 as a data set holds them, or floats
    from 0 to 1, the same divided by 255. A run whose images are floats takes those as they are. Of
    a table, vectors or series: numbers as the data have them, (N, features) in the order of
    ``inputs.features``, names as columns of 0 and 1; they are standardised inside, and NaN, a value
    that is missing, becomes the mean. Of texts: token ids (N, length). ``encode`` makes these of
    rows and texts.
    ``classes``: the names of the C classes; ``input_shape``: of one example; ``network``: the
    network alone, for what is normalised already; ``mean``, ``std``: buffers, a number a channel or
    column; ``inputs``: what an example is made of; ``about``: what was trained on what (method,
    data, seed, round, versions). Raises ConfigError for examples of another shape, type or scale.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: Sequence[str],
        input_shape: tuple[int, ...],
        mean: Sequence[float],
        std: Sequence[float],
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
        image = inputs.kind == "image"
        side = (-1, *[1] * (len(input_shape) - 1))
        self.mean: Tensor
        self.std: Tensor
        for name, values in (("mean", mean), ("std", std)):
            as_run = torch.tensor(tuple(values), dtype=torch.float32 if image else torch.float64)
            self.register_buffer(name, as_run.view(side) if len(values) else as_run)
        self.eval()

    @property
    def made_of(self) -> dict[str, Any]:
        """What an example is made of, without what is not so: kind, features, columns, names,
        tokenizer, ids.
        """
        fields = self.inputs.to_json()
        known = {name: fields[name] for name in ("kind", *INPUT_FIELDS) if fields[name]}
        return (
            {**known, "tokenizer": Path(self.inputs.tokenizer).name}
            if self.inputs.tokenizer
            else known
        )

    def forward(self, examples: Tensor) -> Tensor:
        """Logits (N, C) of examples, a tensor or an array of NumPy's."""
        if not torch.compiler.is_compiling():
            examples = self._as_tensor(examples)
            self._check(examples)
        return self.network(channels_last(self.normalised(examples)))  # type: ignore[no-any-return]

    @process_settings()
    def encode(self, given: Any) -> Tensor:
        """Examples as the model takes them: of a data frame or a list of dicts (a table), or of a
        list of texts.

        A table has the run's columns, others are left out, and its names become columns of 0 and 1
        as in the run; texts become token ids as in the run. Raises ConfigError for other kinds, or
        where the run's data were tensors; DataError for a column that lacks, or a value that the
        run did not know.
        """
        return as_taken(self.inputs, given, self.input_shape[-1])

    def normalised(self, examples: Tensor) -> Tensor:
        """Examples as the network takes them."""
        if self.inputs.kind != "image":
            return self._standardised(examples)
        if self.pixels != "uint8":
            return examples
        scaled = examples.to(torch.float32)
        return ((scaled / 255 if examples.dtype == torch.uint8 else scaled) - self.mean) / self.std

    @process_settings()
    def noise(self, count: int) -> Tensor:
        """Examples (count, …) of noise, the same each time: to try a model on."""
        draw = torch.Generator().manual_seed(0)
        shape = (count, *self.input_shape)
        if self.inputs.vocabulary:
            return torch.randint(1, self.inputs.vocabulary, shape, generator=draw)
        if self.pixels == "uint8":
            return torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        noise = torch.randn(shape, generator=draw)
        plain = self.inputs.kind == "image" or not len(self.mean)
        if plain:
            return noise
        spread = self.std.cpu()
        return (noise * spread.masked_fill(spread >= NO_SPREAD, 0.0) + self.mean.cpu()).to(
            torch.float32
        )

    def _standardised(self, examples: Tensor) -> Tensor:
        if not examples.is_floating_point():
            return examples.to(torch.int64)
        numbers = examples.to(torch.float32)
        if len(self.mean):
            numbers = ((numbers.to(torch.float64) - self.mean) / self.std).to(torch.float32)
        return numbers.nan_to_num(0.0)

    def _as_tensor(self, examples: Any) -> Tensor:
        if isinstance(examples, Tensor):
            return examples.to(self.mean.device)
        if isinstance(examples, np.ndarray):
            with contextlib.suppress(TypeError):  # of texts or objects
                return torch.from_numpy(np.array(examples)).to(self.mean.device)
        rows = (
            "; encode makes one of rows and texts" if self.inputs.kind in ("table", "text") else ""
        )
        kind = (
            f"an array of {examples.dtype}"
            if isinstance(examples, np.ndarray)
            else of_kind(examples)
        )
        raise ConfigError(
            f"{self.inputs.many} are {kind}; give a tensor, or an array of numbers{rows}"
        )

    def _check(self, examples: Tensor) -> None:
        many = self.inputs.many
        if tuple(examples.shape[1:]) != self.input_shape:
            shape = ", ".join(map(str, self.input_shape))
            one = "image" if many == "images" else "example"
            raise ConfigError(
                f"{many} must be (N, {shape}), not {tuple(examples.shape)}; of one {one}, give "
                f"{one}[None]"
            )
        whole, kind = examples.dtype == torch.uint8, examples.dtype
        if self.inputs.vocabulary:
            if examples.is_floating_point() or examples.dtype == torch.bool:
                raise ConfigError(
                    f"texts are {kind}; give token ids, whole numbers, as encode(texts) makes them"
                )
            self._check_range(examples)
            return
        if not (examples.is_floating_point() or (whole and self.pixels == "uint8")):
            wanted = (
                "uint8, or floats from 0 to 1"
                if self.pixels == "uint8"
                else "floats, as in the run's data"
            )
            raise ConfigError(f"{many} are {kind}; give {wanted}")
        if self.pixels == "uint8" and not whole and examples.numel():
            low, high = (float(end) for end in examples.detach().aminmax())
            if not -SLACK <= low <= high <= 1 + SLACK:
                raise ConfigError(
                    f"float images must be from 0 to 1, and these are from {low:.3g} to "
                    f"{high:.3g}; "
                    "give pixels as they are, uint8, or divided by 255: the model normalises them "
                    "itself"
                )

    def _check_range(self, ids: Tensor) -> None:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.inputs.vocabulary:
            raise ConfigError(
                f"token ids must be from 0 to {self.inputs.vocabulary - 1}, 0 for padding"
            )


class OnlyCalled(nn.Module):
    """A predictor of a method that gives a function and no module: it can be called, not
    exported.
    """

    def __init__(self, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of inputs."""
        return self.predict(x)


def network_of(predict: Callable[[Tensor], Tensor]) -> nn.Module:
    """A predictor as a module: with its weights if it shows them, else one that can only be
    called.
    """
    made = module_of(predict)
    return OnlyCalled(predict) if made is None else made
