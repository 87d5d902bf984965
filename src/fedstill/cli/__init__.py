"""The command line. Exit code 0: done; 2: it cannot be done as it was written; 1: it failed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from fedstill import manifest
from fedstill.cli.app import app, say
from fedstill.cli.spelling import (
    as_key,
    first_argument,
    no_value,
    print_what_is_near,
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
        "Run several methods, settings and seeds side by side, print one table, and write a "
        "report.",
        "fedstill.cli.comparisons:compare_command",
    ),
    Part(
        "demo",
        "Train FedAvg, FedProx and FedNTD on handwritten digits, unevenly spread over 20 clients, "
        "and show which forgets.",
        "fedstill.cli.comparisons:demo",
    ),
    Part(
        "explain",
        "Check a config as a run would; show every value that counts, its origin, a run's "
        "arithmetic, the data's split.",
        "fedstill.cli.explain:explain",
    ),
    Part(
        "forgetting",
        "What a model forgot over tasks, by everybody's definition, and how these differ; any "
        "matrix or run will do.",
        "fedstill.cli.comparisons:forgetting_command",
    ),
    Part(
        "list",
        "Show what there is: methods, datasets, partitions, models, topologies, measures, streams.",
        "fedstill.cli.run:list_",
    ),
    Part(
        "pack",
        "Write configs, journals, splits and summaries of all runs below a directory to one file, "
        "DIRECTORY.runs.tar.xz.",
        "fedstill.cli.comparisons:pack_command",
    ),
    Part(
        "report",
        "Write one HTML page from runs: curves, class-wise heat maps, splits, settings that "
        "differ, cost.",
        "fedstill.cli.comparisons:report",
    ),
    Part(
        "resume",
        "Go on with a run that was stopped or killed, with the same bits as an uninterrupted run.",
        "fedstill.cli.run:resume_command",
    ),
    Part("run", "Run one experiment to its end.", "fedstill.cli.run:run_command"),
    Part(
        "tune",
        "Look for good values of fields by trials (Optuna's TPE); each trial is one run per seed.",
        "fedstill.cli.comparisons:tune_command",
    ),
    Part(
        "unpack",
        "Restore the configs, journals, splits and summaries that `fedstill pack` wrote to a file; "
        "it has no models.",
        "fedstill.cli.comparisons:unpack_command",
    ),
)
"""The commands that do not belong to an outer package."""

_commands = {part.name: part for part in (*COMMANDS, *manifest.commands())}

for _part in _commands.values():
    app.command(_part.target, name=_part.name, help=_part.help)


def _import_command(tokens: list[str]) -> None:
    """Import the command that a command line names, so that its page shows its whole docstring.

    cyclopts would show the line of the list of commands there.
    """
    if not tokens or tokens[0] not in _commands:
        return
    part = _commands[tokens[0]]
    if not isinstance(part.load(), App):
        app[part.name].help = None


def main() -> None:
    """Run the command in ``sys.argv`` and exit; a second Ctrl-C ends at once, whatever clients are
    training.
    """
    if sys.platform == "win32":
        sys.exit(
            say(
                "this is Windows, and fedstill runs on Linux and macOS; run it in WSL, which is "
                "Linux",
                2,
            )
        )
    print_what_is_near()
    signal.signal(signal.SIGINT, _interrupted)
    try:
        sys.exit(call(sys.argv[1:]))
    except KeyboardInterrupt:
        _end_at_once()


def _interrupted(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; but end at once where a module is being imported, which would make
    another error of it.

    NumPy and torch are half imported then, and what they raise, or abort with, says nothing of the
    interrupt.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end_at_once() -> None:
    sys.stdout.flush()
    os.write(2, b"fedstill: ended at once; finished work is kept\n")
    os._exit(1)


def _at_home(given: Any) -> Any:
    """A value of a command; a path as it was meant where a shell leaves ``~`` as it is, as in
    --out=~/runs.
    """
    if isinstance(given, tuple):
        return tuple(map(_at_home, given))
    if not isinstance(given, Path):
        return given
    from fedstill.core.files import named_path

    return named_path(given)


def call(tokens: list[str]) -> int:
    """Run one command; its exit code. What is wrong is one line on the standard error."""
    try:
        if hint := no_value(tokens) or spaced_list(tokens):
            return say(hint, 2)
        tokens = with_values(tokens)
        _import_command(tokens)
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        result = command(
            *map(_at_home, bound.args), **{k: _at_home(v) for k, v in bound.kwargs.items()}
        )
    except UnusedCliTokensError as error:
        return say(
            unused_words(tokens)
            or f"nothing takes {' '.join(map(repr, error.unused_tokens or ()))} here",
            2,
        )
    except UnknownOptionError as error:
        return say(as_key(tokens, error.token.keyword or error.token.value) or str(error), 2)
    except MissingArgumentError as error:
        return say(first_argument(tokens) or str(error), 2)
    except CycloptsError as error:
        return say(str(error), 2)
    except FedstillError as error:
        return say(error.in_shell, error.exit_code)
    except Interrupted as stopped:
        return say(str(stopped), 1)
    except BrokenPipeError:
        return 1
    except (
        OSError
    ) as error:  # of a path that was named: a folder one may not enter, a name that is too long
        if not (error.filename and error.strerror):
            raise
        return say(
            f"cannot use {cut_reason(str(error.filename))}: {error.strerror}; name another path", 2
        )
    return result if isinstance(result, int) else 0
