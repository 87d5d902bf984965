"""An engine may be had with another world, or with other rounds to measure; the one it was made
from stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import toys
from fedstill.config.resolve import resolve
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Reply, Stage
from fedstill.engines.pooled import PooledEngine
from fedstill.flower.engine import FlowerEngine
from fedstill.running.preparation import Prepared, prepare

pytestmark = pytest.mark.usefixtures("with_threads")

STAGE = Stage(1, 0, "train", (0, 1, 2, 3, 4, 5))


def ready(engine: str) -> Prepared:
    return prepare(
        resolve(toys.toy(engine=engine, measure=("local",), measure_every=1)), toys.blobs()
    )


def replies(engine: Any, prepared: Prepared, stage: Stage = STAGE) -> list[Reply]:
    payloads = {c: Payload(params=prepared.world.initial(c)) for c in stage.clients}
    return engine.run(ClientWork(), stage, payloads, 7)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["serial", "pooled", "vectorised"])
def test_a_copy_differs_in_what_was_said_and_shares_no_threads(name: str) -> None:
    prepared = ready(name)
    engine = prepared.engine()
    if name == "pooled":
        engine = replace(engine, workers=2)  # threads, on a machine of one core too
    assert all("correct_by_class" in r.metrics for r in replies(engine, prepared))
    longer = replace(
        prepared.world, plans={"train": replace(prepared.world.plans["train"], epochs=6)}
    )
    copy = replace(engine, world=longer, hooks=())
    assert type(copy) is type(engine)
    assert copy.memory is engine.memory
    theirs = replies(copy, prepared)
    assert not any("correct_by_class" in r.metrics or r.failure for r in theirs)
    assert [r.metrics["epochs"] for r in theirs] == [6] * 6
    if name == "pooled":
        assert isinstance(engine, PooledEngine)
        assert isinstance(copy, PooledEngine)
        assert engine._pool is not None
        assert copy._pool is not engine._pool
    copy.close()
    ours = replies(engine, prepared)
    epochs = prepared.world.plans["train"].epochs
    assert [reply.failure for reply in ours] == [""] * 6
    assert [reply.metrics["epochs"] for reply in ours] == [epochs] * 6
    engine.close()


def test_a_flower_engine_is_copied_with_the_engine_of_the_servers_stages() -> None:
    prepared = ready("serial")
    server_engine = prepared.engine()
    engine = FlowerEngine(server_engine, None, None)  # type: ignore[arg-type]  # nothing is asked of clients
    engine._held[3] = ("file", "sha")
    copy = replace(engine, server_engine=replace(server_engine, hooks=()))
    assert copy.server_engine.hooks == ()
    assert server_engine.hooks
    assert copy.memory is engine.memory
    assert copy._held == {}, "a stage that is under way belongs to the engine that began it"
