"""Queries: which classes a client asks its peers for, and why; and the config table ``[query]``.

All functions here are pure. A rule (``QueryRule``) decides from what a client knows about itself
(``ClientKnowledge``): ``reasons`` returns the eligible classes with reasons, and ``picked`` the
classes that the client asks for. If the rule depends on label counts only, the queries of all
clients are known before the run (``drawn``). Otherwise each client raises its query in the run
(``fedstill.querying.hooks``).

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), section 3.1: a query is raised by "under-representation or absence" of a class "but can also
be other triggers such as performance-based or proactive queries".
Reading: the paper does not define the last two. Performance-based ("accuracy"): the accuracy of the
client's local model on a class is below ``accuracy_under``, on examples that the client holds out
in the stage ``fit``. That stage keeps the best epoch on these examples, so the accuracies are
slightly too high. A class without held-out examples is not eligible by this trigger.
Reading: proactive ("need"): the client lists the classes that it will need, and asks for them
regardless of its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedstill.config.settings import PEERS, Settings
from fedstill.config.tables import NO_STREAM, PackageTable
from fedstill.config.validation import CommandLineText, wrong_value
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, CountOrZero, PositiveShare, Seed
from fedstill.core.keys import generator, seed_for
from fedstill.core.label_counts import BALANCED, BALANCED_OVERALL, needs_label_totals
from fedstill.data.views import Order

ClassesByClient = dict[int, tuple[int, ...]]
"""Classes of each client, sorted."""

Trigger = Literal["lack", "accuracy", "need"]
"""A reason for a query: too few examples of a class, a low accuracy of the local model on it, or a
future need.
"""

TRIGGERS: tuple[Trigger, ...] = ("lack", "accuracy", "need")

Why = dict[str, float | None]
"""The reasons for a class: ``lack``, the client's number of examples; ``accuracy``, measured on
``held_out`` examples; ``need``, 1. None for a number that stays at a site.
"""


@dataclass(frozen=True)
class QueryRule:
    """Which classes are eligible for a query, and how many of them a client asks for.

    ``by``: the triggers; one of them is enough. ``fewer_than``: the number of examples for "lack".
    ``accuracy_under``: the accuracy for "accuracy". ``needs``: the classes by client for "need".
    ``draw``: ask for one of the eligible classes, for ``least`` to ``most`` of them, or for all.
    ``seed``: the seed of the draw. ``offered``: by client, the classes of which another client has
    an example; a client that is not listed may ask for all classes. ``discreet``: clients report
    their reasons without numbers.
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
class ClientKnowledge:
    """What a client knows about itself when it raises a query.

    ``counts``: its label counts, (C,) int64. ``correct``, ``held_out``: the correct predictions of
    its local model on held-out examples of each class, and the number of these examples, (C,);
    None if they were not measured.
    """

    counts: Tensor
    correct: Tensor | None = None
    held_out: Tensor | None = None


def reasons(rule: QueryRule, client: int, knowledge: ClientKnowledge) -> dict[int, Why]:
    """The classes that are eligible for a client's query, by id, with all reasons.

    Raises ConfigError if accuracy is a trigger and the client holds out no examples.

    >>> few, often_wrong = torch.tensor([90, 0, 60]), torch.tensor([9, 0, 2])
    >>> rule = QueryRule("all", seed=1, by=("lack", "accuracy"), accuracy_under=0.5)
    >>> held_out = torch.tensor([9, 0, 6])
    >>> reasons(rule, 0, ClientKnowledge(few, correct=often_wrong, held_out=held_out))
    {1: {'lack': 0}, 2: {'accuracy': 0.3333, 'held_out': 6}}
    """
    counts = knowledge.counts.tolist()
    reasons_by_class: dict[int, Why] = {c: {} for c in range(len(counts))}
    if "lack" in rule.by:
        for c, count in enumerate(counts):
            if count < rule.fewer_than:
                reasons_by_class[c]["lack"] = count
    if "accuracy" in rule.by:
        for c, (correct, held_out) in enumerate(_measured(client, knowledge)):
            if held_out > 0 and correct / held_out < rule.accuracy_under:
                reasons_by_class[c] |= {
                    "accuracy": round(correct / held_out, 4),
                    "held_out": held_out,
                }
    if "need" in rule.by:
        for c in rule.needs.get(client, ()):
            reasons_by_class[c] |= {"need": 1}
    return {c: w for c, w in reasons_by_class.items() if w}


