"""Writing that ends in the middle: a crash at any write, fsync, rename or delete, and a disk that
is full.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

import toys
from fedstill.core.codec import encode
from fedstill.core.errors import DiskFull
from fedstill.core.files import (
    MOST_AT_ONCE,
    digest,
    make_folder,
    sweep,
    write_together,
    write_whole,
)
from fedstill.core.records import Payload, State
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.journal import Journal
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits

CONFIG = digest(b"config")
CALLS = ("fsync", "replace", "unlink")


class Crash(BaseException):
    """The process is gone: nothing may catch it."""


@contextmanager
def failing_at(
    k: int, error: Callable[[], BaseException], when: str, forever: bool = False
) -> Iterator[list[int]]:
    """Fail at the k-th fsync, rename or delete: before it, after it, or with the file torn in half
    before its fsync.
    """
    count, counting = [0], Lock()  # fsyncs come from several threads
    real = {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with counting:
                now, count[0] = count[0], count[0] + 1
            hit = now == k or (forever and now > k)
            if hit and when == "torn" and name == "fsync":
                status = os.fstat(args[0])
                if stat.S_ISREG(status.st_mode):
                    os.truncate(args[0], status.st_size // 2)
            if hit and when != "after":
                raise error()
            out = real[name](*args, **kwargs)
            if hit:
                raise error()
            return out

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name))
        yield count


def state_at(round: int) -> State:
    draw = torch.Generator().manual_seed(round)
    return State(
        {"w": torch.randn(4, generator=draw)}, Payload(labels=torch.ones(3), n=round), round
    )


def save(folder: Path, round: int) -> None:
    Checkpoints(folder, CONFIG).save(state_at(round), {}, (round, ""))


def round_of(folder: Path) -> int:
    """The round of the checkpoint that would be used, which must be whole; 0 if there is none."""
    restored = Checkpoints(folder, CONFIG).latest()
    if restored is None:
        return 0
    want, got = state_at(restored.state.round), restored.state
    assert encode(Payload(got.extra, params=got.params)) == encode(
        Payload(want.extra, params=want.params)
    )
    assert restored.journal == (restored.state.round, "")
    return restored.state.round


def test_a_loss_of_power_may_take_any_of_the_new_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it begins where all names are durable
    monkeypatch.setattr(Checkpoints, "prune", lambda self, state, rounds: [])
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, rounds in ((old, 2), (new, 3)):
        for round in range(1, rounds + 1):
            save(folder, round)
    there = {
        p.relative_to(folder): p.read_bytes()
        for folder in (old, new)
        for p in folder.rglob("*")
        if p.is_file()
    }
    named = [
        path
        for path, data in there.items()
        if not (old / path).exists() or (old / path).read_bytes() != data
    ]
    assert {path.name for path in named} > {"0000003-0000000.json", "LATEST"}
    for count in range(len(named) + 1):
        for lost in combinations(named, count):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            shutil.copytree(old, folder)
            for path in set(named) - set(lost):
                (folder / path).write_bytes(there[path])
            assert round_of(folder) == (2 if lost else 3)
            save(folder, 3)
            assert round_of(folder) == 3


def test_more_files_than_wait_side_by_side_and_groups_that_are_alike(tmp_path: Path) -> None:
    files = {tmp_path / f"{i % 3}" / f"{i}": b"%d" % i for i in range(2 * MOST_AT_ONCE + 1)}
    for folder in {path.parent for path in files}:
        make_folder(folder)
    write_together(files.items())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files
    same = torch.arange(4.0)
    state = State({"w": same}, Payload(a={"w": same}, b={"w": same}), 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONFIG)
    checkpoints.save(state, {}, (0, ""))
    restored = checkpoints.latest()
    assert restored is not None
    assert set(restored.state.extra) == {"a", "b"}


@pytest.mark.parametrize("when", ["before", "after", "torn"])
@pytest.mark.parametrize("existing", [0, 1, 4])
def test_a_crash_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(
    existing: int, when: str, tmp_path: Path
) -> None:
    points = 0
    for k in range(1000):
        folder = tmp_path / str(k)
        for round in range(1, existing + 1):
            save(folder, round)
        try:
            with failing_at(k, Crash, when):
                save(folder, existing + 1)
        except Crash:
            points += 1
            assert round_of(folder) in (existing, existing + 1)
            save(folder, existing + 1)
            assert round_of(folder) == existing + 1
            sweep(folder)
            assert not list(folder.rglob("*.part"))
        else:
            break
    assert points >= 12, "three files at least, each with two fsyncs and a rename"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for when in ("before", "after", "torn"):
        for k in range(3):
            path.write_bytes(b"old")
            with pytest.raises(Crash), failing_at(k, Crash, when):
                write_whole(path, b"new and longer")
            assert path.read_bytes() in (b"old", b"new and longer")


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("k", range(3))
def test_a_full_disk_is_said_and_leaves_no_half_file(k: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with (
        pytest.raises(DiskFull, match="file"),
        failing_at(k, full, "before"),
    ):
        write_whole(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_a_reason_to_resume_where_a_run_is_at_work_alone(tmp_path: Path) -> None:
    for name in ("config.toml", "lock"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    with (
        pytest.raises(DiskFull, match=f"fedstill resume {re.escape(str(tmp_path))}"),
        failing_at(0, full, "before"),
    ):
        write_whole(tmp_path / "checkpoints" / "1.json", b"new")
    (tmp_path / "summary.json").touch()
    with (
        pytest.raises(DiskFull, match="same command again"),
        failing_at(0, full, "before"),
    ):
        write_whole(tmp_path / "report.html", b"new")


def test_other_trouble_with_writing_is_named_too(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFull, match="Read-only"),
        failing_at(0, lambda: OSError(errno.EROFS, "Read-only file system"), "before"),
    ):
        write_whole(tmp_path / "file", b"new")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskFull, match="cannot write"):
        make_folder(tmp_path / "file" / "below" / "it")
    with pytest.raises(DiskFull, match="cannot write"):
        Journal(tmp_path / "nowhere" / "journal.jsonl")


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond a size: a real short write, then a real error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_that_find_no_room_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "second").write_bytes(b"old")
    files = {
        tmp_path / "first": b"x" * 50,
        tmp_path / "second": b"y" * 150,
        tmp_path / "third": b"z",
    }
    with (
        at_most(100),
        pytest.raises(DiskFull, match="second"),
    ):
        write_together(files.items())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"second": b"old"}


def test_a_journal_that_finds_no_room_says_so_and_can_go_on_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("start", text="x" * 50)
    mark = journal.sync()
    with at_most(100):
        with pytest.raises(DiskFull, match=r"journal\.jsonl"):
            journal.write("round", text="y" * 100)
        journal.close()
    assert path.stat().st_size == 100, "the kernel took what fitted"
    again = Journal(path)
    again.cut(mark)
    again.write("round", text="z")
    length, sha = again.sync()
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "round"]
    assert (length, sha) == (path.stat().st_size, digest(path.read_bytes()))


CHAIN = toys.toy("toy_chain", rounds=2, plan={"epochs": 1}, topology={"clients": 3, "sampled": 3})


def test_a_run_on_a_full_disk_stops_by_name_and_is_finished_once_there_is_room(
    tmp_path: Path,
) -> None:
    with failing_at(-1, full, "before") as counted:
        run(CHAIN, tmp_path / "whole", data=toys.blobs())
    whole = bits(tmp_path / "whole")
    # the last deletes holder.json, after the run
    for k in range(4, counted[0] - 1, counted[0] // 9):
        folder = tmp_path / str(k)
        with pytest.raises(DiskFull, match="no room"), failing_at(k, full, "before", forever=True):
            run(CHAIN, folder, data=toys.blobs())
        resume(folder, data=toys.blobs())
        assert_same_bits(bits(folder), whole)


def test_a_journal_that_fills_the_disk_costs_nothing_that_was_written(tmp_path: Path) -> None:
    run(CHAIN, tmp_path / "whole", data=toys.blobs())
    whole = bits(tmp_path / "whole")
    size = (tmp_path / "whole" / "journal.jsonl").stat().st_size
    largest = max(
        p.stat().st_size
        for p in (tmp_path / "whole").rglob("*")
        if p.is_file() and p.suffix != ".jsonl"
    )
    shortest = size - size // 20  # the digits of times differ from run to run
    for limit in range(max(largest + 1, size // 2), shortest, size // 6):
        with pytest.raises(DiskFull, match="journal"), at_most(limit):
            run(CHAIN, tmp_path / str(limit), data=toys.blobs())
        resume(tmp_path / str(limit), data=toys.blobs())
        assert_same_bits(bits(tmp_path / str(limit)), whole)


def test_a_slow_disk_before_round_1_takes_no_time_from_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 0 is the census, and its checkpoint takes longer than round 1."""
    save = Checkpoints.save

    def slowly(self: Checkpoints, state: State, *arguments: Any, **further: Any) -> Any:
        if state.round == 1 and state.stage == 0:
            time.sleep(1)
        return save(self, state, *arguments, **further)

    monkeypatch.setattr(Checkpoints, "save", slowly)
    plan = {"epochs": 1, "class_weights": "balanced_overall"}
    result = run(toys.toy(plan=plan, rounds=1), tmp_path / "run", toys.blobs())
    (event,) = result.history
    assert event["seconds_training"] > 0
    assert event["seconds_saving"] < 1
