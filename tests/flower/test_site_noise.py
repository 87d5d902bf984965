"""Noise of real sites: nobody can draw it again, and a hostile server gets one noised answer a
stage.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from test_flower_own_data import CLIENTS, simulated

import fedstill
import toys
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.codec import encode
from fedstill.core.files import digest
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Payload, Stage
from fedstill.data.views import SiteViews
from fedstill.flower.engine import LoopbackGrid, Parcel, parsed, serialised
from fedstill.flower.facts import Facts
from fedstill.flower.messages import Request, SiteReply, header_and_payload
from fedstill.flower.site import StageExecutor, client_app
from fedstill.flower.site_settings import Site
from fedstill.privacy import noise as wire_privacy
from fedstill.privacy.noise import Privacy, clip_rows, secret_normal
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower, own_sites

pytestmark = needs_flower

PRIVACY = {"clip": 3.0, "noise": 20.0}
SITES = {"deadline": 30.0, "poll": 1.0, "data": "sites", "federation": "/federation"}
FIRST = Stage(1, 0, "local", tuple(range(CLIENTS)))


def setting(**privacy: float) -> Experiment:
    return toys.toy(
        "hiper_fedkd",
        data={"public": toys.PUBLIC},
        topology={"clients": CLIENTS},
        privacy=privacy,
        rounds=2,
        plan={"epochs": 1, "batch": 10},
    )


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> list[Site]:
    """Three sites, with data of their own."""
    return own_sites(simulated(setting()), tmp_path_factory.mktemp("sites"))


def asked(experiment: Experiment, stage: Stage = FIRST, **down: Any) -> Request:
    """What the server sends client 0 in a stage."""
    settings = resolve(
        replace(
            experiment.with_values({"data.name": "blobs"}, "test"),
            engine="flower",
            flower=dict(SITES),
        )
    )
    facts, config = Facts.known_by(prepare(settings, toys.blobs())).plain(), settings.toml
    sent = Payload({"temperature": 1.0, **down})
    return Request(
        fedstill.__version__,
        config,
        digest(config.encode()),
        "run1",
        0,
        stage,
        facts=facts,
        payload=sent,
    )


def at(site: Site, memory: Path) -> StageExecutor:
    """The site with an empty memory, as a process that has just started."""
    return StageExecutor(replace(site, memory=memory), shows_reasons=True)


def logits(answer: SiteReply) -> torch.Tensor:
    assert answer.failure == ""
    return answer.content.tensor("logits").double()


def keyed(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The noise that a server draws that knows the run's seed."""
    key = seed_for(seed, FIRST.round, FIRST.index, 0, "privacy")
    return torch.randn(shape, generator=generator(key), dtype=torch.float64)


def test_a_server_that_knows_the_seed_cannot_subtract_the_noise(
    there: list[Site], tmp_path: Path
) -> None:
    clean = clip_rows(logits(at(there[0], tmp_path / "clean")(asked(setting()))), PRIVACY["clip"])
    noised = logits(at(there[0], tmp_path / "noised")(asked(setting(**PRIVACY))))
    spread = PRIVACY["clip"] * PRIVACY["noise"]
    left = noised - spread * keyed(tuple(noised.shape), setting().seed) - clean
    assert left.std().item() == pytest.approx(2**0.5 * spread, rel=0.3), "two draws apart, not none"
    assert (noised - clean).std().item() == pytest.approx(spread, rel=0.3)


def test_in_a_simulation_it_can_be_subtracted_as_the_document_says() -> None:
    """The test above would pass if the attack itself were wrong."""
    experiment, ready = (
        setting(**PRIVACY),
        prepare(
            resolve(setting(**PRIVACY).with_values({"data.name": "blobs"}, "test")), toys.blobs()
        ),
    )
    work, down = ready.settings.method.work(FIRST), Payload(temperature=1.0)
    plain = replace(ready.engine(), hooks=())
    noised, clean = (
        engine.run(work, FIRST, {0: down}, experiment.seed)[0].content.tensor("logits").double()
        for engine in (ready.engine(), plain)
    )
    spread = PRIVACY["clip"] * PRIVACY["noise"]
    left = noised - spread * keyed(tuple(noised.shape), experiment.seed)
    torch.testing.assert_close(left, clip_rows(clean, PRIVACY["clip"]), rtol=0, atol=1e-4)


