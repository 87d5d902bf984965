"""Checkpoints: whole or not at all, the newest sound one is used, and nothing that counts is ever
deleted too early.
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


def state_at(round: int, stage: int = 0) -> State:
    """A state with every kind of group; ``labels`` is the same in all, the rest is this stage's."""
    draw = torch.Generator().manual_seed(100 * round + stage)
    params = {
        "z.weight": torch.randn(3, 2, generator=draw),
        "a.bias": torch.zeros(3),
        "n": torch.tensor(round),
    }
    extra = Payload(
        labels=LABELS,
        importance={"z": torch.randn(2, generator=draw)},
        answered=stage,
        gini=0.1 * round,
        said="x" * round,
    )
    return State(
        params,
        extra,
        round,
        stage,
        ModelSpec(
            name="mlp",
            input_shape=(1, 4, 4),
            classes=5,
            fields=(("deep", True), ("hidden", (8, 4))),
            trains=("head.",),
            held="0" * 64,
            adds=("own_head",),
        ),
    )


def mark(round: int) -> tuple[int, str]:
    return 10 * round, digest(str(round).encode())


def save(checkpoints: Checkpoints, round: int, stage: int = 0) -> list[str]:
    return checkpoints.save(
        state_at(round, stage), {2: (f"m{round}", digest(b"m")), 11: ("m0", "0")}, mark(round)
    )


def assert_is(restored: Restored | None, round: int, stage: int = 0) -> None:
    assert restored is not None
    want, got = state_at(round, stage), restored.state
    assert (got.round, got.stage, got.model) == (round, stage, want.model)
    assert encode(Payload(params=got.params)) == encode(Payload(params=want.params))
    assert list(got.params) == list(want.params)
    assert encode(got.extra) == encode(want.extra)
    assert restored.state_files == {2: (f"m{round}", digest(b"m")), 11: ("m0", "0")}
    assert restored.journal == mark(round)


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 16
    path.write_bytes(data)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "checkpoints", CONFIG)