def without_numbers(class_reasons: Why) -> Why:
    """The reasons without their numbers.

    >>> without_numbers({"lack": 12, "accuracy": 0.25, "held_out": 8})
    {'lack': None, 'accuracy': None}
    """
    return dict.fromkeys((reason for reason in TRIGGERS if reason in class_reasons), None)


def because(class_reasons: Mapping[str, float | None]) -> str:
    """The reasons for a class in words; empty if there are none.

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


def picked(rule: QueryRule, client: int, needed: Sequence[int], number: int = 1) -> tuple[int, ...]:
    """The classes that a client asks for, sorted, out of its eligible classes ``needed``.

    ``number``: the number of the client's query, from 1.

    Classes that no other client has are left out. "single" draws one class uniformly. "multi" draws
    a uniform number from ``least`` to ``most``, and then as many classes without replacement, or
    all if there are fewer. The result is a pure function of the arguments.

    Source: QKT, section 4.1.
    Reading: the paper gives no range for "a random number of classes". The published mean of
    1 / (1 + number) fits the range 2 to 3.
    """
    offered = rule.offered.get(client)
    answerable = sorted(c for c in set(needed) if offered is None or c in offered)
    if rule.draw == "all":
        return tuple(answerable)
    draw = generator(seed_for(rule.seed, number - 1, 0, client, "query"))
    size = 1
    if rule.draw == "multi":
        size = int(torch.randint(rule.least, rule.most + 1, (), generator=draw))
    order = torch.randperm(len(answerable), generator=draw).tolist()
    return tuple(sorted(answerable[i] for i in order[:size]))


def drawn(rule: QueryRule, counts: Tensor) -> ClassesByClient:
    """The queries of all clients, from label counts. Clients without an eligible class that another
    client has ask for nothing.

    counts: (clients, C) int64. Raises ConfigError if the rule needs a model's accuracy.

    >>> drawn(QueryRule("single", seed=1), torch.tensor([[90, 0], [0, 90]]))
    {0: (1,), 1: (0,)}
    """
    rule = replace(rule, offered=offers(counts))
    queries = {
        c: picked(rule, c, list(reasons(rule, c, ClientKnowledge(client_counts))))
        for c, client_counts in enumerate(counts)
    }
    return {client: classes for client, classes in queries.items() if classes}


def offers(counts: Tensor) -> ClassesByClient:
    """For each client, the classes of which another client has an example. counts: (clients, C)."""
    peer_counts = counts.sum(0) - counts
    return {
        client: tuple(row.nonzero().flatten().tolist()) for client, row in enumerate(peer_counts)
    }


def check_queries(
    queries: Mapping[int, Sequence[int]], counts: Tensor, fewer_than: int | None = 50
) -> ClassesByClient:
    """The queries of a config, each sorted.

    counts: (clients, C). Raises ConfigError for unknown clients and classes, an empty query, a
    class of which the client has ``fewer_than`` examples or more (None: no such limit), and a class
    that no other client has.
    """
    checked: ClassesByClient = {}
    for client, classes in sorted(queries.items()):
        if not 0 <= client < len(counts):
            raise ConfigError(
                f"query: there is no client {client}; the clients are 0 to {len(counts) - 1}"
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
    """The queries of real sites, whose label counts are unknown, each sorted.

    Raises ConfigError for an unknown class.
    """
    for client, query in sorted(queries.items()):
        for c in query:
            if not 0 <= c < classes:
                raise ConfigError(
                    f"query of client {client}: there is no class {c}; the classes are 0 to "
                    f"{classes - 1}"
                )
    return {client: tuple(sorted(set(query))) for client, query in queries.items()}


def _refuse(client: int, c: int, counts: Tensor, fewer_than: int | None) -> None:
    if not 0 <= c < counts.shape[1]:
        raise ConfigError(
            f"query of client {client}: there is no class {c}; the classes are 0 to "
            f"{counts.shape[1] - 1}"
        )
    client_count = int(counts[client, c])
    peer_count = int(counts[:, c].sum()) - client_count
    if fewer_than is not None and client_count >= fewer_than:
        raise ConfigError(
            f"query of client {client}: it has {client_count} examples of class {c}; choose a "
            f"class of which it has fewer than {fewer_than} (query.fewer_than)"
        )
    if peer_count == 0:
        raise ConfigError(
            f"query of client {client}: no other client has an example of class {c}; choose "
            "another class"
        )


def _measured(client: int, knowledge: ClientKnowledge) -> list[tuple[int, int]]:
    """By class, the correct predictions and the number of held-out examples."""
    correct = knowledge.correct
    held_out = knowledge.held_out
    if correct is None or held_out is None or not int(held_out.sum()):
        raise ConfigError(
            f"client {client} holds out no examples to evaluate its model on; set "
            "plan.fit.validation, e.g. 0.1"
        )
    return list(zip(correct.tolist(), held_out.tolist(), strict=True))


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
        """Whether the config has queries."""
        return self.draw != "none" or bool(self.classes)

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """The triggers of a query."""
        return self.by or ("lack",)

    @property
    def exchange_each_round(self) -> bool:
        """Whether clients raise a query in every round."""
        return self.again is not None

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str) -> Self:
        """The table of these values. A single trigger may be written without a list."""
        by = values.get("by")
        if isinstance(by, str) and not isinstance(by, CommandLineText):
            values = {**values, "by": (by,)}
        return super().read(values, name)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        for key in ("classes", "needs"):
            for client in getattr(self, key) or ():
                if not client.isdecimal():
                    raise wrong_value(
                        f"query.{key}.{client}",
                        f"is not a client number: write, for example, [query.{key}] 3 = [7, 9]",
                    )
        if self.classes and self.draw != "none":
            raise wrong_value(
                "query.draw", "and [query.classes] both choose the classes; leave one of them out"
            )
        if self.by is not None:
            self._check_triggers(self.by)
        self._check_unread()
        if self.again and not self.asks:
            raise wrong_value(
                "query.again", "needs queries; set query.draw, or add [query.classes]"
            )
        return self

    def _check_triggers(self, by: tuple[Trigger, ...]) -> None:
        """Raise WrongConfig for triggers without what they need."""
        if self.draw == "none":
            raise wrong_value(
                "query.by",
                "needs query.draw, the number of classes in a query: 'single', 'multi' or 'all'",
            )
        if not by or len(set(by)) < len(by):
            raise wrong_value(
                "query.by",
                f"= {list(by)} must contain at least one of 'lack', 'accuracy' and 'need', each at "
                "most once",
            )
        if "accuracy" in by and self.accuracy_under is None:
            raise wrong_value(
                "query.by", "contains 'accuracy', which needs query.accuracy_under, e.g. 0.6"
            )
        if "need" in by and not self.needs:
            raise wrong_value(
                "query.by",
                "contains 'need': list the classes that clients will need, e.g. [query.needs] "
                "3 = [7, 9]",
            )

    def _check_unread(self) -> None:
        """Raise WrongConfig for keys without effect."""
        by = self.by or ()
        if self.accuracy_under is not None and "accuracy" not in by:
            raise wrong_value(
                "query.accuracy_under",
                "has no effect unless query.by contains 'accuracy'; add it there, or leave this "
                "out",
            )
        if self.needs and "need" not in by:
            raise wrong_value(
                "query.needs",
                "has no effect unless query.by contains 'need'; add it there, or leave out "
                "[query.needs]",
            )
        if self.data_at_first is not None and not self.again:
            raise wrong_value(
                "query.data_at_first",
                "has no effect unless clients query in every round; set query.again, or leave this "
                "out",
            )


def check_config(settings: Settings) -> None:
    """Raise ConfigError if queries do not fit the rounds, topology, method or stream."""
    query = settings.package_table(QueryTable)
    if query.asks and settings.named.stream.name != NO_STREAM:
        raise ConfigError(
            "[stream] and [query] cannot be combined: both define when data arrive; leave one of "
            "them out"
        )
    if not query.again:
        return
    kind = settings.named.topology.name
    method = settings.named.method.name
    if kind != PEERS:
        raise ConfigError(
            f"query.again: with topology.kind = {kind!r}, clients query only once; leave it out, "
            f"or choose a method with topology {PEERS!r} (qkt, naive_kd, local_only)"
        )
    if settings.rounds == 1:
        raise ConfigError(
            "query.again: with rounds = 1, clients query only once; set rounds to the number of "
            "queries"
        )
    if Need.LABEL_COUNTS in settings.method.requires():
        raise ConfigError(
            f"query.again: method {method} counts labels once, before round 1, but the data grow; "
            "leave it out, or choose another method"
        )
    if needs_label_totals(settings.plans):
        raise ConfigError(
            f"query.again: class_weights = {BALANCED_OVERALL!r} counts labels once, before round "
            f"1, but the data grow; set {BALANCED!r}"
        )
