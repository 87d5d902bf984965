"""Seeds by key, and torch's global generator."""

from __future__ import annotations

import torch

from fedstill.core.keys import seed_global


def test_the_global_generator_starts_as_with_torchs_own_function() -> None:
    torch.manual_seed(2**62 + 3)
    theirs = torch.rand(5)
    seed_global(2**62 + 3)
    assert torch.equal(torch.rand(5), theirs)
