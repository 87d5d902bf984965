"""What to write instead of a command line that cannot be read: spaced lists, keys as options,
missing arguments.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Callable, Iterator, Sequence
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
    """What a codec prints in the place of what it cannot encode, and where it goes on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(NEAR.get(c, "?") for c in error.object[error.start : error.end]), error.end


LISTS = frozenset(
    {
        "--at",
        "--by",
        "--cells",
        "--class-tasks",
        "--classes",
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
    for before, token in zip(["", *tokens], tokens, strict=False):
        if not token or (token.startswith("--") and token.find("=") == len(token) - 1):
            what = (token or before).removesuffix("=")
            return (
                f"{what} has an empty value; give one, or leave it out"
                if what.startswith("-")
                else "a word is empty"
            )
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

    if not (key := key_for(option.lstrip("-").replace("-", "_"))):
        return ""
    values = next((words for said, words in _values(tokens) if said == option), [])
    value = in_shell(values[0]) if values else "VALUE"
    return f"{option} is a key of the config, not an option; write -s {key}={value}"


def first_argument(tokens: Sequence[str]) -> str:
    """An example of a command that was typed without what it is for.

    >>> first_argument(["run"]), first_argument(["run", "-q"]), first_argument(["list"])
    ('run needs a config, e.g. fedstill run my.toml', 'run needs a config, e.g. fedstill run my.toml', '')
    """  # noqa: E501
    if (
        not tokens
        or tokens[0] not in NEEDS
        or any(words and not option for option, words in _values(tokens[1:]))
    ):
        return ""
    what, example = NEEDS[tokens[0]]
    return f"{tokens[0]} needs {what}, e.g. fedstill {tokens[0]} {example}"


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
    alone = next((words for option, words in _values(tokens) if not option), [])
    if settings := [f"-s {word}" for word in alone if "=" in word]:
        return f"to override a value of the config, write -s before it: {' '.join(settings)}"
    return _corrected(tokens, LISTS | REPEATED, lambda _: True)


def _corrected(
    tokens: Sequence[str], options: frozenset[str], is_part: Callable[[str], bool]
) -> str:
    for option, words in _values(tokens):
        parts = [words[0], *filter(is_part, words[1:])] if words else []
        if option in options and len(parts) > 1:
            if option == "--grid" and not any("=" in part for part in parts[1:]):
                return (
                    "the values of a key are written with commas: --grid "
                    f"{','.join(p.strip(',') for p in parts)}"
                )
            if option in REPEATED:
                return (
                    f"each value has its own {option}: "
                    f"{' '.join(f'{option} {part}' for part in parts)}"
                )
            return (
                f"a list is written with commas: {option} "
                f"{','.join(part.strip(',') for part in parts)}"
            )
    return ""


def _values(tokens: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option, with the words up to the next one."""
    option, words = "", list[str]()
    for token in tokens:
        if token.startswith("-") and not token.lstrip("-")[:1].isdigit():
            yield option, words
            option, equals, value = (
                token.partition("=") if token.startswith("--") else (token, "", "")
            )
            words = [value] if equals else []
        else:
            words.append(token)
    yield option, words


def _is_part(word: str) -> bool:
    """Whether a word after the first of a list is more likely a part of it than a config or a
    directory.
    """
    if ".py" in word:
        return True
    return not (word.endswith(".toml") or "/" in word or Path(word).exists())
