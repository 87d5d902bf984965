"""What to write instead of words that the command line does not take: lists with spaces in place of commas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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


def no_value(tokens: Sequence[str]) -> str:
    """A line on the first word that is empty, as a variable of the shell is that nobody set.

    >>> no_value(["run", "my.toml", "--out", ""]), no_value(["run", "my.toml", "--out="])
    ('--out has an empty value; give one, or leave it out', '--out has an empty value; give one, or leave it out')
    >>> no_value(["run", "my.toml", "-s", "data.name="])
    ''
    """
    for before, token in zip(["", *tokens], tokens, strict=False):
        if not token or (token.startswith("--") and token.find("=") == len(token) - 1):
            what = (token or before).removesuffix("=")
            return (
                f"{what} has an empty value; give one, or leave it out" if what.startswith("-") else "a word is empty"
            )
    return ""


def spaced_list(tokens: Sequence[str]) -> str:
    """A line on the first list that has spaces in place of commas, so that its parts look like other arguments.

    >>> spaced_list(["compare", "--methods", "fedavg", "fedntd"])
    'a list is written with commas: --methods fedavg,fedntd'
    >>> spaced_list(["compare", "--methods", "fedavg", "my.toml"])
    ''
    """
    return _corrected(tokens, LISTS, _is_part)


def unused_words(tokens: Sequence[str]) -> str:
    """The same where the command had no use for some words, whatever they look like; also of options to repeat.

    >>> unused_words(["run", "my.toml", "plan.lr=0.1"])
    "a value over the config's needs -s before it: -s plan.lr=0.1"
    """
    alone = next((words for option, words in _values(tokens) if not option), [])
    if settings := [f"-s {word}" for word in alone if "=" in word]:
        return f"a value over the config's needs -s before it: {' '.join(settings)}"
    return _corrected(tokens, LISTS | REPEATED, lambda _: True)


def _corrected(tokens: Sequence[str], options: frozenset[str], is_part: Callable[[str], bool]) -> str:
    for option, words in _values(tokens):
        parts = [words[0], *filter(is_part, words[1:])] if words else []
        if option in options and len(parts) > 1:
            if option == "--grid" and not any("=" in part for part in parts[1:]):
                return f"the values of a key are written with commas: --grid {','.join(p.strip(',') for p in parts)}"
            if option in REPEATED:
                return f"each value has its own {option}: {' '.join(f'{option} {part}' for part in parts)}"
            return f"a list is written with commas: {option} {','.join(part.strip(',') for part in parts)}"
    return ""


def _values(tokens: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option, with the words up to the next one."""
    option, words = "", list[str]()
    for token in tokens:
        if token.startswith("-") and not token.lstrip("-")[:1].isdigit():
            yield option, words
            option, equals, value = token.partition("=") if token.startswith("--") else (token, "", "")
            words = [value] if equals else []
        else:
            words.append(token)
    yield option, words


def _is_part(word: str) -> bool:
    """Whether a word after the first of a list is more likely a part of it than a config or a directory."""
    if ".py" in word:
        return True
    return not (word.endswith(".toml") or "/" in word or Path(word).exists())
