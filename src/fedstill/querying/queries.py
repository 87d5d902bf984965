"""Queries: why a client asks its peers for a class, for which of these classes, and which queries
nobody can answer; and the table ``[query]`` of a config.

All functions here are pure. What a client knows of itself (``Standing``) raises a query under a
rule (``Asking``): ``reasons`` gives the classes and why, ``picked`` those that it asks for. Where
label counts decide alone, the queries of all clients are known before the run (``drawn``); else
each client raises its own in the run (``fedstill.querying.hooks``).

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), section 3.1: a query is raised by "under-representation or absence" of a class "but can also
be other triggers such as performance-based or proactive queries".
Reading: the paper says no more of the last two. Performance-based ("accuracy"): the model that the
client trained alone is right on fewer than a share ``accuracy_under`` of a class, on examples that
the client itself holds out in the stage ``fit``. That stage keeps the epoch that is best on them,
so the accuracies are a little too high. A class of which none is held out cannot be measured, and
is not asked for by this trigger.
Reading: proactive ("need"): a client says which classes it will need, and asks for them whatever it
has of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedstill.config.settings import PEERS, Settings
from fedstill.config.tables import NO_STREAM
from fedstill.config.validation import CommandLineText, PackageTable, contradiction
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, CountOrZero, PositiveShare, Seed
from fedstill.core.keys import generator, seed_for
from fedstill.core.label_counts import BALANCED, BALANCED_OVERALL, needs_label_totals
from fedstill.data.views import Order

ClassesByClient = dict[int, tuple[int, ...]]
"""Classes of each client, sorted."""

Trigger = Literal["lack", "accuracy", "need"]
"""What raises a query: too few examples of a class, a model that is too often wrong on it, or a
need foreseen.
"""

TRIGGERS: tuple[Trigger, ...] = ("lack", "accuracy", "need")

Why = dict[str, float | None]
"""Why a class is asked for: ``lack``, the client's number of examples; ``accuracy``, on as many
examples as ``held_out``; ``need``, 1. None for a number that stays at a site.
"""


@dataclass(frozen=True)
class Asking:
    """The rule by which clients ask: what raises a query, and for how many of the classes they ask.

    ``by``: the triggers, any of which is enough. ``fewer_than``: examples, for
    "lack"; ``accuracy_under``: for "accuracy"; ``needs``: classes by client, for "need". ``draw``:
    one of the classes, ``least`` to ``most``, or all.
    ``seed``: of the draw. ``offered``: the classes of which another client has an example, by
    client; a client that is left out may ask for any. ``discreet``: clients say why they ask
    without numbers.
    """

    draw: Literal["single", "multi", "all"]
    seed: int
    by: tuple[Trigger, ...] = ("lack",)
    fewer_than: int = 50
    accuracy_under: float = 0.0
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    least: int = 2
    most: int = 3
    offered: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    discreet: bool = False

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"query.least = {self.least} is more than query.most = {self.most}")


@dataclass(frozen=True)
class Standing:
    """What a client knows of itself when it asks: its label counts (C,) int64, and how its local
    model does.

    ``right``, ``held``: of the examples of each class (C,) that it held out, how many the model
    predicts right, and how many there are; None where nothing was measured.
    """

    counts: Tensor
    right: Tensor | None = None
    held: Tensor | None = None


def reasons(asking: Asking, client: int, standing: Standing) -> dict[int, Why]:
    """The classes that a client has reason to ask for, by id, each with all that speaks for it.

    Raises ConfigError if accuracy is a trigger and the client holds out no example.

    >>> few, often_wrong = torch.tensor([90, 0, 60]), torch.tensor([9, 0, 2])
    >>> rule = Asking("all", seed=1, by=("lack", "accuracy"), accuracy_under=0.5)
    >>> reasons(rule, 0, Standing(few, right=often_wrong, held=torch.tensor([9, 0, 6])))
    {1: {'lack': 0}, 2: {'accuracy': 0.3333, 'held_out': 6}}
    """
    counts = standing.counts.tolist()
    reasons_by_class: dict[int, Why] = {c: {} for c in range(len(counts))}
    if "lack" in asking.by:
        for c, count in enumerate(counts):
            if count < asking.fewer_than:
                reasons_by_class[c]["lack"] = count
    if "accuracy" in asking.by:
        for c, (right, held_out) in enumerate(_measured(client, standing)):
            if held_out > 0 and right / held_out < asking.accuracy_under:
                reasons_by_class[c] |= {
                    "accuracy": round(right / held_out, 4),
                    "held_out": held_out,
                }
    if "need" in asking.by:
        for c in asking.needs.get(client, ()):
            reasons_by_class[c] |= {"need": 1}
    return {c: w for c, w in reasons_by_class.items() if w}


def without_numbers(class_reasons: Why) -> Why:
    """The reasons alone.

    >>> without_numbers({"lack": 12, "accuracy": 0.25, "held_out": 8})
    {'lack': None, 'accuracy': None}
    """
    return dict.fromkeys((reason for reason in TRIGGERS if reason in class_reasons), None)


def because(class_reasons: Mapping[str, float | None]) -> str:
    """Why a class is asked for, in words; empty for no reason.

    >>> because({"lack": 12}), because({"accuracy": 0.25, "held_out": 8, "need": 1})
    ('has 12 examples', 'right on 25 % of 8 held out; will need it')
    >>> because({"lack": None, "accuracy": None})
    'has few examples; is often wrong'
    """
    phrases = []
    if "lack" in class_reasons:
        phrases.append(_lack_in_words(class_reasons["lack"]))
    if "accuracy" in class_reasons:
        phrases.append(
            _accuracy_in_words(class_reasons["accuracy"], class_reasons.get("held_out") or 0)
        )
    if "need" in class_reasons:
        phrases.append("will need it")
    return "; ".join(phrases)


def _lack_in_words(examples: float | None) -> str:
    """``examples``: None for a number that stays at a site."""
    if examples is None:
        return "has few examples"
    if examples == 1:
        return "has 1 example"
    return f"has {examples:g} examples"


def _accuracy_in_words(accuracy: float | None, held_out: float) -> str:
    """``accuracy``: None for a number that stays at a site."""
    if accuracy is None:
        return "is often wrong"
    return f"right on {100 * accuracy:.0f} % of {held_out:g} held out"


def picked(asking: Asking, client: int, needed: Sequence[int], number: int = 1) -> tuple[int, ...]:
    """The classes that a client asks for, sorted, of those for which it has reason to ask.

    ``needed``: these classes. ``number``: which of the client's queries it is, from 1.

    Classes that nobody else has are left out. "single": one, uniform; "multi": a uniform number
    from ``least`` to ``most``, at most all of them, uniform without repetition. A pure function of
    the seed.

    Source: QKT, section 4.1.
    Reading: "a random number of classes" has no range; the published mean of 1 / (1 + number) is
    that of 2 and 3.
    """
    offered = asking.offered.get(client)
    answerable = sorted(c for c in set(needed) if offered is None or c in offered)
    if asking.draw == "all":
        return tuple(answerable)
    draw = generator(seed_for(asking.seed, number - 1, 0, client, "query"))
    size = 1
    if asking.draw == "multi":
        size = int(torch.randint(asking.least, asking.most + 1, (), generator=draw))
    order = torch.randperm(len(answerable), generator=draw).tolist()
    return tuple(sorted(answerable[i] for i in order[:size]))


def drawn(asking: Asking, counts: Tensor) -> ClassesByClient:
    """A query for every client that has reason to ask for a class which another client has, from
    label counts alone.

    counts: (clients, C) int64. Raises ConfigError if the rule needs a model's accuracy.

    >>> drawn(Asking("single", seed=1), torch.tensor([[90, 0], [0, 90]]))
    {0: (1,), 1: (0,)}
    """
    rule = replace(asking, offered=offers(counts))
    queries = {
        c: picked(rule, c, list(reasons(rule, c, Standing(client_counts))))
        for c, client_counts in enumerate(counts)
    }
    return {client: classes for client, classes in queries.items() if classes}


def offers(counts: Tensor) -> ClassesByClient:
    """For each client the classes of which another one has an example, from label counts (clients,
    C).
    """
    peer_counts = counts.sum(0) - counts
    return {
        client: tuple(row.nonzero().flatten().tolist()) for client, row in enumerate(peer_counts)
    }


def check_queries(
    queries: Mapping[int, Sequence[int]], counts: Tensor, fewer_than: int | None = 50
) -> ClassesByClient:
    """Queries as they were written, each sorted; raises ConfigError, in one line, for one that no
    client can answer.

    counts: (clients, C). Refused are clients and classes that do not exist, an empty query, a class
    that the client has (``fewer_than`` examples of it or more; None: it may), and one of which no
    other client has an example.
    """
    checked: ClassesByClient = {}
    for client, classes in sorted(queries.items()):
        if not 0 <= client < len(counts):
            raise ConfigError(
                f"query: there is no client {client}; clients are 0 to {len(counts) - 1}"
            )
        if not classes:
            raise ConfigError(
                f"query: client {client} asks for no class; name one, or leave the client out"
            )
        for c in classes:
            _refuse(client, c, counts, fewer_than)
        checked[client] = tuple(sorted(set(classes)))
    return checked


def check_unseen(queries: Mapping[int, Sequence[int]], classes: int) -> ClassesByClient:
    """The same of real sites, whose label counts nobody sees; raises ConfigError for a class that
    does not exist.
    """
    for client, query in sorted(queries.items()):
        for c in query:
            if not 0 <= c < classes:
                raise ConfigError(
                    f"query of client {client}: there is no class {c}; classes are 0 to "
                    f"{classes - 1}"
                )
    return {client: tuple(sorted(set(query))) for client, query in queries.items()}


def _refuse(client: int, c: int, counts: Tensor, fewer_than: int | None) -> None:
    if not 0 <= c < counts.shape[1]:
        raise ConfigError(
            f"query of client {client}: there is no class {c}; classes are 0 to "
            f"{counts.shape[1] - 1}"
        )
    client_count = int(counts[client, c])
    peer_count = int(counts[:, c].sum()) - client_count
    if fewer_than is not None and client_count >= fewer_than:
        raise ConfigError(
            f"query of client {client}: it has class {c} itself, {client_count} examples of it; "
            f"ask for one of which it has fewer than {fewer_than} (query.fewer_than)"
        )
    if peer_count == 0:
        raise ConfigError(
            f"query of client {client}: no other client has an example of class {c}; ask for "
            "another"
        )


def _measured(client: int, standing: Standing) -> list[tuple[int, int]]:
    if standing.right is None or standing.held is None or not int(standing.held.sum()):
        raise ConfigError(
            f"client {client} holds out no example to measure its model on; set "
            "plan.fit.validation, e.g. 0.1"
        )
    return list(zip(standing.right.tolist(), standing.held.tolist(), strict=True))


# ---- the table -----------------------------------------------------------------------------------


class QueryTable(PackageTable):
    """``[query]``: the classes that clients query: drawn, or listed in ``[query.classes]`` as
    ``client = [classes]``.
    """

    draw: Literal["none", "single", "multi", "all"] = Field(
        default="none",
        description="How many of the eligible classes a client queries: none, one, several, or "
        "all.",
    )
    fewer_than: Count = Field(
        default=50,
        description="A client lacks a class if it has fewer examples of it than this.",
    )
    least: Count = Field(
        default=2, description="The smallest number of classes in a query for several."
    )
    most: Count = Field(
        default=3, description="The largest number of classes in a query for several."
    )
    seed: Seed | None = Field(
        default=None,
        description="The seed of the queries. Unset: the run's seed.",
    )
    classes: Mapping[str, tuple[CountOrZero, ...]] = Field(
        default_factory=dict,
        description="The classes that each client queries.",
    )
    by: tuple[Trigger, ...] | None = Field(
        default=None,
        description="Why a class is eligible: the client lacks it (the default), its model is not "
        "accurate on it, or it needs the class.",
    )
    accuracy_under: PositiveShare | None = Field(
        default=None,
        description="With by = accuracy: a class is eligible if the accuracy of the local model "
        "on held-out examples is lower than this.",
    )
    needs: Mapping[str, tuple[CountOrZero, ...]] | None = Field(
        default=None,
        description="With by = need: the classes that each client will need, regardless of its "
        "data.",
    )
    again: Order | None = Field(
        default=None,
        description="The order in which new data arrive, if clients query in every round. Unset: "
        "clients query once, with all data.",
    )
    data_at_first: PositiveShare | None = Field(
        default=None,
        description="The share of its data that a client has at the first query. The remainder "
        "arrives in equal parts. Unset: 1 / rounds.",
    )

    @property
    def asks(self) -> bool:
        """Whether any client may ask."""
        return self.draw != "none" or bool(self.classes)

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """What is reason to ask for a class."""
        return self.by or ("lack",)

    @property
    def exchange_each_round(self) -> bool:
        """Whether clients ask again in every round."""
        return self.again is not None

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str) -> Self:
        """The table of these values, in which one trigger may be written without a list."""
        by = values.get("by")
        if isinstance(by, str) and not isinstance(by, CommandLineText):
            values = {**values, "by": (by,)}
        return super().read(values, name)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        for key in ("classes", "needs"):
            for client in getattr(self, key) or ():
                if not client.isdecimal():
                    raise contradiction(
                        f"query.{key}.{client}",
                        f"names no client: a client is a whole number, e.g. [query.{key}] 3 = "
                        "[7, 9]",
                    )
        if self.classes and self.draw != "none":
            raise contradiction(
                "query.draw", "would draw the classes that [query.classes] names; leave one out"
            )
        if self.by is not None:
            self._check_triggers(self.by)
        self._check_unread()
        if self.again and not self.asks:
            raise contradiction(
                "query.again", "is set, and nobody asks; set query.draw, or write [query.classes]"
            )
        return self

    def _check_triggers(self, by: tuple[Trigger, ...]) -> None:
        """Raise WrongConfig for triggers without what they need."""
        if self.draw == "none":
            raise contradiction(
                "query.by",
                "says what raises a query; say with query.draw for how many classes: 'single', "
                "'multi' or 'all'",
            )
        if not by or len(set(by)) < len(by):
            raise contradiction(
                "query.by",
                f"= {list(by)}: name each of 'lack', 'accuracy' and 'need' at most once, and one "
                "of them at least",
            )
        if "accuracy" in by and self.accuracy_under is None:
            raise contradiction("query.by", "names 'accuracy': set query.accuracy_under, e.g. 0.6")
        if "need" in by and not self.needs:
            raise contradiction(
                "query.by",
                "names 'need': write which classes each client will need, [query.needs] 3 = [7, 9]",
            )

    def _check_unread(self) -> None:
        """Raise WrongConfig for keys that nothing reads."""
        by = self.by or ()
        if self.accuracy_under is not None and "accuracy" not in by:
            raise contradiction(
                "query.accuracy_under",
                "is read where query.by names 'accuracy'; add it there, or leave this out",
            )
        if self.needs and "need" not in by:
            raise contradiction(
                "query.needs",
                "is read where query.by names 'need'; add it there, or leave [query.needs] out",
            )
        if self.data_at_first is not None and not self.again:
            raise contradiction(
                "query.data_at_first",
                "applies only where clients ask more than once; set query.again, or leave it out",
            )


def check_config(settings: Settings) -> None:
    """Raises ConfigError where clients cannot ask with the rounds, topology, method or stream of a
    config.
    """
    query = settings.table(QueryTable)
    if query.asks and settings.named.stream.name != NO_STREAM:
        raise ConfigError("[stream] and [query] both say when data come; leave one of them out")
    if not query.again:
        return
    kind = settings.named.topology.name
    method = settings.named.method.name
    if kind != PEERS:
        raise ConfigError(
            f"query.again: with topology.kind = {kind!r} clients do not ask again; leave it out, "
            f"or choose a method on {PEERS!r} (qkt, naive_kd, local_only)"
        )
    if settings.rounds == 1:
        raise ConfigError(
            "query.again: in rounds = 1 clients ask once; set rounds to how often they ask"
        )
    if Need.LABEL_COUNTS in settings.method.requires():
        raise ConfigError(
            f"query.again: method {method} counts labels once, before round 1, and data grow; "
            "leave it out, or choose another method"
        )
    if needs_label_totals(settings.plans):
        raise ConfigError(
            f"query.again: class_weights = {BALANCED_OVERALL!r} counts labels once, before round "
            f"1, and data grow; set {BALANCED!r}"
        )