def test_the_same_request_has_the_kept_answer_and_noise_is_drawn_once(
    there: list[Site], tmp_path: Path
) -> None:
    request = asked(setting(**PRIVACY))
    first, again = (logits(at(there[0], tmp_path)(request)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "change",
    [
        {"payload": Payload(temperature=2.0)},
        {"payload": Payload(temperature=1.0, more=1)},
        {"memory": ("client0-round0-stage0.safetensors", "0" * 64)},
    ],
    ids=["another content", "more content", "another memory"],
)
def test_another_request_for_a_stage_that_has_noise_is_refused(
    change: dict[str, Any], there: list[Site], tmp_path: Path
) -> None:
    request = asked(setting(**PRIVACY))
    first = logits(at(there[0], tmp_path)(request))
    second = at(there[0], tmp_path)(replace(request, **change))
    assert "round 1, stage 'local'" in second.failure
    assert not second.content
    assert torch.equal(logits(at(there[0], tmp_path)(request)), first), (
        "the first one is still answered"
    )


def test_without_noise_another_request_is_worked_out_anew(
    there: list[Site], tmp_path: Path
) -> None:
    request = asked(setting())
    assert at(there[0], tmp_path)(request).failure == ""
    assert at(there[0], tmp_path)(replace(request, payload=Payload(temperature=2.0))).failure == ""


def test_a_stage_stays_answered_when_its_reply_is_gone(there: list[Site], tmp_path: Path) -> None:
    request = asked(setting(**PRIVACY))
    logits(at(there[0], tmp_path)(request))
    (kept,) = tmp_path.rglob("*.reply")
    kept.unlink()
    assert "answers no other request" in at(there[0], tmp_path)(request).failure


def test_a_site_that_was_killed_before_its_answer_left_works_again(
    there: list[Site], tmp_path: Path
) -> None:
    request = asked(setting(**PRIVACY))
    logits(at(there[0], tmp_path)(request))
    (kept,), (noted,) = tmp_path.rglob("*.reply"), tmp_path.rglob("noised")
    kept.unlink()
    noted.unlink()  # it is written before the answer leaves
    assert at(there[0], tmp_path)(request).failure == ""


@pytest.mark.parametrize("round", [0, 3, 1000])
def test_rounds_that_the_run_does_not_have_are_refused(
    round: int, there: list[Site], tmp_path: Path
) -> None:
    answer = at(there[0], tmp_path)(asked(setting(**PRIVACY), replace(FIRST, round=round)))
    assert f"schedule of round {round}" in answer.failure


def test_more_rows_than_the_run_accounts_for_are_refused(there: list[Site], tmp_path: Path) -> None:
    # one image, again and again: its noise would average out
    images = torch.zeros(toys.PUBLIC + 1, dtype=torch.int64)
    answer = at(there[0], tmp_path)(asked(setting(**PRIVACY), subset=images))
    assert answer.failure == "the request asks for 51 rows of logits, where the run has 50"
    assert not answer.content
    assert (
        logits(at(there[0], tmp_path)(asked(setting(**PRIVACY), subset=images[1:]))).shape[0]
        == toys.PUBLIC
    )


def test_a_site_refuses_what_is_beyond_the_budget_whatever_the_server_says(
    there: list[Site], tmp_path: Path
) -> None:
    """It counts what it has sent itself: one upload goes, the second would be too much."""
    one = Privacy(**PRIVACY).spent(toys.PUBLIC)
    experiment = setting(**PRIVACY, epsilon=one)
    site = at(there[0], tmp_path)
    assert logits(site(asked(experiment))).shape[0] == toys.PUBLIC
    assert logits(site(asked(experiment))).shape[0] == toys.PUBLIC, "the kept answer costs nothing"
    later = at(there[0], tmp_path)(asked(experiment, replace(FIRST, round=2)))
    assert (
        later.failure
        == "50 more rows of logits would cost this site more than privacy.epsilon allows it"
    )
    assert not later.content


def test_an_answer_that_was_lost_is_sent_again_with_the_same_noise(
    there: list[Site], tmp_path: Path
) -> None:
    from flwr.app import Error, Message

    class Losing(LoopbackGrid):
        """Every node's first reply in a stage is lost, when it has left the node."""

        def deliver(self, node: int, data: Parcel) -> Parcel | None:
            reply, message = super().deliver(node, data), parsed(data)
            if message.metadata.message_type != "train.stage" or reply is None:
                return reply
            answers.setdefault(
                (node, str(message.content.config_records["header"]["json"])), []
            ).append(reply)
            lost = len(answers[node, str(message.content.config_records["header"]["json"])]) == 1
            return serialised(Message(Error(4, "gone"), reply_to=message)) if lost else reply

    answers: dict[tuple[int, str], list[Parcel]] = {}
    executors = {s.client: at(s, tmp_path / str(s.client)) for s in there}
    app = client_app(
        lambda c: (c.node_config["partition-id"], executors[c.node_config["partition-id"]]), 1 << 30
    )
    experiment = replace(setting(**PRIVACY), engine="flower", flower=dict(SITES))
    run(experiment, tmp_path / "run", toys.blobs(), grid=Losing(app, range(CLIENTS)))
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [e for e in events if "refused" in e and "client" in e]
    assert all(len(each) == 2 for each in answers.values())
    for lost, came in answers.values():
        left, right = (
            header_and_payload(parsed(data).content, 1 << 30)[1] for data in (lost, came)
        )
        assert encode(left) == encode(right)
    told = [e["privacy"]["epsilon"] for e in events if e["event"] == "round"]
    assert told == [[Privacy(**PRIVACY).spent(toys.PUBLIC, k)] * CLIENTS for k in (1, 2)]


def test_a_server_that_was_killed_after_it_asked_resumes_with_the_noise_that_was_drawn(
    there: list[Site], tmp_path: Path
) -> None:
    class Killed(LoopbackGrid):
        """The server ends when the last node has answered in round 2."""

        def deliver(self, node: int, data: Parcel) -> Parcel | None:
            reply, message = super().deliver(node, data), parsed(data)
            if message.metadata.message_type == "train.stage":
                stage = json.loads(message.content.config_records["header"]["json"])["stage"]
                answered.append((stage[0], stage[1]))
                if answered.count((2, 0)) == CLIENTS:
                    raise KeyboardInterrupt
            return reply

    answered: list[tuple[int, int]] = []
    executors = {s.client: at(s, tmp_path / str(s.client)) for s in there}
    app = client_app(
        lambda c: (c.node_config["partition-id"], executors[c.node_config["partition-id"]]), 1 << 30
    )
    experiment = replace(setting(**PRIVACY), engine="flower", flower=dict(SITES))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", toys.blobs(), grid=Killed(app, range(CLIENTS)))
    kept = {p: p.read_bytes() for p in tmp_path.rglob("0000002-0000000.reply")}
    assert len(kept) == CLIENTS
    resume(tmp_path / "run", toys.blobs(), grid=LoopbackGrid(app, range(CLIENTS)))
    assert {p: p.read_bytes() for p in kept} == kept, "no site worked again"
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [e for e in events if "refused" in e and "client" in e]
    assert [e for e in events if e["event"] == "round"][-1]["privacy"]["epsilon"] == [
        Privacy(**PRIVACY).spent(toys.PUBLIC, 2)
    ] * CLIENTS


def test_secret_draws_are_normal_and_come_from_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    one = secret_normal((300, 100))
    torch.manual_seed(1)
    other = secret_normal((300, 100))
    assert one.shape == (300, 100)
    assert one.dtype == torch.float64
    assert not torch.equal(one, other), "no seed repeats them"
    assert kstest(torch.cat([one, other]).flatten().numpy(), "norm").pvalue > 1e-6


def secret(word: int) -> float:
    """One draw from one word of 64 bits, by another way than the code's: a bisection of erfc."""
    from math import erfc, sqrt

    below, sign = ((word >> 1) + 0.5) * 2.0**-64, 1 if word & 1 else -1
    low, high = -40.0, 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * erfc(-middle / sqrt(2)) < below else (low, middle)
    return sign * low


def test_a_draw_is_the_inverse_of_the_normal_distribution_at_the_systems_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [0, 1, 2**64 - 1, 2**64 - 2, 2**63, 12345678901234567890, 3, 2**32]
    drawn: list[int] = []
    monkeypatch.setattr(
        wire_privacy.os,
        "urandom",
        lambda size: drawn.append(size) or b"".join(w.to_bytes(8, "little") for w in words),
    )
    found = secret_normal((2, 4)).flatten().tolist()
    assert drawn == [64]
    assert found == pytest.approx([secret(w) for w in words], rel=1e-9, abs=1e-12)
    assert max(found) > 9


TRAIN = Stage(1, 0, "train", tuple(range(CLIENTS)))


def trains_privately(**privacy: float) -> Experiment:
    own = {"gradient_clip": 0.5, "gradient_noise": 1.0, **privacy}
    return setting().with_values({"method": "fedavg", "privacy": own}, "test")


def trained(site: StageExecutor, experiment: Experiment, stage: Stage = TRAIN) -> SiteReply:
    request = asked(experiment, stage)
    ready = prepare(resolve(experiment.with_values({"data.name": "blobs"}, "test")), toys.blobs())
    return site(replace(request, payload=Payload(params=ready.world.initial(0))))


def test_private_training_at_a_site_draws_what_no_seed_repeats_answers_once_and_keeps_its_budget(
    there: list[Site], tmp_path: Path
) -> None:
    pytest.importorskip("opacus")
    experiment, sites = trains_privately(), [at(there[0], tmp_path / n) for n in ("one", "two")]
    first, other = (trained(site, experiment) for site in sites)
    assert (first.failure, other.failure) == ("", "")
    assert not any(
        torch.equal(v, other.content.params[k]) for k, v in first.content.params.items()
    ), "not the run's seed"
    again = trained(at(there[0], tmp_path / "one"), experiment)
    assert all(torch.equal(v, again.content.params[k]) for k, v in first.content.params.items()), (
        "the kept answer"
    )
    changed = replace(
        asked(experiment, TRAIN),
        payload=Payload(params={k: v + 1 for k, v in first.content.params.items()}),
    )
    assert "answers no other request for it" in at(there[0], tmp_path / "one")(changed).failure
    (noted,) = (tmp_path / "one").rglob("noised")
    assert int(noted.read_text().split(":")[1]) > 0, "its steps"

    tight = trains_privately(epsilon=0.5)
    refused = trained(at(there[0], tmp_path / "tight"), tight)
    assert refused.failure.endswith(
        "more steps would cost this site more than privacy.epsilon allows it"
    )
    assert not refused.content


def test_a_kept_answer_costs_what_it_had_even_if_the_site_has_more_data_by_then(
    there: list[Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opacus")
    experiment, place = trains_privately(), tmp_path / "one"
    trained(at(there[0], place), experiment)
    (noted,) = place.rglob("noised")
    said = noted.read_text()
    noted.unlink()  # the site stopped when the reply was kept, and its cost was not yet noted

    monkeypatch.setattr(SiteViews, "training_size", lambda *of: 1_000_000)
    assert trained(at(there[0], place), experiment).failure == ""
    assert noted.read_text() == said
