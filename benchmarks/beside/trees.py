"""The two trees of a comparison: the working tree, and a commit in a git worktree of its own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class NoSuchCommit(Exception):
    """Git does not know the commit; the message is git's."""


@dataclass(frozen=True)
class Tree:
    """A checkout of the project.

    ``commit`` is the full hash. ``changed``: tracked files differ from that commit.
    """

    name: str
    root: Path
    commit: str
    changed: bool = False

    @property
    def source(self) -> Path:
        """The folder that goes on PYTHONPATH."""
        return self.root / "src"


def working_tree() -> Tree:
    """Return the tree that this file belongs to."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return Tree("working tree", ROOT, _commit("HEAD"), changed=bool(changes))


@contextmanager
def checked_out(revision: str) -> Iterator[Tree]:
    """Check a commit out into a temporary git worktree, and remove that at the end.

    Raises NoSuchCommit.
    """
    commit = _commit(revision)
    with tempfile.TemporaryDirectory(prefix="fedstill-beside-") as folder:
        root = Path(folder, "tree")
        _git("worktree", "add", "--quiet", "--detach", str(root), commit)
        try:
            yield Tree(revision, root, commit)
        finally:
            _git("worktree", "remove", "--force", str(root))


def _commit(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--end-of-options", revision + "^{commit}")
    except subprocess.CalledProcessError as error:
        raise NoSuchCommit(f"{revision}: {error.stderr.strip()}") from error


def _git(*arguments: str) -> str:
    """Return the output of a git command."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.strip()
