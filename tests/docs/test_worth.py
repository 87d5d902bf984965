"""The claims that the table of what each method is worth compares with runs."""

from __future__ import annotations

import tomllib

from tools.worth import CLAIMS

from fedstill.core import registry


def test_every_claim_is_of_a_method_and_has_its_number() -> None:
    known = set(registry.names("method"))
    for name, said in tomllib.loads(CLAIMS.read_text()).items():
        assert name in known
        assert said["of"] in ("global", "clients", "bytes")
        assert said["claim"] in ("", "above", "fewer")
