"""The command line. Exit codes: 0 for success, 2 for invalid usage, 1 for a failure."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


# Hints for command lines that cannot be parsed: lists with spaces, config keys as options, missing
# arguments.


LISTS = frozenset(
    {
        "--at",
        "--by",
        "--cells",
        "--class-tasks",
        "--classes",
        "--devices",
        "--initial",
        "--methods",
        "--need",
        "--seeds",
        "--teachers",
        "--track",
    }
)
"""Options whose value is a list with commas."""

ONE_VALUE = {("rank", "--track")}
"""Options of ``LISTS`` that take a single value in some commands, by command and option."""

REPEATED = frozenset({"--set", "-s", "--grid", "--host", "--space", "--suite"})
"""Options that take one value, and may be repeated."""


WITH_SETTINGS: dict[str, tuple[str, ...]] = {
    "compare": ("--method", "--seed"),
    "explain": (),
    "run": (),
    "tune": ("--seed",),
}
"""Commands that take config keys with -s; for each, words that are more likely a misspelt option
than a config key.
"""

WITHOUT_VALUE = {("why", "--worst"): "5"}
"""The values of options that were written without one, by command and option."""


def with_values(tokens: Sequence[str]) -> list[str]:
    """The command line with values for options that were written without one.

    >>> with_values(["why", "--worst", "run"]), with_values(["why", "run", "--worst", "3"])
    (['why', '--worst=5', 'run'], ['why', 'run', '--worst', '3'])
    """
    result = list(tokens)
    for position, (token, following) in enumerate(pairwise([*tokens, ""])):
        value = WITHOUT_VALUE.get((tokens[0], token))
        if value is not None and not following.isdecimal():
            result[position] = f"{token}={value}"
    return result


WITHOUT_SETTINGS = {
    "demo": "the settings of demo are fixed; to choose them, use fedstill compare with a config",
    "rank": "the settings of the ranking are fixed; fedstill rank map --grid varies them, and "
    "fedstill compare takes -s",
    "resume": "a run continues with the settings in its config.toml; to change them, start a new "
    "run with fedstill run",
}
"""The remedy for -s in a command that takes no config keys, by command."""

_A_RUN = ("a run's directory", "runs/fedavg-digits-seed0-1")

REQUIRED_ARGUMENTS = {
    "run": ("a config", "my.toml"),
    "resume": _A_RUN,
    "export": _A_RUN,
    "query": _A_RUN,
    "unlearn": _A_RUN,
    "why": _A_RUN,
    "pack": ("a directory that contains runs", "runs"),
    "unpack": ("a pack", "my.runs.tar.xz"),
}
"""The required argument of a command, and an example."""


def empty_value(tokens: Sequence[str]) -> str:
    """The error message about the first empty word, such as an unset shell variable.

    >>> empty_value(["run", "my.toml", "--out", ""]), empty_value(["run", "my.toml", "--out="])
    ('--out has an empty value; give one, or leave it out', '--out has an empty value; give one, or leave it out')
    >>> empty_value(["run", "my.toml", "-s", "data.name="])
    ''
    """  # noqa: E501
    for previous, token in pairwise(["", *tokens]):
        has_empty_value = token.startswith("--") and token.find("=") == len(token) - 1
        if token and not has_empty_value:
            continue
        option = (token or previous).removesuffix("=")
        if option.startswith("-"):
            return f"{option} has an empty value; give one, or leave it out"
        return "an argument is empty; is a shell variable unset?"
    return ""


def option_as_key(tokens: Sequence[str], option: str) -> str:
    """The remedy for an unknown option that is a config key; empty for any other option.

    >>> option_as_key(["run", "my.toml", "--seed", "3"], "--seed")
    '--seed is a key of the config, not an option; write -s seed=3'
    """
    if not tokens:
        return ""
    if option in ("-s", "--set"):
        return WITHOUT_SETTINGS.get(tokens[0], "")
    if tokens[0] not in WITH_SETTINGS or option in WITH_SETTINGS[tokens[0]]:
        return ""
    from fedstill.config.unknown_keys import key_for
    from fedstill.core.files import in_shell

    key = key_for(option.lstrip("-").replace("-", "_"))
    if not key:
        return ""
    groups = _words_by_option(tokens)
    words = (group.words[0] for group in groups if group.option == option and group.words)
    value = in_shell(next(words, "VALUE"))
    return f"{option} is a key of the config, not an option; write -s {key}={value}"


def missing_argument(tokens: Sequence[str]) -> str:
    """The error message for a command without its required argument, with an example.

    >>> missing_argument(["run"]), missing_argument(["run", "-q"]), missing_argument(["list"])
    ('run needs a config, e.g. fedstill run my.toml', 'run needs a config, e.g. fedstill run my.toml', '')
    """  # noqa: E501
    if not tokens or tokens[0] not in REQUIRED_ARGUMENTS:
        return ""
    has_argument = any(group.words and not group.option for group in _words_by_option(tokens[1:]))
    if has_argument:
        return ""
    argument, example = REQUIRED_ARGUMENTS[tokens[0]]
    return f"{tokens[0]} needs {argument}, e.g. fedstill {tokens[0]} {example}"


def spaced_list(tokens: Sequence[str]) -> str:
    """The remedy for the first list whose parts are separated by spaces instead of commas.

    >>> spaced_list(["compare", "--methods", "fedavg", "fedntd"])
    'a list is written with commas: --methods fedavg,fedntd'
    >>> spaced_list(["compare", "--methods", "fedavg", "my.toml"])
    ''
    """
    return _corrected(tokens, LISTS, _is_part)


def unused_words(tokens: Sequence[str]) -> str:
    """The remedy for words that the command cannot use: overrides without -s, lists with spaces,
    and options to repeat.

    >>> unused_words(["run", "my.toml", "plan.lr=0.1"])
    'to override a value of the config, write -s before it: -s plan.lr=0.1'
    """
    arguments = next((group.words for group in _words_by_option(tokens) if not group.option), [])
    settings = [f"-s {word}" for word in _assignments(arguments) if "=" in word]
    if settings:
        return f"to override a value of the config, write -s before it: {' '.join(settings)}"
    return _corrected(tokens, LISTS | REPEATED, lambda _: True)


def _corrected(
    tokens: Sequence[str], options: frozenset[str], is_part: Callable[[str], bool]
) -> str:
    """The remedy for the first of some options whose values are separated by spaces."""
    for group in _words_by_option(tokens):
        if group.option not in options or (tokens[0], group.option) in ONE_VALUE:
            continue
        parts = group.words[:1] + list(filter(is_part, group.words[1:]))
        if len(parts) < 2:
            continue
        option = group.option
        if option in REPEATED:
            parts = _assignments(parts)
        with_commas = ",".join(filter(None, (part.strip(",") for part in parts)))
        if option == "--grid" and not any("=" in part for part in parts[1:]):
            return f"the values of a key are written with commas: --grid {with_commas}"
        if option in REPEATED:
            repeated = " ".join(f"{option} {part}" for part in parts)
            return f"each value has its own {option}, without blanks: {repeated}"
        return f"a list is written with commas: {option} {with_commas}"
    return ""


def _assignments(words: Sequence[str]) -> list[str]:
    """The words without blanks around the sign =.

    >>> _assignments(["plan.lr", "=", "0.1", "seed=2"])
    ['plan.lr=0.1', 'seed=2']
    """
    return re.sub(" ?= ?", "=", " ".join(words)).split(" ")


@dataclass
class _OptionWords:
    """An option and the words after it, up to the next option; the first has no option."""

    option: str
    words: list[str]


def _words_by_option(tokens: Sequence[str]) -> list[_OptionWords]:
    """The words of a command line by option."""
    groups = [_OptionWords("", [])]
    for token in tokens:
        is_negative_number = token.lstrip("-")[:1].isdigit()
        if not token.startswith("-") or is_negative_number:
            groups[-1].words.append(token)
            continue
        option, equals, value = token.partition("=")
        if token.startswith("--") and equals:
            groups.append(_OptionWords(option, [value]))
        else:
            groups.append(_OptionWords(token, []))
    return groups


def _is_part(word: str) -> bool:
    """Whether a later word is more likely a part of a list than a config or a directory."""
    if ".py" in word:
        return True
    return not (word.endswith(".toml") or "/" in word or Path(word).exists())
