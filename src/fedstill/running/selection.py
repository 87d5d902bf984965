"""Selection of the best round, and early stopping.

After every round, the run's models are scored on the data that ``select_on`` names. The scores are
written to the journal, and the best round and the end of the run depend only on them. Therefore, a
resumed run has the same best round and stops in the same round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.stages import held_out_share
from fedstill.config.tables import StopTable
from fedstill.continual.task_test import HELD_OUT_TEST
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import Event, Fields, Observer, RoundResult, common_predictor
from fedstill.core.files import counted
from fedstill.core.records import Examples, World
from fedstill.data.views import SiteViews
from fedstill.engines.hardware import workers
from fedstill.engines.passes import Outputs, outputs_by_example
from fedstill.metrics.classification import (
    ACCURACY,
    METRICS,
    Predictions,
    RunMetrics,
    SelectionData,
    larger_is_better,
)
from fedstill.metrics.score_histograms import concatenated, from_histograms
from fedstill.running import journal as journals
from fedstill.running.journal import STOP_REASON
from fedstill.running.numbers import RunNumbers

log = logging.getLogger("fedstill.run")

SELECTION = "selection"
"""The field of the event ``start`` with the metric and data by which rounds are compared."""

SCORE = "selection_score"
"""The field of a round's event with the round's score."""

DATA_NAMES: Mapping[SelectionData, str] = {
    "held_out": "held-out data",
    "public": "the public data",
    "test": "the test set",
}
"""Readable names of the data on which rounds are compared."""


# ---- comparing rounds ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """The comparison of the rounds so far.

    ``best``: the best round, or the first of several equal ones; None if no round has a score.
    ``score``, ``accuracy``: the score of the best round, and its accuracy on the test set.
    ``reference``: the score that a round must exceed by ``stop.min_delta`` to count as an
    improvement. ``waited``: the number of rounds since the last improvement.
    """

    best: int | None = None
    score: float | None = None
    accuracy: float | None = None
    reference: float | None = None
    waited: int = 0


@dataclass(frozen=True)
class RoundRule:
    """Compares the scores of rounds, and decides when a run stops.

    ``by``: the metric. ``stop``: the table ``[stop]``.
    """

    by: str
    larger_is_better: bool
    stop: StopTable = field(default_factory=lambda: StopTable.read({}, "stop"))

    def is_better(self, score: float, other: float | None, margin: float = 0.0) -> bool:
        """Whether a score is better than another one by more than a margin; any score is better
        than None.
        """
        if other is None:
            return True
        gain = score - other
        if not self.larger_is_better:
            gain = -gain
        return gain > margin

    def after(
        self,
        standing: Standing,
        round: int,
        score: float | None,
        accuracy: float | None = None,
    ) -> Standing:
        """The standing after one more round. A round without a score is not an improvement, and
        rounds before the first score do not count as waited.

        >>> rule = RoundRule("log_loss", larger_is_better=False)
        >>> first = rule.after(Standing(), 1, 0.5)
        >>> rule.after(first, 2, 0.4).best, rule.after(first, 2, 0.6).waited
        (2, 1)
        """
        if score is None and standing.best is None:
            return standing
        later = replace(standing, waited=standing.waited + 1)
        if score is None:
            return later
        if self.is_better(score, standing.score):
            later = replace(later, best=round, score=score, accuracy=accuracy)
        if self.is_better(score, standing.reference, self.stop.min_delta):
            later = replace(later, reference=score, waited=0)
        return later

    def reason_to_stop(self, standing: Standing, score: float | None) -> str:
        """The reason to stop after a round with this score; empty if the run continues.

        ``standing``: the standing after the round.
        """
        target = self.stop.target
        if target is not None and score is not None and not self.is_better(target, score):
            return f"{self.by} reached {target:g}, stop.target"
        if 0 < self.stop.patience <= standing.waited:
            rounds = counted(standing.waited, "round")
            return f"{self.by} did not improve in {rounds}, stop.patience"
        return ""


# ---- the data ------------------------------------------------------------------------------------


def selection_data(
    settings: Settings, sites: SiteViews, stages: Collection[str]
) -> SelectionData | None:
    """The data on which the rounds of a run are compared; None if rounds are not compared.

    ``stages``: the names of the run's stages. Raises ConfigError if the run does not have the data.
    """
    if not settings.selects_round:
        return None
    if settings.select_on is not None:
        problem = _problem_with(settings.select_on, settings, sites, stages)
        if problem:
            raise ConfigError(f"select_on = {settings.select_on!r}: {problem}")
        return settings.select_on

    problems = {}
    candidates: tuple[SelectionData, ...] = ("held_out", "public")
    for name in candidates:
        problems[name] = _problem_with(name, settings, sites, stages)
        if not problems[name]:
            return name
    raise ConfigError(
        f"[stop] needs data for the comparison of rounds: {problems['held_out']}; alternatively, "
        "set select_on = 'test', which makes the results on the test set too optimistic"
    )


def _problem_with(
    name: SelectionData, settings: Settings, sites: SiteViews, stages: Collection[str]
) -> str:
    """The reason why rounds cannot be compared on the given data, with advice; otherwise empty."""
    if name == "held_out":
        return _no_held_out(settings, sites)
    if name == "public":
        return _no_public(settings, sites, stages)
    return _no_test(settings, sites)


def _no_held_out(settings: Settings, sites: SiteViews) -> str:
    if settings.method.personal:
        plans = {name: settings.plans.get(name) for name in settings.method.personal}
        without = [name for name, plan in sorted(plans.items()) if not (plan and plan.validation)]
        if without:
            return (
                f"clients hold no examples out in the stage {without[0]!r}; set "
                f"plan.{without[0]}.validation, for example to 0.1"
            )
        return ""
    if settings.data.test_from == "held_out":
        return ""
    if not held_out_share(settings.plans):
        return "clients hold no examples out; set plan.validation, for example to 0.1"
    if settings.on_sites and not settings.sites_test_rounds:
        return (
            "with secure sums, sites do not report the quality of a model on their data; give the "
            "server public examples with labels, or a test set"
        )
    if not settings.on_sites and not len(held_out_examples(settings, sites)):
        return "all clients have too few examples to hold one out; set a larger plan.validation"
    return ""


def _no_public(settings: Settings, sites: SiteViews, stages: Collection[str]) -> str:
    if settings.method.personal or settings.method.has_client_predictors:
        return "clients use different models, which can only be scored on held_out or test data"
    public = sites.public
    if public is None or not len(public) or bool((public.labels < 0).any()):
        return "there are no public examples with labels; set data.public"
    trained = sorted({*stages} & settings.method.labelled)
    if trained:
        return f"the stage {trained[0]!r} trains on the labels of public data; choose other data"
    return ""


def _no_test(settings: Settings, sites: SiteViews) -> str:
    if settings.method.personal and not sites.own_tests:
        return (
            "clients have their own models but no test sets of their own; set "
            "partition.own_test, or select_on = 'held_out'"
        )
    if not settings.method.personal and not len(sites.common_test or ()):
        return "there is no test set; give the server one with data.name"
    return ""


def stages_of_held_out_tests(settings: Settings) -> frozenset[str]:
    """The stages after which clients test a model on held-out examples."""
    if settings.sites_test_rounds:
        return frozenset({HELD_OUT_TEST})
    if settings.selects_round and settings.select_on in (None, "held_out"):
        return frozenset(settings.method.personal)
    return frozenset()


def held_out_examples(settings: Settings, sites: SiteViews) -> Examples:
    """The held-out examples of all clients, in the order of clients."""
    return sites.train.take(torch.cat(_held_out_positions(settings, sites)))


def held_out_owners(settings: Settings, sites: SiteViews) -> Tensor:
    """The client of each held-out example, (n,) int64."""
    counts = [len(positions) for positions in _held_out_positions(settings, sites)]
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def _held_out_positions(settings: Settings, sites: SiteViews) -> list[Tensor]:
    """The positions of the training examples that each client holds out."""
    share = held_out_share(settings.plans)
    return [sites.division(client, share).held_out for client in range(settings.clients)]


# ---- scores --------------------------------------------------------------------------------------

RoundScore = Callable[[RoundResult, Fields], float | None]
"""The score of a round, given the fields of its event so far; None if it has none."""


def field_score(name: str) -> RoundScore:
    """A score that is taken from a field of the round's event."""

    def score(result: RoundResult, so_far: Fields) -> float | None:
        value: float | None = so_far.get(name)
        return value

    return score


