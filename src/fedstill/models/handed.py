"""What a network's constructor is given of the data, by the names of its parameters; or why it
takes no such data.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fedstill.errors import ConfigError
from fedstill.files import short_name
from fedstill.models.network import ImageShape, RowShape, SeriesShape
from fedstill.records import ModelSpec

RULE = (
    "a model's parameters named input_shape, in_channels (of images and series), vocabulary (of "
    "texts), classes or "
    "num_classes are given what the data have; one with **kwargs gets num_classes; the others are "
    "fields of [model]"
)
"""How classes and channels are handed over to a model."""

ONLY: Mapping[Any, tuple[int, str]] = {
    ImageShape: (3, "images"),
    SeriesShape: (2, "series"),
    RowShape: (1, "rows of numbers"),
}
"""The annotations of ``input_shape`` by which a network takes one kind of numbers: the axes of an
example, in words.
"""


def handed(target: Callable[..., Any], spec: ModelSpec) -> dict[str, Any]:
    """What a constructor is given of the data, by the names of its parameters."""
    known = {
        "input_shape": spec.input_shape,
        "vocabulary": spec.vocabulary,
        "classes": spec.classes,
        "num_classes": spec.classes,
    }
    if len(spec.input_shape) > 1:
        known["in_channels"] = spec.input_shape[0]
    named = inspect.signature(target).parameters
    handed = {name: value for name, value in known.items() if name in named}
    rest = any(p.kind is p.VAR_KEYWORD for p in named.values())
    return handed | (
        {"num_classes": spec.classes}
        if rest and not {"classes", "num_classes"} & set(named)
        else {}
    )


def refuse_other_inputs(target: Callable[..., Any], spec: ModelSpec) -> None:
    """Raise ConfigError for a network of images, of numbers or of token ids on examples of another
    kind.
    """
    named = inspect.signature(target).parameters
    for_any = any(p.kind is p.VAR_KEYWORD for p in named.values())
    takes = ""
    if (
        "vocabulary" in named
        and not spec.vocabulary
        and named["vocabulary"].default is inspect.Parameter.empty
    ):
        takes = "the token ids of texts"
    elif spec.vocabulary and not (for_any or "vocabulary" in named):
        takes = "numbers"
    elif not spec.vocabulary:
        length, what = ONLY.get(_hints(target).get("input_shape"), (len(spec.input_shape), ""))
        takes = what if length != len(spec.input_shape) else ""
    if takes:
        kind, model = suited(spec.input_shape, spec.vocabulary)
        raise ConfigError(
            f"model {short_name(spec.name)!r} takes {takes}, and these examples are {kind}; {model}"
        )


def suited(input_shape: tuple[int, ...], vocabulary: int = 0) -> tuple[str, str]:
    """What examples of a shape are, for people, and a model that takes them."""
    shape = f"of shape ({', '.join(map(str, input_shape))})"
    if vocabulary:
        return "texts, as token ids", "set model.name = 'bag'"
    kinds = {1: ("rows of numbers", "mlp"), 2: ("series", "series_cnn"), 3: ("images", "cnn")}
    kind, model = kinds.get(len(input_shape), ("numbers", "mlp"))
    return f"{kind} {shape}", f"set model.name = '{model}'"


def _hints(target: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations of a constructor; of one whose annotations cannot be read, none."""
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # names that are there for type checkers only
        return {}
