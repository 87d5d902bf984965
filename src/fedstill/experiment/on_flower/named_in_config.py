"""What a configuration names that a site uses only if its operator says so: code, and files on the
site's disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedstill import registry
from fedstill.data.sources.catalog import FOLDERS
from fedstill.data.sources.folders import at_home, local_folder
from fedstill.experiment.config.client_models import words
from fedstill.experiment.config.named_tables import NAMED

NO_FILES = ("", "train", "noise", "words", "bytes")
"""What ``public_from`` and ``tokenizer`` may say without a file."""


def code_in(tree: Mapping[str, Any]) -> list[str]:
    """Names in a configuration that would import code beyond fedstill's own."""
    named = [_text(tree, table, key) for table, (key, _) in NAMED.items()]
    models = (
        tree.get("clients", {}).get("models", [])
        if isinstance(tree.get("clients"), Mapping)
        else []
    )
    measures = tree.get("measure", [])
    named += [str(m) for m in measures] if isinstance(measures, (list, tuple)) else [str(measures)]
    named += [_text(tree, "data", "name"), _text(tree, "data", "public_from"), *words(models)]
    named += words(model) if isinstance(model := tree.get("model"), Mapping) else []
    named += words(data.get("features_of")) if isinstance(data := tree.get("data"), Mapping) else []
    return sorted({n for n in named if ":" in n or n.endswith(".py")})


def files_in(tree: Mapping[str, Any]) -> list[str]:
    """Files and folders that a trial by this configuration would read, but for data sets that are
    known by name.

    A name of the Hugging Face hub is one only where a folder of that name is on this disk, which
    would be read instead.
    """
    named = [*_of_data(tree), str(tree.get("start_from", ""))]
    other = (
        tree.get("model"),
        tree.get("partition"),
        tree.get("clients"),
        _table(tree, "data").get("features_of"),
    )
    named += [word for word in words(other) if "/" in word and Path(at_home(word)).exists()]
    return sorted({name for name in named if name})


def _of_data(tree: Mapping[str, Any]) -> Iterator[str]:
    """What the table ``[data]`` has read: its folder, sets that are none by name, a tokenizer's
    file.
    """
    data = _table(tree, "data")
    yield str(data.get("folder", ""))
    if (tokenizer := str(data.get("tokenizer", ""))) not in NO_FILES:
        yield tokenizer
    for name in (_text(tree, "data", "name"), str(data.get("public_from", ""))):
        known = name in NO_FILES or name in registry.names("dataset") or name in FOLDERS
        on_hub = (
            name.count("/") == 1
            and not name.startswith((".", "/", "~"))
            and not Path(name).exists()
        )
        if not known and (not on_hub or local_folder(name, None)):
            yield name


def _table(tree: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    value = tree.get(table)
    return value if isinstance(value, Mapping) else {}


def _text(tree: Mapping[str, Any], table: str, key: str) -> str:
    value = tree.get(table)
    return str(value.get(key, "")) if isinstance(value, Mapping) else str(value or "")
