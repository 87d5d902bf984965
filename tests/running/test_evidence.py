"""Packed runs: readers find them as if they were in their folder, unpacking restores their bytes,
and hostile packs are refused.
"""

from __future__ import annotations

import errno
import io
import lzma
import os
import shutil
import tarfile
from pathlib import Path

import pytest

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, CorruptFile, RunExists
from fedstill.running import packs
from fedstill.running.runner import resume, run
from fedstill.running.runs import find


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two finished runs below a folder."""
    folder = tmp_path / "results/table"
    for seed in (1, 2):
        experiment = Experiment(
            rounds=1,
            seed=seed,
            threads=1,
            model="logistic",
            partition="iid",
            topology={"clients": 2},
        )
        run(experiment, folder / f"fedavg/seed{seed}", toys.blobs())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder that a pack may contain, by their path."""
    paths = [path for path in folder.rglob("*") if path.name in packs.EVIDENCE]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_unpacking_restores_the_evidence_of_runs_and_nothing_else(runs: Path) -> None:
    contents_of_runs = contents(runs)
    assert len(contents_of_runs) == 8
    packed = packs.pack(runs)
    assert packed.stat().st_size < sum(map(len, contents_of_runs.values()))

    shutil.rmtree(runs)
    assert packs.unpack(packed) == runs
    assert contents(runs) == contents_of_runs
    names = {path.name for path in (runs / "fedavg/seed1").iterdir()}
    assert names == packs.EVIDENCE - {"entry.toml", "certificate.json"}


def test_the_same_runs_give_the_same_bytes(runs: Path) -> None:
    first = packs.pack(runs).read_bytes()
    assert packs.pack(runs).read_bytes() == first
    shutil.rmtree(runs)
    packs.unpack(packs.pack_of(runs))
    assert packs.pack(runs).read_bytes() == first


def test_long_names_and_times_before_1970_are_packed_too(runs: Path) -> None:
    """A comparison's folder is named by the values of its grid."""
    (runs / "fedavg").rename(runs / ("é" * 120))
    os.utime(next(runs.rglob("summary.json")), (-5, -5))
    contents_of_runs = contents(runs)
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    packs.unpack(packed)

    assert contents(runs) == contents_of_runs


