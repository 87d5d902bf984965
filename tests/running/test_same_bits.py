"""A config and a seed have the same bits in every command, however many runs are done at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstill
from fedstill.benchmark.recipes import load_recipe
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.running.compare import Variant, carry_out_runs, seeded, variants
from fedstill.running.tuning import Tuning, parse_space
from run_bits import assert_same_bits, bits

COMMON: dict[str, Any] = {
    "rounds": 1,
    "seed": 5,
    "reuse": False,
    "data": {"train_size": 120, "test_size": 60, "public": 60},
    "plan": {"epochs": 1, "batch": 20, "lr": 0.05},
}

EXPERIMENTS: dict[str, Mapping[str, Any]] = {
    "many clients": {"method": "fedntd", "topology": {"clients": 3}},
    "one client": {"method": "fedavg", "topology": {"clients": 3, "sampled": 1}},
    "chain": {"method": "fedseq", "topology": {"kind": "sequential", "clients": 3}},
    "server trains": {
        "method": "feddf",
        "topology": {"clients": 3, "server": "teach_server"},
        "plan": {"train": COMMON["plan"], "teach_server": {**COMMON["plan"], "optimiser": "sgd"}},
    },
    "chain, two threads": {
        "method": "fedseq",
        "topology": {"kind": "sequential", "clients": 3},
        "threads": 2,
    },
}


def experiment(name: str) -> Experiment:
    return Experiment(**{**COMMON, **EXPERIMENTS[name]})


@pytest.fixture
def three_threads() -> Iterator[None]:
    """What a process of fedstill's may have on another machine, or a caller in Python."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_run_has_the_same_bits_alone_and_in_a_comparison(tmp_path: Path) -> None:
    for name in EXPERIMENTS:
        fedstill.run(experiment(name), tmp_path / "alone" / name / "seed5")
    for jobs in (1, 2):
        folder = tmp_path / f"{jobs} at once"
        runs = [seeded(name, experiment(name), 5, folder / name) for name in EXPERIMENTS]
        outcomes = carry_out_runs(runs, jobs, lambda outcomes: None)
        assert [outcome.problem for outcome in outcomes] == [""] * len(runs)
        for run in runs:
            want = bits(tmp_path / "alone" / run.label / "seed5")
            assert_same_bits(bits(run.folder), want)


@pytest.mark.parametrize("threads", ["auto", 1, 2, (1, 3)])
def test_commands_leave_the_threads_of_an_experiment_as_they_are(
    threads: Any, tmp_path: Path
) -> None:
    chosen = Experiment(**{**COMMON, **EXPERIMENTS["chain"], "threads": threads})
    want = resolve(chosen).threads

    def tuned(number: int) -> list[Variant]:
        space = parse_space(["plan.epochs=1..2"])
        tuning = Tuning(chosen, space, [1], tmp_path, lambda runs: [])
        return tuning.runs(number, {"plan.epochs": 2})

    compared = variants(chosen, tmp_path, ["fedavg", "fedseq"], [1, 2])
    assert {run.settings.threads for run in [*compared, *tuned(0)]} == {want}


def test_a_table_of_a_paper_has_the_threads_of_a_run(tmp_path: Path) -> None:
    recipe = load_recipe("hiper/table1")
    cell = (next(iter(recipe.rows)), next(iter(recipe.columns)))
    (run,) = recipe.variants([cell], [1], {}, tmp_path)
    assert run.settings.threads == resolve(Experiment()).threads
    (changed,) = recipe.variants([cell], [1], {"threads": 2}, tmp_path)
    assert changed.settings.threads == (2, 2)
