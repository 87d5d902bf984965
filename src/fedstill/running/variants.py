"""The runs of a comparison: methods × a grid × seeds, each settled once and with a folder of its
own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedstill.config.experiment import COMMAND_LINE, Experiment, refuse_no_experiment
from fedstill.config.resolve import settle
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.core.files import digest

LONGEST_NAME = 255
"""The most bytes that a file system takes as a name."""

KEPT_OF_NAME = 150
"""How many bytes of a longer one are kept."""


@dataclass(frozen=True)
class Variant:
    """One run of a comparison: what is varied, as text; its settings; its folder; the run that it
    starts from.
    """

    label: str
    experiment: Experiment
    settings: Settings
    folder: Path
    after: Variant | None = None

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.settings.seed


def variants(
    experiment: Experiment,
    out: Path,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> list[Variant]:
    """The runs of a comparison: every method, every combination of the grid's values, every seed;
    all checked.

    Raises ConfigError for a grid without values, and where two runs are the same.
    """
    refuse_no_experiment(experiment)
    if bare := [key for key, values in (grid or {}).items() if not len(values)]:
        raise ConfigError(f"the grid names no values of {bare[0]}, e.g. --grid {bare[0]}=0.1,1")
    runs = []
    for method in methods or ("",):
        of_method = experiment
        if method:
            of_method = _with_method(experiment, method)
        for values in itertools.product(*(grid or {}).values()):
            setting = dict(zip(grid or {}, values, strict=True))
            chosen = of_method.with_values(setting, "compare")
            runs += [
                _variant(replace(chosen, seed=seed), setting, out)
                for seed in seeds or (chosen.seed,)
            ]
    runs = _apart(runs, out)
    if len({v.folder for v in runs}) != len(runs):
        raise ConfigError(
            "two runs of this comparison are the same; name each method, value and seed once"
        )
    return runs


def _with_method(experiment: Experiment, method: str) -> Experiment:
    """The experiment with another method.

    Fields from the command line hold for every method; one that a method does not have is an error
    when the run is settled. Other fields belong to the method that the experiment names, or to
    every method if it names none. Raises ConfigError if the command line names a method, which
    would have no effect.
    """
    origins = experiment.origins
    if COMMAND_LINE in (origins.get("method"), origins.get("method.name")):
        raise ConfigError(
            "--methods names the methods of a comparison; leave out -s method, or add that method "
            "to --methods"
        )
    table = experiment.table("method")
    is_same_method = table.get("name", method) == method
    fields = {
        key: value
        for key, value in table.items()
        if key != "name" and (is_same_method or origins.get(f"method.{key}") == COMMAND_LINE)
    }
    return experiment.with_values({"method": {"name": method, **fields}}, "compare")


def _variant(experiment: Experiment, setting: Mapping[str, Any], out: Path) -> Variant:
    settings = settle(experiment, here=False)
    values = [f"{k}={v}" for k, v in setting.items()]
    label = " ".join([settings.named.method.label, *values])
    folder = _folder(out, [Path(settings.named.method.name.partition(":")[0]).stem, *values])
    return Variant(label, experiment, settings, _of_seed(folder, settings))


def _apart(runs: Sequence[Variant], out: Path) -> list[Variant]:
    """The runs; those whose folder another one of another label has too get one with their whole
    label.
    """
    labels: dict[Path, set[str]] = {}
    for run in runs:
        labels.setdefault(run.folder, set()).add(run.label)
    shared = {folder for folder, of_it in labels.items() if len(of_it) > 1}
    whole = [_of_seed(_folder(out, [run.label.replace(":", "-")]), run.settings) for run in runs]
    return [
        replace(v, folder=own) if v.folder in shared else v
        for v, own in zip(runs, whole, strict=True)
    ]


def _folder(out: Path, words: Sequence[str]) -> Path:
    """The words as a folder's name; of more than a name may have, the first ones and a hash of
    all.
    """
    name = " ".join(words).replace("/", "-").replace(" ", "_")
    if len(whole := os.fsencode(name)) > LONGEST_NAME:
        name = f"{whole[:KEPT_OF_NAME].decode(errors='ignore')}-{digest(whole)[:12]}"
    return out / name


def seeded(label: str, experiment: Experiment, seed: int, folder: Path) -> Variant:
    """One run of an experiment with a seed, in a folder of that seed; raises ConfigError if it
    cannot be run.

    Whether this machine has what it needs is seen to when it is begun: another one may have
    finished it.
    """
    with_seed = replace(experiment, seed=seed)
    settings = settle(with_seed, here=False)
    return Variant(label, with_seed, settings, _of_seed(folder, settings))


def with_starts(runs: Sequence[Variant]) -> list[Variant]:
    """The runs, each after the one that it starts from; a start that several share occurs once."""
    by_folder: dict[Path, Variant] = {}
    for run in runs:
        for one in (run.after, run):
            if one is not None:
                by_folder.setdefault(one.folder, one)
    return list(by_folder.values())


def new_folder(name: str) -> Path:
    """A folder under ``runs/`` that does not exist yet."""
    return next(p for i in itertools.count(1) if not (p := Path("runs") / f"{name}-{i}").exists())


def _of_seed(folder: Path, settings: Settings) -> Path:
    return folder / f"seed{settings.seed}"
