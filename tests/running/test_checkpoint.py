"""Checkpoints are complete or absent, a resume uses the newest sound one, and no file is deleted
while a checkpoint needs it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedstill.core.codec import encode
from fedstill.core.errors import CorruptFile
from fedstill.core.files import digest
from fedstill.core.records import ModelSpec, Payload, Stage, State
from fedstill.running import journal as journals
from fedstill.running.checkpoint import CHECKPOINTS_KEPT, Checkpoints, Restored, StoredMemory

CONFIG = digest(b"config")
LABELS = torch.arange(12).reshape(4, 3)


NETWORK = ModelSpec(
    name="mlp",
    input_shape=(1, 4, 4),
    classes=5,
    fields=(("deep", True), ("hidden", (8, 4))),
    trains=("head.",),
    held="0" * 64,
    adds=("own_head",),
)


def state_at(round: int, stage: int = 0) -> State:
    """A state with every kind of group. ``labels`` is the same at all stages, and the rest
    differs.
    """
    draw = torch.Generator().manual_seed(100 * round + stage)
    weight = torch.randn(3, 2, generator=draw)
    params = {"z.weight": weight, "a.bias": torch.zeros(3), "n": torch.tensor(round)}
    importance = torch.randn(2, generator=draw)
    extra = Payload(
        labels=LABELS,
        importance={"z": importance},
        answered=stage,
        gini=0.1 * round,
        note="x" * round,
    )
    return State(params=params, extra=extra, round=round, stage=stage, model=NETWORK)


def mark(round: int) -> tuple[int, str]:
    """The length and the hash of the journal at a round."""
    return 10 * round, digest(str(round).encode())


def memory_files(round: int) -> dict[int, tuple[str, str]]:
    """The memory files of two clients at a round: the name and the hash of each."""
    return {2: (f"m{round}", digest(b"m")), 11: ("m0", "0")}


def save(checkpoints: Checkpoints, round: int, stage: int = 0) -> list[str]:
    """Save the checkpoint of a stage; returns the memory files that checkpoints still need."""
    return checkpoints.save(state_at(round, stage), memory_files(round), mark(round))


@pytest.fixture
def three_checkpoints(checkpoints: Checkpoints) -> Checkpoints:
    """A folder with the checkpoints of rounds 1, 2 and 3."""
    for round_index in (1, 2, 3):
        save(checkpoints, round_index)
    return checkpoints


def assert_is(restored: Restored | None, round: int, stage: int = 0) -> None:
    """Assert that a restored checkpoint is the one that ``save`` wrote at this stage."""
    assert restored is not None
    state = restored.state
    expected = state_at(round, stage)
    assert (state.round, state.stage, state.model) == (round, stage, expected.model)
    assert encode(Payload(params=state.params)) == encode(Payload(params=expected.params))
    assert list(state.params) == list(expected.params)
    assert encode(state.extra) == encode(expected.extra)
    assert restored.state_files == memory_files(round)
    assert restored.journal == mark(round)


def flip(path: Path, position: float = 0.5) -> None:
    """Flip a bit of a file, at a position from 0 (its first byte) to 1 (its last byte)."""
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 16
    path.write_bytes(content)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """An empty folder of checkpoints."""
    return Checkpoints(tmp_path / "run" / "checkpoints", CONFIG)


def test_a_saved_state_is_restored(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    for round, stage in [(1, 0), (1, 1), (9, 3), (10, 0), (10, 11)]:
        save(checkpoints, round, stage)
        assert_is(checkpoints.latest(), round, stage)
        assert_is(Checkpoints(checkpoints.folder, CONFIG).latest(), round, stage)


def test_a_state_without_extras_model_or_parameters_is_restored(checkpoints: Checkpoints) -> None:
    checkpoints.save(State({}), {}, journals.EMPTY_MARK)
    restored = checkpoints.latest()
    assert restored is not None
    assert dict(restored.state.params) == {}
    assert dict(restored.state.extra) == {}
    assert restored.state.model is None


def test_extras_may_have_names_that_a_checkpoint_uses_itself(
    checkpoints: Checkpoints,
) -> None:
    extra = Payload({"params": 1, "extra x": 2, "x": 3, "model.0": {"w": torch.ones(1)}})
    checkpoints.save(State({"w": torch.zeros(1)}, extra), {}, journals.EMPTY_MARK)
    restored = checkpoints.latest()
    assert restored is not None
    assert encode(restored.state.extra) == encode(extra)
    assert restored.state.params["w"].item() == 0


def test_an_unchanged_group_is_not_written_again(checkpoints: Checkpoints) -> None:
    def modification_times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in checkpoints.objects.iterdir()}

    save(checkpoints, 1)
    first_times = modification_times()
    save(checkpoints, 2)
    second_times = modification_times()

    labels = digest(encode(Payload(labels=LABELS))) + ".safetensors"
    assert second_times[labels] == first_times[labels]
    assert len(second_times) == len(first_times) + 4, (
        "params, importance, gini and note changed; labels and answered did not"
    )


def groups_of(manifest: Path) -> dict[str, str]:
    """The objects that a checkpoint consists of, by group."""
    groups: dict[str, str] = json.loads(manifest.read_text())["manifest"]["groups"]
    return groups


def test_the_last_three_checkpoints_are_kept_and_no_other_file(checkpoints: Checkpoints) -> None:
    for round_index in range(1, 8):
        needed_memory_files = save(checkpoints, round_index)

    manifests = sorted(checkpoints.folder.glob("*.json"))
    names = [manifest.name for manifest in manifests]
    assert names == ["0000005-0000000.json", "0000006-0000000.json", "0000007-0000000.json"]
    assert len(names) == CHECKPOINTS_KEPT
    needed_objects = set()
    for manifest in manifests:
        needed_objects.update(groups_of(manifest).values())
    assert {path.stem for path in checkpoints.objects.iterdir()} == needed_objects
    assert needed_memory_files == ["m0", "m5", "m6", "m7"]


def test_memory_files_that_no_kept_checkpoint_names_are_pruned(tmp_path: Path) -> None:
    """Client 3 acts in every round, and client 4 in the first one alone."""
    memory = StoredMemory(tmp_path / "memory")
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONFIG, tmp_path / "memory")
    memory.hold(4, Payload(n=0))
    for round_index in range(1, 8):
        memory.hold(3, Payload(n=round_index))
        clients = [3]
        if round_index == 1:
            clients = [3, 4]
        memory.commit(Stage(round_index, 0, "train", (3, 4)), clients)
        state = State({}, round=round_index)
        memory.prune(checkpoints.save(state, dict(memory.index), journals.EMPTY_MARK))

    assert {path.name for path in (tmp_path / "memory").iterdir()} == {
        "client4-round1-stage0.safetensors",
        "client3-round5-stage0.safetensors",
        "client3-round6-stage0.safetensors",
        "client3-round7-stage0.safetensors",
    }
    restored = checkpoints.latest()
    assert restored is not None
    assert StoredMemory(tmp_path / "memory", restored.state_files).load(3).number("n") == 7


# --- damage ---------------------------------------------------------------------------

Damage = Callable[[Checkpoints], None]


def newest(checkpoints: Checkpoints) -> Path:
    """The manifest of the newest checkpoint."""
    return max(checkpoints.folder.glob("*.json"))


def own_object(checkpoints: Checkpoints) -> Path:
    """The parameters of the newest checkpoint, which no other checkpoint uses."""
    sha256 = groups_of(newest(checkpoints))["params"]
    return checkpoints.objects / f"{sha256}.safetensors"


def truncate(path: Path, count: int) -> None:
    """Cut off the last bytes of a file."""
    path.write_bytes(path.read_bytes()[:-count])


OTHER_OBJECT = encode(Payload(params={"w": torch.zeros(1)}))

DAMAGES: dict[str, Damage] = {
    "manifest flipped": lambda c: flip(newest(c)),
    "manifest's end flipped": lambda c: flip(newest(c), 0.97),
    "manifest truncated": lambda c: truncate(newest(c), 20),
    "manifest empty": lambda c: newest(c).write_bytes(b""),
    "manifest not JSON": lambda c: newest(c).write_bytes(b"\xff\xfe"),
    "manifest a list": lambda c: newest(c).write_bytes(b"[]"),
    "manifest too deep": lambda c: newest(c).write_bytes(b"[" * 100_000),
    "manifest gone": lambda c: newest(c).unlink(),
    "object flipped": lambda c: flip(own_object(c)),
    "object truncated": lambda c: truncate(own_object(c), 1),
    "object empty": lambda c: own_object(c).write_bytes(b""),
    "object gone": lambda c: own_object(c).unlink(),
    "object another's": lambda c: own_object(c).write_bytes(OTHER_OBJECT),
}
"""Damages of the newest checkpoint."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    name: str, three_checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[name](three_checkpoints)
    reopened = Checkpoints(three_checkpoints.folder, CONFIG)
    with caplog.at_level(logging.WARNING):
        assert_is(reopened.latest(), 2)
    assert name == "manifest gone" or "skipped a checkpoint" in caplog.text

    save(reopened, 3)
    assert_is(Checkpoints(three_checkpoints.folder, CONFIG).latest(), 3)


