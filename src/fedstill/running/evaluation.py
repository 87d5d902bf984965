"""Evaluation by class: on the common test set, on clients' test sets, and at real sites."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.continual.task_test import TASK_TEST
from fedstill.core.method import Method
from fedstill.core.records import SERVER, Examples, State, World
from fedstill.core.trees import same_bits
from fedstill.data.views import SiteViews
from fedstill.engines.cores import workers
from fedstill.engines.passes import correct_by_class, right_by_example
from fedstill.metrics import class_accuracy
from fedstill.metrics.local_models import personal_answers
from fedstill.metrics.values import Values

# What the server's models are worth on the common test set, by class.


Counting = Callable[[Callable[[Tensor], Tensor], Examples], Tensor]


def tests_by_class(sites: SiteViews, classes: int) -> list[int]:
    """Test examples by class (C,); zeros without a common test set."""
    test = sites.common_test
    return (
        [0] * classes if test is None else torch.bincount(test.labels, minlength=classes).tolist()
    )


def of_some_clients(name: str) -> bool:
    """Whether a predictor's name ends with a number: then it answers for a client or a group, not
    for all.

    >>> of_some_clients("cluster 0"), of_some_clients("client 3"), of_some_clients("global")
    (True, True, False)
    """
    return name.rpartition(" ")[2].isdecimal()


def evaluated(
    predictors: Mapping[str, Callable[[Tensor], Tensor]],
    sites: SiteViews,
    classes: int,
    right_of: Counting | None = None,
) -> dict[str, Any]:
    """``accuracy`` and ``class_accuracy`` (C,) of the first predictor, those of further ones by
    name in ``others``.

    right_of: counts a predictor's right answers by class; unset, in a pass of its own. Models of
    some clients ("client 3", "cluster 0") all stand in ``others``: none of them is the
    federation's. None where there is no test set, or no test example of a class.
    """
    test, totals = sites.common_test, tests_by_class(sites, classes)
    if test is None or not predictors:
        return {"accuracy": None, "class_accuracy": [None] * classes}
    each = {}
    for name, predict in predictors.items():
        right = (
            right_of(predict, test)
            if right_of
            else correct_by_class(predict, test, sites.inputs, classes)
        )
        by_class = [r / t if t else None for r, t in zip(right.tolist(), totals, strict=True)]
        each[name] = {"accuracy": int(right.sum()) / sum(totals), "class_accuracy": by_class}
    first, *others = each
    if of_some_clients(first):
        return {"accuracy": None, "class_accuracy": [None] * classes, "others": each}
    return {**each[first], **({"others": {n: each[n] for n in others}} if others else {})}


# What the clients' own models could do when they were last measured: remembered over rounds, from
# journal events.


log = logging.getLogger("fedstill.measuring")

UNTRAINED = "round 1 left the server's model as it was, so its accuracy says nothing"


@dataclass
class OwnAnswers:
    """The answers of a method that leaves each client a model of its own; empty for all others.

    ``stages``: those after which a client's own model is its answer; of several, the last in which
    it acted counts.
    ``label_counts``: (clients, C), empty where nobody knows them. ``totals``: test examples by
    class (C,).
    """

    stages: Collection[str]
    label_counts: Sequence[Sequence[int]]
    totals: Sequence[int]
    _now: dict[int, Values] = field(default_factory=dict)
    _best: dict[int, Values] = field(default_factory=dict)  # by class, of the rounds before
    _looked: set[int] = field(default_factory=set)  # clients that were measured in this round

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients measured in a stage of this round."""
        for event in events:
            if event["name"] in self.stages and "correct_by_class" in event and self.label_counts:
                self._now[event["client"]] = class_accuracy(event["correct_by_class"], self.totals)
                self._looked.add(event["client"])

    def round(self) -> dict[str, Any]:
        """Fields of the round's event; empty if no client was measured in it. Ends the round."""
        told = personal_answers(self._now, self._best, self.label_counts) if self._looked else {}
        for client in self._looked:
            self._best[client] = np.fmax(
                self._best.get(client, self._now[client]), self._now[client]
            )
        self._looked.clear()
        return told


