"""Hints for command lines that cannot be read: lists with spaces, keys as options, missing
arguments.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# What the standard streams do with characters that their encoding lacks, as Latin-1 lacks the en
# dash.


NEAR = {
    "–": "-",
    "—": "-",
    "−": "-",
    "…": ".",
    "→": ">",
    "Δ": "d",
    "±": "~",
    "×": "x",
    "░": ".",
    "▒": ":",
    "▓": "+",
    "█": "#",
}
"""One character for each that tables and pictures have, so that columns stay where they are."""

NAME = "fedstill.near"


def print_what_is_near() -> None:
    """From now on, standard output and error print something near a character that their encoding
    lacks, or ``?``.
    """
    codecs.register_error(NAME, _near)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)


def _near(error: UnicodeError) -> tuple[str, int]:
    """The replacement of characters that a codec cannot encode, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(NEAR.get(character, "?") for character in characters), error.end


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

REPEATED = frozenset({"--set", "-s", "--grid", "--host"})
"""Options that have one value each, and may be repeated."""


WITH_SETTINGS: dict[str, tuple[str, ...]] = {
    "compare": ("--method", "--seed"),
    "explain": (),
    "run": (),
    "tune": ("--seed",),
}
"""Commands that take keys of a config with -s, and what is rather a slip for an option of
theirs.
"""

WITHOUT_VALUE = {("why", "--worst"): "5"}
"""Options that may stand alone, by command, and the value that they have then."""


def with_values(tokens: Sequence[str]) -> list[str]:
    """A command line in which options that may stand alone have their value.

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
    "demo": "demo has settings of its own; to choose them, use fedstill compare with a config",
    "rank": "the settings of the ranking are fixed; fedstill rank map --grid varies them, and "
    "fedstill compare takes -s",
    "resume": "a run goes on with the settings in its config.toml; for others, start a new run "
    "with fedstill run",
}
"""What to do where a command takes no keys of a config, by the command's first word."""

_A_RUN = ("a run's directory", "runs/fedavg-digits-seed0-1")

NEEDS = {
    "run": ("a config", "my.toml"),
    "resume": _A_RUN,
    "export": _A_RUN,
    "query": _A_RUN,
    "why": _A_RUN,
    "pack": ("a directory with runs below it", "runs"),
    "unpack": ("a pack", "my.runs.tar.xz"),
}
"""What a command is for that it cannot do without, and an example."""


def no_value(tokens: Sequence[str]) -> str:
    """A line on the first word that is empty, as a variable of the shell is that nobody set.

    >>> no_value(["run", "my.toml", "--out", ""]), no_value(["run", "my.toml", "--out="])
    ('--out has an empty value; give one, or leave it out', '--out has an empty value; give one, or leave it out')
    >>> no_value(["run", "my.toml", "-s", "data.name="])
    ''
    """  # noqa: E501
    for previous, token in pairwise(["", *tokens]):
        has_empty_value = token.startswith("--") and token.find("=") == len(token) - 1
        if token and not has_empty_value:
            continue
        option = (token or previous).removesuffix("=")
        if option.startswith("-"):
            return f"{option} has an empty value; give one, or leave it out"
        return "a word is empty"
    return ""


def as_key(tokens: Sequence[str], option: str) -> str:
    """What to write in the place of an option that is none, but a key of the config; empty if it is
    not.

    >>> as_key(["run", "my.toml", "--seed", "3"], "--seed")
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
    value = "VALUE"
    for group in _values(tokens):
        if group.option == option and group.words:
            value = in_shell(group.words[0])
            break
    return f"{option} is a key of the config, not an option; write -s {key}={value}"


def first_argument(tokens: Sequence[str]) -> str:
    """An example of a command that was typed without what it is for.

    >>> first_argument(["run"]), first_argument(["run", "-q"]), first_argument(["list"])
    ('run needs a config, e.g. fedstill run my.toml', 'run needs a config, e.g. fedstill run my.toml', '')
    """  # noqa: E501
    if not tokens or tokens[0] not in NEEDS:
        return ""
    has_argument = any(group.words and not group.option for group in _values(tokens[1:]))
    if has_argument:
        return ""
    argument, example = NEEDS[tokens[0]]
    return f"{tokens[0]} needs {argument}, e.g. fedstill {tokens[0]} {example}"


def spaced_list(tokens: Sequence[str]) -> str:
    """A line on the first list that has spaces in place of commas, so that its parts look like
    other arguments.

    >>> spaced_list(["compare", "--methods", "fedavg", "fedntd"])
    'a list is written with commas: --methods fedavg,fedntd'
    >>> spaced_list(["compare", "--methods", "fedavg", "my.toml"])
    ''
    """
    return _corrected(tokens, LISTS, _is_part)


def unused_words(tokens: Sequence[str]) -> str:
    """The same where the command had no use for some words, whatever they look like; also of
    options to repeat.

    >>> unused_words(["run", "my.toml", "plan.lr=0.1"])
    'to override a value of the config, write -s before it: -s plan.lr=0.1'
    """
    arguments = next((group.words for group in _values(tokens) if not group.option), [])
    settings = [f"-s {word}" for word in arguments if "=" in word]
    if settings:
        return f"to override a value of the config, write -s before it: {' '.join(settings)}"
    return _corrected(tokens, LISTS | REPEATED, lambda _: True)


def _corrected(
    tokens: Sequence[str], options: frozenset[str], is_part: Callable[[str], bool]
) -> str:
    """A line on the first of some options whose values are separated by spaces."""
    for group in _values(tokens):
        if group.option not in options:
            continue
        parts = group.words[:1] + list(filter(is_part, group.words[1:]))
        if len(parts) < 2:
            continue
        option = group.option
        with_commas = ",".join(part.strip(",") for part in parts)
        if option == "--grid" and not any("=" in part for part in parts[1:]):
            return f"the values of a key are written with commas: --grid {with_commas}"
        if option in REPEATED:
            repeated = " ".join(f"{option} {part}" for part in parts)
            return f"each value has its own {option}: {repeated}"
        return f"a list is written with commas: {option} {with_commas}"
    return ""


@dataclass
class _OptionWords:
    """An option and the words after it, up to the next option; the first has no option."""

    option: str
    words: list[str]


def _values(tokens: Sequence[str]) -> list[_OptionWords]:
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
    """Whether a word after the first of a list is more likely a part of it than a config or a
    directory.
    """
    if ".py" in word:
        return True
    return not (word.endswith(".toml") or "/" in word or Path(word).exists())
