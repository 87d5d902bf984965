"""The errors of the library. A message names the problem, its place and the value, and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

TRACEBACK = "; see the traceback with --debug"
"""The end of a message that a command shows without a traceback."""

USER = "fedstill_user_"
"""The prefix of the modules that are made from users' files (``core.user_modules``)."""

Topic = Literal[
    "accept",
    "app",
    "budget",
    "classes",
    "columns",
    "config",
    "data",
    "files",
    "imports",
    "limit",
    "measure",
    "noise",
    "public",
    "range",
    "repeated",
    "request",
    "shape",
    "signature",
    "start",
    "state",
    "stage",
    "sum",
    "tasks",
    "tokenizer",
    "version",
    "work",
]
"""What an error at a site is about, for the server: a key of ``flower.messages.PUBLIC_REASONS``."""


class FedstillError(Exception):
    """The base of all errors that fedstill raises on purpose. The text is one line, with a remedy.

    ``in_shell``: the text for the command line, if ``text`` mentions Python arguments. ``topic``:
    what the server learns if the error ends a request at a site.
    """

    exit_code = 1
    topic: Topic = "work"

    def __init__(self, text: str = "", in_shell: str = "") -> None:
        super().__init__(text)
        self.in_shell = in_shell or text


class ConfigError(FedstillError):
    """An invalid configuration, command line or argument."""

    exit_code = 2
    topic: Topic = "config"


class UntrustedCode(ConfigError):
    """A file from somebody else names code that this user has not trusted on this machine."""


class UnknownName(ConfigError):
    """A method, model, dataset, partition, topology, measure or key that does not exist.

    ``names``: the names that exist. ``place``: where the name was used. ``remedy``: what to write
    instead; by default, the most similar of the names. ``advice`` has the remedy of the message.
    """

    def __init__(
        self, kind: str, name: str, names: Iterable[str], place: str = "", remedy: str = ""
    ) -> None:
        self.name = name
        self.advice = remedy or suggestion(name, names)
        if len(name) > 80:
            name = name[:79] + "…"
        text = f"unknown {kind} {name!r}; {self.advice}"
        if place:
            text = f"{place}: {text}"
        super().__init__(text)


class RunsFailed(FedstillError):
    """Some runs of a comparison failed. The other runs are finished."""


class DataError(ConfigError):
    """Data that are missing, damaged or of an unexpected form."""

    topic: Topic = "data"


class DataAbsent(DataError):
    """A data set, or a file or folder of one, that is missing and cannot be downloaded."""


class InfeasiblePartition(ConfigError):
    """A partition that is impossible with these labels and parameters."""


class IncompatibleMethod(ConfigError):
    """A method that needs something that the model, the data or the topology lacks."""


class RunExists(ConfigError):
    """The directory already contains another run."""


class NoRun(ConfigError):
    """The directory contains no run."""


class RunBusy(ConfigError):
    """Another process is writing to the run's directory."""


class CorruptFile(FedstillError):
    """A damaged file of a run: truncated, altered or replaced by another file."""

    topic: Topic = "state"


class BadPayload(FedstillError):
    """Bytes or groups that are not a valid payload."""

    topic: Topic = "request"


class Refused(FedstillError):
    """A request that a site rejects.

    The text is for the site's log, and may name folders, columns and values. ``topic``: what the
    server learns; no text of it depends on the site (``flower.messages``).
    """

    def __init__(self, text: str, topic: Topic = "request") -> None:
        super().__init__(text)
        self.topic = topic


class DeployFailed(FedstillError):
    """A program of Flower that failed."""


class ClientFailed(FedstillError):
    """A client failed in a run that stops at a failure (``clients.failures``). An exception from
    this process is chained.

    ``place``: round and stage, in words. ``clients``: the client, or all clients of a stack, which
    fail together; -1 is the server. ``is_remote``: whether the client has the traceback.
    """

    def __init__(
        self, place: str, clients: Sequence[int], reason: str, *, is_remote: bool = False
    ) -> None:
        ids = ", ".join(map(str, clients))
        advice = '; to leave out clients that fail, set clients.failures = "tolerate"'
        if len(clients) > 1:
            subject = f"clients {ids} in a stack"
        elif clients[0] == -1:
            subject = "the server"
            advice = ""
        else:
            subject = f"client {ids}"
        text = f"{place}: {subject} failed: {reason}"
        hint = "" if is_remote else TRACEBACK
        super().__init__(text + advice, text + hint + advice)
        self.clients = tuple(clients)
        self.reason = reason


class MethodFailed(FedstillError):
    """A hook of a method raised an exception at the server. The exception is chained."""


class BadReturn(FedstillError):
    """A function of a method returned a wrong value."""


class ChangedInPlace(FedstillError):
    """A method or a measure changed tensors in place that it shares with others."""


class TooFewReplies(FedstillError):
    """A stage has fewer accepted replies than the quorum."""


class BudgetSpent(FedstillError):
    """A stage would exceed a client's privacy budget, ``privacy.epsilon``. It was not begun."""


class Diverged(FedstillError):
    """The norm of the parameters exceeds its limit, or they contain NaN or infinity."""


class DiskFull(FedstillError):
    """A file could not be written completely."""

    exit_code = 2


def suggestion(name: str, names: Iterable[str]) -> str:
    """What to write instead of ``name``: the most similar of the names, or else all of them.

    >>> suggestion("fednt", ["fedavg", "fedntd"])
    "did you mean 'fedntd'?"
    >>> suggestion("zzz", ["b", "a"])
    'choose one of a, b'
    """
    choices = sorted(names)
    similar = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if similar:
        return f"did you mean {similar[0]!r}?"
    if not choices:
        return "there are none"
    return f"choose one of {', '.join(choices)}"


class Interrupted(Exception):
    """A run was stopped on request. Its finished stages are kept."""


MAX_REASON = 300
"""The most characters in the reason of a failure or a refusal."""


def cut_reason(text: str, most: int = MAX_REASON) -> str:
    """A reason as one printable line. The middle of a long reason is left out.

    >>> (
    ...     cut_reason("it \\n was \\x1b[2J"),
    ...     len(cut_reason("no " * 1000)),
    ...     cut_reason("a" * 400 + "b", 12),
    ... )
    ('it was ?[2J', 300, 'aaaaaa … aab')
    """
    if len(text) > 20 * MAX_REASON:
        # A very long text would take long to split.
        text = text[: 10 * MAX_REASON] + text[-10 * MAX_REASON :]
    words = " ".join(text.split())
    if len(words) > most:
        tail = max(0, most - 3) // 3
        words = f"{words[: max(0, most - 3) - tail]} … {words[len(words) - tail :]}"[:most]
    return "".join(c if c.isprintable() else "?" for c in words)


def on_one_line(error: BaseException) -> str:
    """An exception of another library or of a user's code: its type and text, as one line."""
    return cut_reason(f"{type(error).__name__}: {error}".removesuffix(": "))