@dataclass(frozen=True)
class SitesScore:
    """Scores the server's model from the reports of sites in the stage ``held_out_test``.

    ``by``: the metric. ``positive``: the positive class if there are two classes.
    """

    by: str
    positive: int

    def __call__(self, result: RoundResult, so_far: Fields) -> float | None:
        """The metric on the held-out examples of all sites; None if no site reported."""
        reports = [e for e in result.client_events if "held_out_examples" in e]
        if self.by != ACCURACY:
            histograms = [e["held_out_histograms"] for e in reports if "held_out_histograms" in e]
            if not histograms:
                return None
            sites = [from_histograms(one, self.positive) for one in histograms]
            return METRICS[self.by].value(concatenated(sites))
        examples: int = sum(event["held_out_examples"] for event in reports)
        right = 0
        for event in reports:
            right += round(event.get("held_out_accuracy", 0.0) * event["held_out_examples"])
        if examples:
            return right / examples
        return None


@dataclass(frozen=True)
class ServerScore:
    """Scores the server's models on examples in this process.

    ``by``: the metric. ``positive``: the positive class if there are two classes. ``owners``: the
    client of each example, (n,) int64; None for public examples.
    """

    examples: Examples
    sites: SiteViews
    by: str
    positive: int
    owners: Tensor | None = None

    def __call__(self, result: RoundResult, so_far: Fields) -> float | None:
        """The metric of the common predictor, or of the predictors of each example's client; None
        if there are no predictors.
        """
        outputs = self._outputs(result)
        if outputs is None:
            return None
        labels = self.examples.labels.cpu()
        if self.by == ACCURACY:
            return float((outputs.predicted == labels).double().mean())
        predictions = Predictions.of(outputs.logits, outputs.predicted, labels, self.positive)
        return METRICS[self.by].value(predictions)

    def _outputs(self, result: RoundResult) -> Outputs | None:
        """The prediction for each example by the model of its client."""
        names = result.client_predictors
        if not names:
            common = common_predictor(result.predictors)
            if not common:
                return None
            return self._outputs_of(result.predictors[common])
        if self.owners is None:
            return None

        outputs = {n: self._outputs_of(result.predictors[n]) for n in sorted({*names.values()})}
        number = {name: i for i, name in enumerate(outputs)}
        answered = torch.tensor([number[names[owner]] for owner in self.owners.tolist()])
        rows = torch.arange(len(answered))
        return Outputs(
            predicted=torch.stack([o.predicted for o in outputs.values()])[answered, rows],
            logits=torch.stack([o.logits for o in outputs.values()])[answered, rows],
        )

    def _outputs_of(self, predict: Callable[[Tensor], Tensor]) -> Outputs:
        return outputs_by_example(predict, self.examples, self.sites.inputs, workers())


