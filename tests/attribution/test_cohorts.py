"""A round with other draws of its clients: who was drawn, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import fedstill
import toys
from fedstill.attribution.class_changes import ClassChange
from fedstill.attribution.replays import repeat_round, sample_sentence, sample_table
from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.core.records import Stage, World
from fedstill.core.topology import Parallel, Sequential
from fedstill.running.replay import Replay
from fedstill.running.runs import read_run


@dataclass(frozen=True)
class InRoundThree(Parallel):
    """Round 3 with clients of one's own choice."""

    who: str = ""

    def __call__(self, round: int, world: World) -> list[Stage]:
        stages = super().__call__(round, world)
        return (
            [Stage(3, 0, "train", tuple(map(int, self.who.split("+"))))] if round == 3 else stages
        )


def quiet(round: int, last: int) -> None:
    pass


def made(folder: Path, method: str = "fedavg", **topology: object) -> Path:
    asked = toys.toy(
        method,
        rounds=3,
        topology={"clients": 6, "sampled": 2, **topology},
        keep_checkpoints_every=2,
    )
    fedstill.run(asked, folder, data=toys.blobs())
    return folder


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn"])
def test_each_draw_is_the_round_with_those_clients(method: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", method)
    was = [e["class_accuracy"] for e in read_run(folder).rounds]
    cohorts = repeat_round(Replay.of_round(folder, 3, toys.blobs()), 3, 4, quiet)
    assert list(cohorts[0].class_accuracy) == was[2]
    assert len({c.clients for c in cohorts}) == 5
    for i, cohort in enumerate(cohorts[1:3]):
        own = {"kind": f"{__name__}:InRoundThree", "who": "+".join(map(str, cohort.clients))}
        other = made(tmp_path / str(i), method, **own)
        now = [e["class_accuracy"] for e in read_run(other).rounds]
        assert now == [*was[:2], list(cohort.class_accuracy)]


def test_a_chain_is_drawn_in_other_orders_too(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "fedseq", sampled=6)
    cohorts = repeat_round(Replay.of_round(folder, 2, toys.blobs()), 2, 3, quiet)
    assert all(sorted(c.clients) == list(range(6)) for c in cohorts)
    assert len({c.clients for c in cohorts}) == 4
    settings = Replay.of_round(folder, 2, toys.blobs()).prepared.settings
    assert isinstance(settings.schedule.topology, Sequential)


def test_where_nobody_else_can_be_drawn_it_is_said(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", sampled=6)
    with pytest.raises(ConfigError, match="3 other"):
        repeat_round(Replay.of_round(folder, 2, toys.blobs()), 2, 3, quiet)
    few = made(tmp_path / "few", clients=3, sampled=2)
    with pytest.raises(ConfigError, match="10 other"):
        repeat_round(Replay.of_round(few, 2, toys.blobs()), 2, 10, quiet)


def test_the_sentence_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = toys.toy(
        "fedavg", rounds=3, topology={"clients": 6, "sampled": 2}, data="digits", model="logistic"
    )
    fedstill.run(asked, tmp_path / "run")
    run = read_run(tmp_path / "run")
    cohorts = repeat_round(Replay.of_round(tmp_path / "run", 2), 2, 2, quiet)
    before, of = run.rounds[0]["class_accuracy"][1], 1
    moment = ClassChange(2, of, before, run.rounds[1]["class_accuracy"][of])
    after = [100 * (c.class_accuracy[of] - before) for c in cohorts]  # type: ignore[operator]
    said = sample_sentence(run, moment, cohorts)
    mean, sd = sum(after[1:]) / 2, abs(after[1] - after[2]) / 2**0.5
    shown = f"{mean:+.1f}" if abs(mean) >= 0.05 else "0.0"
    assert f"{shown} ± {sd:.1f} over 2 other samples" in said
    table = sample_table(moment, cohorts)
    rows = table.lines
    assert table.head == ["clients", "of the class", "after", "change [points]"]
    for row, cohort in zip(rows, cohorts, strict=True):
        assert int(row[1]) == sum(run.label_counts[c][of] for c in cohort.clients)
    assert call(["why", str(tmp_path / "run"), "--class", "1", "--round", "2", "--draws", "2"]) == 0
    out, err = capsys.readouterr()
    assert said in out
    assert "sample 2 of 2" in err


def test_over_tasks_a_draws_clients_are_counted_with_what_they_have_in_the_rounds_task(
    tmp_path: Path,
) -> None:
    tasks = {"tasks": 2, "kind": "classes", "order": "given"}
    asked = toys.toy("fedavg", rounds=4, topology={"clients": 6, "sampled": 2}, stream=tasks)
    fedstill.run(asked, tmp_path / "run", data=toys.blobs())
    kept = Replay.of_round(tmp_path / "run", 3, toys.blobs())
    cohorts = repeat_round(kept, 3, 2, quiet)
    ours = kept.prepared.world.stream.classes(1)
    assert 0 < len(ours) < 5
    for of in range(5):
        rows = sample_table(ClassChange(3, of, 0.5, 0.0), cohorts).lines
        own = [
            sum(int(kept.prepared.sites.label_counts(c)[of]) for c in cohort.clients)
            for cohort in cohorts
        ]
        assert [int(row[1]) for row in rows] == (own if of in ours else [0, 0, 0])
