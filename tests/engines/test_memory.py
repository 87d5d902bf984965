"""What clients remember: it counts once it is committed, in this process or in files, and damage is
noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedstill.core.codec import decode, encode
from fedstill.core.errors import CorruptFile
from fedstill.core.files import digest
from fedstill.core.records import KEEP, NOTHING, Payload, Stage
from fedstill.engines.serial import Memory
from fedstill.running.checkpoint import StoredMemory


def stage(round: int, index: int = 0) -> Stage:
    return Stage(round, index, "train", (0, 1, 2))


def said(number: int) -> Payload:
    return Payload(number=number, params={"w": torch.full((2,), float(number))})


@pytest.fixture(params=["here", "files"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Memory:
    if request.param == "files":
        return StoredMemory(tmp_path / "memory")
    return Memory()


def remembered(memory: Memory, client: int) -> int | None:
    """The number in a client's state, or None if it has no state."""
    payload = memory.load(client)
    if payload:
        return int(payload.number("number"))
    return None


def test_what_is_held_counts_once_it_is_committed(memory: Memory) -> None:
    assert memory.load(0) == NOTHING
    memory.hold(0, said(1))
    assert remembered(memory, 0) is None
    assert memory.held(0).number("number") == 1
    memory.commit(stage(1), [0])
    assert remembered(memory, 0) == 1
    assert memory.held(0) == NOTHING
    assert torch.equal(memory.load(0).params["w"], torch.tensor([1.0, 1.0]))


def test_what_those_left_out_hold_is_dropped_and_what_they_remember_stays(memory: Memory) -> None:
    for client in (0, 1):
        memory.hold(client, said(1))
    memory.commit(stage(1), [0, 1])
    for client in (0, 1):
        memory.hold(client, said(2))
    memory.commit(stage(2), [0])
    assert (remembered(memory, 0), remembered(memory, 1)) == (2, 1)
    memory.commit(stage(3), [1])  # who remembers nothing of a stage has forgotten all
    assert (remembered(memory, 0), remembered(memory, 1)) == (2, None)


def test_a_file_a_client_and_stage_is_named_with_its_digest(tmp_path: Path) -> None:
    memory = StoredMemory(tmp_path)
    memory.hold(2, said(5))
    memory.commit(stage(3, 1), [2])
    (path,) = tmp_path.iterdir()
    assert memory.index == {2: ("client2-round3-stage1.safetensors", digest(path.read_bytes()))}
    assert path.name == memory.index[2][0]
    assert path.read_bytes() == encode(said(5))
    assert decode(path.read_bytes()).number("number") == 5
    memory.commit(stage(4), [2])
    assert memory.index == {}


def test_another_process_reads_what_the_index_names(tmp_path: Path) -> None:
    first = StoredMemory(tmp_path)
    first.hold(0, said(1))
    first.commit(stage(1), [0])
    again = StoredMemory(tmp_path)
    assert remembered(again, 0) is None, "a file that no index names does not count"
    again.index.update(first.index)
    assert remembered(again, 0) == 1


def test_files_that_no_checkpoint_names_are_deleted_and_others_left(tmp_path: Path) -> None:
    memory = StoredMemory(tmp_path)
    for round in (1, 2, 3):
        memory.hold(0, said(round))
        memory.commit(stage(round), [0])
    (tmp_path / "notes.txt").write_text("mine")
    memory.prune({"client0-round3-stage0.safetensors", "client0-round2-stage0.safetensors"})
    remaining = {p.name for p in tmp_path.iterdir()}
    assert remaining == {
        "client0-round2-stage0.safetensors",
        "client0-round3-stage0.safetensors",
        "notes.txt",
    }
    StoredMemory(tmp_path / "absent").prune(set())
    Memory().prune(set())


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "another"])
def test_a_damaged_file_names_the_client(damage: str, tmp_path: Path) -> None:
    memory = StoredMemory(tmp_path)
    memory.hold(1, said(1))
    memory.commit(stage(1), [1])
    path = tmp_path / memory.index[1][0]
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:-1])
        case "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "gone":
            path.unlink()
        case "another":
            path.write_bytes(encode(said(2)))  # intact, but of another run
    with pytest.raises(CorruptFile, match=rf"{path.name}.*client 1"):
        memory.load(1)
    memory.index.clear()
    assert memory.load(1) == NOTHING


def test_a_file_whose_digest_is_right_and_whose_content_is_none_is_damaged_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "strange").write_bytes(b"not a payload")
    memory = StoredMemory(tmp_path, {0: ("strange", digest(b"not a payload"))})
    with pytest.raises(CorruptFile, match="client 0"):
        memory.load(0)


def test_of_what_is_remembered_already() -> None:
    memory = Memory({4: said(9)})
    assert (remembered(memory, 4), remembered(memory, 0)) == (9, None)


def test_what_is_to_be_kept_is_what_the_client_remembered_before(tmp_path: Path) -> None:
    for memory in (Memory(), StoredMemory(tmp_path)):
        for index, state in enumerate((Payload(visits=3), KEEP)):
            memory.hold(1, state)
            memory.hold(2, KEEP)
            memory.commit(Stage(1, index, "train", (1, 2)), (1, 2))
        assert memory.load(1).number("visits") == 3
        assert not memory.load(2), "there was nothing to keep"
        memory.hold(1, Payload())
        memory.commit(Stage(2, 0, "train", (1,)), (1,))
        assert not memory.load(1), "an empty state is not the one of before"