@dataclass
class Selection(Observer):
    """Scores every round, tracks the best one, and decides whether the run stops.

    ``on``: the data. ``examples``: the number of examples; None if only clients know it.
    ``rounds``: the largest number of rounds. ``score_of``: computes a round's score; None if the
    score is the mean of the clients' last reports on their own models, after ``stages``.
    """

    rule: RoundRule
    on: SelectionData
    rounds: int
    score_of: RoundScore | None
    stages: frozenset[str] = frozenset()
    examples: int | None = None
    standing: Standing = field(default_factory=Standing)
    stopped_because: str = ""
    _by_client: dict[int, float] = field(default_factory=dict)
    """The last score that each client reported for its own model."""

    def start_fields(self) -> Fields:
        """The field of the event ``start``: metric and data of the comparison."""
        fields: Fields = {
            "on": self.on,
            "by": self.rule.by,
            "larger_is_better": self.rule.larger_is_better,
        }
        if self.examples is not None:
            fields["examples"] = self.examples
        return {SELECTION: fields}

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """The score of the round, the best round so far, and the reason to stop, if any."""
        score = self._score(result, so_far)
        if score is None and result.number == 1:
            log.warning(
                "round 1 has no %s on %s; without scores, there is no best round",
                self.rule.by,
                DATA_NAMES[self.on],
            )
        accuracy = result.accuracies["accuracy"]
        standing = self.rule.after(self.standing, result.number, score, accuracy)
        fields: Fields = {
            SCORE: score,
            "best_round": standing.best,
            "best_round_score": standing.score,
            "best_round_accuracy": standing.accuracy,
        }
        reason = self.rule.reason_to_stop(standing, score)
        if reason and result.number < self.rounds:
            fields[STOP_REASON] = reason
        return fields

    def on_event(self, event: Event) -> None:
        """Update the standing and the reports of clients."""
        if event["event"] == "client" and event["name"] in self.stages:
            score = event.get("held_out_score", event.get("held_out_accuracy"))
            if score is not None:
                self._by_client[event["client"]] = score
        elif event["event"] == "round":
            self.standing = self.rule.after(
                self.standing, event["round"], event[SCORE], event["accuracy"]
            )
            self.stopped_because = event.get(STOP_REASON, "")

    def _score(self, result: RoundResult, so_far: Fields) -> float | None:
        if self.score_of is None:
            reports = self._by_client.values()
            if reports:
                return sum(reports) / len(reports)
            return None
        score = self.score_of(result, so_far)
        if score is None or not math.isfinite(score):
            return None
        return score


