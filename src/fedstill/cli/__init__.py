"""The command line. Exit codes: 0 for success, 2 for invalid usage, 1 for a failure."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from fedstill import manifest
from fedstill.cli.app import app, first_imports, replace_unprintable_characters, say
from fedstill.cli.spelling import (
    empty_value,
    missing_argument,
    option_as_key,
    spaced_list,
    unused_words,
    with_values,
)
from fedstill.core.errors import FedstillError, Interrupted, cut_reason
from fedstill.manifest import Part

__all__ = ["app", "call", "main"]

COMMANDS = (
    Part(
        "compare",
        "Run several methods, settings and seeds in parallel, print a table, and write a report.",
        "fedstill.cli.comparisons:compare_command",
    ),
    Part(
        "demo",
        "Train FedAvg, FedProx and FedNTD on handwritten digits, unevenly distributed over 20 "
        "clients, and compare their forgetting.",
        "fedstill.cli.comparisons:demo_command",
    ),
    Part(
        "explain",
        "Check a config before a run: show every value and its origin, the cost, and the data of "
        "each client.",
        "fedstill.cli.run:explain_command",
    ),
    Part(
        "forgetting",
        "Compute forgetting from an accuracy matrix or a run with tasks, by the definitions of "
        "different papers.",
        "fedstill.cli.comparisons:forgetting_command",
    ),
    Part(
        "list",
        "List all methods, datasets, partitions, models, topologies, measures and streams.",
        "fedstill.cli.run:list_command",
    ),
    Part(
        "pack",
        "Pack the configs, journals, splits and summaries of all runs in a directory into one "
        "file, DIRECTORY.runs.tar.xz.",
        "fedstill.cli.comparisons:pack_command",
    ),
    Part(
        "report",
        "Write an HTML page about runs: curves, heat maps by class, splits, different settings, "
        "cost.",
        "fedstill.cli.comparisons:report_command",
    ),
    Part(
        "resume",
        "Continue a run that was stopped or killed; the result has the same bits as that of an "
        "uninterrupted run.",
        "fedstill.cli.run:resume_command",
    ),
    Part("run", "Run one experiment.", "fedstill.cli.run:run_command"),
    Part(
        "tune",
        "Search for good values of hyper-parameters with Optuna's TPE; each trial runs all seeds.",
        "fedstill.cli.comparisons:tune_command",
    ),
    Part(
        "unpack",
        "Unpack the configs, journals, splits and summaries that `fedstill pack` packed. Packs "
        "contain no models.",
        "fedstill.cli.comparisons:unpack_command",
    ),
)
"""The commands that do not belong to an outer package."""

_commands = {part.name: part for part in (*COMMANDS, *manifest.commands())}

for _part in _commands.values():
    app.command(_part.target, name=_part.name, help=_part.help)


def _import_command(tokens: list[str]) -> None:
    """Import the command that a command line names, so that ``--help`` shows its full docstring.

    Otherwise, cyclopts would show the one-line summary from the list of commands.
    """
    if not tokens or tokens[0] not in _commands:
        return
    part = _commands[tokens[0]]
    if not isinstance(part.load(), App):
        app[part.name].help = None


def main() -> None:
    """Run the command in ``sys.argv`` and exit. A second Ctrl-C ends the process at once."""
    if sys.platform == "win32":
        sys.exit(
            say(
                "this is Windows, and fedstill runs on Linux and macOS; run it in WSL, which is "
                "Linux",
                2,
            )
        )
    replace_unprintable_characters()
    signal.signal(signal.SIGINT, _interrupted)
    try:
        status = call(sys.argv[1:])
    except KeyboardInterrupt:
        _end_at_once()
    # At its end, Python searches all objects for circular references, and torch has created many.
    gc.freeze()
    sys.exit(status)


def _interrupted(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during the import of a module, end the process at once instead.

    An interrupted import of NumPy or torch raises other errors or aborts, and the message would not
    mention the interrupt.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end_at_once() -> NoReturn:
    sys.stdout.flush()
    os.write(2, b"fedstill: ended at once; finished stages are kept\n")
    os._exit(1)


def _with_home(value: Any) -> Any:
    """The value of an option with ``~`` expanded in paths. A shell does not expand it in
    ``--out=~/runs``.
    """
    if isinstance(value, tuple):
        return tuple(map(_with_home, value))
    if not isinstance(value, Path):
        return value
    from fedstill.core.files import named_path  # --help needs no files, and starts without them

    return named_path(value)


def call(tokens: list[str]) -> int:
    """Run one command and return its exit code. An error is one line on the standard error."""
    complete_tokens = with_values(tokens)
    try:
        hint = empty_value(tokens)
        if hint:
            return say(hint, 2)
        return _run(complete_tokens)
    except CycloptsError as error:
        return say(_usage_hint(complete_tokens, error), 2)
    except FedstillError as error:
        return say(error.in_shell, error.exit_code)
    except Interrupted as stopped:
        return say(str(stopped), 1)
    except BrokenPipeError:
        return 1
    except OSError as error:
        # A path on the command line: a folder without permission, or a name that is too long.
        if not (error.filename and error.strerror):
            raise
        return say(
            f"cannot use {cut_reason(str(error.filename))}: {error.strerror}; choose another path",
            2,
        )


def _run(tokens: list[str]) -> int:
    """Run the command of a command line and return its exit code."""
    with first_imports():
        _import_command(tokens)
    command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    arguments = list(map(_with_home, bound.args))
    keywords = {name: _with_home(value) for name, value in bound.kwargs.items()}
    if _has_absent_path(arguments):
        # The command would refuse the path, but the word may be a part of the list before it.
        hint = spaced_list(tokens)
        if hint:
            return say(hint, 2)
    result = command(*arguments, **keywords)
    if isinstance(result, int):
        return result
    return 0


def _has_absent_path(arguments: Sequence[Any]) -> bool:
    """Whether an argument is a path of nothing, such as a config that does not exist."""
    return any(isinstance(value, Path) and not value.exists() for value in arguments)


def _usage_hint(tokens: list[str], error: CycloptsError) -> str:
    """The error message for a command line that cyclopts cannot parse, with a remedy."""
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(map(repr, error.unused_tokens or ()))
        hint = spaced_list(tokens) or unused_words(tokens)
        return hint or f"unexpected argument {words}; `--help` lists the options"
    if isinstance(error, UnknownOptionError):
        return option_as_key(tokens, error.token.keyword or error.token.value) or str(error)
    if isinstance(error, MissingArgumentError):
        return missing_argument(tokens) or str(error)
    return str(error)