def test_what_is_saved_is_restored(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    for round, stage in [(1, 0), (1, 1), (9, 3), (10, 0), (10, 11)]:
        save(checkpoints, round, stage)
        assert_is(checkpoints.latest(), round, stage)
        assert_is(Checkpoints(checkpoints.folder, CONFIG).latest(), round, stage)


def test_a_state_without_extras_model_or_parameters_is_restored(checkpoints: Checkpoints) -> None:
    checkpoints.save(State({}), {}, journals.EMPTY_MARK)
    restored = checkpoints.latest()
    assert restored is not None
    assert (dict(restored.state.params), dict(restored.state.extra), restored.state.model) == (
        {},
        {},
        None,
    )


def test_extras_whose_names_look_like_the_checkpoints_own_stay_apart(
    checkpoints: Checkpoints,
) -> None:
    extra = Payload({"params": 1, "extra x": 2, "x": 3, "model.0": {"w": torch.ones(1)}})
    checkpoints.save(State({"w": torch.zeros(1)}, extra), {}, journals.EMPTY_MARK)
    restored = checkpoints.latest()
    assert restored is not None
    assert encode(restored.state.extra) == encode(extra)
    assert restored.state.params["w"].item() == 0


def test_what_has_not_changed_is_not_written_again(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    before = {p.name: p.stat().st_mtime_ns for p in checkpoints.objects.iterdir()}
    save(checkpoints, 2)
    after = {p.name: p.stat().st_mtime_ns for p in checkpoints.objects.iterdir()}
    same = {n for n in before if after.get(n) == before[n]}
    assert digest(encode(Payload(labels=LABELS))) + ".safetensors" in same
    assert len(after) == len(before) + 4, (
        "params, importance, gini and said changed; labels and answered did not"
    )


def test_the_last_three_are_kept_and_the_rest_is_gone(checkpoints: Checkpoints) -> None:
    for round in range(1, 8):
        named = save(checkpoints, round)
    manifests = sorted(p.name for p in checkpoints.folder.glob("*.json"))
    assert manifests == [f"000000{r}-0000000.json" for r in (5, 6, 7)]
    assert len(manifests) == CHECKPOINTS_KEPT
    needed = set()
    for name in manifests:
        needed.update(
            json.loads((checkpoints.folder / name).read_text())["manifest"]["groups"].values()
        )
    assert {p.stem for p in checkpoints.objects.iterdir()} == needed
    assert named == ["m0", "m5", "m6", "m7"]


def test_memory_files_that_no_kept_checkpoint_names_are_pruned(tmp_path: Path) -> None:
    memory, checkpoints = (
        StoredMemory(tmp_path / "memory"),
        Checkpoints(tmp_path / "checkpoints", CONFIG, tmp_path / "memory"),
    )
    for round in range(1, 8):
        memory.hold(3, Payload(n=round))
        if round == 1:
            memory.hold(4, Payload(n=0))
        memory.commit(Stage(round, 0, "train", (3, 4)), [3, 4] if round == 1 else [3])
        memory.prune(
            checkpoints.save(State({}, round=round), dict(memory.index), journals.EMPTY_MARK)
        )
    names = {p.name for p in (tmp_path / "memory").iterdir()}
    assert names == {
        f"client{c}-round{r}-stage0.safetensors" for c, r in [(4, 1), (3, 5), (3, 6), (3, 7)]
    }
    restored = checkpoints.latest()
    assert restored is not None
    assert StoredMemory(tmp_path / "memory", restored.state_files).load(3).number("n") == 7


# --- damage ---------------------------------------------------------------------------

Damage = Callable[[Checkpoints], None]


def newest(checkpoints: Checkpoints) -> Path:
    return max(checkpoints.folder.glob("*.json"))


def own_object(checkpoints: Checkpoints) -> Path:
    """The parameters of the newest checkpoint, which no other one uses."""
    sha = json.loads(newest(checkpoints).read_text())["manifest"]["groups"]["params"]
    return checkpoints.objects / f"{sha}.safetensors"


def exchange(a: Path, b: Path) -> None:
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y)
    b.write_bytes(x)


def older(checkpoints: Checkpoints) -> Path:
    return sorted(checkpoints.folder.glob("*.json"))[-2]


DAMAGES: dict[str, Damage] = {
    "manifest flipped": lambda c: flip(newest(c)),
    "manifest's end flipped": lambda c: flip(newest(c), 0.97),
    "manifest truncated": lambda c: newest(c).write_bytes(newest(c).read_bytes()[:-20]),
    "manifest empty": lambda c: newest(c).write_bytes(b""),
    "manifest not JSON": lambda c: newest(c).write_bytes(b"\xff\xfe"),
    "manifest a list": lambda c: newest(c).write_bytes(b"[]"),
    "manifest too deep": lambda c: newest(c).write_bytes(b"[" * 100_000),
    "manifest gone": lambda c: newest(c).unlink(),
    "object flipped": lambda c: flip(own_object(c)),
    "object truncated": lambda c: own_object(c).write_bytes(own_object(c).read_bytes()[:-1]),
    "object empty": lambda c: own_object(c).write_bytes(b""),
    "object gone": lambda c: own_object(c).unlink(),
    "object another's": lambda c: own_object(c).write_bytes(
        encode(Payload(params={"w": torch.zeros(1)}))
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_and_said(
    name: str, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    for round in (1, 2, 3):
        save(checkpoints, round)
    DAMAGES[name](checkpoints)
    again = Checkpoints(checkpoints.folder, CONFIG)
    with caplog.at_level(logging.WARNING):
        assert_is(again.latest(), 2)
    assert name == "manifest gone" or "skipped a checkpoint" in caplog.text
    save(again, 3)
    assert_is(Checkpoints(checkpoints.folder, CONFIG).latest(), 3)


def test_manifests_that_were_exchanged_are_not_taken_for_each_other(
    checkpoints: Checkpoints,
) -> None:
    for round in (1, 2, 3):
        save(checkpoints, round)
    exchange(newest(checkpoints), older(checkpoints))
    assert_is(checkpoints.latest(), 1)


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"zzz", b"0000000", b"0000009-0000000.json", b"../../x"]
)
def test_a_damaged_latest_falls_back_to_the_newest_manifest(
    text: bytes, checkpoints: Checkpoints
) -> None:
    for round in (1, 2, 3):
        save(checkpoints, round)
    (checkpoints.folder / "LATEST").write_bytes(text)
    assert_is(checkpoints.latest(), 3)


def test_a_manifest_that_latest_does_not_vouch_for_is_not_used(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    old = (checkpoints.folder / "LATEST").read_bytes()
    save(checkpoints, 2)
    (checkpoints.folder / "LATEST").write_bytes(old)
    assert_is(checkpoints.latest(), 1)


def test_if_all_are_damaged_it_is_said_and_nothing_is_loaded(checkpoints: Checkpoints) -> None:
    for round in (1, 2, 3):
        save(checkpoints, round)
    flip(checkpoints.objects / f"{digest(encode(Payload(labels=LABELS)))}.safetensors")
    with pytest.raises(CorruptFile, match="checkpoint"):
        Checkpoints(checkpoints.folder, CONFIG).latest()


def test_another_configurations_checkpoint_is_refused(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    with pytest.raises(CorruptFile, match="another configuration"):
        Checkpoints(checkpoints.folder, digest(b"other")).latest()


@pytest.mark.parametrize(
    "harm", [flip, Path.unlink, lambda p: p.write_bytes(b"")], ids=["flip", "unlink", "empty"]
)
def test_a_checkpoint_whose_memory_files_are_damaged_is_not_used(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    memory, checkpoints = (
        StoredMemory(tmp_path / "memory"),
        Checkpoints(tmp_path / "checkpoints", CONFIG, tmp_path / "memory"),
    )
    for round in (1, 2):
        memory.hold(3, Payload(n=round))
        memory.commit(Stage(round, 0, "train", (3,)), [3])
        checkpoints.save(State({}, round=round), dict(memory.index), journals.EMPTY_MARK)
    harm(tmp_path / "memory" / memory.index[3][0])
    restored = checkpoints.latest()
    assert restored is not None
    assert restored.state.round == 1
    with pytest.raises(CorruptFile, match="the memory of client 3"):
        memory.load(3)
