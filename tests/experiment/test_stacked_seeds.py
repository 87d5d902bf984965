"""Seeds of a comparison trained in common stacks: each run as if alone up to rounding, and resumable to its bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from safetensors.torch import load_file

from fedstill.engines import vectorised
from fedstill.engines.together import Company, Seat
from fedstill.errors import ConfigError, RunExists
from fedstill.experiment import compare, seeds
from fedstill.experiment.compare import Variant, variants
from fedstill.experiment.config import Experiment
from fedstill.experiment.prepare import prepare
from fedstill.experiment.runner import Interrupted, Quiet, resume, run
from fedstill.experiment.settings import settle
from run_bits import StopAfter, assert_same_bits, bits

SEEDS = (1, 2, 3)
HALF = {"clients": 6, "sampled": 3}
SMALL: dict[str, Any] = {
    "engine": "vectorised",
    "rounds": 3,
    "measure": [],
    "model": {"name": "mlp", "hidden": [8]},
    "data": {"train_size": 200, "test_size": 100},
}


def asked(out: Path, names: Sequence[int] = SEEDS, stack: bool = True, **changes: Any) -> list[Variant]:
    """Three rounds on handwritten digits with a small network."""
    values = {**SMALL, "method": "fedntd", "topology": HALF, **changes}
    return variants(Experiment(**values), out, seeds=names, stack_seeds=stack)


def company(runs: Sequence[Variant]) -> list[Variant]:
    (only,) = seeds.together(runs)
    return only


CHAIN = {"method": "sfedkd", "topology": {"kind": "sequential", "clients": 6, "sampled": 3}}
SETTINGS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "plain": {"method": "fedavg"},
    "chain": CHAIN,
    "remembers": {"method": "scaffold"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_seeds_in_one_stack_are_as_if_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = sizes_of_stacks(monkeypatch)
    errors = seeds.run_together(company(asked(tmp_path / "all", **SETTINGS[name])), Quiet())
    assert errors == [None, None, None]
    assert max(stacked) > (1 if name == "chain" else 3), "clients of several seeds were in one stack"
    for one in asked(tmp_path / "all", stack=False, **SETTINGS[name]):
        alone = tmp_path / f"alone{one.seed}"
        run(one.experiment.with_values({"engine": "pooled"}, "test"), alone)
        got, want = (load_file(f / "model.safetensors") for f in (one.folder, alone))
        for key in want:
            assert got[key] == pytest.approx(want[key], abs=2e-5), f"seed {one.seed}, {key}"
        assert tomllib.loads((one.folder / "config.toml").read_text())["stacked_seeds"] == list(SEEDS)


def sizes_of_stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients are in each stack from now on."""
    sizes: list[int] = []
    before = vectorised.train_stack

    def noted(work: Any, carries: Sequence[Any], *rest: Any) -> Any:
        sizes.append(len(carries))
        return before(work, carries, *rest)

    monkeypatch.setattr(vectorised, "train_stack", noted)
    return sizes


Whole = tuple[str, list[Any]]
"""A setting, and the bits of its runs that nobody stopped."""


