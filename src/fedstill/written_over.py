"""Files that a person names to be written: what is there already is written over only if it is of
the same kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedstill.errors import ConfigError
from fedstill.files import write_whole


@dataclass(frozen=True)
class Kind:
    """A kind of files: in words, how their names end (empty: in any way), and what their bytes
    hold.
    """

    words: str
    ending: str
    mark: re.Pattern[bytes]


PAGE = Kind("a page that fedstill made", "", re.compile(rb"Made by fedstill"))
ONNX = Kind("an ONNX model", ".onnx", re.compile(rb"\A\x08"))
PROGRAM = Kind("a program of torch.export", ".pt2", re.compile(rb"\APK"))
MODEL = Kind(
    "a model that `fedstill query` wrote",
    ".safetensors",
    re.compile(rb"\A.{8}\{.*fedstill_model", re.DOTALL),
)

RUN_TABLE = Kind(
    "a run's table",
    "",
    re.compile(rb'\A(\s*\Z|(round,|PAR1).*(seconds_training|"columns": \[\]))', re.DOTALL),
)
CSV = Kind("a table that fedstill wrote", "", re.compile(rb"\A(label,note|compared,with,number)"))
MARKDOWN = Kind("a table that fedstill wrote", "", re.compile(rb"\A\|  \|"))
LATEX = Kind(
    "a table that fedstill wrote", "", re.compile(rb"\A\\begin\{tabular\}\{lr+\}\n\\toprule\n & ")
)
OF_TABLES = {".csv": CSV, ".md": MARKDOWN, ".tex": LATEX}
"""The kinds of a comparison's tables, by how their names end."""


def refuse_other_kind(path: Path | None, kind: Kind) -> None:
    """Raise ConfigError if there is something that is not of this kind, so that a wrong name costs
    nobody a file.

    An empty file may be written over; None is no name. A directory is left to who writes, whose
    error says more of it.
    """
    if path is None or path.is_dir() or not (path.exists() or path.is_symlink()):
        return
    if path.is_file():
        if not path.stat().st_size:
            return
        try:
            held = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}, which would be written over: {error.strerror}"
            ) from error
        if path.name.endswith(kind.ending) and kind.mark.search(held):
            return
    raise ConfigError(
        f"{path} is there and is not {kind.words}, so it is not written over; name another file"
    )


def write_over(path: Path, data: bytes, kind: Kind) -> None:
    """Write a file whole, as ``write_whole`` does; raises ConfigError over one that is not of this
    kind.
    """
    refuse_other_kind(path, kind)
    write_whole(path, data)
