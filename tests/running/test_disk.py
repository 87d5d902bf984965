"""Crashes during any fsync, rename or delete, and full disks: files are complete or absent, and a
run can be resumed.
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
    replaced_folder,
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
    k: int, error: Callable[[], BaseException], moment: str, forever: bool = False
) -> Iterator[list[int]]:
    """Fail at the k-th fsync, rename or delete: before it, after it, or with the file torn in half
    before its fsync.
    """
    count = [0]
    counting = Lock()  # fsyncs come from several threads
    real = {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with counting:
                number = count[0]
                count[0] += 1
            fails = number == k or (forever and number > k)
            if fails and moment == "torn" and name == "fsync":
                _tear(args[0])
            if fails and moment != "after":
                raise error()
            result = real[name](*args, **kwargs)
            if fails:
                raise error()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name))
        yield count


def _tear(descriptor: int) -> None:
    """Cut a file in half."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        os.truncate(descriptor, status.st_size // 2)


def state_at(round: int) -> State:
    """The server's state at a round; its labels are the same in every round."""
    draw = torch.Generator().manual_seed(round)
    weight = torch.randn(4, generator=draw)
    return State({"w": weight}, Payload(labels=torch.ones(3), n=round), round)


def save(folder: Path, round: int) -> None:
    """Save the checkpoint of a round."""
    Checkpoints(folder, CONFIG).save(state_at(round), {}, (round, ""))


def encoded(state: State) -> bytes:
    """All of a state as bytes."""
    return encode(Payload(state.extra, params=state.params))


def round_of(folder: Path) -> int:
    """The round of the checkpoint that a resume would use, which must be complete; 0 if there is
    none.
    """
    restored = Checkpoints(folder, CONFIG).latest()
    if restored is None:
        return 0
    state = restored.state
    assert encoded(state) == encoded(state_at(state.round))
    assert restored.journal == (state.round, "")
    return state.round


def test_a_loss_of_power_may_take_any_of_the_new_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the files that the checkpoint of round 3 adds to those of rounds 1 and 2, any subset may
    be lost.
    """
    # Deleted files would be another loss.
    monkeypatch.setattr(Checkpoints, "prune", lambda self, state, rounds: [])
    for round_index in (1, 2):
        save(tmp_path / "old", round_index)
        save(tmp_path / "new", round_index)
    save(tmp_path / "new", 3)

    old = files_below(tmp_path / "old")
    new = files_below(tmp_path / "new")
    changed_files = [path for path, content in new.items() if old.get(path) != content]
    assert {path.name for path in changed_files} > {"0000003-0000000.json", "LATEST"}
    for count in range(len(changed_files) + 1):
        for lost in combinations(changed_files, count):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            shutil.copytree(tmp_path / "old", folder)
            for path in set(changed_files) - set(lost):
                (folder / path).write_bytes(new[path])
            expected_round = 3
            if lost:
                expected_round = 2
            assert round_of(folder) == expected_round

            save(folder, 3)
            assert round_of(folder) == 3


def files_below(folder: Path) -> dict[Path, bytes]:
    """The contents of all files below a folder by their path in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def test_more_files_can_be_written_together_than_threads_write_at_once(tmp_path: Path) -> None:
    """So can groups with the same content."""
    files = {Path(f"{i % 3}/{i}"): b"%d" % i for i in range(2 * MOST_AT_ONCE + 1)}
    for name in ("0", "1", "2"):
        make_folder(tmp_path / name)
    write_together((tmp_path / path, content) for path, content in files.items())
    assert files_below(tmp_path) == files

    same = torch.arange(4.0)
    state = State({"w": same}, Payload(a={"w": same}, b={"w": same}), 1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CONFIG)
    checkpoints.save(state, {}, (0, ""))
    restored = checkpoints.latest()
    assert restored is not None
    assert set(restored.state.extra) == {"a", "b"}


@pytest.mark.parametrize("moment", ["before", "after", "torn"])
@pytest.mark.parametrize("existing", [0, 1, 4])
def test_a_crash_at_any_point_of_a_save_leaves_the_old_or_the_new_checkpoint(
    existing: int, moment: str, tmp_path: Path
) -> None:
    points = 0
    for k in range(1000):
        folder = tmp_path / str(k)
        for round in range(1, existing + 1):
            save(folder, round)
        try:
            with failing_at(k, Crash, moment):
                save(folder, existing + 1)
            break
        except Crash:
            points += 1

        assert round_of(folder) in (existing, existing + 1)
        save(folder, existing + 1)
        assert round_of(folder) == existing + 1
        sweep(folder)
        assert not list(folder.rglob("*.part"))
    assert points >= 12, "three files at least, each with two fsyncs and a rename"