def test_exchanged_manifests_are_not_used(three_checkpoints: Checkpoints) -> None:
    _, second, third = sorted(three_checkpoints.folder.glob("*.json"))
    text = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(text)

    assert_is(three_checkpoints.latest(), 1)


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"zzz", b"0000000", b"0000009-0000000.json", b"../../x"]
)
def test_the_newest_manifest_is_used_if_latest_is_damaged(
    text: bytes, three_checkpoints: Checkpoints
) -> None:
    (three_checkpoints.folder / "LATEST").write_bytes(text)
    assert_is(three_checkpoints.latest(), 3)


def test_a_manifest_newer_than_the_one_that_latest_names_is_not_used(
    checkpoints: Checkpoints,
) -> None:
    save(checkpoints, 1)
    latest = (checkpoints.folder / "LATEST").read_bytes()
    save(checkpoints, 2)
    (checkpoints.folder / "LATEST").write_bytes(latest)
    assert_is(checkpoints.latest(), 1)


def test_nothing_is_loaded_if_all_checkpoints_are_damaged(three_checkpoints: Checkpoints) -> None:
    shared_object = digest(encode(Payload(labels=LABELS)))
    flip(three_checkpoints.objects / f"{shared_object}.safetensors")
    with pytest.raises(CorruptFile, match="checkpoint"):
        Checkpoints(three_checkpoints.folder, CONFIG).latest()


def test_the_checkpoint_of_another_configuration_is_refused(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    with pytest.raises(CorruptFile, match="another configuration"):
        Checkpoints(checkpoints.folder, digest(b"other")).latest()


def empty(path: Path) -> None:
    """Leave nothing in a file."""
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, Path.unlink, empty])
def test_a_checkpoint_whose_memory_files_are_damaged_is_not_used(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    memory = StoredMemory(tmp_path / "memory")
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONFIG, tmp_path / "memory")
    for round_index in (1, 2):
        memory.hold(3, Payload(n=round_index))
        memory.commit(Stage(round_index, 0, "train", (3,)), [3])
        checkpoints.save(State({}, round=round_index), dict(memory.index), journals.EMPTY_MARK)
    damage(tmp_path / "memory" / memory.index[3][0])

    restored = checkpoints.latest()
    assert restored is not None
    assert restored.state.round == 1
    with pytest.raises(CorruptFile, match="the memory of client 3"):
        memory.load(3)