def test_a_pack_is_read_like_the_folder(runs: Path) -> None:
    def read(path: Path) -> list[tuple[object, ...]]:
        return [(run.settings, run.rounds, run.last_written // 1) for run in find([path])]

    runs_of_folder = read(runs)
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    paths_before_packing = [runs / "fedavg/seed1", runs / "fedavg/seed2"]
    for place in (packed, runs, runs.parent):
        assert read(place) == runs_of_folder
        display_paths = [run.display_path for run in find([place])]
        assert display_paths == paths_before_packing, "not paths in the cache"
    assert [run.seed for run in find([runs / "fedavg/seed2"])] == [2], "a folder in a pack"
    assert not runs.exists()

    packs.unpack(packed)
    assert len(find([runs.parent])) == 2, "runs that lie beside their pack count once"


@pytest.mark.parametrize(
    ("place", "name"), [("table", "."), ("table/fedavg", ".."), ("table/fedavg", "../../table/.")]
)
def test_a_folder_is_packed_beside_it_however_it_is_named(
    place: str, name: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent / place)
    assert packs.pack(Path(name)).resolve() == packs.pack_of(runs)
    assert [path.name for path in Path.cwd().iterdir() if path.name.endswith(packs.SUFFIX)] == []


def test_the_commands_pack_read_and_unpack(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packs.pack_of(runs)
    assert call(["pack", str(runs)]) == 0
    assert "not models" in capsys.readouterr().out

    shutil.rmtree(runs)
    assert call(["report", str(packed), "--out", str(runs.parent / "page.html")]) == 0

    page = (runs.parent / "page.html").read_text(encoding="utf-8")
    assert len(page) > 100_000
    assert str(runs / "fedavg/seed1") in page
    assert str(runs.parent.parent / "cache") not in page

    monkeypatch.chdir(runs.parent)
    assert call(["report", "."]) == 0
    assert call(["unpack", str(packed)]) == 0
    assert call(["unpack", str(packed)]) == 2
    assert str(runs) in capsys.readouterr().err
    assert call(["pack", str(runs.parent / "nothing")]) == 2


def test_unfinished_runs_are_named_when_they_are_packed_and_cannot_be_resumed(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (runs / "fedavg/seed1/summary.json").unlink()
    packed = packs.pack(runs)
    assert str(runs / "fedavg/seed1") in caplog.text

    shutil.rmtree(runs)
    packs.unpack(packed)
    with pytest.raises(CorruptFile, match="checkpoint"):
        resume(runs / "fedavg/seed1", toys.blobs())
    with pytest.raises(
        CorruptFile,
        match=r"model\.safetensors",
    ):
        resume(runs / "fedavg/seed2", toys.blobs())


def test_the_report_of_a_pack_that_is_named_by_its_file_is_in_the_folder_of_before(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    assert call(["report", str(packed)]) == 0
    assert capsys.readouterr().out.strip() == str(runs / "report.html")
    assert (runs / "report.html").is_file()


def test_a_report_does_not_hide_the_pack(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents_of_runs = contents(runs)
    packed = packs.pack(runs)
    shutil.rmtree(runs)

    for _ in range(2):
        assert call(["report", str(runs)]) == 0
    assert [path.name for path in runs.iterdir()] == ["report.html"]
    for place in (runs, runs.parent, packed):
        assert [run.seed for run in find([place])] == [1, 2]
    assert packs.unpack_if_packed(runs), "so that runs go on where they were"
    assert contents(runs) == contents_of_runs
    assert (runs / "report.html").stat().st_size > 100_000
    assert [path.name for path in runs.parent.iterdir() if path.name.startswith(".")] == []


def test_nothing_is_unpacked_over_a_folder_without_runs(runs: Path) -> None:
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    runs.mkdir()
    (runs / "fedavg").write_text("not a folder")

    with pytest.raises(RunExists, match=str(runs)):
        packs.unpack(packed)
    assert (runs / "fedavg").read_text() == "not a folder"


def test_a_pack_with_other_runs_is_not_lost(runs: Path) -> None:
    packed = packs.pack(runs)
    packed_bytes = packed.read_bytes()
    shutil.rmtree(runs / "fedavg/seed2")
    with pytest.raises(RunExists, match=packed.name):
        packs.pack(runs)
    assert packed.read_bytes() == packed_bytes


def test_a_packed_folder_is_unpacked_if_its_runs_are_to_be_continued(runs: Path) -> None:
    packs.pack(runs)
    assert not packs.unpack_if_packed(runs)
    shutil.rmtree(runs)
    assert packs.unpack_if_packed(runs)
    assert len(find([runs])) == 2
    assert not packs.unpack_if_packed(runs.parent / "nothing")


def test_an_empty_folder_is_no_hindrance(runs: Path) -> None:
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    runs.mkdir()
    assert len(find([packs.unpack(packed)])) == 2


@pytest.mark.parametrize("renames", [1, 2])
def test_a_folder_survives_an_interrupt_while_it_is_replaced(
    runs: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    runs.mkdir()
    (runs / "notes.txt").write_text("mine")
    rename = Path.rename
    calls: list[Path] = []

    def interrupted(self: Path, target: Path) -> Path:
        if {self, target} & {runs}:
            calls.append(self)
            if len(calls) == renames:
                raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)

    with pytest.raises(KeyboardInterrupt):
        packs.unpack(packed)
    assert (runs / "notes.txt").read_text() == "mine"

    monkeypatch.undo()
    assert len(find([packs.unpack(packed)])) == 2


def test_a_partly_unpacked_folder_is_not_found(runs: Path) -> None:
    shutil.copytree(runs, runs.parent / f".{runs.name}.killed" / "runs")
    assert len(find([runs.parent])) == 2


def test_one_that_another_process_has_unpacked_meanwhile_is_taken(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packs.pack(runs)
    moved = shutil.move(runs, runs.with_name("kept"))

    def too_late(making: Path, folder: Path) -> Path:
        shutil.copytree(moved, folder)
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(Path, "rename", too_late)

    assert len(find([packs.unpack(packed)])) == 2

    names = {path.name for path in runs.parent.iterdir()}
    assert names == {packed.name, runs.name, "kept"}


def test_another_archive_among_runs_is_not_looked_at(runs: Path) -> None:
    (runs / "images.tar.xz").write_bytes(b"a stranger's")
    assert len(find([runs.parent])) == 2


def tar(path: Path, *members: tarfile.TarInfo) -> Path:
    """A pack with these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    path.write_bytes(lzma.compress(out.getvalue()))
    return path


def member(
    name: str, size: int = 3, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    """A member of a pack, of any kind."""
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.type = kind
    entry.linkname = link
    return entry


HOSTILE = {
    "another file": member("a/model.safetensors"),
    "a link": member("a/config.toml", 0, tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": member("a/config.toml", 0, tarfile.LNKTYPE, "../../secret"),
    "a device": member("a/config.toml", 0, tarfile.CHRTYPE),
    "a path out of it": member("../../config.toml"),
    "an absolute path": member("/tmp/elsewhere/config.toml"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pack_that_holds_anything_else_is_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / "in/there"
    place.mkdir(parents=True)
    packed = tar(place / f"runs{packs.SUFFIX}", HOSTILE[name])
    with pytest.raises(CorruptFile, match=packed.name):
        packs.unpack(packed)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [packed]


def test_a_pack_that_is_too_large_or_damaged_is_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packs.pack(runs)
    shutil.rmtree(runs)
    monkeypatch.setattr(packs, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(CorruptFile, match=packed.name):
        packs.readable(packed)
    monkeypatch.undo()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    content = packed.read_bytes()
    half = content[: len(content) // 2]
    with_zeros = content[:100] + bytes(50) + content[150:]
    for damaged in (half, b"", b"no pack", with_zeros):
        packed.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=packed.name):
            packs.readable(runs)

    with pytest.raises(ConfigError, match="nothing"):
        packs.unpack(tmp_path / f"nothing{packs.SUFFIX}")


def xz(path: Path, *blocks: bytes) -> Path:
    """A pack of these blocks, and the end of an archive."""
    path.write_bytes(lzma.compress(b"".join(blocks) + bytes(1024), preset=0))
    return path


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The block that announces a member of an archive."""
    return member(name, size, kind).tobuf(tarfile.GNU_FORMAT)


def pax(**fields: str) -> bytes:
    """A header with these fields for the next file."""
    entry = tarfile.TarInfo("a/config.toml")
    entry.pax_headers = fields
    return entry.tobuf(tarfile.PAX_FORMAT)


ATTACKS = {
    "a negative size": [header("a/config.toml", -512)],
    "a negative size in a long header": [pax(size="-1024")],
    "a huge size": [header("a/config.toml", 1 << 60)],
    "a huge header": [header("a/config.toml", 3 << 30, tarfile.XHDTYPE)],
    "a chain of headers": [header("a", 512, tarfile.XHDTYPE), bytes(512)] * 2,
    "a sparse file": [pax(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})],
    "a file inside a file": [header("config.toml"), header("config.toml/journal.jsonl")],
    "a file twice": [header("config.toml"), header("config.toml")],
    "a name without end": [header("a/" * 5000 + "config.toml")],
    "a device": [header("a/config.toml", 0, tarfile.CHRTYPE)],
    "a global header": [header("a", 512, tarfile.XGLTYPE), bytes(512)],
    "nothing behind a header": [header("a/config.toml", 5000)],
    "a time beyond all clocks": [pax(mtime="1e300"), header("a/config.toml")],
    "an infinite time": [pax(mtime="inf"), header("a/config.toml")],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_strangers_pack_cannot_exhaust_or_leave_the_folder(attack: str, tmp_path: Path) -> None:
    packed = xz(tmp_path / f"runs{packs.SUFFIX}", *ATTACKS[attack])
    with pytest.raises(CorruptFile, match=packed.name):
        packs.unpack(packed)
    assert list(tmp_path.iterdir()) == [packed]


def test_a_pack_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the number of files, the time, the memory and what unpacks after the last file."""
    packed = xz(tmp_path / f"runs{packs.SUFFIX}", header("config.toml"), header("a/config.toml"))
    for limit, value in (("MAX_MEMBERS", 1), ("MAX_SECONDS", 0.0), ("MAX_DECODER_BYTES", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(packs, limit, value)
            with pytest.raises(CorruptFile, match=packed.name):
                packs.unpack(packed)
    assert packs.unpack(packed).is_dir()

    zeros = bytes(5 << 20)
    bomb = xz(tmp_path / f"bomb{packs.SUFFIX}", header("config.toml"), zeros)
    monkeypatch.setattr(packs, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(CorruptFile, match=bomb.name):
        packs.unpack(bomb)


def test_links_are_not_packed(runs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the user's own")
    journal = runs / "fedavg/seed1/journal.jsonl"
    journal.unlink()
    journal.symlink_to(secret)

    with pytest.raises(ConfigError, match=r"journal\.jsonl"):
        packs.pack(runs)
    assert not packs.pack_of(runs).exists()