def evaluated_answers(
    method: Method, state: State, world: World
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The method's predictors; none where clients have models of their own and nobody has trained
    the server's.
    """
    if state.round == 1 or not same_bits(state.params, world.initial(SERVER)):
        return dict(method.predictors(state, world))
    if state.round == 2 and not method.personal:
        log.warning("%s: %s", UNTRAINED, _why_untrained(world))
    return {} if method.personal else dict(method.predictors(state, world))


def _why_untrained(world: World) -> str:
    """What most likely left it so, and what to do."""
    if not any(plan.epochs or plan.steps for plan in world.plans.values()):
        return "no plan has epochs or steps, so nobody trained; set plan.epochs above 0"
    own = "the method says after which stages: personal = frozenset({'train'})"
    return (
        f"if clients have models of their own, {own}; if not, look at what fold gives, and at "
        "plan.lr"
    )


# What answers are worth on the clients' own test sets, where a simulation has such.


Predictors = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass
class OwnTests:
    """The clients' own test sets of a run, and what the last answers were worth there.

    ``stages``: those after which a client's own model is its answer, as the method says.
    """

    sites: SiteViews
    stages: Collection[str]
    _personal: dict[int, float] = field(default_factory=dict)

    @cached_property
    def everyone(self) -> tuple[Examples, Tensor]:
        """All own test examples, and whose each is (n,): one pass of a common model then serves all
        clients.
        """
        tests = self.sites.own_tests
        values, labels = (
            torch.cat([getattr(own, name) for own in tests.values()])
            for name in ("values", "labels")
        )
        owners = torch.repeat_interleave(
            torch.tensor([*tests]), torch.tensor([len(own) for own in tests.values()])
        )
        return Examples(values, labels), owners

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients with models of their own reported."""
        for event in events:
            if event["name"] in self.stages and "site_accuracy" in event:
                self._personal[event["client"]] = event["site_accuracy"]

    def round(self, predictors: Predictors) -> dict[str, Any]:
        """Fields of a round's event; empty where clients have no tests of their own.

        ``own_test_accuracy``: each client's answer on its own test set, the mean over
        clients; ``own_test_worst``: the least of them; ``own_test_by_client``: by client, as text.
        """
        if not self.sites.own_tests:
            return {}
        by_client = self._by_client(predictors)
        if not by_client:
            return {}
        return {
            "own_test_accuracy": sum(by_client.values()) / len(by_client),
            "own_test_worst": min(by_client.values()),
            "own_test_by_client": {
                str(client): value for client, value in sorted(by_client.items())
            },
        }

    def _by_client(self, predictors: Predictors) -> dict[int, float]:
        if self.stages and self._personal:
            return dict(self._personal)
        single = {f"client {c}": c for c in self.sites.own_tests if f"client {c}" in predictors}
        if single:
            tests = {c: self.sites.own_tests[c] for c in single.values()}
            return {c: self._shares(predictors[name], tests[c]) for name, c in single.items()}
        if not predictors:
            return {}
        examples, owners = self.everyone
        right = right_by_example(
            next(iter(predictors.values())), examples, self.sites.inputs, workers()
        ).double()
        most = int(owners.max()) + 1
        hits, counts = torch.bincount(owners, right, most), torch.bincount(owners, minlength=most)
        return {c: float(hits[c] / counts[c]) for c in self.sites.own_tests}

    def _shares(self, predict: Callable[[Tensor], Tensor], examples: Examples) -> float:
        return float(right_by_example(predict, examples, self.sites.inputs).double().mean())


# What real sites say of a model at a task's end: its accuracy on their own test sets, by task.


Row = Sequence[float | None]


@dataclass
class SiteRows:
    """Each site's row of the task under way.

    ``personal``: the stages after which a client's own model is its answer; empty: sites test the
    global model in a stage of its own.
    """

    personal: Collection[str]
    rows: dict[int, Row] = field(default_factory=dict)

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what clients reported."""
        stages = self.personal or (TASK_TEST,)
        said = [e for e in events if e["name"] in stages and "site_by_task" in e]
        self.rows |= {e["client"]: e["site_by_task"] for e in said}

    def end(self) -> dict[int, Row]:
        """The rows by client at the end of a task, which are then forgotten."""
        rows, self.rows = dict(sorted(self.rows.items())), {}
        return rows


def mean_row(rows: Collection[Row], tasks: int) -> list[float | None]:
    """The mean over sites of the accuracy on each task, (T,); None for one on which no site has
    tested.

    >>> mean_row([[1.0, None], [0.5, None]], 2)
    [0.75, None]
    """
    each = [[row[task] for row in rows] for task in range(tasks)]
    known = [[value for value in column if value is not None] for column in each]
    return [sum(column) / len(column) if column else None for column in known]
