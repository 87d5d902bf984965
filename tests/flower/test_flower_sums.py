"""Secure sums over Flower: what leaves a site, clients that drop out at any step, and what a site
refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import BadPayload, ConfigError, Refused, TooFewReplies
from fedstill.core.extensions import SiteNotebook
from fedstill.core.files import digest
from fedstill.core.records import Examples, Payload, Stage
from fedstill.flower.engine import Parcel, parsed
from fedstill.flower.messages import Request, SiteReply, header_and_payload
from fedstill.flower.site import StageExecutor
from fedstill.flower.site_settings import Site
from fedstill.privacy.masking import Masking
from fedstill.privacy.noise import Privacy
from fedstill.privacy.protocol import KEY, SEALED, STEPS, as_bytes, byte_tensors, question, unmasked
from fedstill.privacy.site_guards import RUNS_WITH_SUMS, RunsWithSums
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower, over_flower
from troubled_grid import TroubledGrid

pytestmark = needs_flower

ON = {"secure_sum": True}
SECRET = toys.toy(
    "moon",
    privacy=ON,
    measure=(),
    rounds=2,
    topology={"clients": 5},
    plan={"epochs": 1, "batch": 20},
)


def step_of(data: Parcel) -> str:
    return str(payload_of(data).get("sum.step"))


def payload_of(data: Parcel) -> Payload:
    return header_and_payload(parsed(data).content, 1 << 30)[1]


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(replace(SECRET, engine="serial"), folder, data=toys.blobs())
    return folder


Trouble = Callable[[TroubledGrid, int, int, int, Parcel], Parcel | None]


def carried(folder: Path, trouble: Trouble, experiment=SECRET, **flower: Any) -> TroubledGrid:
    asked = over_flower(experiment, retries=0, **flower)
    grid = TroubledGrid(asked, folder.parent / "sites", trouble)
    run(asked, folder, data=toys.blobs(), grid=grid)
    return grid


def test_it_is_the_run_of_one_process_and_no_message_of_a_site_tells_its_model(
    whole: Path, tmp_path: Path
) -> None:
    groups, vectors, headers = dict[str, set[str]](), list[torch.Tensor](), list[dict[str, Any]]()

    def noted(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        answer = grid.work(client, data)
        assert answer is not None
        header, up = header_and_payload(parsed(answer).content, 1 << 30)
        groups.setdefault(step_of(data), set()).update(up)
        headers.append(json.loads(header))
        vectors.extend([up.tensor("sum.vector")] if "sum.vector" in up else [])
        return answer

    carried(tmp_path / "run", noted)
    assert model(tmp_path / "run") == model(whole)
    assert groups == {step: {f"sum.{step}"} for step in STEPS}
    assert {header["examples"] for header in headers} == {0}
    assert {key for header in headers for key in header["metrics"]} <= {
        "seconds",
        "seconds_training",
    }
    assert len(vectors) == 10
    top = np.concatenate([v.numpy().view(np.uint64) for v in vectors]) >> np.uint64(60)
    assert len(set(top.tolist())) == 16, (
        "changes of a model would fill the lowest and highest places alone"
    )


@pytest.mark.parametrize("step", STEPS)
def test_clients_that_drop_out_at_any_step_are_left_out_or_counted(
    step: str, tmp_path: Path
) -> None:
    def lost(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        return None if client in (1, 4) and step_of(data) == step else grid.work(client, data)

    carried(tmp_path / "run", lost)
    events = [e for e in read_journal(tmp_path / "run" / "journal.jsonl") if e["event"] == "client"]
    away = {e["client"]: e["refused"] for e in events if "refused" in e}
    summed = {e["summed"] for e in events if "refused" not in e}
    sizes = prepare(resolve(replace(SECRET, engine="serial")), toys.blobs()).sites
    if step == "revealed":  # their models were in the sum already
        assert not away
        assert summed == {sum(sizes.training_size(c, "train") for c in range(5))}
    else:
        assert set(away) == {1, 4}
        assert all("did not reply within the deadline" in why for why in away.values())
        assert summed == {sum(sizes.training_size(c, "train") for c in (0, 2, 3))}


@pytest.mark.parametrize("step", STEPS)
def test_with_too_few_left_at_any_step_the_run_stops_by_name_and_goes_on_when_they_are_back(
    step: str, whole: Path, tmp_path: Path
) -> None:
    def lost(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        return (
            None if round == 2 and client < 3 and step_of(data) == step else grid.work(client, data)
        )

    asked = over_flower(SECRET, retries=0)
    grid = TroubledGrid(asked, tmp_path / "sites", lost)
    with pytest.raises(
        TooFewReplies, match=r"no secure sum: round 2, stage 'train': 2 of 5 clients .* needs 3"
    ):
        run(asked, tmp_path / "run", data=toys.blobs(), grid=grid)
    grid.trouble = None
    resume(tmp_path / "run", data=toys.blobs(), grid=grid)
    assert model(tmp_path / "run") == model(whole)


def test_a_client_that_answers_with_something_else_drops_out_by_name(tmp_path: Path) -> None:

    def odd(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        if client != 2 or step_of(data) != "vector":
            return grid.work(client, data)
        return instead(
            data, SiteReply(2, round, 0, Payload({"sum.vector": torch.zeros(3, dtype=torch.int64)}))
        )

    carried(tmp_path / "run", odd)
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    said = [e["refused"] for e in events if e["event"] == "client" and "refused" in e]
    assert len(said) == 2
    assert all("something else than a masked vector of 182 numbers" in why for why in said)


def instead(data: Parcel, answer: SiteReply) -> Parcel:
    """Another answer to a message than the site's own."""
    from flwr.app import Message

    from fedstill.flower.engine import serialised
    from fedstill.flower.messages import answer_content

    return serialised(Message(answer_content(answer), reply_to=parsed(data)))


