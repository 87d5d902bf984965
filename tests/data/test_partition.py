"""Partitions: the official codes' figures and streams, properties of every split, and what is
refused.
"""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fedstill.core import descriptions
from fedstill.core.errors import ConfigError, DataError, InfeasiblePartition
from fedstill.core.keys import numpy_generator
from fedstill.core.registry import lookup, names
from fedstill.data import partition as p
from fedstill.data.client_split import ClientSplit

SEED = 19940817  # FedNTD's
BALANCED = np.repeat(np.arange(10), 5000)
HAM10000 = np.repeat(np.arange(7), [327, 514, 1099, 115, 1113, 6705, 142])


def real_cifar10_labels():
    folder = os.environ.get("FEDSTILL_DATA")
    if not folder or not (Path(folder) / "cifar10").is_dir():
        pytest.skip("FEDSTILL_DATA holds no cifar10")
    import pyarrow.parquet as pq

    files = sorted((Path(folder) / "cifar10").rglob("train-*.parquet"))
    return np.concatenate([pq.read_table(f, columns=["label"])["label"].to_numpy() for f in files])


@pytest.fixture(params=["class sizes of CIFAR-10", "CIFAR-10"])
def cifar10(request):
    return BALANCED if request.param.startswith("class") else real_cifar10_labels()


def sizes(parts):
    return [len(part) for part in parts]


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# The figures of papers.md, section 13


@pytest.fixture
def draws(monkeypatch):
    """A list that gets an entry with every draw of shares."""
    module = importlib.import_module("fedstill.data.partition.dirichlet")
    entries = []
    draw = module._draw_pieces

    def counted(*arguments):
        entries.append(None)
        return draw(*arguments)

    monkeypatch.setattr(module, "_draw_pieces", counted)
    return entries


@pytest.mark.parametrize(
    ("alpha", "found"), [(0.1, (2, 22, 2349)), (0.3, (1, 34, 1317)), (0.5, (1, 134, 1004))]
)
def test_dirichlet_gives_the_official_sizes(cifar10, draws, alpha, found):
    """``found``: the number of draws, and the sizes of the smallest and the largest client."""
    parts = p.dirichlet(cifar10, 100, alpha, SEED)
    assert (len(draws), min(sizes(parts)), max(sizes(parts))) == found


@pytest.mark.slow
def test_dirichlet_005_is_accepted_at_the_19126th_draw(draws):
    parts = p.dirichlet(BALANCED, 100, 0.05, SEED)
    assert (len(draws), min(sizes(parts)), max(sizes(parts))) == (19_126, 12, 2_731)


@pytest.mark.parametrize("shards", [2, 3, 5, 10])
def test_sharding_deals_equal_clients_of_few_classes(cifar10, shards):
    parts = p.sharding(cifar10, 100, shards, SEED)
    assert max(abs(n - 500) for n in sizes(parts)) <= (5000 % (10 * shards) > 0) * shards
    assert max(len(np.unique(cifar10[part])) for part in parts) <= shards
    assert len(np.unique(np.concatenate(parts))) == 50_000
    rows = p.shard_rows(100, 10, shards, SEED)
    assert np.bincount(rows.ravel()).tolist() == [10 * shards] * 10


def test_hiper_gives_the_notebooks_sizes():
    labels = real_cifar10_labels()
    pool, public = p.public_split(len(labels), 5_000)
    assert len(pool) == 45_000
    assert len(np.union1d(pool, public)) == 50_000
    even = p.hiper(labels[pool], 4, 1.0, 42)
    assert sizes(even) == pytest.approx([11_400, 10_300, 10_200, 13_100], abs=75)
    skewed = p.hiper(labels[pool], 4, 0.1, 42)
    assert len(skewed[0]) == pytest.approx(320, abs=2)
    # the paper's accuracies there are multiples of 1/64
    assert len(skewed[0]) - len(skewed[0]) * 4 // 5 == 64


@pytest.mark.parametrize(("classes", "alpha"), [(2, 0.5), (2, 10.0), (2, 100.0)])
def test_extended_dirichlet_succeeds_where_the_papers_use_it(classes, alpha):
    parts = p.extended_dirichlet(BALANCED, 100, classes, alpha, SEED)
    assert max(len(np.unique(BALANCED[part])) for part in parts) <= classes
    assert min(sizes(parts)) >= 10


# The official streams, re-derived with plain loops


