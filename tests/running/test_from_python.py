"""What is handed over from Python: classes, instances, networks and functions; how such a run is
resumed; on_round.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from annotated_types import Interval
from torch import Tensor, nn

import toys
from fedstill.config.resolve import settle
from fedstill.core import registry
from fedstill.core.aggregation import weighted_mean
from fedstill.core.errors import ConfigError
from fedstill.core.method import Method
from fedstill.core.records import Reply, Stage, State, World
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")


@dataclass(frozen=True)
class PartOfTheWay(Method):
    """The mean, approached by a share."""

    share: Annotated[float, Interval(gt=0, le=1)] = 0.5

    def aggregate(self, state: State, replies: list[Reply], stage: Stage, world: World) -> State:  # type: ignore[override]
        mean = weighted_mean(replies)
        return state.next(
            params={k: v + self.share * (mean[k] - v) for k, v in state.params.items()}
        )


class Wide(nn.Module):
    """One hidden layer."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, wide: int = 3) -> None:
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(size, wide), nn.Linear(wide, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def stripes(labels: Any, clients: int, width: int = 1) -> list[Any]:
    """Every so many-th example."""
    return [np.arange(c, len(labels), clients) for c in range(clients)]


def local_method() -> type[Method]:
    @dataclass(frozen=True)
    class Local(PartOfTheWay):
        """The same, of this call alone."""

    return Local


def test_what_can_be_imported_is_named_by_its_import_path() -> None:
    settings = settle(toys.toy(PartOfTheWay(share=0.25), model=Wide, partition=stripes))
    assert settings.tree["method"] == {"name": f"{__name__}:PartOfTheWay", "share": 0.25}
    assert settings.tree["model"] == {"name": f"{__name__}:Wide", "wide": 3}
    assert settings.tree["partition"] == {"kind": f"{__name__}:stripes", "width": 1}
    assert settle(toys.toy(PartOfTheWay)).method == PartOfTheWay()
    assert settle(toys.toy(model={"name": Wide, "wide": 5})).named.model.values == {"wide": 5}
    assert (
        settle(toys.toy(registry.lookup("method", "fedprox").build(mu=0.5))).tree["method"]["name"]
        == "fedprox"
    )


def test_a_class_of_a_users_file_is_named_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import fedstill\nclass Mine(fedstill.Method):\n    pass\n")
    mine = registry.lookup("method", "net.py:Mine", tmp_path).target
    assert settle(toys.toy(mine)).named.method.name == f"{tmp_path / 'net.py'}:Mine"


@pytest.mark.parametrize("engine", ["serial", "pooled", "flower"])
def test_what_cannot_be_imported_runs_and_resumes_to_the_same_bits(
    engine: str, tmp_path: Path
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    split = functools.partial(stripes, width=2)
    what = toys.toy(local_method()(share=0.5), model=network, partition=split, engine=engine)
    run(what, tmp_path / "whole", toys.blobs())
    text = (tmp_path / "whole" / "config.toml").read_text()
    assert 'name = "python:Local' in text
    assert 'name = "python:Sequential' in text
    assert 'kind = "python:stripes' in text
    start = read_journal(tmp_path / "whole" / "journal.jsonl")[0]["sources"]
    assert len([name for name in start if name.startswith("python:")]) == 3
    halfway = stopped(what, tmp_path / "stopped", 1)
    resume(halfway, toys.blobs())
    if engine != "flower":  # its sites' folders have names of their own
        assert_same_bits(bits(halfway), bits(tmp_path / "whole"))
    last = [(folder / "model.safetensors").read_bytes() for folder in (halfway, tmp_path / "whole")]
    assert last[0] == last[1]


def test_a_network_is_copied_with_its_weights() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    world = prepare(settle(toys.toy(model=network)), toys.blobs()).world
    assert all(torch.equal(world.initial(-1)[k], v) for k, v in network.state_dict().items())
    world.initial(-1)["1.weight"].zero_()
    assert network[1].weight.abs().sum() > 0


def test_two_things_of_one_name_stay_two() -> None:
    one, other = (settle(toys.toy(local_method())).named.method.name for _ in range(2))
    assert one != other
    again = functools.partial(Wide, wide=7)
    names = [settle(toys.toy(model=again)).named.model.name for _ in range(2)]
    assert names[0] == names[1]
    assert names[0].startswith("python:Wide")


SCRIPT = """
import sys
import fedstill, toys
from fedstill.core.errors import FedstillError
from fedstill.running.runner import resume, run
from run_bits import StopAfter
from fedstill.core.errors import Interrupted
from dataclasses import dataclass

@dataclass(frozen=True)
class Mine(fedstill.Method):
    '''A method of this script.'''
    {body}

if __name__ == "__main__":
    try:
        {call}
    except (FedstillError, Interrupted) as error:
        print(type(error).__name__, error)
"""


FORKING = """
import os, runpy, sys
sys.path.insert(0, sys.argv[1])
import fedstill.running.runner, toys, run_bits
for number in range(int(sys.argv[2])):
    if not (process := os.fork()):
        os.dup2(os.open(f"said{number}", os.O_WRONLY | os.O_CREAT), 1)
        runpy.run_path(f"script{number}.py", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""
"""Runs scripts one after another, each in a process of its own that imports nothing anew."""


def test_another_process_says_what_it_needs_and_goes_on_with_it(tmp_path: Path) -> None:
    calls = [
        ("run(toys.toy(Mine(beta=0.25), rounds=2), 'run', toys.blobs(), StopAfter(1))", 0.5),
        ("resume('run', toys.blobs())", 0.5),
        ("resume('run', toys.blobs(), method=Mine)", 0.75),
        ("print(resume('run', toys.blobs(), method=Mine).accuracy)", 0.5),
    ]
    for number, (call, beta) in enumerate(calls):
        (tmp_path / f"script{number}.py").write_text(
            SCRIPT.format(call=call, body=f"beta: float = {beta}")
        )
    command = [sys.executable, "-c", FORKING, str(Path(__file__).parents[1]), str(len(calls))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    begun, without, other, with_it = (
        (tmp_path / f"said{number}").read_text() for number in range(len(calls))
    )
    assert begun.startswith("Interrupted")
    assert "python:Mine" in without
    assert "fedstill.resume(DIRECTORY, method=Mine)" in without
    assert "python:Mine" in other
    assert with_it.strip()[:2] == "0."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": 3}, "partition = 3 must be a table"),
        ({"model": lambda input_shape, classes: 3}, "made a int, not a torch.nn.Module"),
        ({"method": {"name": stripes}}, "labels is missing, and has no default"),
    ],
    ids=["a number", "a function of no network", "another class"],
)
def test_what_is_no_such_thing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(settle(toys.toy(**changes)), toys.blobs())


def test_a_federation_cannot_have_what_is_in_this_process_only() -> None:
    far = {"engine": "flower", "flower": {"federation": "somewhere"}}
    with pytest.raises(ConfigError, match="python:Local"):
        settle(toys.toy(local_method(), **far))


def test_resume_takes_only_what_was_handed_over(tmp_path: Path) -> None:
    folder = stopped(toys.toy(PartOfTheWay), tmp_path / "run", 1)
    with pytest.raises(ConfigError, match="PartOfTheWay"):
        resume(folder, toys.blobs(), method=PartOfTheWay)
    with pytest.raises(ConfigError, match="seed"):
        resume(folder, toys.blobs(), seed=3)


def test_on_round_sees_every_round(tmp_path: Path) -> None:
    met: list[dict[str, Any]] = []
    run(toys.toy(rounds=3), tmp_path / "run", toys.blobs(), on_round=met.append)
    events = [e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "round"]
    assert [e["round"] for e in met] == [1, 2, 3]
    assert [{"event": "round", **e} for e in met] == events


def test_what_on_round_raises_ends_the_run_which_goes_on(tmp_path: Path) -> None:
    def fail(event: dict[str, Any]) -> None:
        if event["round"] == 2:
            raise ZeroDivisionError("mine")

    run(toys.toy(), tmp_path / "whole", toys.blobs())
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run(toys.toy(), tmp_path / "run", toys.blobs(), on_round=fail)
    assert caught.traceback[-1].name == "fail"
    rounds: list[int] = []
    resume(tmp_path / "run", toys.blobs(), on_round=lambda event: rounds.append(event["round"]))
    assert rounds == [2, 3], "the round in which it failed is told again"
    assert_same_bits(bits(tmp_path / "run"), bits(tmp_path / "whole"))
