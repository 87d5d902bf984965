"""The table ``[query]`` of a config: which classes clients ask for, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedstill.config.settings import PEERS, Settings
from fedstill.config.tables import NO_STREAM
from fedstill.config.validation import CommandLineText, PackageTable, contradiction
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, CountOrZero, PositiveShare, Seed
from fedstill.core.label_counts import BALANCED, BALANCED_OVERALL, are_overall
from fedstill.data.views import Order
from fedstill.querying.queries import Trigger


class QueryTable(PackageTable):
    """``[query]``: which classes clients ask for: drawn, or written in ``[query.classes]``,
    ``client = [classes]``.
    """

    draw: Literal["none", "single", "multi", "all"] = Field(
        default="none",
        description="Whether clients ask for classes, and for how many of those they have reason "
        "to: none, one, several, or all.",
    )
    fewer_than: Count = Field(
        default=50,
        description="A client lacks a class of which it has fewer examples than this.",
    )
    least: Count = Field(default=2, description="The fewest classes in a query of several.")
    most: Count = Field(default=3, description="The most classes in a query of several.")
    seed: Seed | None = Field(
        default=None,
        description="What the queries are drawn from; unset: the run's seed.",
    )
    classes: Mapping[str, tuple[CountOrZero, ...]] = Field(
        default_factory=dict,
        description="The queries written out: the classes that each client asks for.",
    )
    by: tuple[Trigger, ...] | None = Field(
        default=None,
        description="What is reason to ask for a class: that the client lacks it (unset), its "
        "model's accuracy on it, or a need.",
    )
    accuracy_under: PositiveShare | None = Field(
        default=None,
        description="By accuracy: a client asks for classes on which its local model is less "
        "accurate, on its held-out examples.",
    )
    needs: Mapping[str, tuple[CountOrZero, ...]] | None = Field(
        default=None,
        description="By need: the classes that each client says it will need, whatever it has of "
        "them.",
    )
    again: Order | None = Field(
        default=None,
        description="In what order new data come with which clients ask again in every round; "
        "unset: they ask once, with all data.",
    )
    data_at_first: PositiveShare | None = Field(
        default=None,
        description="The share of its data with which a client asks first; the rest comes in "
        "equal parts; unset: 1 / rounds.",
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
    def _refuse_contradictions(self) -> Self:
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
            self._refuse_triggers(self.by)
        self._refuse_unread()
        if self.again and not self.asks:
            raise contradiction(
                "query.again", "is set, and nobody asks; set query.draw, or write [query.classes]"
            )
        return self

    def _refuse_triggers(self, by: tuple[Trigger, ...]) -> None:
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

    def _refuse_unread(self) -> None:
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
    if are_overall(settings.plans):
        raise ConfigError(
            f"query.again: class_weights = {BALANCED_OVERALL!r} counts labels once, before round "
            f"1, and data grow; set {BALANCED!r}"
        )
