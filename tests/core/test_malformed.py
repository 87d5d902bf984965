"""Malformed bytes are BadPayload and nothing else: no other exception, no endless work, no
pickle.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import time
import zipfile

import pytest
import torch

from fedstill.core.codec import (
    MAX_DIMS,
    MAX_ENTRIES,
    MAX_LOCAL_ENTRIES,
    MAX_TENSOR_HEADER,
    decode,
    encode,
)
from fedstill.core.errors import BadPayload
from fedstill.core.records import Payload

SAMPLE = Payload(
    params={
        "body.weight": torch.arange(12.0).reshape(3, 4),
        "body.bias": torch.ones(3),
        "seen": torch.tensor(3),
    },
    mean=torch.eye(2).bfloat16(),
    empty={},
    gini=0.5,
    visits=3,
    yes=True,
    said="naïve",
)
GOOD = encode(SAMPLE)
HEADER = struct.unpack("<Q", GOOD[:8])[0]


def with_header(header: bytes, body: bytes = b"") -> bytes:
    """A file of safetensors: the length of the header, the header, and the bytes of tensors."""
    return struct.pack("<Q", len(header)) + header + body


def with_note(note: object, tensors: dict[str, object] | None = None, body: bytes = b"") -> bytes:
    """A file with a note of groups, as text or as an object, and entries of tensors."""
    if not isinstance(note, str):
        note = json.dumps(note)
    header = {"__metadata__": {"fedstill": note}, **(tensors or {})}
    return with_header(json.dumps(header).encode(), body)


def with_tensor(**changes: object) -> bytes:
    """A file with one tensor of one number, whose entry has changes."""
    return with_note({"groups": ["a"], "rest": {}}, {"a": {**FLOAT, **changes}}, b"\0" * 4)


def zipped() -> bytes:
    """An archive that unpacks to a thousand times its size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb", b"0" * 1_000_000)
    return buffer.getvalue()


