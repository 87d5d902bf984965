"""The command-line app, the options and names that commands share, and printing to the terminal."""

from __future__ import annotations

import codecs
import gc
import io
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import App, Parameter, Token, validators

from fedstill.core.errors import ConfigError, FedstillError, NoRun, UnknownName
from fedstill.version import VERSION

if TYPE_CHECKING:
    from fedstill.config.experiment import Experiment

app = App(
    name="fedstill",
    help="Federated learning that does not forget: train, measure and compare methods when "
    "clients' data differ.",
    version=VERSION,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


def _comma_separated(type_: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
    """``1,2,3`` as a tuple. Each part is converted separately, so that an error names the part."""
    part_type = get_args(type_)[0]
    text = ",".join(token.value for token in tokens)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{tokens[0].keyword}: {text!r} has no values; give one, or leave it out")
    for part in parts:
        if part_type is int and re.fullmatch(r"[+-]?\d{1,18}", part) is None:
            raise ConfigError(
                f"{tokens[0].keyword}: {part!r} is not a whole number; write 1,2,3, for example"
            )
    return tuple(part_type(part) for part in parts)


def _check_distinct_seeds(_: Any, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise ConfigError(f"--seeds names {seed} more than once; name each seed once")


def _one_kind(type_: Any, tokens: Sequence[Token]) -> str:
    """A kind of registered entries, in the singular or the plural; raises UnknownName otherwise."""
    kinds = get_args(type_)
    (word,) = (token.value for token in tokens)
    plurals = {_plural(kind): kind for kind in kinds}
    if word not in kinds and word not in plurals:
        raise UnknownName("kind", word, kinds)
    return str(plurals.get(word, word))


def _plural(kind: str) -> str:
    if kind.endswith("y"):
        return f"{kind.removesuffix('y')}ies"
    return f"{kind}s"


_LIST = Parameter(converter=_comma_separated, n_tokens=1, negative="", show_default=False)
_REPEATED = Parameter(negative="", consume_multiple=False, show_default=False)
_FLAG = Parameter(negative="", show_default=False)

Names = Annotated[tuple[str, ...], _LIST, Parameter(metavar="A,B,...")]
Seeds = Annotated[
    tuple[int, ...], _LIST, Parameter(metavar="1,2,...", validator=_check_distinct_seeds)
]
Rounds = Annotated[tuple[int, ...], _LIST, Parameter(metavar="50,100,...")]
Numbers = Annotated[tuple[float, ...], _LIST, Parameter(metavar="10,10,...")]
ClassTasks = Annotated[tuple[int, ...], _LIST, Parameter(metavar="0,0,1,...")]
Grid = Annotated[tuple[str, ...], _REPEATED, Parameter(metavar="KEY=A,B,...")]
Space = Annotated[tuple[str, ...], _REPEATED, Parameter(metavar="KEY=LOW..HIGH")]
Settings = Annotated[
    tuple[str, ...], _REPEATED, Parameter(name=["--set", "-s"], metavar="KEY=VALUE")
]
Devices = Annotated[tuple[int, ...], _LIST, Parameter(metavar="0,1,...")]
Jobs = Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=10_000))]
Kind = Annotated[
    Literal["method", "dataset", "partition", "model", "topology", "measure", "stream"],
    Parameter(converter=_one_kind),
]
Engine = Literal["serial", "pooled", "vectorised", "auto", "flower"]
"""The values of the config key ``engine``. They are repeated here to avoid importing torch; a test
compares both.
"""
Flag = Annotated[bool, _FLAG]
Quiet = Annotated[bool, _FLAG, Parameter(name=["--quiet", "-q"])]


def experiment_of(
    config: Path | None, set_: Sequence[str], engine: str | None, federation: Path | None
) -> Experiment:
    """The experiment of a command line: a config with overrides, an engine and a federation."""
    from fedstill.config.experiment import load

    experiment = load(config, tuple(set_))
    if engine is not None:
        experiment = experiment.with_values({"engine": engine}, "--engine")
    if federation is not None:
        place = {"flower.federation": str(federation.resolve())}
        experiment = experiment.with_values(place, "--federation")
    return experiment


