"""The directory of a run: a new one for each, and one process at a time in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedstill.errors import ConfigError, RunBusy, RunExists
from fedstill.experiment.config.settings import Settings
from fedstill.files import is_leftover


def new_directory(settings: Settings, out: Path | None) -> Path:
    """A directory for a new run; raises RunExists if it holds anything already."""
    name = settings.named.method.name.rpartition("/")[2].replace(":", "-")
    base = Path("runs") / f"{name}-{settings.data.name.replace('/', '-')}-seed{settings.seed}"
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            refuse_used(out)
            return out
        base.parent.mkdir(parents=True, exist_ok=True)
        return next(p for i in range(1, 100_000) if _is_made(p := base.with_name(f"{base.name}-{i}")))
    except FileExistsError as error:
        raise RunExists(f"{out} is a file; choose another --out") from error
    except OSError as error:
        raise ConfigError(f"cannot make the run's directory {out or base}: {error.strerror}; choose --out") from error


def refuse_used(folder: Path) -> None:
    """Raise RunExists if a directory holds anything; what a killed process left of its first write does not count."""
    if any(p.name != "lock" and not is_leftover(p) for p in folder.iterdir()):
        raise RunExists(f"{folder} is not empty; choose another --out, or go on with `fedstill resume {folder}`")


def _is_made(folder: Path) -> bool:
    """Make a new directory; another process may be choosing one at the same time."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's directory against other processes; the lock ends with this process, however it ends."""
    if not folder.is_dir():
        raise RunExists(f"there is no directory {folder}")
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunBusy(f"{folder} is being written by another process; wait for it, or end it") from error
    except OSError as error:
        raise ConfigError(f"cannot write in {folder}: {error.strerror}; make it writable") from error
    try:
        yield
    finally:
        lock.release()