def test_dirichlet_draws_what_the_official_code_draws():
    labels = np.random.RandomState(3).randint(0, 5, 2000)
    stream = np.random.RandomState(SEED)
    smallest = 0
    while smallest < 10:
        held = [[] for _ in range(12)]
        for c in range(5):
            own = np.where(labels == c)[0]
            stream.shuffle(own)
            q = stream.dirichlet([0.3] * 12)
            q = np.array([x if len(h) < 2000 / 12 else 0.0 for x, h in zip(q, held, strict=True)])
            ends = [0, *(np.cumsum(q / q.sum()) * len(own)).astype(int)[:-1], len(own)]
            for k in range(12):
                held[k] += own[ends[k] : ends[k + 1]].tolist()
        smallest = min(map(len, held))
    for h in held:
        stream.shuffle(h)
    assert same(p.dirichlet(labels, 12, 0.3, SEED), held)


def test_sharding_draws_what_the_official_code_draws():
    labels = np.random.RandomState(4).randint(0, 4, 503)
    deck = [0, 1, 2, 3] * 5
    random.Random(SEED).shuffle(deck)
    stream = np.random.RandomState(SEED)
    blocks = {}
    for c in range(4):
        own = np.where(labels == c)[0].tolist()
        size, left = len(own) // 5, len(own) % 5
        tail = own[len(own) - left :] if left else []
        runs = [own[k * size : (k + 1) * size] for k in range(5)]
        blocks[c] = [run + tail[k : k + 1] for k, run in enumerate(runs)]
    expected = []
    for client in range(10):
        mine = []
        for c in deck[2 * client : 2 * client + 2]:
            mine += blocks[c].pop(stream.choice(len(blocks[c]), replace=False))
        expected.append(mine)
    assert same(p.sharding(labels, 10, 2, SEED), expected)


def test_extended_dirichlet_draws_what_the_official_code_draws():
    labels = np.random.RandomState(5).randint(0, 6, 3000)
    stream = np.random.RandomState(7)
    holders = {c: [] for c in range(6)}
    while min(map(len, holders.values())) < 2:  # max(2 * 30 // 6 // 5, 1)
        holders = {c: [] for c in range(6)}
        for client in range(30):
            for c in stream.choice(range(6), 2, replace=False):
                holders[c].append(client)
    smallest = 0
    while smallest < 10:
        held = [[] for _ in range(30)]
        for c in range(6):
            own = np.where(labels == c)[0]
            stream.shuffle(own)
            q = stream.dirichlet([1.0] * 30)
            q = np.array(
                [
                    x * (len(h) < 100 and j in holders[c])
                    for j, (x, h) in enumerate(zip(q, held, strict=True))
                ]
            )
            ends = (np.cumsum(q / q.sum()) * len(own)).astype(int)[:-1]
            if ends[-1] != len(own):
                ends[holders[c][-1] :] = len(own)
            for h, piece in zip(held, np.split(own, ends), strict=True):
                h += piece.tolist()
        smallest = min(map(len, held))
    for h in held:
        stream.shuffle(h)
    assert same(p.extended_dirichlet(labels, 30, 2, 1.0, 7), held)


def test_hiper_draws_what_the_notebook_draws():
    labels = np.random.RandomState(6).randint(0, 3, 400)
    matrix = np.random.RandomState(42).dirichlet([1.0] * 4, size=3)
    expected = [[] for _ in range(4)]
    for c in range(3):
        own, start = np.where(labels == c)[0], 0
        for k in range(4):
            count = len(own) - start if k == 3 else int(matrix[c, k] * len(own))
            expected[k] += own[start : start + count].tolist()
            start += count
    for k, mine in enumerate(expected):
        np.random.RandomState(42 + k).shuffle(mine)
    assert same(p.hiper(labels, 4, 1.0, 42), expected)


