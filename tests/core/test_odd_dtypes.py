"""Label counts and sums of an unexpected dtype are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedstill.core.capabilities import Need
from fedstill.core.codec import decode, encode
from fedstill.core.label_counts import CensusChecks, CensusStages
from fedstill.core.method import Method
from fedstill.core.records import Payload, Reply, Stage, State, World
from fedstill.core.rounds import RunContext, Schedule, run_round
from fedstill.core.screen import Refusal, Rules, screen
from fedstill.privacy.extensions import NoisedSums
from loops import Collecting

ODD = [
    "uint16",
    "uint32",
    "uint64",
    "complex64",
    "float8_e5m2",
    "float8_e4m3fn",
    "bool",
    "bfloat16",
]


class Clients:
    """An engine whose clients answer the census: all with counts, and client 1 with those of
    another dtype.
    """

    def __init__(self, odd: torch.Tensor) -> None:
        self.odd = odd

    def run(
        self, work: Any, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        labels = {client: torch.tensor([2, 3, 0]) for client in payloads}
        labels[1] = self.odd
        contents = {client: Payload(labels=labels[client]) for client in payloads}
        return [
            Reply(client, decode(encode(content)), examples=5)
            for client, content in contents.items()
        ]

    def commit(self, stage: Stage, clients: Any) -> None: ...


@pytest.mark.parametrize("dtype", ODD)
def test_the_census_goes_on_without_a_client_that_counts_in_another_dtype(dtype: str) -> None:
    world: World = SimpleNamespace(clients=3, classes=3, seed=0)  # type: ignore[assignment]
    recorder = Collecting()
    odd_counts = torch.zeros(3).to(getattr(torch, dtype))
    context = RunContext(
        Schedule(Method(), lambda round, world: [], (CensusStages(),)),
        world,
        Clients(odd_counts),
        recorder=recorder,
        hooks=(CensusChecks(Rules().max_examples),),
    )

    state = run_round(State({}, round=0), context.schedule(0, world), context)

    (result,) = recorder.results
    (refusal,) = result.refused
    assert refusal.client == 1
    assert refusal.reason == f"labels is torch.{dtype}, not torch.int64"
    assert state.extra.tensor("labels").sum(1).tolist() == [5, 0, 5]


@pytest.mark.parametrize("dtype", ODD)
def test_sums_of_another_dtype_are_left_to_the_screen(dtype: str) -> None:
    work = NoisedSums((3,), places=(0, 1, 2), low=(0.0,) * 3, high=(1.0,) * 3, clip=1.0, noise=1.0)
    sums = torch.zeros(3, 2).to(getattr(torch, dtype))
    assert work.refuses(Reply(0, Payload(noised_sums=sums), 5)) == ""


def test_a_client_that_said_it_has_nothing_claims_no_more_than_the_largest() -> None:
    """Its row in the census is 0, and so is that of one whose answer to the census was refused."""
    stage = Stage(1, 0, "train", (0, 1, 2))
    claims = {0: 100, 1: 10_000_000, 2: 100}
    replies = [
        Reply(client, Payload(), examples, round=1, stage=0) for client, examples in claims.items()
    ]

    def screened(counts: torch.Tensor) -> tuple[list[Reply], list[Refusal]]:
        state = State({}, Payload(labels=counts))
        census = CensusChecks(Rules().max_examples)
        return screen(
            lambda _: Payload(),
            stage,
            dict.fromkeys(claims, Payload()),
            replies,
            Rules(),
            refusal=lambda reply: census.check_reply(reply, stage, Need.LABEL_COUNTS, state),
        )

    accepted, refused = screened(torch.tensor([[50, 50], [0, 0], [0, 0]]))
    assert [reply.client for reply in accepted] == [0, 2]
    (refusal,) = refused
    assert refusal.reason == "claims 10000000 examples, and the largest client 100 in the census"

    accepted_without_a_census, _ = screened(torch.zeros(3, 2))
    assert len(accepted_without_a_census) == 3
