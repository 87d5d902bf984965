"""The environments of the contestants: one for each, with pinned packages, in a cache folder
outside the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

SHARED = ("safetensors==0.8.0", "numpy", "packaging")
"""The packages that every environment needs in addition to torch."""

NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONPATH")
"""Variables of this process's environment that would lead to its packages."""


@dataclass(frozen=True)
class Contestant:
    """A library, the module that runs it, and its pinned packages (none for plain PyTorch).

    ``python``: a version of Python, if it needs another one than ours. ``torchrun``: whether it is
    started as one process for each core. ``settings``: environment variables that its documentation
    recommends.
    """

    name: str
    module: str
    packages: tuple[str, ...] = ()
    python: str = ""
    torchrun: bool = False
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name for ``--only``, and the name of its environment's folder."""
        return self.module.removeprefix("run_")


FEDSTILL = Contestant("fedstill", "run_fedstill")

CONTESTANTS = (
    FEDSTILL,
    Contestant("plain PyTorch", "run_plain"),
    Contestant(
        "Flower 1.41.0",
        "run_flower",
        ("flwr[simulation]==1.41.0",),
        settings={
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # By default, Ray gives up after 60 seconds, which is too early on a busy machine.
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
    """A library that could not be installed; the message is the reason."""


@dataclass(frozen=True)
class Installer:
    """Creates environments.

    ``cache``: the folder that keeps them. ``fresh``: create them again. ``uv_arguments``: further
    arguments of uv, such as an index with builds of torch. ``seconds``: the time limit of one call
    of uv.
    """

    cache: Path
    fresh: bool
    uv_arguments: Sequence[str]
    seconds: float

    def python(self, contestant: Contestant) -> Path:
        """The interpreter of a contestant's environment, which is created if it does not exist.

        It gets the version of torch that fedstill has, if the contestant's packages allow this.
        Raises NotInstalled.
        """
        if contestant == FEDSTILL:
            return Path(sys.executable)
        folder = self.cache / contestant.key
        python = folder / "bin" / "python"
        marker = folder / "ready"
        requirements = [*contestant.packages, *SHARED, _same_torch()]
        content = "\n".join([*requirements, contestant.python, *self.uv_arguments])
        if not self.fresh and python.exists() and _has_content(marker, content):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        base = interpreter(contestant.python)
        uv(["venv", "--python", base, str(folder)], self.seconds)
        self._install(python, contestant)
        marker.write_text(content, encoding="utf-8")
        return python

    def _install(self, python: Path, contestant: Contestant) -> None:
        command = ["pip", "install", "--python", str(python), *self.uv_arguments]
        command += [*contestant.packages, *SHARED]
        try:
            uv([*command, _same_torch()], self.seconds)
        except NotInstalled as error:
            try:
                uv([*command, "torch"], self.seconds)
            except NotInstalled:
                # The version of torch was not the reason.
                raise error from None


def _same_torch() -> str:
    """The requirement of the version of torch that fedstill has."""
    return "torch==" + torch.__version__.partition("+")[0]


def _has_content(file: Path, content: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == content


def uv(arguments: Sequence[str], seconds: float) -> None:
    """Run uv; raises NotInstalled with its message.

    The uv of this environment is preferred to one on the path.
    """
    environment_uv = Path(sys.executable).parent / "uv"
    program = shutil.which("uv")
    if environment_uv.exists():
        program = str(environment_uv)
    if not program:
        raise NotInstalled("uv is not installed: python -m pip install uv")
    variables = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    # uv does not accept an empty value.
    if not variables.get("UV_FIND_LINKS"):
        variables.pop("UV_FIND_LINKS", None)
    try:
        process = subprocess.run(
            [program, "-q", *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"not installed within {seconds:.0f} s") from None
    if process.returncode:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        raise NotInstalled(" ".join(lines[:2]) or f"uv ended with status {process.returncode}")


def interpreter(version: str) -> str:
    """An interpreter of a version, on the path or from pyenv; ours if the version is empty.

    Raises NotInstalled.
    """
    if not version:
        return sys.executable
    program = "import sys; print(*sys.version_info[:2], sep='.')"
    for python in _candidates(version):
        process = subprocess.run([python, "-c", program], capture_output=True)
        if process.returncode == 0 and process.stdout.decode().strip() == version:
            return python
    raise NotInstalled(f"needs Python {version}, which is not installed")


def _candidates(version: str) -> Iterator[str]:
    """Programs that may be an interpreter of a version."""
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in sorted((pyenv / "versions").glob(f"{version}*/bin/python")):
        yield str(python)
