"""Instructions that the server signs: a site does nothing for a message that another has made,
changed, redirected or sent again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import federation_in

from fedstill.core import codec
from fedstill.core.codec import encode
from fedstill.core.errors import ConfigError, Refused
from fedstill.core.records import Payload, Stage
from fedstill.flower import messages
from fedstill.flower.deployment import certificates, folder, node, programs
from fedstill.flower.engine import parsed, serialised
from fedstill.flower.messages import (
    PUBLIC_REASONS,
    SIGNED,
    Contents,
    InstructionCheck,
    Request,
    SiteReply,
    answer_content,
    content_digest,
    header_and_payload,
    sign,
    sign_all,
)
from flowers import needs_flower

pytestmark = needs_flower

NODE = 2**63 + 7
OTHER_NODE = 11
RUN = 5


@pytest.fixture
def federation(tmp_path: Path) -> folder.Federation:
    """A federation of two clients."""
    return federation_in(tmp_path, 2)


@pytest.fixture
def check(federation: folder.Federation, tmp_path: Path) -> InstructionCheck:
    """The check of the first client, with the key that it got with its folder."""
    member = folder.membership(federation.client(0))
    return InstructionCheck(member.server_key, tmp_path / "used")


@pytest.fixture(params=["small", "large"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Groups of small messages stand in their header, those of large ones in arrays."""
    if request.param == "large":
        monkeypatch.setattr(messages, "HEADER_BYTES", 0)
    return str(request.param)


def request(client: int = 0) -> Request:
    """A request with a small model."""
    payload = Payload({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "round": 1})
    return Request(
        "1.0",
        "rounds = 1\n",
        "0" * 64,
        "abc",
        client,
        Stage(1, 0, "train", (0, 1)),
        payload=payload,
    )


def message(
    node: int = NODE,
    run: int = RUN,
    ttl: float = 60.0,
    kind: str = "train.stage",
    records: Any = None,
) -> Any:
    """A message to a node before it is signed."""
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    unsigned = Message(records or Contents().of_request(request()), node, kind, ttl=ttl)
    unsigned.metadata.__dict__["_run_id"] = run
    unsigned.metadata.__dict__["_message_id"] = "m"
    return unsigned


def instruction(federation: folder.Federation, **changes: Any) -> Any:
    """A message that the server has signed, as it arrives at a site."""
    unsigned = message(**changes)
    sign(unsigned, unsigned.metadata.run_id, certificates.signing_key(federation.signing_key))
    return parsed(serialised(unsigned))


def test_a_site_takes_an_instruction_of_its_server_once(
    form: str, federation: folder.Federation, check: InstructionCheck
) -> None:
    arrived = instruction(federation)
    check(arrived, NODE)
    header, payload = header_and_payload(arrived.content, 1 << 20)
    assert Request.of(header, payload).digest() == request().digest()
    again = instruction(federation)
    check(again, NODE)
    assert len(list(check.used.iterdir())) == 2


def test_an_instruction_that_comes_again_is_refused_also_after_a_restart(
    federation: folder.Federation, check: InstructionCheck
) -> None:
    arrived = instruction(federation)
    data = serialised(arrived)
    check(arrived, NODE)
    restarted = InstructionCheck(check.server_key, check.used)
    with pytest.raises(Refused, match="before"):
        restarted(parsed(data), NODE)


def change_header(arrived: Any) -> None:
    """Change the configuration in the header."""
    header = arrived.content.config_records["header"]
    header["json"] = header["json"].replace("rounds = 1", "rounds = 9")


def changed(data: bytes) -> bytes:
    """The same bytes but for the last one."""
    return data[:-1] + bytes([data[-1] ^ 1])


def change_group(arrived: Any) -> None:
    """Change the last byte of the first group."""
    header = arrived.content.config_records["header"]
    arrays = arrived.content.array_records.get("groups")
    if arrays is None:
        header["groups"] = [changed(header["groups"][0]), *header["groups"][1:]]
    else:
        arrays["000000"].data = changed(arrays["000000"].data)


