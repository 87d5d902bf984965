"""Payloads as bytes: decoding gives the payload that was encoded, in its order; anything else is
refused.
"""

from __future__ import annotations

import json
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.core.codec import DTYPES as DTYPES_BY_NAME
from fedstill.core.codec import decode, encode, encoded_parts
from fedstill.core.errors import BadPayload
from fedstill.core.records import Payload

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """A tensor that lies in memory in one of several ways."""
    draw = torch.Generator().manual_seed(seed)
    values = (100 * torch.randn(shape, generator=draw)).to(dtype)
    if layout == "channels_last" and len(shape) == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and len(shape) >= 2:
        return values.transpose(0, -1)
    if layout == "strided" and shape and shape[0] > 1:
        return values[::2]
    if layout == "expanded":
        return values.reshape(1, *shape).expand(3, *shape)
    return values


def is_allowed(name: str) -> bool:
    """Whether a group or a tensor may have a name; folders above are no names."""
    return name not in (".", "..")


tensors = st.builds(
    random_tensor,
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "channels_last", "transposed", "strided", "expanded"]),
    st.integers(0, 2**20),
)
group_names = st.text("abcdefgh.ä_ -0", min_size=1, max_size=8).filter(is_allowed)
quoted_names = st.text('ab.ä"é_', min_size=1, max_size=4).filter(is_allowed)
tensor_names = st.one_of(group_names, st.sampled_from(["body.0.weight", "blocks/3/bias", "z", "a"]))
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(exclude_categories=("Cs",))),
)
groups = st.one_of(tensors, scalars, st.dictionaries(tensor_names, tensors, max_size=4))
payloads = st.dictionaries(group_names, groups, max_size=5).map(Payload)


def assert_same_value(value: object, expected: object) -> None:
    """Check that two tensors, numbers or texts are of one type and equal; NaN equals NaN."""
    assert type(value) is type(expected)
    if isinstance(expected, Tensor):
        assert isinstance(value, Tensor)
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
    elif isinstance(expected, float) and math.isnan(expected):
        assert isinstance(value, float)
        assert math.isnan(value)
    else:
        assert value == expected


def assert_same(payload: Payload, expected: Payload) -> None:
    """Check that two payloads have the same groups in the same order: sums over names depend on
    it.
    """
    assert list(payload) == list(expected)
    for name in expected:
        if not isinstance(expected[name], dict):
            assert_same_value(payload[name], expected[name])
            continue
        group = payload.tensors(name)
        expected_group = expected.tensors(name)
        assert list(group) == list(expected_group)
        for key, tensor in expected_group.items():
            assert_same_value(group[key], tensor)


@settings(max_examples=150, deadline=None)
@given(payloads)
def test_what_goes_in_comes_out(payload: Payload) -> None:
    data = encode(payload)
    back = decode(data)
    assert_same(back, payload)
    assert encode(back) == data
    assert back.nbytes == payload.nbytes


@settings(max_examples=100)
@given(st.dictionaries(quoted_names, tensors, max_size=6))
def test_the_bytes_are_those_of_safetensors(group: dict[str, Tensor]) -> None:
    data = encode(Payload({"g": group}, n=1))
    stored = safetensors.torch.load(data)
    assert stored.keys() == {f"g/{name}" for name in group}
    copies = {name: tensor.clone() for name, tensor in stored.items()}
    note = {"groups": ["g", "n"], "rest": {"g": list(group), "n": 1}}
    assert data == safetensors.torch.save(copies, {"fedstill": json.dumps(note)})


@pytest.mark.parametrize("name", DTYPES_BY_NAME)
def test_each_type_of_tensor_has_the_name_that_safetensors_gives_it(name: str) -> None:
    dtype = DTYPES_BY_NAME[name]
    if dtype not in safetensors.torch._SIZE:
        pytest.skip("the library of this version has no such type")
    tensor = torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    if dtype == torch.bool:
        tensor = torch.tensor([True, False])
    data = encode(Payload(t=tensor))
    metadata = {"fedstill": json.dumps({"groups": ["t"], "rest": {}})}
    assert data == safetensors.torch.save({"t": tensor}, metadata)
    decoded = decode(data).tensor("t")
    assert decoded.dtype == dtype
    assert torch.equal(decoded.view(torch.uint8), tensor.view(torch.uint8))


