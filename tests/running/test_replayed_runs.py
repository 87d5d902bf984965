"""Replay of a run: the bits of its checkpoints, from any of them, and rounds with other clients."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.codec import encode
from fedstill.core.errors import CorruptFile
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.core.records import Payload, State
from fedstill.running.checkpoint import Position
from fedstill.running.replay import Replay, Without, checkpoints_of
from fedstill.running.runner import run
from fedstill.running.runs import read_run

CHAIN = toys.toy("fedseq", rounds=3, topology={"clients": 4, "sampled": 3})
"""Three links a round, so that checkpoints in the middle of a round are kept."""

EXPERIMENTS = {
    "scaffold": toys.toy("scaffold"),
    "chain": CHAIN,
    "stopped early": toys.stopping_early("scaffold"),
}
if toys.has("querying"):
    EXPERIMENTS["queries"] = toys.asking_again()


@dataclass
class States(NoRecorder):
    """Keeps the bits of the state after every stage."""

    bits: dict[Position, bytes] = field(default_factory=dict)

    def stage(self, result: StageResult) -> None:
        state = result.after
        self.bits[Position(state.round, state.stage)] = bits(state)


def bits(state: State) -> bytes:
    """All of a state as bytes."""
    return encode(Payload({"params": state.params, **state.extra}))


def with_all_checkpoints(experiment: Experiment, folder: Path) -> Path:
    """Run an experiment that keeps the checkpoint of every round."""
    run(experiment.with_values({"keep_checkpoints_every": 1}, "test"), folder, toys.blobs())
    return folder


def kept_bits(folder: Path) -> dict[Position, bytes]:
    """The bits of the checkpoints that a run kept."""
    checkpoints = checkpoints_of(folder)
    return {position: bits(checkpoints.at(position).state) for position in checkpoints.positions()}


def replay_from(folder: Path, position: Position) -> Replay:
    """A replay of a run that starts at one of its checkpoints."""
    replay = Replay.of_round(folder, position.round, toys.blobs())
    return replace(replay, restored=checkpoints_of(folder).at(position))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_replayed_states_are_the_checkpoints_of_the_run_from_each_of_them(
    name: str, tmp_path: Path
) -> None:
    folder = with_all_checkpoints(EXPERIMENTS[name], tmp_path / "run")
    checkpoints = kept_bits(folder)
    assert len(checkpoints) >= len(read_run(folder).rounds) > 0

    for start in checkpoints:
        states = States()
        replay = replay_from(folder, start)
        with replay.session() as session:
            numbers = [s.round - 1 for s in session.rounds(recorder=states)]
        assert numbers == list(range(replay.start, len(read_run(folder).rounds) + 1))
        for position in checkpoints:
            if position > start:
                assert states.bits[position] == checkpoints[position], (start, position)


def test_a_replay_of_a_round_begins_at_the_last_checkpoint_before_it(tmp_path: Path) -> None:
    folder = with_all_checkpoints(CHAIN, tmp_path / "run")
    checkpoints = kept_bits(folder)
    assert Position(3, 2) in checkpoints, "the last three stages are kept"
    replay = Replay.of_round(folder, 3, toys.blobs())
    assert replay.restored is not None
    assert bits(replay.restored.state) == checkpoints[Position(2, 3)]
    assert replay.start == 3

    states = States()
    # Without checkpoints, the replay begins at round 1.
    shutil.rmtree(folder / "checkpoints")
    with Replay.of_round(folder, 3, toys.blobs()).session() as session:
        session.go_to(3)
        list(session.rounds(3, recorder=states))
    assert states.bits[Position(3, 2)] == checkpoints[Position(3, 2)]


def test_a_fork_does_not_change_the_session_that_it_was_forked_from(tmp_path: Path) -> None:
    folder = with_all_checkpoints(toys.toy("scaffold"), tmp_path / "run")
    checkpoints = kept_bits(folder)
    states = States()
    with Replay.of_round(folder, 2, toys.blobs()).session() as session:
        session.go_to(2)
        without = Without(frozenset(range(3)))
        for _ in session.fork().rounds(3, change=without):
            pass
        for _ in session.rounds(3, recorder=states):
            pass
    for position in checkpoints:
        assert (position in states.bits) == (position > Position(1, 1))
        if position in states.bits:
            assert states.bits[position] == checkpoints[position]


def test_links_of_a_chain_are_left_out_in_the_middle_of_a_round(tmp_path: Path) -> None:
    folder = with_all_checkpoints(CHAIN, tmp_path / "run")
    replay = replay_from(folder, Position(3, 1))
    stages = replay.prepared.settings.schedule(3, replay.prepared.world)
    states = States()
    with replay.session() as session:
        change = Without(frozenset({stages[0].clients[0], stages[1].clients[0]}))
        (state,) = session.rounds(3, change=change, recorder=states)

    assert list(states.bits) == [Position(3, 3)], "the first link had acted, the second is left out"
    assert state.round == 4


def test_a_checkpoint_that_was_not_kept_is_named(tmp_path: Path) -> None:
    folder = with_all_checkpoints(CHAIN, tmp_path / "run")
    with pytest.raises(CorruptFile, match="0000001-0000001"):
        checkpoints_of(folder).at(Position(1, 1))
