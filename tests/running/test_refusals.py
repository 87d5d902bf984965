"""A run names the clients whose replies were refused at its end, in the terminal, the summary,
comparisons and the report.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import toys
from fedstill.cli import call
from fedstill.running.numbers import RunNumbers
from fedstill.running.result import Refusals
from fedstill.running.runner import run

NETWORK = """
import torch
from torch import nn

class Even(nn.Module):
    '''A network that cannot train at a client with an odd number of images.'''

    def __init__(self, input_shape, classes):
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(64, classes)

    def forward(self, x):
        if self.training and len(x) % 2:
            raise ValueError(f"an odd number of images: [{len(x)}]")
        return self.head(self.body(x))
"""
CONFIG = """
rounds = 2
measure = []
engine = "serial"
model = "mynet.py:Even"
partition = "iid"
topology = { clients = 3 }
data = { train_size = 76 }
plan = { epochs = 1, batch = 100 }
"""
"""26, 25 and 25 images: two clients of three cannot train."""
TOLERANT = ["-s", "clients.failures=tolerate", "-s", "clients.quorum=0.3", "-q"]
REASON = "failed: ValueError: an odd number of images: [25] (mynet.py, line 14, in forward)"
SENTENCE = f"2 of 3 clients refused in every round, first: client 1 in round 1: {REASON}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mynet.py").write_text(NETWORK)
    Path("half.toml").write_text(CONFIG)
    return "half.toml"


def test_by_default_the_run_ends_with_the_authors_file_and_line(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", config, "--out", "one", "-q"]) == 1

    printed = capsys.readouterr()
    assert printed.err.startswith(
        f"fedstill: round 1, stage 'train': client 1 {REASON}; see the traceback with --debug"
    )
    assert printed.out == ""
    assert call(["compare", config, "--out", "all", "-q"]) == 1
    assert f"client 1 {REASON}" in capsys.readouterr().err


def test_a_run_that_tolerates_failures_names_the_clients_at_its_end(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", config, "--out", "one", *TOLERANT]) == 0

    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"warning: {SENTENCE}"

    summary = json.loads(Path("one/summary.json").read_text())
    assert summary["refused"] == 4
    assert summary["refused_clients"] == [1, 2]
    assert summary["refusals"] == SENTENCE
    assert call(["resume", "one", "-q"]) == 0, "also if it is asked again"
    assert f"warning: {SENTENCE}" in capsys.readouterr().out


def test_comparison_and_report_name_them_too(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "fedavg,fedprox", "--seeds", "1,2", "--out", "all", *TOLERANT]
    assert call(["compare", config, *options]) == 0

    printed = capsys.readouterr().out
    for method in ("fedavg", "fedprox"):
        assert f"warning: {method}, seed 1: {SENTENCE}; seeds with refusals: 1, 2\n" in printed

    page = Path("all/report.html").read_text()
    head = page[page.index("<header>") : page.index("</header>")]
    assert head.count('<p class="note">') == 2
    assert "2 of 3 clients refused in every round, first: client 1 in round 1" in head
    assert 'id="failures"' in page


def test_a_run_without_refusals_does_not_mention_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = run(toys.toy(), tmp_path / "run", toys.blobs()).summary
    assert summary["refused"] == 0
    assert not {"refusals", "refused_clients"} & set(summary)
    assert not caplog.records


def test_in_python_refusals_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nan = toys.toy(
        {"name": "toy_failing", "who": 1, "how": "nan"}, topology={"clients": 6, "sampled": 6}
    )
    with caplog.at_level(logging.WARNING):
        result = run(nan, tmp_path / "run", toys.blobs())
    sentence = (
        "2 of 18 replies refused, of 1 of 6 clients, in 2 of 3 rounds, first: client 1 in round 2: "
        "params/"
    )

    assert result.summary["refusals"].startswith(sentence)
    assert f"run: {sentence}" in caplog.text


def accepted(client: int, round: int) -> dict[str, object]:
    """The event of an accepted reply."""
    return {"event": "client", "client": client, "round": round, "stage": 0, "name": "census"}


def refused(client: int, round: int) -> dict[str, object]:
    """The event of a refused reply."""
    return {**accepted(client, round), "refused": "why"}


OF_MOMENTS = {**refused(3, 0), "name": "moments"}
IDLE = {**accepted(1, 1), "idle": True}


def two_rounds(*clients: dict[str, object]) -> RunNumbers:
    """The numbers of a run of two rounds with these events of clients."""
    return RunNumbers.of([*clients, {"event": "round", "round": 1}, {"event": "round", "round": 2}])


@pytest.mark.parametrize(
    ("events", "parts"),
    [
        (
            [refused(0, 1), accepted(1, 1), refused(0, 2)],
            ("1 of 6 clients", "every round", "client 0 in round 1"),
        ),
        (
            [refused(0, 1), accepted(1, 2)],
            ("1 of 6 clients", "whenever", "client 0 in round 1"),
        ),
        (
            [accepted(0, 1), refused(0, 2)],
            ("1 of 2 replies", "1 of 6 clients", "1 of 2 rounds", "client 0 in round 2"),
        ),
        (
            [refused(3, 0), accepted(3, 1)],
            ("1 of 2 replies", "0 of 2 rounds", "client 3", "'census'"),
        ),
        ([OF_MOMENTS, accepted(3, 1)], ("0 of 2 rounds", "client 3", "'moments'")),
    ],
)
def test_refusals_are_counted_and_the_first_is_named(
    events: list[dict[str, object]], parts: tuple[str, ...]
) -> None:
    sentence = Refusals.of(two_rounds(*events), 6).sentence
    assert all(part in sentence for part in parts), sentence
    assert sentence.endswith(": why")


@pytest.mark.parametrize("idle", [[], [IDLE]])
def test_without_refusals_the_sentence_is_empty(idle: list[dict[str, object]]) -> None:
    assert Refusals.of(two_rounds(accepted(0, 1), *idle), 6).sentence == ""


def test_the_frame_has_a_number_for_each_reply_of_a_client() -> None:
    idle = {**accepted(2, 1), "idle": True}
    numbers = two_rounds(refused(0, 1), accepted(1, 1), idle, refused(0, 2))
    (replies,) = numbers.columns(["refused"])
    assert replies.values.tolist() == [1, 0, 1]
    assert replies.coordinates["client"].tolist() == [0, 1, 0]
    assert replies.coordinates["round"].tolist() == [1, 1, 2]
