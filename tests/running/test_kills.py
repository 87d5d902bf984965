"""A run that ``kill -9`` ends at any moment and that is resumed has the bits of an uninterrupted
run. The tests are slow: a second for each kill.

``FEDSTILL_KILLS`` is the number of kills over all settings; a dozen if it is unset.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forking import SETTINGS, Helper
from run_bits import assert_same_bits, bits

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("FEDSTILL_KILLS", "12"))
KINDS = (
    "moment", "checkpoint torn", "final",
    "moment", "between stages", "checkpoint fsync",
    "moment", "census", "checkpoint rename",
    "moment", "twice", "pruning",
)  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its setting, its bits, its duration, and the number of its calls by
    kind.
    """

    setting: str
    bits: dict[str, Any]
    seconds: float
    counts: dict[str, int]


@pytest.fixture(scope="module", params=list(SETTINGS))
def reference(
    request: pytest.FixtureRequest, helper: Helper, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    answer = helper.go(request.param, folder)
    assert answer["status"] == 0
    return Reference(
        setting=request.param,
        bits=bits(folder),
        seconds=answer["seconds"],
        counts=answer["counts"],
    )


def fault(kind: str, counts: dict[str, int], draw: random.Random) -> tuple[str, int, str]:
    """A point of a run at which it is killed: a kind of call, its index, and whether before or
    after it. The last two files of a run are the model and the summary.
    """
    side = draw.choice(["before", "after"])
    match kind:
        case "checkpoint torn":
            return "fsync", draw.randrange(2, counts["fsync"] - 4), "torn"
        case "checkpoint fsync":
            return "fsync", draw.randrange(2, counts["fsync"] - 4), side
        case "checkpoint rename":
            return "replace", draw.randrange(1, counts["replace"] - 2), side
        case "pruning" if counts["unlink"]:
            return "unlink", draw.randrange(counts["unlink"]), side
        case "final":
            call = draw.choice(["fsync", "replace"])
            calls_of_last_files = {"fsync": 4, "replace": 2}
            return call, counts[call] - draw.randint(1, calls_of_last_files[call]), side
        case "census" if counts["census"]:
            return "census", draw.randrange(counts["census"]), side
    return "stage", draw.randrange(counts["stage"]), "before"


@dataclass
class Killer:
    """Kills runs of one setting at drawn moments and calls."""

    helper: Helper
    reference: Reference
    draw: random.Random

    def kill(self, folder: Path, kind: str) -> str:
        """Begin or continue a run, kill it, and describe the point. If the run ends before a drawn
        moment, another moment is drawn.
        """
        if kind in ("moment", "twice"):
            return self._kill_at_a_moment(folder, may_finish=kind == "twice")
        point = fault(kind, self.reference.counts, self.draw)
        assert self.helper.go(self.reference.setting, folder, fault=point)["status"] != 0, point
        return " ".join(map(str, point))

    def _kill_at_a_moment(self, folder: Path, may_finish: bool) -> str:
        for _ in range(20):
            moment = self.kill_within(folder, self.reference.seconds)
            if moment:
                return moment
            if (folder / "summary.json").exists() and not may_finish:
                folder.rename(folder.with_name(f"{folder.name}.finished{self.draw.random()}"))
        pytest.fail("the run was never killed")

    def kill_within(self, folder: Path, seconds: float) -> str:
        """Kill a run within some seconds, and describe the moment; empty if the run ended
        earlier.
        """
        moment = self.draw.uniform(0, seconds)
        if self.helper.go(self.reference.setting, folder, after=moment)["status"] == 0:
            return ""
        return f"{100 * moment / self.reference.seconds:.0f} % of the time"


def test_a_killed_run_that_is_resumed_has_the_bits_of_an_uninterrupted_run(
    reference: Reference, helper: Helper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = reference.setting
    index = list(SETTINGS).index(setting)
    killer = Killer(helper, reference, random.Random(f"{setting} 9"))
    kill_count = KILLS // len(SETTINGS) + (index < KILLS % len(SETTINGS))
    kills: list[tuple[str, str]] = []
    for number in itertools.count():
        if len(kills) >= kill_count:
            break
        kind = KINDS[(3 * index + number) % len(KINDS)]
        folder = tmp_path / str(number)
        kills.append((kind, killer.kill(folder, kind)))
        if kind == "twice":
            moment = killer.kill_within(folder, 0.5 * reference.seconds)
            if moment:
                kills.append(("twice, resume", moment))

        answer = helper.go(setting, folder)
        assert answer["status"] == 0
        assert_same_bits(bits(folder), reference.bits)

    with capsys.disabled():
        duration = f"run of {reference.seconds:.2f} s"
        print(f"\n{setting}: {len(kills)} kills, {duration}, {reference.counts}")
        for kind, point in kills:
            print(f"    {kind:18} {point}")


def test_a_run_that_is_killed_again_and_again_is_finished_at_last(
    reference: Reference, helper: Helper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process is killed after its fourteenth rename, or after a third of all renames, and
    makes a little progress.
    """
    folder = tmp_path / "run"
    # A stage of clients with a memory has more than thirteen renames.
    last = max(13, reference.counts["replace"] // 3)
    kills = 0
    while helper.go(reference.setting, folder, fault=("replace", last, "after"))["status"] != 0:
        kills += 1
        assert kills < 50

    assert kills >= 1
    assert_same_bits(bits(folder), reference.bits)
    with capsys.disabled():
        print(f"\n{reference.setting}: {kills} kills in one run")