@pytest.fixture(scope="module", params=SETTINGS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out = tmp_path_factory.mktemp("whole")
    runs = company(asked(out, **SETTINGS[request.param]))
    assert seeds.run_together(runs, Quiet()) == [None, None, None]
    return request.param, [bits(r.folder) for r in runs]


class StopsAt(Quiet):
    """Asks one of the threads that look to stop, after so many looks in all."""

    def __init__(self, looks: int) -> None:
        self.left, self.lock = looks, threading.Lock()

    def stop(self) -> bool:
        with self.lock:
            self.left -= 1
            return self.left == 0


@pytest.mark.parametrize("looks", [1, 4, 8])
def test_stopped_together_they_resume_to_the_same_bits(
    whole: tuple[str, list[Any]], looks: int, tmp_path: Path
) -> None:
    name, want = whole
    errors = seeds.run_together(company(asked(tmp_path, **SETTINGS[name])), StopsAt(looks))
    assert all(isinstance(e, Interrupted) for e in errors), "one was asked, and all stopped at the same place"
    assert seeds.run_together(company(asked(tmp_path, **SETTINGS[name])), Quiet()) == [None, None, None]
    for one, expected in zip(asked(tmp_path, **SETTINGS[name]), want, strict=True):
        assert_same_bits(bits(one.folder), expected)


def test_one_that_was_killed_a_stage_earlier_takes_the_others_back(whole: Whole, tmp_path: Path) -> None:
    name, want = whole
    setting = SETTINGS[name]
    early, late = tmp_path / "early", tmp_path / "late"
    for out, looks in ((early, 4), (late, 7)):
        seeds.run_together(company(asked(out, **setting)), StopsAt(looks))
    behind = asked(late, **setting)[1].folder
    shutil.rmtree(behind)
    shutil.copytree(asked(early, **setting)[1].folder, behind)
    assert seeds.run_together(company(asked(late, **setting)), Quiet()) == [None, None, None]
    for one, expected in zip(asked(late, **setting), want, strict=True):
        assert_same_bits(bits(one.folder), expected)


def test_one_that_never_began_takes_the_others_back_to_the_beginning(whole: Whole, tmp_path: Path) -> None:
    name, want = whole
    seeds.run_together(company(asked(tmp_path, **SETTINGS[name])), StopsAt(1))
    shutil.rmtree(asked(tmp_path, **SETTINGS[name])[2].folder)
    assert seeds.run_together(company(asked(tmp_path, **SETTINGS[name])), Quiet()) == [None, None, None]
    for one, expected in zip(asked(tmp_path, **SETTINGS[name]), want, strict=True):
        assert_same_bits(bits(one.folder), expected)


def test_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    one, two, three = company(asked(tmp_path))
    broken = two.experiment.with_values({"clients.norm_limit": 1e-9}, "test")
    errors = seeds.run_together([one, Variant(two.label, two.seed, broken, two.folder), three], Quiet())
    assert [e is None for e in errors] == [True, False, True]
    again = seeds.run_together([two], Quiet())
    assert type(again[0]) is type(errors[1]), "it fails alone as it did among them"


def test_one_far_behind_goes_on_alone() -> None:
    kept = {0: [(3, 0), (3, 1), (3, 2)], 1: [(1, 0), (1, 1), (1, 2)], 2: [(3, 0), (3, 1)], 3: []}
    got: dict[int, Any] = {}
    members = Company(len(kept))

    def one(member: int) -> None:
        got[member] = Seat(members, member).start(kept[member], 3)

    threads = [threading.Thread(target=one, args=(m,)) for m in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert got == {0: (3, 1), 1: None, 2: (3, 1), 3: None}


def test_members_out_of_step_are_an_error_and_no_deadlock() -> None:
    members, errors = Company(2), list[str]()

    def one(member: int, what: str) -> None:
        try:
            members.meet(member, what, None, lambda all_: dict(all_))
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=one, args=(m, what)) for m, what in enumerate(("round 1", "round 2"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert errors == ["runs that train together are out of step: round 1, round 2"] * 2


def folders(companies: Sequence[Sequence[Variant]]) -> list[list[int]]:
    return [[v.seed for v in c] for c in companies]


def test_who_trains_together(tmp_path: Path) -> None:
    assert folders(seeds.together(asked(tmp_path))) == [[1, 2, 3]]
    assert folders(seeds.together(asked(tmp_path, stack=False))) == [[1], [2], [3]]
    with pytest.raises(ConfigError, match="engine = 'pooled' stacks nothing"):
        asked(tmp_path, engine="pooled")
    assert folders(seeds.together(asked(tmp_path, names=(1,)))) == [[1]]
    seeds.run_together(company(asked(tmp_path, names=(1, 2))), StopAfter(3))
    assert folders(seeds.together(asked(tmp_path, names=(1, 2, 3, 4)))) == [[1, 2], [3, 4]], "begun ones stay together"
    with pytest.raises(ConfigError, match=r"seed1 was begun together with seed 2: name that one too, in --seeds"):
        seeds.together(asked(tmp_path, names=(1, 3)))
    with pytest.raises(ConfigError, match=r"stacked_seeds = \[1, 2\]: fedstill compare trains these seeds together"):
        resume(tmp_path / "fedntd/seed1")
    for one in asked(tmp_path):
        compare._check_folder(one)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"seed": 7, "stacked_seeds": [1, 2]},
            r"stacked_seeds = \[1, 2\] must name different seeds, and the run's own, 7",
        ),
        ({"seed": 1, "stacked_seeds": [1, 1]}, "must name different seeds"),
        ({"seed": 1, "stacked_seeds": [1, 2], "engine": "pooled"}, "engine = 'pooled' stacks nothing"),
        ({"seed": 1, "stacked_seeds": [1, 2]}, "fedstill compare trains these seeds together"),
    ],
)
def test_a_config_that_names_them_wrongly_is_refused(changes: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    (one,) = asked(tmp_path, names=(0,), stack=False)
    with pytest.raises(ConfigError, match=words):
        run(one.experiment.with_values(changes, "test"), tmp_path / "run")


def test_auto_counts_the_clients_of_all_seeds(tmp_path: Path) -> None:
    chain = asked(tmp_path, (1, 2, 3, 4), engine="auto", **CHAIN)
    assert seeds.stacks(company(chain)), "four clients of four chains"
    (alone,) = asked(tmp_path, (1,), engine="auto", **CHAIN)
    assert prepare(settle(alone.experiment)).settings["engine"] == "pooled"
    assert not seeds.stacks(company(asked(tmp_path, engine="auto", **CHAIN))), "three are too few"


def test_the_command_stacks_seeds_or_trains_them_apart(tmp_path: Path) -> None:
    for engine, stacked in (("vectorised", [1, 2, 3]), ("auto", None)):
        out = tmp_path / engine
        runs = asked(out, engine=engine, rounds=1, **CHAIN)
        outcomes = compare.compare(runs, 2, lambda _: None)
        assert [(o.state, o.problem) for o in outcomes] == [("finished", "")] * 3
        for one in runs:
            config = tomllib.loads((one.folder / "config.toml").read_text())
            assert config.get("stacked_seeds") == stacked
            assert json.loads((one.folder / "summary.json").read_text())
        again = asked(out, names=(1, 3), engine=engine, rounds=1, **CHAIN)
        assert [o.state for o in compare.compare(again, 2, lambda _: None)] == ["finished"] * 2


def test_a_folder_of_another_setting_is_still_refused(tmp_path: Path) -> None:
    seeds.run_together(company(asked(tmp_path)), StopsAt(1))
    with pytest.raises(RunExists):
        compare._check_folder(asked(tmp_path, rounds=9)[0])


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_killed_at_any_moment_they_resume_to_the_same_bits(setting: str, tmp_path: Path) -> None:
    """``FEDSTILL_KILLS`` sets how many kills there are, over all settings; a dozen if it is unset."""
    values = {**SMALL, "method": "fedntd", "topology": HALF, **SETTINGS[setting], "rounds": 12}
    (tmp_path / "setting.toml").write_text(tomli_w.dumps(values))
    words = ["compare", str(tmp_path / "setting.toml"), "--seeds", "1,2,3", "--stack-seeds", "--quiet", "--out"]

    def go(out: Path, after: float | None = None) -> float:
        began = time.monotonic()
        command = [sys.executable, "-m", "fedstill", *words, str(out)]
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(after) == 0
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return time.monotonic() - began

    usual = go(tmp_path / "whole")
    draw, kills = random.Random(setting), max(1, int(os.environ.get("FEDSTILL_KILLS", "12")) // len(SETTINGS))
    for kill in range(kills):
        out = tmp_path / f"killed{kill}"
        for after in (draw.uniform(0.4 * usual, usual), draw.uniform(0.4 * usual, usual), None):
            go(out, after)
        for want in (tmp_path / "whole").rglob("config.toml"):
            got = out / want.parent.relative_to(tmp_path / "whole")
            assert_same_bits(bits(got), bits(want.parent))