@contextmanager
def first_imports() -> Iterator[None]:
    """Exclude what imports create from Python's search for circular references.

    torch creates more lasting objects than a small run, and a single search visits all of them.
    Nothing changes where torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def tracebacks(is_shown: bool) -> Iterator[None]:
    """If ``is_shown``, print the traceback of an error and of its cause; then raise it again."""
    try:
        yield
    except (FedstillError, OSError) as error:
        if is_shown:
            traceback.print_exception(error)
        raise


def say(text: str, code: int) -> int:
    """Print one line on the standard error, and return the exit code."""
    from fedstill.core.files import neutral  # --help prints no error, and starts without it

    line = " ".join(text.split())
    print(f"fedstill: {neutral(line, 'terminal')}", file=sys.stderr)
    return code


# The classes and clients that a command line names.


def check_contains_run(folder: Path) -> None:
    """Raise NoRun if a path is not the directory of a run."""
    from fedstill.running.directory import hint_without_run
    from fedstill.running.journal import JOURNAL

    if not (folder / JOURNAL).is_file():
        raise NoRun(f"{folder} contains no run: {hint_without_run(folder)}")


def parse_class_numbers(folder: Path, texts: Sequence[str]) -> list[int]:
    """Convert what a user typed, names or numbers of classes of a run, to numbers of classes.

    Raises NoRun if ``folder`` contains no run, and UnknownName for a name that the run does not
    have.
    """
    return _parse_numbers("class", texts, _names_at_start(folder, "classes"))


def parse_client_numbers(folder: Path, texts: Sequence[str]) -> list[int]:
    """Convert what a user typed, names or numbers of clients of a run, to numbers of clients.

    Raises errors as ``parse_class_numbers``.
    """
    return _parse_numbers("client", texts, _names_at_start(folder, "client_names"))


def parse_client_number(folder: Path, text: str) -> int:
    """Convert what a user typed, the name or the number of a client of a run, to its number.

    Raises NoRun if ``folder`` contains no run, and UnknownName for a name that the run does not
    have.
    """
    return _parse_number("client", text, _names_at_start(folder, "client_names"))


def _names_at_start(folder: Path, key: str) -> list[str]:
    """The names in a field of a run's first event, or none if there is no such field."""
    from fedstill.core.fields import nfc
    from fedstill.running.journal import read_start

    check_contains_run(folder)
    return [nfc(str(name)) for name in read_start(folder).get(key, ())]


def _parse_numbers(kind: str, texts: Sequence[str], names: Sequence[str]) -> list[int]:
    return [_parse_number(kind, text, names) for text in _with_whole_names(texts, names)]


def _with_whole_names(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words of a list, which was split at commas; names that contain commas are whole again.

    >>> _with_whole_names(["Ulm", "South", "3"], ["Ulm", "Ulm, South"])
    ['Ulm, South', '3']
    """
    from fedstill.core.fields import nfc

    by_parts = {tuple(part.strip() for part in name.split(",")): name for name in names}
    remaining = list(map(nfc, words))
    whole = []
    while remaining:
        matches = [parts for parts in by_parts if tuple(remaining[: len(parts)]) == parts]
        longest = max(matches, key=len, default=(remaining[0],))
        whole.append(by_parts.get(longest, remaining[0]))
        remaining = remaining[len(longest) :]
    return whole


MOST_DIGITS = 18
"""The most digits of a client's or a class's number."""


def _parse_number(kind: str, text: str, names: Sequence[str]) -> int:
    """Convert one of ``names``, or a number, to a number; ``kind`` is for the error message.

    A name comes first, because names may be numbers: the numbers of a study's subjects.
    """
    from fedstill.core.fields import nfc

    name = nfc(text)
    if name in names:
        return names.index(name)
    if text.isdecimal() and len(text) <= MOST_DIGITS:
        return int(text)
    todo = ""
    if not names:
        todo = "the run has no names; give a number, from 0"
    raise UnknownName(kind, text, names, remedy=todo)


def number_or_name(number: int, names: Sequence[str]) -> str:
    """The text that a user types for a client or a class: its number, or its name if the number is
    the name of another.

    >>> number_or_name(1, ["a", "b"]), number_or_name(1, ["1", "3"])
    ('1', '3')
    """
    text = str(number)
    if text in names and number < len(names):
        return names[number]
    return text


# Replacements for characters that the encoding of the standard streams lacks. Latin-1, for example,
# lacks the en dash.


SIMILAR_CHARACTERS = {
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
"""A replacement of one character for each character of tables and drawings, so that columns stay
aligned.
"""

ERROR_HANDLER = "fedstill.near"
"""The name under which Python's codecs know ``_replacement``."""


def replace_unprintable_characters() -> None:
    """Make the standard output and error print a similar character, or ``?``, for a character that
    their encoding lacks.
    """
    codecs.register_error(ERROR_HANDLER, _replacement)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERROR_HANDLER)


def _replacement(error: UnicodeError) -> tuple[str, int]:
    """The replacement of characters that a codec cannot encode, and the position after them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(SIMILAR_CHARACTERS.get(character, "?") for character in characters), error.end
