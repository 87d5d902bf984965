"""kill -9 at any moment, then resume: the same bits as the run that nobody killed. Marked slow; a
second each.

``FEDSTILL_KILLS`` sets how many kills there are, over all topologies; a dozen if it is unset.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    one = Helper()
    yield one
    one.close()


@dataclass
class Reference:
    """The run that nobody killed: its bits, how long it took, how often it called what."""

    bits: dict[str, Any]
    seconds: float
    counts: dict[str, int]


@pytest.fixture(scope="module", params=list(SETTINGS))
def reference(
    request: pytest.FixtureRequest, helper: Helper, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Reference]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    answer = helper.go(request.param, folder)
    assert answer["status"] == 0
    return request.param, Reference(bits(folder), answer["seconds"], answer["counts"])


def fault(kind: str, counts: dict[str, int], draw: random.Random) -> tuple[str, int, str]:
    """A point of a run: which call, before or after it. The last two files are the model and the
    summary.
    """
    match kind:
        case "checkpoint torn":
            return "fsync", draw.randrange(2, counts["fsync"] - 4), "torn"
        case "checkpoint fsync":
            return "fsync", draw.randrange(2, counts["fsync"] - 4), draw.choice(["before", "after"])
        case "checkpoint rename":
            return (
                "replace",
                draw.randrange(1, counts["replace"] - 2),
                draw.choice(["before", "after"]),
            )
        case "pruning" if counts["unlink"]:
            return "unlink", draw.randrange(counts["unlink"]), draw.choice(["before", "after"])
        case "final":
            call = draw.choice(["fsync", "replace"])
            last = 4 if call == "fsync" else 2
            return call, counts[call] - draw.randint(1, last), draw.choice(["before", "after"])
        case "census" if counts["census"]:
            return "census", draw.randrange(counts["census"]), draw.choice(["before", "after"])
    return "stage", draw.randrange(counts["stage"]), "before"


def killed(
    helper: Helper, setting: str, folder: Path, kind: str, whole: Reference, draw: random.Random
) -> str:
    """Kill a run that was begun or not, and say where; a moment that came too late is drawn
    again.
    """
    if kind in ("moment", "twice"):
        for _ in range(20):
            after = draw.uniform(0, whole.seconds)
            if helper.go(setting, folder, after=after)["status"] != 0:
                return f"{100 * after / whole.seconds:.0f} % of the time"
            if "summary.json" in {p.name for p in folder.iterdir()} and kind == "moment":
                folder.rename(folder.with_name(folder.name + f".finished{after}"))
        pytest.fail("no moment hit")
    where = fault(kind, whole.counts, draw)
    assert helper.go(setting, folder, fault=where)["status"] != 0, where
    return " ".join(map(str, where))


def test_a_killed_run_that_is_resumed_is_bit_for_bit_the_run_that_nobody_killed(
    reference: tuple[str, Reference],
    helper: Helper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    setting, whole = reference
    place = list(SETTINGS).index(setting)
    draw = random.Random(f"{setting} 9")
    share = KILLS // len(SETTINGS) + (place < KILLS % len(SETTINGS))
    rows, number = [], 0
    while len(rows) < share:
        kind = KINDS[(3 * place + number) % len(KINDS)]
        folder, number = tmp_path / str(number), number + 1
        rows.append((kind, killed(helper, setting, folder, kind, whole, draw)))
        if kind == "twice":
            again = draw.uniform(0, 0.5 * whole.seconds)
            if helper.go(setting, folder, after=again)["status"] != 0:
                rows.append(("twice, resume", f"{100 * again / whole.seconds:.0f} % of the time"))
        answer = helper.go(setting, folder)
        assert answer["status"] == 0
        assert_same_bits(bits(folder), whole.bits)
    with capsys.disabled():
        print(f"\n{setting}: {len(rows)} kills, run of {whole.seconds:.2f} s, {whole.counts}")
        for kind, where in rows:
            print(f"    {kind:18} {where}")


def test_a_run_that_is_killed_again_and_again_gets_to_its_end(
    reference: tuple[str, Reference],
    helper: Helper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed after its fourteenth rename, or a third of all, time and again: each life gets a
    little further.
    """
    setting, whole = reference
    folder, lives = tmp_path / "run", 0
    # a stage of clients that remember has more than thirteen
    last = max(13, whole.counts["replace"] // 3)
    while helper.go(setting, folder, fault=("replace", last, "after"))["status"] != 0:
        lives += 1
        assert lives < 50
    assert lives >= 1
    assert_same_bits(bits(folder), whole.bits)
    with capsys.disabled():
        print(f"\n{setting}: {lives} kills in one run")
