"""The claims that the table of what each method is worth compares with runs."""

from __future__ import annotations

from tools.worth import METRICS, read_claims

from fedstill.core import registry


def test_every_claim_is_of_a_method_and_has_its_number() -> None:
    methods = set(registry.names("method"))
    for method, claim in read_claims().items():
        assert method in methods
        assert claim.base in methods
        assert claim.metric in (*METRICS, "bytes")
        assert claim.claim in ("", "above", "fewer")
