"""Runs the tests and commands of a page that adds a package to fedstill.

A program for a child process, because fedstill reads the manifest's config tables when it is
imported: ``python with_page_package.py FOLDER [COMMAND ...]``. The folder holds the files that
the page shows; ``src/fedstill/manifest.py`` there is the package's entry alone. Each command is one
argument.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedstill
from fedstill import manifest


def add_package(source: Path) -> None:
    """Make a package in another folder a package of fedstill, as its entry says."""
    entry = (source / "manifest.py").read_text(encoding="utf-8")
    space = dict(vars(manifest))
    exec(compile(f"package = {entry}", "manifest.py", "exec"), space)
    package = space["package"]
    fedstill.__path__.append(str(source))
    manifest.PACKAGES = (*manifest.PACKAGES, package)
    manifest.installed.cache_clear()
    assert package in manifest.installed()


def main(folder: Path, commands: Sequence[str]) -> int:
    """Run the page's tests, then the commands; the first exit code that is not 0."""
    add_package(folder / "src" / "fedstill")
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}"]
    code = int(pytest.main([*options, str(folder / "tests")]))
    for command in commands:
        from fedstill.cli import call  # after the package was added

        code = code or call(shlex.split(command))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
