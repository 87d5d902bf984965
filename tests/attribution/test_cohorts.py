"""A round repeated with other samples of its clients: the samples, and the results."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest
from announcements import no_announcement

import fedstill
import toys
from fedstill.attribution.class_changes import ClassChange
from fedstill.attribution.replays import (
    SampledRound,
    repeat_round,
    sample_sentence,
    sample_table,
)
from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.core.records import Stage, World
from fedstill.core.topology import Parallel, Sequential
from fedstill.running.replay import Replay
from fedstill.running.runs import read_run


@dataclass(frozen=True)
class ChosenInRoundThree(Parallel):
    """Parallel rounds whose third round has chosen clients, for example ``0+4``."""

    chosen: str = ""

    def __call__(self, round: int, world: World) -> list[Stage]:
        if round != 3:
            return super().__call__(round, world)
        clients = tuple(map(int, self.chosen.split("+")))
        return [Stage(3, 0, "train", clients)]


def trained(folder: Path, method: str = "fedavg", **topology: object) -> Path:
    """The folder, with a run of three rounds in it; two of six clients are sampled."""
    experiment = toys.toy(
        method,
        rounds=3,
        topology={"clients": 6, "sampled": 2, **topology},
        keep_checkpoints_every=2,
    )
    fedstill.run(experiment, folder, data=toys.blobs())
    return folder


def repeated(folder: Path, round: int, count: int) -> list[SampledRound]:
    """A round of a run on blobs as it was, and with as many other samples."""
    return repeat_round(Replay.of_round(folder, round, toys.blobs()), round, count, no_announcement)


def class_accuracies(folder: Path) -> list[list[float | None]]:
    """The accuracy of each class after each round of a run."""
    return [event["class_accuracy"] for event in read_run(folder).rounds]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
def test_a_repeated_round_is_that_of_a_run_which_samples_these_clients(
    method: str, tmp_path: Path
) -> None:
    folder = trained(tmp_path / "run", method)
    accuracies = class_accuracies(folder)

    original, *samples = repeated(folder, 3, 4)

    assert list(original.class_accuracy) == accuracies[2]
    clients = {sample.clients for sample in samples}
    assert len(clients | {original.clients}) == 5
    for number, sample in enumerate(samples[:2]):
        topology = {
            "kind": f"{__name__}:ChosenInRoundThree",
            "chosen": "+".join(map(str, sample.clients)),
        }
        run = trained(tmp_path / str(number), method, **topology)
        assert class_accuracies(run) == [*accuracies[:2], list(sample.class_accuracy)]


def test_a_chain_is_repeated_in_other_orders_too(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "fedseq", sampled=6)
    settings = Replay.of_round(folder, 2, toys.blobs()).prepared.settings
    assert isinstance(settings.schedule.topology, Sequential)

    samples = repeated(folder, 2, 3)

    assert all(sorted(sample.clients) == list(range(6)) for sample in samples)
    assert len({sample.clients for sample in samples}) == 4


def test_more_samples_than_there_are_other_clients_are_refused(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", sampled=6)
    with pytest.raises(ConfigError, match="3 other"):
        repeated(folder, 2, 3)

    small = trained(tmp_path / "small", clients=3, sampled=2)
    with pytest.raises(ConfigError, match="10 other"):
        repeated(small, 2, 10)


def test_the_command_prints_mean_and_spread_over_samples_and_a_row_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    topology = {"clients": 6, "sampled": 2}
    experiment = toys.toy(rounds=3, topology=topology, data="digits", model="logistic")
    fedstill.run(experiment, folder)
    run = read_run(folder)
    samples = repeat_round(Replay.of_round(folder, 2), 2, 2, no_announcement)
    label = 1
    first, second, _ = class_accuracies(folder)
    change = ClassChange(2, label, first[label], second[label])

    sentence = sample_sentence(run, change, samples)
    table = sample_table(change, samples)

    changes = []
    for sample in samples[1:]:
        accuracy = sample.class_accuracy[label]
        changes.append(100 * (accuracy - first[label]))
    mean = statistics.mean(changes)
    mean_text = f"{mean:+.1f}"
    if abs(mean) < 0.05:
        mean_text = "0.0"
    assert f"{mean_text} ± {statistics.stdev(changes):.1f} over 2 other samples" in sentence

    assert table.head == ["clients", "of the class", "after", "change [points]"]
    for row, sample in zip(table.lines, samples, strict=True):
        examples = sum(run.label_counts[client][label] for client in sample.clients)
        assert int(row[1]) == examples

    assert call(["why", str(folder), "--class", "1", "--round", "2", "--draws", "2"]) == 0
    printed = capsys.readouterr()
    assert sentence in printed.out
    assert "sample 2 of 2" in printed.err


def test_over_tasks_a_row_counts_the_examples_of_the_task_of_the_round(tmp_path: Path) -> None:
    experiment = toys.toy(
        rounds=4,
        topology={"clients": 6, "sampled": 2},
        stream={"tasks": 2, "kind": "classes", "order": "given"},
    )
    fedstill.run(experiment, tmp_path / "run", data=toys.blobs())
    replay = Replay.of_round(tmp_path / "run", 3, toys.blobs())
    samples = repeat_round(replay, 3, 2, no_announcement)
    task_classes = replay.prepared.world.stream.classes(1)
    assert 0 < len(task_classes) < 5

    for label in range(5):
        examples = [0, 0, 0]
        if label in task_classes:
            sites = replay.prepared.sites
            examples = [
                sum(int(sites.label_counts(client)[label]) for client in sample.clients)
                for sample in samples
            ]
        rows = sample_table(ClassChange(3, label, 0.5, 0.0), samples).lines
        assert [int(row[1]) for row in rows] == examples