def told_of(folder: Path, round: int = 1) -> tuple[dict[int, str], set[int]]:
    """Why clients were refused in a round, and the sums' weights of the others."""
    events = [
        e
        for e in read_journal(folder / "journal.jsonl")
        if e["event"] == "client" and e["round"] == round
    ]
    refused = {e["client"]: e["refused"] for e in events if "refused" in e}
    return refused, {e["summed"] for e in events if "refused" not in e}


def weight_of(*clients: int) -> int:
    sites = prepare(resolve(replace(SECRET, engine="serial")), toys.blobs()).sites
    return sum(sites.training_size(c, "train") for c in clients)


def zeros_for_all(length: int) -> dict[str, torch.Tensor]:
    return byte_tensors({other: bytes(length) for other in range(5)})


WRONG = {
    "keys": (Payload({"sum.keys": torch.zeros(96, dtype=torch.uint8)}), "a public key is invalid"),
    "shares": (
        Payload({"sum.shares": zeros_for_all(SEALED)}),
        "most clients cannot read the shares that it sent",
    ),
    "vector": (
        Payload({"sum.unread": torch.tensor([77])}),
        "it cannot read shares of clients that sent none",
    ),
}


@pytest.mark.parametrize("step", WRONG)
def test_a_wrong_answer_is_refused_by_name_and_the_sum_goes_on_without_it(
    step: str, tmp_path: Path
) -> None:
    up, why = WRONG[step]

    def wrong(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        answer = grid.work(client, data)
        mine = client == 2 and step_of(data) == step
        return instead(data, SiteReply(2, round, 0, up)) if mine else answer

    carried(tmp_path / "run", wrong)
    refused, summed = told_of(tmp_path / "run")
    assert list(refused) == [2]
    assert why in refused[2]
    assert summed == {weight_of(0, 1, 3, 4)}


def test_keys_that_two_clients_send_are_of_neither(tmp_path: Path) -> None:
    seen = dict[int, Payload]()

    def copies(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        answer = grid.work(client, data)
        if step_of(data) != "keys" or answer is None:
            return answer
        seen[client] = header_and_payload(parsed(answer).content, 1 << 30)[1]
        return instead(data, SiteReply(2, round, 0, seen[0])) if client == 2 else answer

    carried(tmp_path / "run", copies)
    refused, summed = told_of(tmp_path / "run")
    assert refused.keys() == {0, 2}
    assert all("its keys are those of another client" in why for why in refused.values())
    assert summed == {weight_of(1, 3, 4)}


def test_a_client_that_says_it_cannot_read_anothers_shares_drops_out_alone(tmp_path: Path) -> None:
    def accuses(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        answer = grid.work(client, data)
        mine = client == 2 and step_of(data) == "vector"
        return (
            instead(data, SiteReply(2, round, 0, Payload({"sum.unread": torch.tensor([0])})))
            if mine
            else answer
        )

    carried(tmp_path / "run", accuses)
    refused, summed = told_of(tmp_path / "run")
    assert refused == {2: "failed: it cannot read the shares that client 0 sent it"}
    assert summed == {weight_of(0, 1, 3, 4)}


def test_wrong_shares_at_the_end_are_passed_over(whole: Path, tmp_path: Path) -> None:
    def wrong(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        answer = grid.work(client, data)
        mine = client == 0 and step_of(data) == "revealed"
        up = Payload({"sum.revealed": zeros_for_all(16)})
        return instead(data, SiteReply(0, round, 0, up)) if mine else answer

    carried(tmp_path / "run", wrong)
    assert model(tmp_path / "run") == model(whole)


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_of_another_round_is_refused_before_it_is_read(step: str, tmp_path: Path) -> None:
    def late(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        answer = grid.work(client, data)
        assert answer is not None
        if client != 2 or step_of(data) != step:
            return answer
        header, up = header_and_payload(parsed(answer).content, 1 << 30)
        return instead(data, replace(SiteReply.of(header, up), round=77))

    carried(tmp_path / "run", late)
    refused, summed = told_of(tmp_path / "run")
    if step == "revealed":  # the others' shares are enough
        assert not refused
        assert summed == {weight_of(*range(5))}
    else:
        assert "replied for round 77 stage 0, not 1 and 0" in refused[2]
        assert summed == {weight_of(0, 1, 3, 4)}


def test_no_entry_of_a_step_may_be_longer_than_it_is() -> None:
    for most in (16, 96):
        assert as_bytes({"0": torch.zeros(most, dtype=torch.uint8)}, most) == {0: bytes(most)}
        with pytest.raises(BadPayload, match=f"more than {most} bytes"):
            as_bytes({"0": torch.zeros(most + 1, dtype=torch.uint8)}, most)


def test_of_three_clients_none_may_drop_out(tmp_path: Path) -> None:
    """Of a sum of two each would know the other's model."""

    def lost(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        return None if client == 2 and step_of(data) == "vector" else grid.work(client, data)

    three = replace(SECRET, topology={"clients": 3})
    with pytest.raises(TooFewReplies, match=r"2 of 3 clients sent masked vectors.* needs 3"):
        carried(tmp_path / "run", lost, three)


def test_after_shares_were_revealed_a_resume_has_the_same_clients_left(tmp_path: Path) -> None:
    """Client 4 was away then; two answers were lost on their way, so the run stopped."""

    def stuck(
        grid: TroubledGrid, client: int, round: int, before: int, data: Parcel
    ) -> Parcel | None:
        if round == 2 and client == 4 and step_of(data) == "vector":
            return None
        answer = grid.work(client, data)
        return None if round == 2 and client in (0, 1) and step_of(data) == "revealed" else answer

    asked = over_flower(SECRET, retries=0)
    grid, folder = TroubledGrid(asked, tmp_path / "sites", stuck), tmp_path / "run"
    with pytest.raises(
        TooFewReplies, match=r"2 of 5 clients revealed shares.* needs 3 .*; client 0: .*deadline"
    ):
        run(asked, folder, data=toys.blobs(), grid=grid)
    grid.trouble = lambda g, client, round, before, data: (
        None if client == 3 else g.work(client, data)
    )
    with pytest.raises(
        TooFewReplies,
        match=r"the same clients take part: 0, 1, 2, 3; client 3: .*resume when it is",
    ):
        resume(folder, data=toys.blobs(), grid=grid)
    grid.trouble = None
    resume(folder, data=toys.blobs(), grid=grid)
    refused, summed = told_of(folder, 2)
    assert "was not left when shares were revealed" in refused[4]
    assert summed == {weight_of(0, 1, 2, 3)}
    plain = over_flower(SECRET, retries=0)
    carried(
        tmp_path / "plain" / "run",
        lambda g, c, r, b, d: None if (r, c) == (2, 4) else g.work(c, d),
        plain,
    )
    assert model(folder) == model(tmp_path / "plain" / "run")


def test_what_a_site_leaves_on_disk_is_its_owners_alone_and_a_new_run_may_overwrite_it(
    tmp_path: Path,
) -> None:
    asked, folder = over_flower(SECRET, retries=0), tmp_path / "run"
    run(asked, folder, data=toys.blobs())
    kept = [path for path in folder.glob("sites/*/client*/*") if path.name != ".lock"]
    assert len([path for path in kept if path.name.startswith("secure-sum")]) == 10
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    run(asked, folder, data=toys.blobs(), overwrite=True)


STAGE = Stage(1, 0, "train", (0, 1, 2))


class Asked:
    """Three sites, and a server that may ask them anything."""

    def __init__(self, folder: Path) -> None:
        asked = toys.toy(privacy=ON, measure=(), topology={"clients": 3}, data={"name": "blobs"})
        self.settings = resolve(replace(asked, engine="flower"))
        self.world = prepare(self.settings, toys.blobs()).world
        self.executors = {
            c: StageExecutor(Site(c, folder / str(c)), toys.blobs(), shows_reasons=True)
            for c in STAGE.clients
        }
        self.model = Payload(params=self.world.initial(0))

    def ask(self, client: int, payload: Payload, stage: Stage = STAGE) -> SiteReply:
        config = self.settings.toml
        sent = Request(
            fedstill.__version__,
            config,
            digest(config.encode()),
            "run1",
            client,
            stage,
            payload=payload,
        )
        return self.executors[client](sent)

    def content(self, client: int, payload: Payload) -> Payload:
        answer = self.ask(client, payload)
        assert answer.failure == ""
        return answer.content

    def until_masked(
        self, word: str = "abc"
    ) -> tuple[dict[int, bytes], dict[int, dict[int, bytes]], dict[int, Any]]:
        keys = {
            c: bytes(self.content(c, question("keys", word)).tensor("sum.keys").tolist())
            for c in self.executors
        }
        told = byte_tensors(keys)
        shares = {
            c: as_bytes(
                self.content(c, question("shares", word, keys=told)).tensors("sum.shares"), SEALED
            )
            for c in self.executors
        }
        masked = {
            c: self.content(c, self.vector(c, shares, word)).tensor("sum.vector")
            for c in self.executors
        }
        return keys, shares, masked

    def vector(
        self, client: int, shares: dict[int, dict[int, bytes]], word: str = "abc"
    ) -> Payload:
        sealed = byte_tensors({c: shares[c][client] for c in shares})
        return Payload({**self.model, **question("vector", word, sealed=sealed)})

    def reveal(
        self, client: int, left: tuple[int, ...] = STAGE.clients, word: str = "abc"
    ) -> SiteReply:
        return self.ask(client, question("revealed", word, left=torch.tensor(left)))


def test_a_site_answers_no_plain_request_for_its_model(tmp_path: Path) -> None:
    server = Asked(tmp_path)
    for down in (
        server.model,
        Payload({**server.model, **question("model", "abc")}),
        question("keys", "../x"),
    ):
        answer = server.ask(0, down)
        assert (
            "summed securely: this site answers only the steps of the secure sum" in answer.failure
        )
        assert not answer.content


def test_a_site_reveals_once_and_masks_one_model_only(tmp_path: Path) -> None:
    server = Asked(tmp_path)
    keys, shares, masked = server.until_masked()
    other = Payload(
        {**server.vector(0, shares), "params": {k: v + 1 for k, v in server.model.params.items()}}
    )
    assert "a mask hides only one model" in server.ask(0, other).failure
    assert torch.equal(
        server.content(0, server.vector(0, shares)).tensor("sum.vector"), masked[0]
    ), "asked again, the same"
    revealed = {
        c: as_bytes(server.reveal(c).content.tensors("sum.revealed"), KEY) for c in STAGE.clients
    }
    assert "two sums would reveal a single model" in server.reveal(0, (0, 1)).failure
    assert as_bytes(server.reveal(0).content.tensors("sum.revealed"), KEY) == revealed[0]
    made = Masking.of(server.settings.package_table(Privacy), server.settings.method)
    assert made is not None
    of, numbers = (
        made.new_sum(STAGE, STAGE.clients, "abc"),
        {c: v.numpy().view(np.uint64) for c, v in masked.items()},
    )
    _, mean = made.mean(of, unmasked(of, keys, shares, numbers, revealed), server.model.params)
    assert any(not torch.equal(v, server.model.params[k]) for k, v in mean.params.items())


def test_a_sum_that_is_begun_anew_has_new_secrets_and_the_same_clients_left(tmp_path: Path) -> None:
    server = Asked(tmp_path)
    first, _, masked = server.until_masked("abc")
    second, shares, other = server.until_masked("def")
    assert not set(first.values()) & set(second.values())
    assert not any(torch.equal(masked[c], other[c]) for c in masked)
    assert (
        "another secure sum than the one in which this site takes part"
        in server.reveal(0, word="abc").failure
    )
    assert server.reveal(0, word="def").failure == ""
    server.until_masked("ghi")
    assert "two sums would reveal a single model" in server.reveal(0, (0, 1), "ghi").failure
    assert server.reveal(0, word="ghi").failure == ""
    assert shares.keys() == {0, 1, 2}


def test_a_step_with_too_few_clients_or_without_the_first_is_refused(tmp_path: Path) -> None:
    server = Asked(tmp_path)
    assert (
        "another secure sum than the one in which this site takes part" in server.reveal(0).failure
    )
    keys, _, _ = server.until_masked()
    assert "1 of 3 clients sent masked vectors" in server.reveal(0, (0,)).failure
    few = question("shares", "new", keys=byte_tensors({0: keys[0]}))
    server.content(0, question("keys", "new"))
    assert "1 of 3 clients sent keys" in server.ask(0, few).failure
    alone = server.ask(0, question("keys", "abc"), replace(STAGE, clients=(0,)))
    assert "is not in the schedule of round 1" in alone.failure


def test_attacks_of_a_simulation_and_private_training_at_sites_are_refused() -> None:
    asked = over_flower(SECRET)
    attacked = replace(asked, clients={"attack": "scaled", "attackers": 0.2})
    with pytest.raises(ConfigError, match=r"clients\.attack"):
        prepare(resolve(attacked), toys.blobs())
    pytest.importorskip("opacus")
    private = replace(asked, privacy={**ON, "gradient_clip": 1.0}).with_values(
        {"data.name": "blobs"}, "test"
    )
    at_sites = {"data": "sites", "federation": "/federation"}
    with pytest.raises(ConfigError, match="gradient_clip"):
        prepare(resolve(replace(private, method="fedavg", flower=at_sites)), toys.blobs())


def test_label_counts_of_a_later_task_go_up_as_they_are(tmp_path: Path) -> None:
    asked = replace(
        SECRET, method="fedlc", stream={"kind": "classes", "tasks": 2}, topology={"clients": 4}
    )
    run(replace(asked, engine="serial"), tmp_path / "serial", data=toys.blobs())
    carried(
        tmp_path / "run", lambda grid, client, round, before, data: grid.work(client, data), asked
    )
    assert model(tmp_path / "run") == model(tmp_path / "serial")


def runs_with_sums(memory: Path, run: str, labels: list[int], **allowed: bool) -> RunsWithSums:
    """A site's record of its runs, as a request of this run sees it."""
    train = Examples(torch.arange(6.0).reshape(3, 2), torch.tensor(labels))
    return RunsWithSums(SiteNotebook(memory / run, memory, run, **allowed), train)


def test_data_that_change_in_a_run_with_secure_sums_are_those_of_this_run(tmp_path: Path) -> None:
    old, new, other = [0, 1, 1], [0, 1, 0], [1, 1, 1]
    runs_with_sums(tmp_path, "first", old).enter()
    runs_with_sums(tmp_path, "first", new).enter()
    for labels in (old, new):
        with pytest.raises(Refused):
            runs_with_sums(tmp_path, "second", labels).enter()

    runs_with_sums(tmp_path, "second", other).enter()
    runs_with_sums(tmp_path, "first", old).enter()
    with pytest.raises(Refused):
        runs_with_sums(tmp_path, "first", other).enter()
    runs_with_sums(tmp_path, "first", other, repeat_sums=True).enter()


def test_a_record_of_an_earlier_version_counts(tmp_path: Path) -> None:
    record = tmp_path / RUNS_WITH_SUMS
    runs_with_sums(tmp_path, "first", [0, 1, 1]).enter()
    ((run, (digest_of_data,)),) = json.loads(record.read_text()).items()
    record.write_text(json.dumps({run: digest_of_data}))
    with pytest.raises(Refused):
        runs_with_sums(tmp_path, "second", [0, 1, 1]).check()
    runs_with_sums(tmp_path, "first", [0, 1, 1]).enter()
