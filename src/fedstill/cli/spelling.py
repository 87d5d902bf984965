"""Hints for command lines that cannot be parsed: lists with spaces, config keys as options, missing
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

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
    settings = [f"-s {word}" for word in arguments if "=" in word]
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
