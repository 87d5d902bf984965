"""The scorecard: its rows measure what they say, notice what is broken, and are written down."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import CorruptFile, UnknownName
from fedstill.privacy.noise import Privacy
from scorecard import doors, everyday, hostile_replies, stopping_runs, what_runs
from scorecard.__main__ import main
from scorecard.attacks_and_privacy import canary, epsilons, members_told, sent_by
from scorecard.malformed_files import malformed
from scorecard.rows import ROWS, all_passed, chosen_rows, measure_rows, write_scorecard
from scorecard.secret_sums import secret_sums
from scorecard.trials import PromiseRow, Trials

pytest.importorskip("opacus")
pytest.importorskip("cryptography")
pytest.importorskip("Crypto")


def test_every_row_has_one_home() -> None:
    ids = [row.id for row in ROWS]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {f"R{i}" for i in range(1, 7)} | {f"S{i}" for i in range(1, 7)} | {
        f"P{i}" for i in range(1, 5)
    } | {"Q1", "Q2"}
    assert all(0 < row.quick <= row.complete for row in ROWS)


@pytest.mark.parametrize(
    ("probe", "trials"),
    [
        (hostile_replies.poisoned, 17),
        (hostile_replies.absent, 5),
        (hostile_replies.repeated, 3),
        (hostile_replies.diverging, 3),
        (stopping_runs.damage, 5),
        (malformed, 80),
        (epsilons, 5),
        (secret_sums, 6),
        (what_runs.foreign_code, 10),
        (doors.strangers, 11),
        (everyday.one_file, 1),
    ],
)
def test_a_row_passes_here(probe, trials: int) -> None:
    measured = probe(trials)
    assert measured.remarks == ()
    assert measured.passed == measured.trials >= trials


def test_rows_that_say_what_they_measured_pass_here() -> None:
    seen = members_told(2)
    assert (seen.trials, seen.passed) == (2, 2)
    assert [line.partition(": AUC 0.")[0] for line in seen.remarks] == ["fedavg", "fedavgm"]
    sent = sent_by(9)
    assert (sent.trials, sent.passed) == (9, 9)
    assert "ccvr: counts, sums, products made from labels" in sent.remarks


def test_a_module_that_reads_pickles_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "reads.py").write_text("import numpy as np\n\nnp.load(file, allow_pickle=True)\n")
    monkeypatch.setattr(what_runs.fedstill, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(what_runs, "WATCHED", "print('met: []')")
    assert what_runs.unpickled(9) == Trials(2, 1, ("reads.py: line 3",))


def test_a_gate_that_is_open_and_an_app_that_is_taken_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def opened(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    monkeypatch.setattr(doors.Gate, "__call__", opened)
    assert doors.strangers(11).passed == 7
    monkeypatch.setattr(what_runs, "require_own_app", lambda _: None)
    assert what_runs.foreign_code(10).passed == 8


def test_memory_that_grows_and_files_left_open_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "[[1000, 5], [1009, 5], [1011, 5], [1000, 6]]"
    monkeypatch.setattr(
        everyday,
        "subprocess",
        SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0, stdout=told)),
    )
    assert everyday.lasting(3).remarks == (
        "parallel, after 300 rounds: 1,011 bytes, and 1,000 after 100 rounds",
        "parallel, after 400 rounds: 6 open files, and 5 after 100 rounds",
    )


@pytest.mark.slow
def test_what_takes_long_passes_here() -> None:
    assert everyday.lasting(1) == Trials(1, 1)
    assert everyday.examples(10_000).remarks == ()


def test_a_screen_that_lets_all_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.core.screen._Screening._numbers", lambda *_: "")
    says = hostile_replies.poisoned(17).remarks
    assert any("NaN: it ended the round: Diverged" in line for line in says)


def test_masks_that_hide_nothing_and_sums_that_are_wrong_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(secret: bytes, length: int, purpose: bytes):
        return np.zeros(length, dtype=np.uint64)

    monkeypatch.setattr("fedstill.privacy.protocol.mask_of", nothing)
    (first, *_) = secret_sums(1).remarks
    assert "the upload of client 0 is not uniform" in first
    monkeypatch.undo()
    monkeypatch.setattr("fedstill.privacy.masking.FixedPoint.error", 0.0)
    assert "the mean is off by" in secret_sums(1).remarks[0]


def test_a_mechanism_with_a_quarter_of_its_noise_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = torch.randn
    assert canary(1.0)[1] < canary(1.0)[0]
    monkeypatch.setattr("fedstill.privacy.noise.torch.randn", lambda *a, **k: drawn(*a, **k) / 4)
    assert canary(1.0)[1] > canary(1.0)[0]
    assert Privacy(clip=1.0, noise=1.0).sigma == 1.0


def test_a_checkpoint_that_is_loaded_damaged_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyError("layer")

    monkeypatch.setattr(stopping_runs, "resume", crash)
    assert "KeyError" in stopping_runs.damage(1).remarks[0]

    def named(*_: object) -> None:
        raise CorruptFile("by name")

    monkeypatch.setattr(stopping_runs, "resume", named)
    assert stopping_runs.damage(1) == Trials(1, 1)


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits() -> None:
    assert stopping_runs.kills(4) == Trials(4, 4)


def test_rows_are_chosen_by_id() -> None:
    assert [row.id for row in chosen_rows(["s1", "R4"])] == ["S1", "R4"]
    assert chosen_rows([]) == list(ROWS)
    with pytest.raises(UnknownName, match="unknown row 'Z9'"):
        chosen_rows(["Z9"])


def test_the_page_and_the_numbers_say_the_same(tmp_path: Path) -> None:
    row = PromiseRow(
        id="R4",
        promise="a <promise>",
        trial="a trial",
        probe=lambda n: Trials(n, n - 1, ("one & only",)),
        quick=2,
        complete=9,
    )
    told = measure_rows([row], True, lambda _: None)
    assert not all_passed(told)
    page = write_scorecard(told, tmp_path / "card").read_text()
    written = json.loads((tmp_path / "card" / "scorecard.json").read_text())
    assert written == told
    assert written["rows"][0]["command"] == 'make scorecard ARGS="R4 --quick"'
    assert "a &lt;promise&gt;" in page
    assert "one &amp; only" in page


def test_the_command_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["S4", "--quick", "--out", str(tmp_path / "card")]) == 0
    out = capsys.readouterr().out
    assert 'make scorecard ARGS="S4 --quick"' in out
    assert (tmp_path / "card" / "scorecard.html").is_file()
    with pytest.raises(SystemExit) as stopped:
        main(["Z9", "--quick"])
    assert stopped.value.code == 2
    assert "Z9" in capsys.readouterr().err