def selection_of(
    settings: Settings, world: World, sites: SiteViews, metrics: RunMetrics
) -> Selection | None:
    """The observer that compares the rounds of a run; None if rounds are not compared.

    ``metrics``: those that the run records.
    """
    stages = {stage.name for stage in settings.schedule(1, world)}
    on = selection_data(settings, sites, stages)
    if on is None:
        return None

    by = settings.rank_by
    examples = _scored_examples(settings, sites, on)
    example_count = None
    if examples is not None:
        example_count = len(examples)
    stages_of_scores = frozenset[str]()
    if on == "held_out":
        stages_of_scores = frozenset(settings.method.personal)
    return Selection(
        rule=RoundRule(by, larger_is_better=larger_is_better(by), stop=settings.stop),
        on=on,
        rounds=settings.rounds,
        score_of=_round_score(settings, sites, metrics.positive, on, examples),
        stages=stages_of_scores,
        examples=example_count,
    )


def _is_on_test_set(settings: Settings, on: SelectionData) -> bool:
    """Whether the data are the run's test set, which may itself consist of held-out examples."""
    return on == "test" or (on == "held_out" and settings.data.test_from == "held_out")


def _scored_examples(settings: Settings, sites: SiteViews, on: SelectionData) -> Examples | None:
    """The examples on which rounds are compared; None if only clients have them."""
    if settings.method.personal or settings.sites_test_rounds:
        return None
    if _is_on_test_set(settings, on):
        return sites.common_test
    if on == "public":
        return sites.public
    return held_out_examples(settings, sites)


def _round_score(
    settings: Settings,
    sites: SiteViews,
    positive: int,
    on: SelectionData,
    examples: Examples | None,
) -> RoundScore | None:
    """The function that scores a round; None if clients report their scores.

    ``positive``: the positive class if there are two classes.
    """
    by = settings.rank_by
    if settings.method.personal:
        if on == "test":
            return field_score(f"own_test_{by}")
        return None
    if settings.sites_test_rounds:
        return SitesScore(by, positive)
    if _is_on_test_set(settings, on):
        return field_score(by)
    assert examples is not None  # the rules of a run ask for them
    owners = None
    if on == "held_out":
        owners = held_out_owners(settings, sites)
    return ServerScore(examples, sites, by, positive, owners)


# ---- the best round of a run that has begun ------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BestRound:
    """The best round of a run. ``score``: the value of the metric ``by`` on the data ``on``.
    ``accuracy``: the accuracy on the test set.
    """

    round: int
    score: float
    by: str
    on: SelectionData
    accuracy: float | None

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> BestRound | None:
        """Read the best round from the summary of a run; None if the summary has none."""
        if summary.get("best_round") is None:
            return None
        return cls(
            round=summary["best_round"],
            score=summary["best_round_score"],
            by=summary["selected_by"],
            on=summary["selected_on"],
            accuracy=summary["best_round_accuracy"],
        )

    @property
    def criterion(self) -> str:
        """A readable description of the metric and data of the selection.

        >>> BestRound(round=7, score=0.5, by="accuracy", on="held_out", accuracy=0.4).criterion
        'accuracy on held-out data'
        """
        return f"{self.by} on {DATA_NAMES[self.on]}"


def best_round(start: Event, numbers: RunNumbers) -> BestRound | None:
    """The best round, given a journal's event ``start`` and the run's numbers; None if the run does
    not compare rounds, or if no round has a score.
    """
    number = numbers.in_last_round("best_round")
    score = numbers.in_last_round("best_round_score")
    if SELECTION not in start or number is None or score is None:
        return None
    return BestRound(
        round=int(number),
        score=score,
        accuracy=numbers.in_last_round("best_round_accuracy"),
        by=start[SELECTION]["by"],
        on=start[SELECTION]["on"],
    )


def best_round_of(folder: Path, events: Sequence[journals.Event]) -> int:
    """The number of the best round of the run in a folder, whose journal has these events.

    Raises ConfigError if there is none.
    """
    best = best_round(events[0], RunNumbers.of(events))
    if best is not None:
        return best.round
    if SELECTION not in events[0]:
        raise ConfigError(
            f"{folder} has no best round because it did not compare rounds; run it again with "
            "select_on = 'held_out' or with [stop]"
        )
    raise ConfigError(f"{folder} has no best round yet because no round has a score")


def selection_summary(start: Event, numbers: RunNumbers, stop_reason: str) -> Fields:
    """Fields of a summary about the best round and about early stopping.

    ``stop_reason``: why the run stopped early; empty if it did not.
    """
    fields: Fields = {}
    if SELECTION in start:
        best = best_round(start, numbers)
        fields = {"best_round": None, "best_round_score": None, "best_round_accuracy": None}
        if best is not None:
            fields["best_round"] = best.round
            fields["best_round_score"] = best.score
            fields["best_round_accuracy"] = best.accuracy
        fields["selected_by"] = start[SELECTION]["by"]
        fields["selected_on"] = start[SELECTION]["on"]
    if stop_reason:
        fields["stopped_in_round"] = numbers.last_round
        fields[STOP_REASON] = stop_reason
    return fields
