"""The table of what each method is worth is made from the runs that are there."""

from __future__ import annotations

import tomllib

from tools.worth import CLAIMS, PAGE, written

from fedstill import registry


def test_the_table_is_that_of_the_runs() -> None:
    text = PAGE.read_text()
    assert written(text) == text, "python tools/worth.py writes it anew"


def test_every_claim_is_of_a_method_and_has_its_number() -> None:
    known = set(registry.names("method"))
    for name, said in tomllib.loads(CLAIMS.read_text()).items():
        assert name in known
        assert said["of"] in ("global", "clients", "bytes")
        assert said["claim"] in ("", "above", "fewer")