def move_group(arrived: Any) -> None:
    """Change the order of groups."""
    header = arrived.content.config_records["header"]
    arrays = arrived.content.array_records.get("groups")
    if arrays is None:
        header["groups"] = header["groups"][::-1]
    else:
        arrays["000007"] = arrays.pop("000000")


def add_record(arrived: Any) -> None:
    """Add a record that the signature does not cover."""
    from flwr.app import MetricRecord

    arrived.content["more"] = MetricRecord({"rounds": 9})


def statement(arrived: Any, **changes: Any) -> None:
    """Change the signed statement."""
    signed = arrived.content[SIGNED]
    signed["statement"] = json.dumps({**json.loads(signed["statement"]), **changes})


CHANGES: dict[str, Callable[[Any], object]] = {
    "no signature": lambda m: m.content.pop(SIGNED),
    "another header": change_header,
    "another group": change_group,
    "a group in another place": move_group,
    "one more record": add_record,
    "another kind": lambda m: m.metadata.__dict__.update(_message_type="query.whoami"),
    "another run": lambda m: m.metadata.__dict__.update(_run_id=RUN + 1),
    "another node": lambda m: m.metadata.__dict__.update(_dst_node_id=OTHER_NODE),
    "another time": lambda m: statement(m, until=time.time() + 1e6),
    "another number": lambda m: statement(m, number="0" * 32),
    "another signature": lambda m: m.content[SIGNED].update(signature=b"0" * 64),
    "a signature of another form": lambda m: m.content[SIGNED].update(signature="text"),
    "a signature without a statement": lambda m: m.content[SIGNED].pop("statement"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_site_does_nothing_for_a_message_that_was_changed(
    change: str, form: str, federation: folder.Federation, check: InstructionCheck
) -> None:
    arrived = instruction(federation)
    CHANGES[change](arrived)
    with pytest.raises(Refused) as refusal:
        check(arrived, NODE)
    assert refusal.value.topic == "signature"
    assert not check.used.exists()


def test_a_site_does_nothing_for_an_instruction_to_another_site(
    federation: folder.Federation, check: InstructionCheck
) -> None:
    redirected = instruction(federation, node=OTHER_NODE)
    redirected.metadata.__dict__["_dst_node_id"] = NODE
    for arrived in (instruction(federation, node=OTHER_NODE), redirected):
        with pytest.raises(Refused, match="node"):
            check(arrived, NODE)


def test_a_site_does_nothing_for_the_key_of_another_server(
    federation: folder.Federation, check: InstructionCheck, tmp_path: Path
) -> None:
    other_federation = federation_in(tmp_path / "other")
    with pytest.raises(Refused, match="signature"):
        check(instruction(other_federation), NODE)


def test_an_instruction_expires_and_is_forgotten_later(
    federation: folder.Federation, check: InstructionCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.time()
    late = instruction(federation)
    check(instruction(federation), NODE)
    monkeypatch.setattr("fedstill.flower.messages.time.time", lambda: began + 60 + 400)
    with pytest.raises(Refused, match="expired"):
        check(late, NODE)
    monkeypatch.setattr("fedstill.flower.messages.time.time", lambda: began + 3 * 86_400)
    (check.used / "a file of somebody").touch()
    check(instruction(federation), NODE)
    assert len(list(check.used.iterdir())) == 2


def test_each_client_gets_the_servers_key_with_its_own(federation: folder.Federation) -> None:
    public = federation.signing_key.with_suffix(".pub").read_bytes()
    for client in range(2):
        member = folder.membership(federation.client(client))
        assert member.server_key.read_bytes() == public
    member.server_key.unlink()
    with pytest.raises(ConfigError, match=r"server\.pub"):
        programs.check_client(member, insecure=False)


@pytest.mark.parametrize("is_signed", [True, False])
# Flower's own, in packing an app
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_a_site_does_only_what_the_server_has_signed(
    is_signed: bool, federation: folder.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.cli.build import build_fab_from_disk

    arrived = instruction(federation)
    if not is_signed:
        arrived.content.pop(SIGNED)
    did: list[Any] = []

    def work(message: Any, context: Any) -> Any:
        from flwr.app import Message, RecordDict

        did.append(message)
        return Message(RecordDict(), reply_to=message)

    monkeypatch.setattr("fedstill.flower.apps.client_app", work)
    app = build_fab_from_disk(federation.app)
    incoming = node.Incoming(RUN, NODE, "root", b"", {}, app, is_app_run=True)
    member = folder.membership(federation.client(0))
    answer = node.reply_to(arrived, incoming, member)
    assert len(did) == is_signed
    assert answer.has_error() != is_signed
    if not is_signed:
        assert PUBLIC_REASONS["signature"] in answer.error.reason


def test_equal_answers_of_two_sites_have_no_part_in_common(form: str) -> None:
    """The attack: Flower tells a site which parts the server has, so it could try label counts."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    counts = Payload({"labels": torch.tensor([3, 0, 7])})
    answers = [answer_content(SiteReply(0, 1, 0, counts)) for _ in range(2)]
    first, second = (set(get_all_nested_objects(answer)) for answer in answers)
    assert not first & second
    for answer in answers:
        header_text, payload = header_and_payload(answer, 1 << 20)
        assert SiteReply.of(header_text, payload).content["labels"].tolist() == [3, 0, 7]


def test_a_message_is_not_kept_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage in cycles would keep the replies of several rounds, each as large as a model."""
    import gc
    import weakref

    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(messages, "HEADER_BYTES", 0)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    answer = SiteReply(0, 1, 0, Payload(params={"w": torch.zeros(3)}))
    message = Message(answer_content(answer), 5, "train.stage", ttl=5.0)
    message.metadata.__dict__["_message_id"] = "1"
    gc.disable()
    try:
        arrived = parsed(serialised(message))
        header_and_payload(arrived.content, 1 << 20)
        content_digest(arrived.content)
        arrays = [weakref.ref(m.content["groups"]["000000"]) for m in (message, arrived)]
        del message, arrived
        assert [array() for array in arrays] == [None, None]
    finally:
        gc.enable()


def test_instructions_with_the_same_model_have_a_signature_each(
    form: str,
    federation: folder.Federation,
    check: InstructionCheck,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes of the model are hashed once, and what is hashed is what a site gets."""
    contents = Contents()
    payload = request().payload
    signed_messages = [
        message(node=node, records=contents.of_request(request().with_payload(payload)))
        for node in (OTHER_NODE, NODE)
    ]
    sign_all(signed_messages, RUN, certificates.signing_key(federation.signing_key))
    first, second = (parsed(serialised(signed)) for signed in signed_messages)
    check(second, NODE)
    assert encode(header_and_payload(second.content, 1 << 20)[1]) == encode(payload)
    with pytest.raises(Refused, match="node"):
        check(first, NODE)
    change_group(signed_messages[1])
    changed_message = parsed(serialised(signed_messages[1]))
    with pytest.raises(Refused, match="content"):
        check(changed_message, NODE)


def test_requests_of_the_same_model_share_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "HEADER_BYTES", 0)
    contents = Contents()
    payload = request().payload
    encoded: list[Payload] = []

    def encoded_parts(group: Payload) -> list[bytes | memoryview]:
        encoded.append(group)
        return codec.encoded_parts(group)

    monkeypatch.setattr(messages, "encoded_parts", encoded_parts)
    records = [contents.of_request(request(client).with_payload(payload)) for client in (0, 1)]
    first, second = (record["groups"]["000000"] for record in records)
    assert first.data is second.data
    assert len(encoded) == len(payload)
    assert parsed_data(records[0]) is first.data


def parsed_data(records: Any) -> bytes:
    """The bytes of the first group of a message that went over the loopback grid."""
    from flwr.app import Message
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    arrived: Any = parsed(serialised(Message(records, 5, "train.stage", ttl=5.0)))
    data: bytes = arrived.content["groups"]["000000"].data
    return data
