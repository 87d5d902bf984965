"""Values of fields chosen by trials: a sampler proposes, each trial is a few runs, on seeds that
are not reported.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstill.config.experiment import Experiment
from fedstill.config.overrides import parse_grid
from fedstill.config.resolve import Parts
from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.core.files import make_folder, read_file, write_whole
from fedstill.core.keys import seed_for
from fedstill.metrics.classification import ACCURACY, METRICS, larger_is_better
from fedstill.running.compare import Outcome, Variant, seeded
from fedstill.running.journal import SUMMARY

if TYPE_CHECKING:
    import optuna

LOWER = ("forgetting", "personal_forgetting")
"""Goals of accuracy of which less is better."""

METRIC_GOALS = {
    f"{prefix}{name}": name for prefix in ("", "best_", "own_test_") for name in METRICS
}
"""Goals that are the metric of a run's last round, of its best round, or on clients' own tests; and
which metric each is.
"""

BEST_ROUND = "best_round_score"
"""The goal that is the score of the selected round: ``rank_by`` on the data of ``select_on``."""

GOALS = (
    BEST_ROUND,
    "query_average_accuracy",
    "personal_accuracy",
    "mean_accuracy_last_10",
    "accuracy",
    "best_accuracy",
    *LOWER,
    *METRIC_GOALS,
)
"""What may be tuned for: numbers of a run's summary. Without a goal it is the score of the selected
round where runs select one; else the metric ``rank_by`` if that is not accuracy; else the first of
these that the runs have.
"""


def minimised(goal: str) -> bool:
    """Whether less is better of a goal.

    >>> minimised("best_log_loss"), minimised("auc"), minimised("forgetting")
    (True, False, True)
    """
    return goal in LOWER or not larger_is_better(METRIC_GOALS.get(goal, goal))


FEWEST_DIGITS = 3
"""The fewest digits of a proposed number."""


@dataclass(frozen=True)
class Dimension:
    """A key and the values that it may take: from ``low`` to ``high``, or one of ``choices``.

    ``is_whole``: only whole numbers. ``log``: sampled evenly on a logarithmic scale.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False
    log: bool = False
    choices: tuple[Any, ...] = ()

    def suggested(self, trial: optuna.Trial) -> Any:
        """The sampler's proposal. A number that is not whole has few digits, so that people can
        write it.
        """
        if self.choices:
            index = trial.suggest_categorical(self.key, list(range(len(self.choices))))
            return self.choices[index]
        if self.is_whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        proposal = trial.suggest_float(self.key, self.low, self.high, log=self.log)
        rounded = float(f"{proposal:.{self.digits}g}")
        return min(max(rounded, self.low), self.high)

    @property
    def digits(self) -> int:
        """The digits of a proposal: three, or more if the range is so narrow that three would leave
        fewer than ten values.

        >>> Dimension("plan.lr", 0.001, 1.0).digits, Dimension("plan.lr", 1.01, 1.02).digits
        (3, 5)
        """
        largest = max(abs(self.low), abs(self.high))
        return max(FEWEST_DIGITS, 2 + math.ceil(math.log10(largest / (self.high - self.low))))


def parse_space(texts: Sequence[str]) -> list[Dimension]:
    """``("method.beta=0.1..10:log", "plan.epochs=1..5", "method.head=a,b")`` as dimensions; raises
    ConfigError.

    >>> parse_space(["plan.epochs=1..5"])[0].is_whole
    True
    """
    if not texts:
        raise ConfigError("name what may vary, e.g. --space method.beta=0.1..10:log")
    space = [_dimension(text) for text in texts]
    if len({d.key for d in space}) != len(space):
        raise ConfigError("--space names a key twice; name each once")
    return space


def _dimension(text: str) -> Dimension:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not key or not values.strip():
        raise ConfigError(
            f"--space {text!r} is not of the form KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=A,B,C"
        )
    ends, _, scale = values.strip().partition(":")
    low, dots, high = ends.partition("..")
    if not dots:
        return Dimension(key, choices=tuple(parse_grid((text,))[key]))

    try:
        dimension = Dimension(
            key=key,
            low=float(low),
            high=float(high),
            is_whole=all(end.strip().lstrip("+-").isdecimal() for end in (low, high)),
            log=bool(scale),
        )
    except ValueError:
        raise ConfigError(f"--space {text!r}: {low!r} and {high!r} must be numbers") from None
    if not (math.isfinite(dimension.low) and math.isfinite(dimension.high)):
        raise ConfigError(f"--space {text!r}: {low!r} and {high!r} must be finite numbers")
    is_legal_log = not scale or (scale.strip() == "log" and dimension.low > 0)
    if not is_legal_log or not dimension.low < dimension.high:
        raise ConfigError(
            f"--space {text!r}: the first end must be below the second, and above 0 with :log, the "
            "only scale"
        )
    return dimension


