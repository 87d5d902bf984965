"""Options of the benchmarks that take several names."""

from __future__ import annotations

import pytest
from benchmarks.options import names_among, option_parser


def test_names_are_separated_by_commas() -> None:
    assert names_among(["W1", "W2", "W4"])("W4,W1") == ["W4", "W1"]


def test_an_unknown_name_ends_the_command_with_the_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = option_parser("A benchmark.")
    parser.add_argument("--workloads", type=names_among(["W1", "W2"]), default="W1")
    with pytest.raises(SystemExit):
        parser.parse_args(["--workloads", "W1,W9"])
    message = capsys.readouterr().err
    assert "--workloads" in message
    assert "W9" in message
    assert "W1, W2" in message