def test_the_parts_of_a_payload_are_the_memory_of_its_tensors() -> None:
    """A large model is not copied before it is written or hashed."""
    weights = torch.zeros(3, 5)
    _, memory = encoded_parts(Payload(params={"w": weights}))
    weights.fill_(1.0)
    assert bytes(memory) == weights.numpy().tobytes()


def test_a_tensor_of_one_element_is_stored_whatever_its_strides_are() -> None:
    tensor = torch.arange(8.0)[::4][:1]
    assert tensor.as_strided((1,), (4,)).is_contiguous()
    data = encode(Payload(t=tensor.as_strided((1,), (4,))))
    assert decode(data).tensor("t").tolist() == [0.0]


def test_equal_payloads_give_equal_bytes_however_they_lie_in_memory() -> None:
    values = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    plain = Payload(params={"w": values, "v": torch.zeros(4, 5)}, n=3)
    channels_last = values.contiguous(memory_format=torch.channels_last)
    strided = torch.zeros(4, 10)[:, ::2]
    twisted = Payload(params={"w": channels_last, "v": strided}, n=3)
    assert encode(plain) == encode(twisted)
    assert encode(plain) != encode(Payload(plain, n=4))


def test_tensors_that_share_storage_do_not_share_it_afterwards() -> None:
    values = torch.arange(6.0)
    payload = Payload(a=values, b=values[2:], params={"x": values, "y": values})
    decoded = decode(encode(payload))
    decoded.tensor("a")[:] = -1
    assert decoded.tensor("b").tolist() == [2, 3, 4, 5]
    assert decoded.params["y"].tolist() == values.tolist()


def test_decoded_tensors_are_aligned_as_torch_aligns_its_own() -> None:
    """Matrix kernels may sum in another order on other alignments; then a resumed run would have
    other bits.
    """
    tensors_of_odd_sizes = {}
    for size in range(1, 21, 2):
        tensors_of_odd_sizes[f"floats of {size}"] = torch.ones(size)
        tensors_of_odd_sizes[f"bytes of {size + 1}"] = torch.ones(size + 1, dtype=torch.int8)
    decoded = decode(encode(Payload(params=tensors_of_odd_sizes)))
    usual_offsets = {torch.ones(7).data_ptr() % 64 for _ in range(5)}
    assert {tensor.data_ptr() % 64 for tensor in decoded.params.values()} <= usual_offsets


def test_a_gradient_does_not_travel() -> None:
    back = decode(encode(Payload(w=torch.ones(2, requires_grad=True))))
    assert not back.tensor("w").requires_grad


@pytest.mark.parametrize(
    "payload",
    [
        Payload(x=None),  # type: ignore[arg-type]
        Payload(x=object()),  # type: ignore[arg-type]
        Payload(x={"a": 1}),  # type: ignore[dict-item]
        Payload(x={"a": {"b": torch.zeros(1)}}),  # type: ignore[dict-item]
        Payload(x=torch.eye(3).to_sparse()),
        Payload(x=torch.zeros(2, device="meta")),
        Payload(x="\ud800"),
        Payload(x=10**5000),
        Payload({"": torch.zeros(1)}),
        Payload({"a/b": torch.zeros(1)}),
        Payload({"..": torch.zeros(1)}),
        Payload({"__metadata__": torch.zeros(1)}),
        Payload({"a\nb": 1}),
        Payload({"\ud800": 1}),
        Payload({3: 1}),  # type: ignore[dict-item]
        Payload(x={"": torch.zeros(1)}),
        Payload(x={"../../up": torch.zeros(1)}),
        Payload(x={"/root": torch.zeros(1)}),
        Payload(x={"c:\\windows": torch.zeros(1)}),
        Payload(x={"n" * 1000: torch.zeros(1)}),
    ],
    ids=range(20),
)
def test_values_that_are_no_payload_are_not_encoded(payload: Payload) -> None:
    with pytest.raises(BadPayload):
        encode(payload)


def test_groups_of_other_names_are_not_taken_for_numbered_ones() -> None:
    weights = {"w": torch.zeros(1)}
    payload = Payload({"3": weights, "peer.4": weights, "peers.5": weights, "peer.x": weights})
    assert list(payload.many("peer")) == [4]