def torch_saved() -> bytes:
    """A file of ``torch.save``, which is a pickle."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    return buffer.getvalue()


FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
UNUSUAL_ENTRIES: dict[str, dict[str, object]] = {
    "an unknown type": {"dtype": "F31"},
    "a type that is no text": {"dtype": ["F32"]},
    "another shape": {"shape": [2]},
    "a negative shape": {"shape": [-1]},
    "a shape of fractions": {"shape": [1.0]},
    "a shape of truths": {"shape": [True]},
    "a huge empty shape": {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
    "offsets that are swapped": {"data_offsets": [4, 0]},
    "offsets of fractions": {"data_offsets": [0.0, 4.0]},
    "one offset": {"data_offsets": [0]},
    "bytes before it": {"shape": [0], "data_offsets": [4, 4]},
    "bytes after it": {"shape": [0], "data_offsets": [0, 0]},
    "one more field": {"more": 1},
    "type F33": {"dtype": "F33"},
    "no type": {"dtype": None},
    "a shape that is text": {"shape": "x"},
    "a huge shape": {"shape": [2**62, 2**62]},
    "offsets beyond the file": {"data_offsets": [0, 8]},
    "a negative offset": {"data_offsets": [-4, 0]},
    "an offset of 64 bits": {"data_offsets": [0, 2**63]},
    "offsets that are shifted": {"data_offsets": [1, 5]},
    "offsets that are text": {"data_offsets": "0,4"},
}
"""Changes of the entry of a tensor in the header."""

GROUP_NAMES = (
    "../../etc/passwd",
    "a/b",
    "/",
    "..",
    ".",
    "",
    "C:\\x",
    "a\0b",
    "a\nb",
    "\ud800",
    "n" * 600,
)
TENSOR_NAMES = ("../../etc/passwd", "/etc/passwd", "a//b", "..", "", "C:\\x", "a\0b")

DOUBLED = (
    b'{"__metadata__":{"fedstill":"{\\"groups\\":[],\\"rest\\":{}}"},'
    b'"__metadata__":{"fedstill":"{}"}}'
)

MALFORMED = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "zeros": b"\0" * 64,
    "pickle": pickle.dumps({"w": [1, 2, 3]}),
    "pickle, protocol 0": pickle.dumps({"w": [1, 2, 3]}, protocol=0),
    "zip": zipped(),
    "torch.save": torch_saved(),
    "header longer than all": struct.pack("<Q", 1000) + b"{}",
    "header of 2^64-1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header over the cap": struct.pack("<Q", MAX_TENSOR_HEADER + 1)
    + b" " * (MAX_TENSOR_HEADER + 2),
    "no JSON": with_header(b"hello"),
    "half a JSON": with_header(b'{"__metadata__": {"fedstill": '),
    "no UTF-8": with_header(b'{"__metadata__": {"fedstill": "\xff\xfe"}}'),
    "a name that is no UTF-8": with_header(
        GOOD[8 : 8 + HEADER].replace(b"body.bias", b"body.bia\xff"), GOOD[8 + HEADER :]
    ),
    "a list": with_header(b"[1, 2]"),
    "a number": with_header(b"3"),
    "a string": with_header(b'"__metadata__"'),
    "null": with_header(b"null"),
    "deep lists": with_header(b"[" * 100_000),
    "deep tables": with_header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "deep note": with_note("[" * 100_000),
    "no metadata": with_header(b"{}"),
    "metadata of others": with_header(b'{"__metadata__": {"format": "pt"}}'),
    "metadata a list": with_header(b'{"__metadata__": []}'),
    "metadata a string": with_header(b'{"__metadata__": "fedstill"}'),
    "note a table": with_header(b'{"__metadata__": {"fedstill": {"groups": [], "rest": {}}}}'),
    "note a number": with_note("3"),
    "note null": with_note("null"),
    "note empty": with_note({}),
    "note with more": with_note({"groups": [], "rest": {}, "more": 1}),
    "groups a string": with_note({"groups": "ab", "rest": {}}),
    "groups of numbers": with_note({"groups": [1], "rest": {}}),
    "groups of lists": with_note({"groups": [["a"]], "rest": {}}),
    "groups twice": with_note({"groups": ["a", "a"], "rest": {"a": 1}}),
    "group not there": with_note({"groups": ["a"], "rest": {}}),
    "tensor not there": with_note({"groups": ["a"], "rest": {"a": ["w"]}}),
    "tensors named twice": with_note(
        {"groups": ["a"], "rest": {"a": ["w", "w"]}}, {"a/w": FLOAT}, b"\0" * 4
    ),
    "tensor names of numbers": with_note({"groups": ["a"], "rest": {"a": [1]}}),
    "rest of a stranger": with_note({"groups": [], "rest": {"a": 1}}),
    "rest a list": with_note({"groups": [], "rest": []}),
    "rest null": with_note({"groups": ["a"], "rest": {"a": None}}),
    "rest a table": with_note({"groups": ["a"], "rest": {"a": {"b": 1}}}),
    "a string that is no text": with_note('{"groups": ["a"], "rest": {"a": "\\ud800"}}'),
    "an endless number": with_note('{"groups": ["a"], "rest": {"a": ' + "9" * 10_000 + "}}"),
    "tensor of no group": with_note({"groups": [], "rest": {}}, {"a": FLOAT}, b"\0" * 4),
    "a key twice": with_header(DOUBLED),
    "a note's key twice": with_note('{"groups": [], "groups": [], "rest": {}}'),
    **{
        f"a tensor with {label}": with_tensor(**changes)
        for label, changes in UNUSUAL_ENTRIES.items()
    },
    "tensors that overlap": with_note(
        {"groups": ["a", "b"], "rest": {}}, {"a": FLOAT, "b": FLOAT}, b"\0" * 4
    ),
    "a tensor twice": with_header(
        b'{"__metadata__":{"fedstill":"{\\"groups\\":[\\"a\\"],\\"rest\\":{}}"},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],'
        b'"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    **{
        f"group name {name!a}": with_note({"groups": [name], "rest": {name: 1}})
        for name in GROUP_NAMES
    },
    **{
        f"tensor name {name!a}": with_note(
            {"groups": ["g"], "rest": {"g": [name]}}, {f"g/{name}": FLOAT}, b"\0" * 4
        )
        for name in TENSOR_NAMES
    },
    "bytes after the last tensor": GOOD + b"more",
}


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def many(count: int, tensor: dict[str, object] = EMPTY) -> bytes:
    """A file with so many equal tensors."""
    names = [f"t{i}" for i in range(count)]
    entries = {f"a/{name}": tensor for name in names}
    return with_note({"groups": ["a"], "rest": {"a": names}}, entries)


def many_groups(count: int) -> bytes:
    """A file with so many groups without tensors, which are not described."""
    return with_note({"groups": [f"g{i}" for i in range(count)], "rest": {}})


def many_numbers(count: int) -> bytes:
    """A file with so many groups, each of which is a number."""
    names = [str(i) for i in range(count)]
    return with_note({"groups": names, "rest": dict.fromkeys(names, 1)})


TOO_MUCH = {
    "one tensor too many": (many(MAX_ENTRIES + 1), "more than 10000 tensors"),
    "sixty thousand": (many(60_000), "more than 10000 tensors"),
    "groups": (many_groups(MAX_ENTRIES + 1), "10001 groups"),
    "numbers": (many_numbers(10**5), "10000"),
    "one dimension too many": (
        many(1, {**EMPTY, "shape": [1] * MAX_DIMS + [0]}),
        "9 dimensions, over the limit of 8",
    ),
    "a million dimensions": (
        many(1, {**EMPTY, "shape": [1] * 10**6 + [0]}),
        "more than 10000 tensors",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_in_milliseconds(name: str) -> None:
    data, reason = TOO_MUCH[name]
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(BadPayload, match=reason) as caught:
            decode(data)
        durations.append(time.perf_counter() - start)
        assert len(str(caught.value)) < 300
    assert min(durations) < 0.1, "1.9 s, when each tensor was made first"


def test_the_most_that_is_allowed_is_decoded() -> None:
    assert len(decode(many(MAX_ENTRIES)).tensors("a")) == MAX_ENTRIES
    deep = encode(Payload(a=torch.zeros([1] * MAX_DIMS)))
    assert decode(deep).tensor("a").ndim == MAX_DIMS
    with pytest.raises(BadPayload, match="9 dimensions"):
        encode(Payload(a=torch.zeros([1] * (MAX_DIMS + 1))))

    with pytest.raises(BadPayload, match="more than 2 tensors"):
        decode(many(3), entries=2)


def test_a_local_file_may_have_more_tensors() -> None:
    local = decode(many(MAX_ENTRIES + 1), entries=MAX_LOCAL_ENTRIES)
    assert len(local.tensors("a")) == MAX_ENTRIES + 1


def test_a_local_file_may_describe_more_tensors_than_a_message_can() -> None:
    models = {f"peer.{i}": {"w" * 400: torch.zeros(1)} for i in range(MAX_ENTRIES)}
    data = encode(Payload(models))

    assert len(decode(data, entries=MAX_LOCAL_ENTRIES)) == MAX_ENTRIES
    with pytest.raises(BadPayload, match="does not fit"):
        decode(data)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_a_bad_payload(name: str) -> None:
    with pytest.raises(BadPayload):
        decode(MALFORMED[name])


def test_every_truncation_is_a_bad_payload() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(BadPayload):
            decode(GOOD[:length])


def test_more_bytes_than_the_limit_are_refused_before_they_are_read() -> None:
    assert encode(decode(GOOD, limit=len(GOOD))) == GOOD
    with pytest.raises(BadPayload, match=f"limit of {len(GOOD) - 1}"):
        decode(GOOD, limit=len(GOOD) - 1)
    with pytest.raises(BadPayload, match="limit of 3"):
        decode(b"not even read", limit=3)


JSON_FRAGMENTS = [b'"', b"{", b"}", b"[", b",", b"-", b"9", b"null", b"\\u0000", b"\xff"]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Bytes with one to three small damages, most of them in the header, where structure is."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        end = len(out)
        if draw.random() < 0.8:
            end = min(8 + HEADER, end)
        position = draw.randrange(end)
        match draw.randrange(6):
            case 0:
                out[position] ^= 1 << draw.randrange(8)
            case 1:
                out[position] = draw.randrange(256)
            case 2:
                del out[position : position + draw.randint(1, 8)]
            case 3:
                out[position:position] = draw.randbytes(draw.randint(1, 8))
            case 4:
                partner = draw.randrange(len(out))
                out[position], out[partner] = out[partner], out[position]
            case 5:
                out[position : position + 1] = draw.choice(JSON_FRAGMENTS)
        if not out:
            break
    return bytes(out)


def test_two_thousand_mutations_give_a_payload_or_a_bad_payload() -> None:
    draw = random.Random(20)
    refused = 0
    for _ in range(2000):
        data = mutated(GOOD, draw)
        try:
            payload = decode(data)
        except BadPayload:
            refused += 1
        else:
            assert encode(decode(encode(payload))) == encode(payload)
    assert refused > 1000, "damage to the header must mostly be noticed"
