"""Throw-away environments: one a peer, pinned, kept between calls in a cache folder outside the
repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

SHARED = ("safetensors==0.8.0", "numpy", "packaging")
"""What the hand-over needs beside torch."""


@dataclass(frozen=True)
class Contestant:
    """A name, the module that runs it, its pinned packages (none: plain PyTorch), and what its own
    docs say to set.
    """

    name: str
    module: str
    packages: tuple[str, ...] = ()
    python: str = ""  # another version than ours, where it needs one
    arguments: tuple[str, ...] = ()
    torchrun: bool = False  # started as one process a core
    settings: dict[str, str] = field(default_factory=dict)


CONTESTANTS = (
    Contestant("fedstill", "run_fedstill"),
    Contestant("plain PyTorch", "run_plain"),
    Contestant(
        "Flower 1.41.0",
        "run_flower",
        ("flwr[simulation]==1.41.0",),
        settings={
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray gives up after 60, which a busy machine can need
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_worker_register_timeout_seconds": "300",
        },
    ),
    Contestant(
        "pfl-research 0.6.0",
        "run_pfl",
        ("pfl==0.6.0",),
        torchrun=True,
        settings={"OMP_NUM_THREADS": "1"},
    ),
    Contestant(
        "fluke 0.8.1", "run_fluke", ("fluke-fl==0.8.1",), settings={"WANDB_MODE": "disabled"}
    ),
    Contestant(
        "blazefl 2.0.1", "run_blazefl", ("blazefl[contrib,reproducibility]==2.0.1",), python="3.12"
    ),
)


class NotInstalled(Exception):
    """A peer that could not be installed; the first line of the reason."""


def make(one: Contestant, cache: Path, fresh: bool, more: Sequence[str], seconds: float) -> Path:
    """The interpreter of a contestant's environment, made now if it is not there; raises
    NotInstalled.

    ``more``: further arguments for uv, such as an index of torch's builds. The same torch as
    fedstill's, if the peer's packages allow that, else the one they resolve to.
    """
    if one.module == "run_fedstill":
        return Path(sys.executable)
    folder = cache / one.module.removeprefix("run_")
    same = "torch==" + torch.__version__.partition("+")[0]
    asked = "\n".join([*one.packages, *SHARED, same, one.python, *more])
    ready, python = folder / "ready", folder / "bin" / "python"
    if (
        not fresh
        and ready.is_file()
        and ready.read_text(encoding="utf-8") == asked
        and python.exists()
    ):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    uv(["venv", "--python", interpreter(one.python), str(folder)], seconds)
    install = ["pip", "install", "--python", str(python), *more, *one.packages, *SHARED]
    try:
        uv([*install, same], seconds)
    except NotInstalled as first:
        try:
            uv([*install, "torch"], seconds)
        except NotInstalled:
            raise first from None  # it is not torch's version that stands in the way
    ready.write_text(asked, encoding="utf-8")
    return python


def uv(arguments: list[str], seconds: float) -> None:
    """Run uv, ours or the path's; raises NotInstalled with what it said."""
    beside = Path(sys.executable).parent / "uv"
    program = str(beside) if beside.exists() else shutil.which("uv")
    if not program:
        raise NotInstalled("uv is not here: python -m pip install uv")
    settings = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    if not settings.get("UV_FIND_LINKS"):
        settings.pop("UV_FIND_LINKS", None)
    try:
        command = [program, "-q", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=settings
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed within {seconds:.0f} s") from None
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise NotInstalled(" ".join(said[:2]) or f"uv ended with {done.returncode}")


def interpreter(version: str) -> str:
    """An interpreter of a version: ours if none is asked for, one on the path, or one that pyenv
    keeps.
    """
    if not version:
        return sys.executable
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [
        shutil.which(f"python{version}"),
        *map(str, sorted(kept.glob(f"{version}*/bin/python"))),
    ]
    for python in filter(None, found):
        tried = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True
        )
        if tried.returncode == 0 and tried.stdout.decode().strip() == version:
            return str(python)
    raise NotInstalled(f"needs Python {version}, which is not here")
