"""Every named error in the library: what happened, where, the offending value, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Literal

TRACEBACK = "; see the traceback with --debug"
"""What an error says to who typed a command that showed no traceback."""


USER = "fedstill_user_"
"""How the names of modules made from users' files begin (``core.user_modules``)."""


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
    "state",
    "stage",
    "sum",
    "tasks",
    "tokenizer",
    "version",
    "work",
]
"""What an error at a site is about, for the server: a key of
``flower.messages.PUBLIC_REASONS``."""


class FedstillError(Exception):
    """The base of all errors that fedstill raises on purpose; its text is one line a user can act
    on.

    ``in_shell``: the text that the command line shows, if ``text`` names an argument of a Python
    function. ``topic``: what the server learns if the error ends a request at a site.
    """

    exit_code = 1
    topic: Topic = "work"

    def __init__(self, text: str = "", in_shell: str = "") -> None:
        super().__init__(text)
        self.in_shell = in_shell or text


class ConfigError(FedstillError):
    """A configuration, command line or argument that cannot be run as it is written."""

    exit_code = 2
    topic: Topic = "config"


class UntrustedCode(ConfigError):
    """A file from somebody else names code that this user has not trusted on this machine."""


class UnknownName(ConfigError):
    """A method, model, dataset, partition, topology, measure or key that does not exist.

    ``todo``: what to write instead, where that is known better than by the nearest of the ``known``
    names. ``advice``: what the message says to write.
    """

    def __init__(
        self, what: str, name: str, known: Iterable[str], where: str = "", todo: str = ""
    ) -> None:
        self.name = name
        self.advice = todo or suggestion(name, known)
        if len(name) > 80:
            name = name[:79] + "…"
        text = f"unknown {what} {name!r}; {self.advice}"
        if where:
            text = f"{where}: {text}"
        super().__init__(text)


class RunsFailed(FedstillError):
    """Runs of a comparison that failed; the others are finished."""


class DataError(ConfigError):
    """Data that are absent, damaged, or not what their name promises."""

    topic: Topic = "data"


class DataAbsent(DataError):
    """A data set, or a file or folder of one, that is not on this machine and cannot be had from
    here.
    """


class InfeasiblePartition(ConfigError):
    """A split that these labels and parameters cannot give."""


class IncompatibleMethod(ConfigError):
    """A method that needs what the model, the data or the topology lacks."""


class RunExists(ConfigError):
    """A directory that already holds another run."""


class NoRun(ConfigError):
    """A directory that holds no run."""


class RunBusy(ConfigError):
    """A run directory that another process is writing."""


class CorruptFile(FedstillError):
    """A file of a run that is damaged: truncated, altered, or not what its name says."""

    topic: Topic = "state"


class BadPayload(FedstillError):
    """A message whose bytes or groups are not a payload."""

    topic: Topic = "request"


class Refused(FedstillError):
    """A request that a site does not serve.

    Its text is for the site's log, and may name folders, columns and values. ``topic``: what the
    server learns; no text of it depends on the site (``flower.messages.PUBLIC_REASONS``).
    """

    def __init__(self, text: str, topic: Topic = "request") -> None:
        super().__init__(text)
        self.topic = topic


class DeployFailed(FedstillError):
    """A program of Flower's that did not do what it was started for."""


class ClientFailed(FedstillError):
    """Clients that failed in a run that stops at that (``clients.failures``); what one raised here
    is chained.

    ``where``: round and stage, in words. ``clients``: one, or those of a stack, which fail
    together; -1 is the server.
    """

    def __init__(self, where: str, clients: Sequence[int], why: str) -> None:
        ids = ", ".join(map(str, clients))
        advice = '; to leave out clients that fail, set clients.failures = "tolerate"'
        if len(clients) > 1:
            subject = f"clients {ids} in a stack"
        elif clients[0] == -1:
            subject = "the server"
            advice = ""
        else:
            subject = f"client {ids}"
        text = f"{where}: {subject} failed: {why}"
        super().__init__(text + advice, text + TRACEBACK + advice)
        self.clients = tuple(clients)
        self.why = why


class MethodFailed(FedstillError):
    """A method that raised at the server; the cause is chained."""


class BadReturn(FedstillError):
    """A function of a method that gave something else than it is asked for."""


class ChangedInPlace(FedstillError):
    """Code of a method or a measure that wrote into tensors which others have too."""


class TooFewReplies(FedstillError):
    """A stage with fewer accepted replies than the quorum asks for."""


class BudgetSpent(FedstillError):
    """A stage that would cost a client more privacy than ``privacy.epsilon`` allows; it was not
    begun.
    """


class Diverged(FedstillError):
    """Parameters that grew beyond the norm guard, or that are no longer numbers."""


class DiskFull(FedstillError):
    """A file that could not be written whole."""

    exit_code = 2


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to write instead of ``name``: the nearest legal name, or all of them.

    >>> suggestion("fednt", ["fedavg", "fedntd"])
    "did you mean 'fedntd'?"
    >>> suggestion("zzz", ["b", "a"])
    'choose one of a, b'
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "there are none"
    return f"choose one of {', '.join(names)}"


LISTED = 12
"""The most names that a message lists."""


def name_advice(kind: str, name: str, known: Sequence[str]) -> str:
    """What to write instead of the name of a registered thing: a name that is spelt almost alike,
    or how to list all names.

    The names of published methods are similar, and a user may mean one that fedstill lacks. So a
    name counts as a misspelling only by capitals and hyphens, two neighbours that changed places,
    or one letter in a name of at least six.

    >>> name_advice("method", "fedtnd", ["fedavg", "fedntd"])
    "did you mean 'fedntd'?"
    >>> name_advice("model", "mlp3", ["cnn", "mlp"])
    'choose one of cnn, mlp'
    """
    for other in known:
        if _is_misspelt(name, other):
            return f"did you mean {other!r}?"
    if len(known) <= LISTED:
        return f"choose one of {', '.join(known)}"
    return f"`fedstill list {kind}` lists the names"


def _is_misspelt(name: str, known: str) -> bool:
    written = re.sub(r"[-_ .]", "", name.lower())
    meant = re.sub(r"[-_ .]", "", known.lower())
    changes = difflib.SequenceMatcher(None, written, meant, autojunk=False).get_opcodes()
    changed = [change for change in changes if change[0] != "equal"]
    if not changed:
        return True
    first = changed[0]
    last = changed[-1]
    wrong = written[first[1] : last[2]]
    right = meant[first[3] : last[4]]
    if len(wrong) == 2 and wrong == right[::-1]:
        return True
    is_one_letter = len(wrong) <= 1 and len(right) <= 1
    return is_one_letter and max(len(written), len(meant)) >= 6


class Interrupted(Exception):
    """What ran was asked to stop and has stopped; all that is finished is kept."""


MAX_REASON = 300
"""The most characters of a reason: why a client failed, or why its reply was refused."""


def cut_reason(text: str, most: int = MAX_REASON) -> str:
    """A reason on one line of text that can be shown anywhere; of a long one, the beginning and the
    end.

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


def error_text(error: BaseException) -> str:
    """The text of an error of fedstill; of another error, its type and its text."""
    if isinstance(error, FedstillError):
        return str(error)
    return on_one_line(error)


def on_one_line(error: BaseException) -> str:
    """Another library's error, or a user's: its type and its text, cut to a line."""
    return cut_reason(f"{type(error).__name__}: {error}".removesuffix(": "))
