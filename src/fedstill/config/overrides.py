"""Values by dotted key: ``key=value`` for one run, ``key=value,value`` for a grid of runs, a tree
as one level.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import ConfigError
from fedstill.core.fields import Typed
from fedstill.core.files import named_path


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, Any]:
    """``("method.beta=0.5",)`` as ``{"method.beta": 0.5}``; raises ConfigError for what is no
    KEY=VALUE.

    >>> parse_overrides(("method.beta=0.5", "method=fedntd"))
    {'method.beta': 0.5, 'method': 'fedntd'}
    """
    out: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"override {text!r} is not of the form key=value, e.g. -s method.beta=0.5"
            )
        try:
            read = tomllib.loads(f"v = {value}")
        except (ValueError, RecursionError):
            read = {}
        out[key.strip()] = read["v"] if len(read) == 1 else Typed(value.strip())
    return out


PATHS = ("start_from", "data.folder", "data.tokenizer", "flower.federation")
"""Keys whose texts are paths, however they look."""


def from_here(value: Any, base: Path | None, is_path: bool = False) -> Any:
    """Values that were typed, in which a file that is in the working directory, and not in
    ``base``, is named whole.

    A text is taken for a file's name where it has a slash or a dot, or its key is one of ``PATHS``;
    ``:Name`` may follow. In lists and tables, too.
    """
    if isinstance(value, Mapping):
        return {key: from_here(one, base, key in PATHS) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(from_here(one, base) for one in value)
    path, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if base is None or not ("/" in path or "." in path or is_path) or len(path) > 1000:
        return value
    try:
        there = named_path(path)
        here = not (base / there).exists() and there.exists()
    except (ConfigError, OSError, ValueError):  # no name that a file can have
        return value
    return type(value)(f"{there.resolve()}{colon}{rest}") if here else value


def parse_grid(texts: tuple[str, ...]) -> dict[str, list[Any]]:
    """``("method.beta=0.1,1",)`` as ``{"method.beta": [0.1, 1]}``.

    >>> parse_grid(("method.beta=0.1,1", "partition=iid,sharding"))
    {'method.beta': [0.1, 1], 'partition': ['iid', 'sharding']}
    >>> parse_grid(("model.hidden=[8],[8, 8]",))
    {'model.hidden': [[8], [8, 8]]}
    """
    grid = {}
    for text in texts:
        key, _, values = text.partition("=")
        (whole,) = parse_overrides((f"{key}=[{values}]",)).values()
        words = (
            []
            if isinstance(whole, list)
            else [parse_overrides((f"{key}={v}",)) for v in values.split(",")]
        )
        grid[key.strip()] = (
            whole if isinstance(whole, list) else [v for word in words for v in word.values()]
        )
    return grid


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings by dotted key.

    >>> flat({"seed": 1, "plan": {"train": {"lr": 0.1}}})
    {'seed': 1, 'plan.train.lr': 0.1}
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return out
