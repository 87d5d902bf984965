"""The runs of a comparison: methods × a grid × seeds, each settled once and with a folder of its
own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedstill.config.experiment import Experiment, refuse_no_experiment
from fedstill.config.named_tables import read_named, schema_of_name
from fedstill.config.overrides import Origin, overriding_fields, refuse_set_twice
from fedstill.config.resolve import read_package_tables, read_stream, settle
from fedstill.config.settings import PEERS, Settings
from fedstill.config.stages import read_method
from fedstill.config.validation import keys_of
from fedstill.core.errors import ConfigError
from fedstill.core.files import digest
from fedstill.methods.fit import FIT
from fedstill.methods.ridge import RIDGE

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
    of_methods = [experiment]
    if methods:
        of_methods = with_methods(experiment, methods)
    for of_method in of_methods:
        for values in itertools.product(*(grid or {}).values()):
            setting = dict(zip(grid or {}, values, strict=True))
            chosen = of_method.with_values(setting, "--grid")
            with_seeds = [with_seed(chosen, seed) for seed in seeds]
            runs += [_variant(one, setting, out) for one in with_seeds or [chosen]]
    runs = _apart(runs, out)
    if len({v.folder for v in runs}) != len(runs):
        raise ConfigError(
            "two runs of this comparison are the same; name each method, value and seed once"
        )
    return runs


# The experiment with each method of a comparison. Methods may differ in topology, stages and number
# of rounds.


@dataclass(frozen=True)
class Shape:
    """What an experiment's method decides: the fields of the topology, the stages that have plans,
    and the number of rounds if it is not free.
    """

    topology: frozenset[str]
    stages: frozenset[str]
    rounds: int | None

    @staticmethod
    def of(experiment: Experiment) -> Shape:
        """The shape of an experiment; raises ConfigError for a method or topology that cannot be
        read.
        """
        _, method = read_method(experiment)
        table = experiment.table("topology")
        only_kind = {key: value for key, value in table.items() if key == "kind"}
        topology = read_named("topology", only_kind, experiment.base, method.topology)
        fields = keys_of(schema_of_name("topology", topology.name, experiment.base))
        added_stages = [table.get("first"), table.get("last")]
        return Shape(
            topology=frozenset({*fields, "kind", "clients"}),
            stages=frozenset({*method.plans, *(s for s in (FIT, RIDGE) if s in added_stages)}),
            rounds=_fixed_rounds(experiment, topology.name),
        )


def _fixed_rounds(experiment: Experiment, topology: str) -> int | None:
    """The number of rounds of a topology with one exchange; None if it is free, or is not valid,
    which whoever settles the run says.
    """
    if topology != PEERS or not isinstance(experiment.rounds, int):
        return None
    tables = read_package_tables(experiment).values()
    if any(table.exchange_each_round for table in tables):
        return None
    _, stream = read_stream(experiment, experiment.rounds)
    return stream.tasks


def with_methods(experiment: Experiment, methods: Sequence[str]) -> list[Experiment]:
    """The experiment with each of some methods.

    Values of the config, not of the command line, are left out where they are for another method of
    these: fields of its topology, and plans of its stages. A method with one exchange has one round
    (with tasks, one for each) beside methods that have ``rounds`` of them.
    """
    experiments = [experiment.with_values({"method": method}, "--methods") for method in methods]
    shapes = [Shape.of(one) for one in experiments]
    fields = {field for shape in shapes for field in shape.topology}
    stages = {stage for shape in shapes for stage in shape.stages}
    fields -= overriding_fields("topology", experiment.origins)
    stages -= overriding_fields("plan", experiment.origins)

    has_free_rounds = any(shape.rounds is None for shape in shapes)
    fitted = []
    for one, shape in zip(experiments, shapes, strict=True):
        topology = _without(one.table("topology"), fields - shape.topology)
        plan = _without(one.table("plan"), stages - shape.stages)
        rounds = experiment.rounds
        if shape.rounds is not None and has_free_rounds:
            rounds = shape.rounds
        fitted.append(replace(one, topology=topology, plan=plan, rounds=rounds))
    return fitted


def _without(table: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _variant(experiment: Experiment, setting: Mapping[str, Any], out: Path) -> Variant:
    settings = settle(experiment, check_device=False)
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
    chosen = with_seed(experiment, seed)
    settings = settle(chosen, check_device=False)
    return Variant(label, chosen, settings, _of_seed(folder, settings))


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


def with_seed(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with one of the seeds of a command; raises ConfigError if an option has set
    it.
    """
    refuse_set_twice({"seed": seed}, experiment.origins, Origin("--seeds"))
    return replace(experiment, seed=seed)


def _of_seed(folder: Path, settings: Settings) -> Path:
    return folder / f"seed{settings.seed}"