def test_a_crash_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for moment in ("before", "after", "torn"):
        for k in range(3):
            path.write_bytes(b"old")
            with pytest.raises(Crash), failing_at(k, Crash, moment):
                write_whole(path, b"new and longer")
            assert path.read_bytes() in (b"old", b"new and longer")


def full() -> OSError:
    """The error of a disk without room."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("k", range(3))
def test_the_error_of_a_full_disk_names_the_file_and_no_part_of_it_is_left(
    k: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(DiskFull, match="file"), failing_at(k, full, "before"):
        write_whole(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_error_of_a_full_disk_advises_a_resume_only_in_an_unfinished_run(
    tmp_path: Path,
) -> None:
    for name in ("config.toml", "lock"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    advice = f"fedstill resume {re.escape(str(tmp_path))}"
    with pytest.raises(DiskFull, match=advice), failing_at(0, full, "before"):
        write_whole(tmp_path / "checkpoints" / "1.json", b"new")

    (tmp_path / "summary.json").touch()
    with pytest.raises(DiskFull, match="same command again"), failing_at(0, full, "before"):
        write_whole(tmp_path / "report.html", b"new")


def read_only() -> OSError:
    """The error of a file system that cannot be written to."""
    return OSError(errno.EROFS, "Read-only file system")


def test_the_error_of_another_failed_write_gives_its_reason(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="Read-only"), failing_at(0, read_only, "before"):
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
    files = {"first": b"x" * 50, "second": b"y" * 150, "third": b"z"}
    with at_most(100), pytest.raises(DiskFull, match="second"):
        write_together((tmp_path / name, content) for name, content in files.items())
    assert files_below(tmp_path) == {Path("second"): b"old"}


def test_a_journal_without_room_is_an_error_and_can_be_continued_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("start", text="x" * 50)
    mark = journal.sync()
    with at_most(100):
        with pytest.raises(DiskFull, match=r"journal\.jsonl"):
            journal.write("round", text="y" * 100)
        journal.close()
    assert path.stat().st_size == 100, "the kernel wrote the part that fits"

    reopened = Journal(path)
    reopened.cut(mark)
    reopened.write("round", text="z")
    length, sha256 = reopened.sync()
    reopened.close()
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert events == ["start", "round"]
    assert length == path.stat().st_size
    assert sha256 == digest(path.read_bytes())


CHAIN = toys.toy("toy_chain", rounds=2, plan={"epochs": 1}, topology={"clients": 3, "sampled": 3})


def test_a_run_on_a_full_disk_stops_by_name_and_is_finished_once_there_is_room(
    tmp_path: Path,
) -> None:
    with failing_at(-1, full, "before") as counted:
        run(CHAIN, tmp_path / "whole", data=toys.blobs())
    uninterrupted_bits = bits(tmp_path / "whole")

    # The last call deletes holder.json, after the run.
    for k in range(4, counted[0] - 1, counted[0] // 9):
        folder = tmp_path / str(k)
        with pytest.raises(DiskFull, match="no room"), failing_at(k, full, "before", forever=True):
            run(CHAIN, folder, data=toys.blobs())
        resume(folder, data=toys.blobs())
        assert_same_bits(bits(folder), uninterrupted_bits)


def test_a_journal_that_fills_the_disk_costs_nothing_that_was_written(tmp_path: Path) -> None:
    run(CHAIN, tmp_path / "whole", data=toys.blobs())
    uninterrupted_bits = bits(tmp_path / "whole")
    files = files_below(tmp_path / "whole")
    size = len(files.pop(Path("journal.jsonl")))
    largest = max(len(content) for content in files.values())
    shortest = size - size // 20  # the digits of times differ from run to run

    for limit in range(max(largest + 1, size // 2), shortest, size // 6):
        with pytest.raises(DiskFull, match="journal"), at_most(limit):
            run(CHAIN, tmp_path / str(limit), data=toys.blobs())
        resume(tmp_path / str(limit), data=toys.blobs())
        assert_same_bits(bits(tmp_path / str(limit)), uninterrupted_bits)


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


def test_a_folder_that_cannot_be_replaced_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "old").write_text("old")
    rename = Path.rename

    def fails_for_the_new_folder(path: Path, target: Path) -> Path:
        if (path / "new").exists():
            raise OSError(errno.EACCES, "no permission")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_folder)
    with pytest.raises(OSError, match="no permission"), replaced_folder(folder) as temporary:
        (temporary / "new").write_text("new")

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (folder / "old").read_text() == "old"


def test_a_replaced_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.mkdir()
    with replaced_folder(tmp_path / "new"):
        pass
    with replaced_folder(tmp_path / "private", mode=0o700):
        pass

    assert (tmp_path / "new").stat().st_mode == usual.stat().st_mode
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
