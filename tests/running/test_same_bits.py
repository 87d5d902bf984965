"""A config and a seed lead to the same bits in every command and with any number of processes."""

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
from fedstill.running.compare import carry_out_runs, seeded, variants
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


def experiment(name: str, **changes: Any) -> Experiment:
    """One of ``EXPERIMENTS``."""
    return Experiment(**{**COMMON, **EXPERIMENTS[name], **changes})


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three threads of torch, as on another machine or for a caller in Python."""
    thread_count = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(thread_count)


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
            alone = tmp_path / "alone" / run.label / "seed5"
            assert_same_bits(bits(run.folder), bits(alone))


@pytest.mark.parametrize("threads", ["auto", 1, 2, (1, 3)])
def test_commands_do_not_change_the_threads_of_an_experiment(threads: Any, tmp_path: Path) -> None:
    chain = experiment("chain", threads=threads)
    compared = variants(chain, tmp_path, ["fedavg", "fedseq"], [1, 2])
    tuning = Tuning(chain, parse_space(["plan.epochs=1..2"]), [1], tmp_path, lambda runs: [])
    tuned = tuning.runs(0, {"plan.epochs": 2})
    for variant in (*compared, *tuned):
        assert variant.settings.threads == resolve(chain).threads


def test_a_table_of_a_paper_has_the_threads_of_a_run(tmp_path: Path) -> None:
    recipe = load_recipe("hiper/table1")
    cell = (next(iter(recipe.rows)), next(iter(recipe.columns)))
    (run,) = recipe.variants([cell], [1], {}, tmp_path)
    assert run.settings.threads == resolve(Experiment()).threads
    (changed,) = recipe.variants([cell], [1], {"threads": 2}, tmp_path)
    assert changed.settings.threads == (2, 2)