def test_the_fast_dirichlet_stream_is_sizes_first_then_one_shuffle():
    labels = np.random.RandomState(8).randint(0, 3, 300)
    rng = numpy_generator(SEED)
    owned = [np.where(labels == c)[0] for c in range(3)]
    held, counts = np.zeros((64, 7), dtype=int), []
    for own in owned:
        q = rng.dirichlet([2.0] * 7, 64) * (held < 300 / 7)
        ends = (np.cumsum(q / q.sum(1, keepdims=True), axis=1) * len(own)).astype(int)[:, :-1]
        counts.append(np.diff(ends, prepend=0, append=len(own), axis=1))
        held += counts[-1]
    first = int(np.flatnonzero(held.min(1) >= 5)[0])
    pieces = [
        np.split(rng.permutation(own), np.cumsum(c[first])[:-1])
        for own, c in zip(owned, counts, strict=True)
    ]
    expected = [rng.permutation(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]
    assert same(p.dirichlet(labels, 7, 2.0, SEED, min_size=5, stream="fast"), expected)


@pytest.mark.parametrize("rule", ["random", "pfllib"])
def test_pathological_draws_owners_then_cuts_each_class(rule):
    labels = np.random.RandomState(9).randint(0, 4, 700)
    stream = np.random.RandomState(SEED)
    owners = [[] for _ in range(4)]
    if rule == "random":
        for client in range(11):
            for c in stream.choice(4, 2, replace=False):
                owners[c].append(client)
    else:
        needs = [2] * 11
        for c in range(4):
            order = sorted(stream.permutation(11).tolist(), key=lambda k: -needs[k])
            count = max(-(-sum(needs) // (4 - c)), sum(n >= 4 - c for n in needs))
            owners[c] = sorted(k for k in order[:count] if needs[k] > 0)
            for k in owners[c]:
                needs[k] -= 1
    expected = [[] for _ in range(11)]
    for c in range(4):
        own = stream.permutation(np.where(labels == c)[0]).tolist()
        even = len(own) / len(owners[c])
        low = max(1, int(np.ceil(even / 10)))
        for k, size in zip(
            owners[c], stream.randint(low, int(np.ceil(even)), len(owners[c]) - 1), strict=False
        ):
            expected[k] += own[:size]
            own = own[size:]
        expected[owners[c][-1]] += own
    assert same(p.pathological(labels, 11, 2, SEED, rule), expected)


def test_hybrid_deals_odd_examples_in_turn_and_splits_the_rest_by_dirichlet():
    labels = np.random.RandomState(10).randint(0, 3, 400)
    stream, even, turn = np.random.RandomState(SEED), 5, 0
    expected, rest = [[] for _ in range(even)], []
    for c in range(3):
        own = stream.permutation(np.where(labels == c)[0]).tolist()
        share = round(len(own) * even / 12)
        takes = [share // even] * even
        for extra in range(share % even):
            takes[(turn + extra) % even] += 1
        turn = (turn + share % even) % even
        for k in range(even):
            expected[k] += own[: takes[k]]
            own = own[takes[k] :]
        rest += own
    rest = np.sort(rest)
    expected += [rest[part] for part in p.dirichlet(labels[rest], 7, 1.0, SEED, min_size=1)]
    assert same(p.hybrid(labels, 12, even / 12, SEED, alpha=1.0), expected)


def test_iid_cuts_one_permutation_into_equal_parts():
    order = np.random.RandomState(SEED).permutation(23)
    assert same(p.iid(np.zeros(23, dtype=int), 5, SEED), np.array_split(order, 5))


@pytest.mark.parametrize(
    "name", ["iid", "dirichlet", "extended_dirichlet", "hybrid", "pathological", "hiper"]
)
def test_all_clients_are_views_of_one_array(name):
    parts = lookup("partition", name).target(
        labels=BALANCED[::100], clients=10, seed=3, **FIELDS[name]
    )
    assert isinstance(parts, ClientSplit)
    assert all(np.shares_memory(part, parts.positions) for part in parts)


def test_public_split_is_torch_random_split():
    pool, public = torch.utils.data.random_split(
        range(100), [90, 10], generator=torch.Generator().manual_seed(42)
    )
    ours = p.public_split(100, 10)
    assert same(ours, (np.array(pool.indices), np.array(public.indices)))


# What holds for every split

FIELDS = {
    "iid": {},
    "sharding": {"shards": 4},
    "dirichlet": {"alpha": 0.5, "min_size": 1},
    "extended_dirichlet": {"classes_per_client": 2, "alpha": 5.0, "min_size": 1},
    "hybrid": {"iid_share": 0.3, "alpha": 0.5},
    "pathological": {"classes_per_client": 2},
    "hiper": {"alpha": 5.0},
}
OPTIONS = [
    ("dirichlet", {"stream": "fast"}),
    ("pathological", {"path_rule": "pfllib"}),
    ("hybrid", {"hybrid_share": "equal_per_client"}),
    ("hybrid", {"iid_share": 1.0}),
    ("hybrid", {"iid_share": 0.0}),
]
ELSEWHERE = ("column", "flower_datasets")
"""Splits that the data name, which need more than labels; they have tests of their own."""

CASES = [(name, {}) for name in names("partition") if name not in ELSEWHERE] + OPTIONS


@pytest.mark.parametrize(("name", "options"), CASES)
# of old versions
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(seed=st.integers(0, 2**63 - 1), clients=st.sampled_from([4, 8]), data=st.data())
def test_every_split_is_whole_pure_and_repeatable(name, options, seed, clients, data):
    counts = data.draw(st.lists(st.integers(60, 120), min_size=4, max_size=4))
    labels = np.random.RandomState(seed % 1000).permutation(np.repeat(np.arange(4), counts))
    before, states = (
        labels.copy(),
        (np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()),
    )
    entry = lookup("partition", name)
    fields = {**FIELDS[name], **options, "labels": labels, "clients": clients, "seed": seed}
    try:
        parts = entry.build(**fields)
    except InfeasiblePartition:
        reject()
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and len(part) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert same(parts, entry.build(**fields))
    assert np.array_equal(labels, before)
    assert np.array_equal(states[0], np.random.get_state()[1])
    assert states[1] == random.getstate()
    assert torch.equal(states[2], torch.get_rng_state())


def test_registry_knows_every_split_and_its_fields():
    assert set(names("partition")) == {*FIELDS, *ELSEWHERE}
    assert set(descriptions.fields(lookup("partition", "dirichlet"))) == {
        "alpha",
        "min_size",
        "max_tries",
        "stream",
    }
    assert all(descriptions.summary(lookup("partition", name)) for name in FIELDS)


def test_fast_stream_keeps_the_balance_rule():
    parts = p.dirichlet(BALANCED, 100, 0.1, 1, stream="fast")
    assert min(sizes(parts)) >= 10
    # A client stops receiving at 500, so it exceeds that through its last class alone (rounding
    # left aside).
    for part in parts:
        counts = np.bincount(BALANCED[part], minlength=10)
        counts[counts == 1] = 0
        assert counts.sum() - counts[np.flatnonzero(counts)[-1]] < 500


def test_hybrid_gives_iid_clients_equal_and_even_parts():
    parts = p.hybrid(BALANCED, 100, 0.1, 5)
    assert all(np.bincount(BALANCED[part]).tolist() == [50] * 10 for part in parts[:10])
    equal = p.hybrid(BALANCED, 100, 0.1, 5, hybrid_share="equal_per_client")
    assert set(sizes(equal)) == {500}


def test_pathological_keeps_to_its_classes():
    for rule in ("random", "pfllib"):
        for seed in range(20):
            parts = p.pathological(BALANCED, 10, 3, seed, path_rule=rule)
            assert {len(np.unique(BALANCED[part])) for part in parts} == {3}


def test_iid_uses_every_example():
    assert sizes(p.iid(np.zeros(10, dtype=int), 3, 0)) == [4, 3, 3]


# What is refused

REFUSED = [
    (lambda: p.iid(BALANCED[:5], 6, 0), "6 clients"),
    (lambda: p.sharding(BALANCED, 3, 1, 0), "not a multiple of the 10 classes"),
    (
        lambda: p.sharding(np.repeat([0, 1], [50, 3]), 10, 2, 0),
        "class 1 has 3 examples for 10 shards",
    ),
    (lambda: p.dirichlet(BALANCED, 6_000, 0.1, 0), "60,000"),
    (lambda: p.dirichlet(BALANCED, 100, 0.05, 0, max_tries=3), "none of 3 draws"),
    (lambda: p.dirichlet(BALANCED, 100, 0.05, 0, max_tries=3, stream="fast"), "none of 3 draws"),
    (lambda: p.dirichlet(BALANCED, 10, -1.0, 0), "alpha = -1.0: input should be greater than 0"),
    (
        lambda: p.dirichlet(BALANCED, 0, 0.1, 0),
        "clients = 0: input should be greater than or equal to 1",
    ),
    (lambda: p.dirichlet(BALANCED, 2.5, 0.1, 0), "clients = 2.5: input should be a valid integer"),
    (lambda: p.dirichlet(BALANCED, 10, 0.1, -1), "seed = -1"),
    (lambda: p.extended_dirichlet(BALANCED, 100, 11, 0.5, 0), "the data have 10 classes"),
    (lambda: p.extended_dirichlet(BALANCED, 3, 2, 0.5, 0), "cannot hold 10 classes"),
    (
        lambda: p.extended_dirichlet(HAM10000, 100, 2, 1.0, 0, max_tries=20),
        r"class \d: \d+ examples for \d+ clients",
    ),
    (lambda: p.pathological(BALANCED, 3, 3, 0), "cannot hold 10 classes"),
    (lambda: p.pathological(BALANCED, 3, 30, 0), "the data have 10 classes"),
    (
        lambda: p.pathological(np.repeat([0, 1], [50, 2]), 10, 2, 0),
        "class 1 has 2 examples for 10 clients",
    ),
    (lambda: p.hiper(np.zeros(3, dtype=int), 4, 0.1, 0), "leaves client"),
    (lambda: p.public_split(10, 10), "choose 0 to 9"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_impossible_settings_are_refused_in_one_line(call, text):
    with pytest.raises(ConfigError, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.0], [-1, 0]])
def test_labels_that_are_no_class_ids_are_refused(labels):
    with pytest.raises(DataError):
        p.iid(np.array(labels), 1, 0)


def test_extended_dirichlet_lowers_the_minimum_only_when_asked():
    fields = {"clients": 100, "classes_per_client": 2, "alpha": 1.0, "seed": 0, "max_tries": 20}
    with pytest.raises(InfeasiblePartition, match="none of 100 draws"):
        p.extended_dirichlet(HAM10000, **fields)
    parts = p.extended_dirichlet(HAM10000, **fields, lower_min_size=True)
    assert 1 <= min(sizes(parts)) < 10


# The cache of slow splits


def test_slow_splits_are_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    fields = {"clients": 20, "alpha": 0.5, "seed": 3}
    first = p.cached_split(p.dirichlet, BALANCED, slow_seconds=0, **fields)
    (file,) = (tmp_path / "partitions").iterdir()
    stamp = file.stat().st_mtime_ns
    assert same(first, p.cached_split(p.dirichlet, BALANCED, slow_seconds=0, **fields))
    assert same(first, p.dirichlet(BALANCED, **fields))
    assert file.stat().st_mtime_ns == stamp
    p.cached_split(p.dirichlet, BALANCED, slow_seconds=0, **{**fields, "seed": 4})
    p.cached_split(p.dirichlet, BALANCED[1:], slow_seconds=0, **fields)
    assert len(list((tmp_path / "partitions").iterdir())) == 3


@pytest.mark.parametrize("as_groups", [np.asarray, torch.from_numpy, lambda a: a.astype(object)])
def test_the_cache_tells_long_columns_of_owners_apart(as_groups, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    labels = np.zeros(2000, dtype=np.int64)
    first = np.repeat([0, 1], 1000)
    second = first.copy()
    second[[500, 1500]] = [1, 0]

    def by_owner(labels, clients, groups):
        return [np.flatnonzero(np.asarray(groups) == owner) for owner in range(clients)]

    for groups in (first, second):
        parts = p.cached_split(
            by_owner, labels, slow_seconds=0, clients=2, groups=as_groups(groups)
        )
        assert same(parts, by_owner(labels, 2, groups))
    assert len(list((tmp_path / "partitions").iterdir())) == 2


def test_a_damaged_or_missing_cache_is_as_none(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    first = p.cached_split(p.iid, BALANCED, slow_seconds=0, clients=7, seed=1)
    (file,) = (tmp_path / "partitions").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert same(first, p.cached_split(p.iid, BALANCED, slow_seconds=0, clients=7, seed=1))
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "file" / "below"))
    assert same(first, p.cached_split(p.iid, BALANCED, slow_seconds=0, clients=7, seed=1))


@pytest.mark.parametrize(
    "parts",
    [
        [np.array([0.5, 1.5]), np.array([2.5])],
        [np.array([True, False])] * 2,
        None,
        {0: [1], 1: [2]},
        iter([[0], [1]]),
    ],
)
def test_what_is_no_split_is_not_kept(parts, tmp_path, monkeypatch):
    """As a file it would be whole numbers, and the next call would take it for a split."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))

    def slow(labels, clients):
        return parts

    assert p.cached_split(slow, BALANCED, slow_seconds=0, clients=2) is parts
    assert not (tmp_path / "partitions").exists()


def test_quick_splits_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    p.cached_split(p.iid, BALANCED, clients=7, seed=1)
    assert not (tmp_path / "partitions").exists()


@pytest.mark.parametrize("stream", ["official", "fast"])
@pytest.mark.parametrize("clients", [1, 2, 3])
@pytest.mark.filterwarnings("error")
def test_shares_that_underflow_are_drawn_again_without_a_warning(stream, clients):
    labels = np.arange(100) % 2
    for seed in range(20):
        parts = p.dirichlet(labels, clients, 0.001, seed, min_size=1, stream=stream)
        assert sorted(np.concatenate(list(parts)).tolist()) == list(range(100))


@pytest.mark.filterwarnings("error")
def test_hiper_refuses_shares_that_underflow():
    with pytest.raises(InfeasiblePartition, match="hiper: with alpha 1e-06"):
        p.hiper(np.arange(100) % 2, 2, 1e-6, 0)


@pytest.mark.filterwarnings("error")
def test_class_mixes_of_a_column_may_underflow():
    groups = np.arange(100) % 4
    parts = p.column(np.arange(100) % 3, 4, groups, alpha=1e-6, seed=0)
    assert all(len(part) > 0 for part in parts)
