"""The command that looks for good values of fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from fedstill.cli.app import Grid, Jobs, Quiet, Seeds, Settings, say

if TYPE_CHECKING:
    from fedstill.running.compare import Outcome
    from fedstill.running.variants import Variant

Space = Annotated[tuple[str, ...], *Grid.__metadata__[:1], Parameter(metavar="KEY=LOW..HIGH")]
TrialCount = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=10_000))]


def tune_command(
    config: Path | None = None,
    *,
    space: Space = (),
    trials: TrialCount = 20,
    seeds: Seeds = (100, 101, 102),
    goal: str = "",
    out: Path | None = None,
    jobs: Jobs = None,
    set_: Settings = (),
    quiet: Quiet = False,
) -> int:
    """Look for good values of fields by trials (Optuna's TPE); each trial is one run per seed.

    Then print the command that reports the best values on other seeds. The same command goes on
    where it was stopped, with --out; more trials continue the search. It needs the extra tune.

    Args:
        config: What all runs have in common, a TOML file. Unset, the defaults.
        space: What may vary, KEY=LOW..HIGH[:log] or KEY=A,B,..., e.g. --space plan.lr=0.001..1:log.
            May be repeated.
        trials: How many trials, those that are done already included.
        seeds: Seeds of each trial's runs. Unset, 100,101,102. The values are to be reported on
            others.
        goal: A number of a run's summary: query_average_accuracy, personal_accuracy,
            mean_accuracy_last_10, accuracy, best_accuracy, forgetting, personal_forgetting, or a
            metric that the config records, as auc, best_auc or own_test_auc. Unset, the metric that
            rank_by names, or else the first of these that the runs have.
        out: The directory of all trials and the page. Unset, one is made under runs/.
        jobs: How many runs at once. By default one a core, fewer if there is not enough memory.
        set_: A value over the file's, as key=value. May be repeated.
        quiet: Say nothing of progress: no bar in a terminal, no lines elsewhere.
    """
    from fedstill.config.experiment import load
    from fedstill.report import terminal
    from fedstill.report import tuning as tuned
    from fedstill.report.progress import followed_runs
    from fedstill.running import compare as compared
    from fedstill.running.directory import claimed
    from fedstill.running.tuning import Tuning, parse_space
    from fedstill.running.variants import new_folder

    folder, experiment = out or new_folder("tune"), load(config, set_)
    count = jobs or compared.jobs_that_fit(experiment.device)
    before: list[Outcome] = []
    with claimed(folder), followed_runs(quiet, trials * len(seeds)) as shown:

        def do(runs: Sequence[Variant]) -> Sequence[Outcome]:
            before.extend(
                ended := compared.carry_out_runs(
                    runs, count, lambda now: shown.show([*before, *now])
                )
            )
            return ended

        tuning = Tuning(experiment, parse_space(space), seeds, folder, do, goal)
        for _ in tuning.run(trials):
            tuned.write_tuning_page(tuning, folder / "tuning.html")
    screen = terminal.console()
    if tuning.trials:
        screen.print(terminal.table(*tuned.trial_lines(tuning)))
        screen.print(tuned.advice(tuning, str(config or ""), set_), soft_wrap=True)
        screen.print(f"page: {folder / 'tuning.html'}", soft_wrap=True)
    if len(tuning.trials) < trials:
        return say(
            f"stopped after {len(tuning.trials)} of {trials} trials; the same command with --out "
            f"{folder} goes on",
            1,
        )
    return 0 if any(t.scores for t in tuning.trials) else 1