@dataclass(frozen=True)
class Trial:
    """One proposal: its values by key, and the goal by seed; none where a run failed, ``problem``
    says why.
    """

    number: int
    values: Mapping[str, Any]
    scores: Mapping[int, float]
    problem: str = ""

    @property
    def mean(self) -> float:
        """The mean of the goal over seeds; NaN if a run failed."""
        if not self.scores:
            return math.nan
        return statistics.fmean(self.scores.values())


PROPOSALS = "trials.json"
"""The file with the proposals of a search, in its folder."""


@dataclass
class ProposalFile:
    """What the sampler has proposed for each trial: its parameters, as Optuna has them.

    A repeated command takes the proposals from the file. The sampler would not propose them again
    if a trial that had failed now succeeds, and the folders of trials hold runs with these values.

    ``search``: what the sampler depends on besides scores, its space and its seed.
    """

    path: Path
    search: Mapping[str, Any]
    proposals: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(path: Path, search: Mapping[str, Any], *, overwrite: bool) -> ProposalFile:
        """The file of a search; without proposals if there is none yet.

        Raises CorruptFile for a file that has no proposals, and RunExists for the file of another
        search, which is replaced with ``overwrite``.
        """
        search = _as_json(search)
        if not path.is_file():
            return ProposalFile(path, search)
        try:
            content = json.loads(read_file(path))
            stored_search = content["search"]
            proposals = list(map(dict, content["proposals"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptFile(
                f"{path} is not the file of a search; choose another --out, or delete it"
            ) from error
        if stored_search == search:
            return ProposalFile(path, search, proposals)
        if not overwrite:
            raise RunExists(
                f"{path.parent} holds a search with another --space or seed; choose another --out, "
                "or start again with --overwrite"
            )
        return ProposalFile(path, search)

    def add(self, proposal: Mapping[str, Any]) -> None:
        """Add the proposal of the next trial, and write the file."""
        self.proposals.append(dict(proposal))
        content = {"search": self.search, "proposals": self.proposals}
        make_folder(self.path.parent)
        write_whole(self.path, json.dumps(content, indent=1).encode())


def _as_json(search: Mapping[str, Any]) -> dict[str, Any]:
    """A search as JSON has it: lists for tuples, and texts for dates."""
    read: dict[str, Any] = json.loads(json.dumps(search, default=str))
    return read


@dataclass
class Tuning:
    """A search, from the beginning or from where it stopped: the samplers are a function of the
    experiment's seed.

    ``do``: carries runs out, and leaves alone those that are finished. ``overwrite``: replace
    another search in the folder. Raises ConfigError for an unknown goal, and if Optuna is not
    installed.
    """

    experiment: Experiment
    space: Sequence[Dimension]
    seeds: Sequence[int]
    out: Path
    do: Callable[[Sequence[Variant]], Sequence[Outcome]]
    goal: str = ""
    overwrite: bool = False
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._check_goal()
        ranking = self.experiment.rank_by
        if not self.goal and self._selects_round:
            self.goal = BEST_ROUND
        if not self.goal and ranking != ACCURACY:
            self.goal = ranking
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(
                f"tune needs Optuna: pip install 'fedstill[tune]' ({error})"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._seed = Parts(self.experiment).top.seed
        direction = optuna.study.StudyDirection.MAXIMIZE
        if self.is_minimised:
            direction = optuna.study.StudyDirection.MINIMIZE
        self.study = optuna.create_study(direction=direction)

    def _check_goal(self) -> None:
        """Raise ConfigError for an unknown goal, and for one that no run will have."""
        if self.goal and self.goal not in GOALS:
            goals = [goal for goal in GOALS if not self._obstacle(goal)]
            raise ConfigError(
                f"there is no goal {self.goal!r}; choose one of {', '.join(goals)}, or add a "
                "metric with -s metrics=NAME; a measure cannot be a goal, because fedstill does "
                "not know whether more of it is better"
            )
        obstacle = self._obstacle(self.goal)
        if obstacle:
            raise ConfigError(f"--goal {self.goal}: {obstacle}")

    def _obstacle(self, goal: str) -> str:
        """The reason why no run will have a goal, with a remedy; empty if runs may have it."""
        metric = METRIC_GOALS.get(goal)
        top = Parts(self.experiment).top
        if metric is not None and metric not in (*top.metrics, top.rank_by):
            return f"no run records {metric}; add it with -s metrics={metric}"
        searched_tables = {dimension.key.partition(".")[0] for dimension in self.space}
        may_select_round = self._selects_round or searched_tables & {"select_on", "stop"}
        if goal == BEST_ROUND and not may_select_round:
            return (
                "no run selects a round; set select_on or [stop], e.g. with "
                "-s select_on=held_out -s plan.validation=0.1"
            )
        return ""

    @property
    def metric(self) -> str:
        """The metric if the goal is one; empty for any other number of a summary."""
        if self.goal == BEST_ROUND:
            return self.experiment.rank_by
        return METRIC_GOALS.get(self.goal, "")

    @property
    def is_minimised(self) -> bool:
        """Whether a smaller value of the goal is better."""
        return minimised(self.metric or self.goal)

    @property
    def _selects_round(self) -> bool:
        stop = self.experiment.table("stop")
        stops_early = bool(stop.get("patience")) or stop.get("target") is not None
        return self.experiment.select_on is not None or stops_early

    def run(self, trials: int) -> Iterator[Trial]:
        """Yield the trials in order, each when its runs are finished; the search may be stopped
        early.
        """
        from optuna.trial import TrialState

        search = {"seed": self._seed, "space": list(map(asdict, self.space))}
        file = ProposalFile.read(self.out / PROPOSALS, search, overwrite=self.overwrite)
        for number in range(trials):
            proposal = self._propose(number, file.proposals)
            values = {dimension.key: dimension.suggested(proposal) for dimension in self.space}
            runs = self.runs(number, values)
            if number == len(file.proposals):
                file.add(proposal.params)
            outcomes = self.do(runs)
            if any(outcome.state in ("waiting", "stopped", "running") for outcome in outcomes):
                return

            problem = next((outcome.problem for outcome in outcomes if outcome.problem), "")
            scores: dict[int, float] = {}
            if not problem:
                variants = [outcome.variant for outcome in outcomes]
                scores = {variant.seed: self._score(variant.folder) for variant in variants}
            trial = Trial(number, values, scores, problem)
            if problem:
                self.study.tell(proposal, state=TrialState.FAIL)
            else:
                self.study.tell(proposal, trial.mean)
            self.trials.append(trial)
            yield trial

    def _propose(self, number: int, proposals: Sequence[Mapping[str, Any]]) -> optuna.Trial:
        """A trial with the proposal of an earlier command, or a new one."""
        from optuna.samplers import TPESampler

        # Every trial has its own seed, so that a trial draws the same numbers whether or not those
        # before it drew any. NumPy's seeds have 32 bits.
        seed = seed_for(self._seed, number, 0, 0, "trial") % 2**32
        self.study.sampler = TPESampler(seed=seed)
        if number < len(proposals):
            self.study.enqueue_trial(dict(proposals[number]))
        return self.study.ask()

    def runs(self, number: int, values: Mapping[str, Any]) -> list[Variant]:
        """The runs of a trial, one for each seed; raises ConfigError for invalid values."""
        label = ", ".join(f"{k}={v}" for k, v in values.items())
        # The seed of the config is the sampler's, and does not contradict the seeds of the runs.
        origins = {key: origin for key, origin in self.experiment.origins.items() if key != "seed"}
        chosen = replace(self.experiment, origins=origins).with_values(values, "--space")
        return [seeded(label, chosen, seed, self.out / f"trial{number:03d}") for seed in self.seeds]

    def _score(self, folder: Path) -> float:
        summary = json.loads(read_file(folder / SUMMARY).decode())
        goals = [goal for goal in GOALS if summary.get(goal) is not None]
        self.goal = self.goal or next(iter(goals), "")
        if self.goal in METRICS and self.goal not in goals:
            # Clients with models of their own have no common model that is tested.
            self.goal = f"own_test_{self.goal}"
        if self.goal not in goals:
            raise ConfigError(
                f"{folder} has no {self.goal or 'accuracy'}; its goals: "
                f"{', '.join(goals) or 'none'}"
            )
        return float(summary[self.goal])

    def ranked(self) -> list[Trial]:
        """The trials, the best one first and failed ones last."""
        successful = [trial for trial in self.trials if trial.scores]
        failed = [trial for trial in self.trials if not trial.scores]
        ranked = sorted(successful, key=lambda trial: trial.mean, reverse=not self.is_minimised)
        return [*ranked, *failed]
