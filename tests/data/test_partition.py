"""Partitions: the official codes' figures and streams, properties of every split, and what is
refused.
"""

from __future__ import annotations

import importlib
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fedstill.core import descriptions
from fedstill.core.errors import USER, ConfigError, DataError, InfeasiblePartition
from fedstill.core.keys import numpy_generator
from fedstill.core.registry import lookup, names
from fedstill.data import partition as p
from fedstill.data.client_split import ClientSplit

SEED = 19940817  # FedNTD's
BALANCED = np.repeat(np.arange(10), 5000)
HAM10000 = np.repeat(np.arange(7), [327, 514, 1099, 115, 1113, 6705, 142])


def real_cifar10_labels():
    """The labels of the training split, in the order of the files."""
    folder = os.environ.get("FEDSTILL_DATA")
    if not folder or not (Path(folder) / "cifar10").is_dir():
        pytest.skip("FEDSTILL_DATA holds no cifar10")
    import pyarrow.parquet as pq

    files = sorted((Path(folder) / "cifar10").rglob("train-*.parquet"))
    return np.concatenate([pq.read_table(f, columns=["label"])["label"].to_numpy() for f in files])


@pytest.fixture(params=["class sizes of CIFAR-10", "CIFAR-10"])
def cifar10(request):
    """Labels with the class sizes of CIFAR-10: in the order of the classes, and the real ones."""
    if request.param == "CIFAR-10":
        return real_cifar10_labels()
    return BALANCED


def sizes(parts):
    """The number of examples of each client."""
    return [len(part) for part in parts]


def class_counts(parts, labels):
    """The number of classes of which each client has examples."""
    return [len(np.unique(labels[part])) for part in parts]


def same(parts, expected_parts):
    """Whether two splits give all clients the same examples, in the same order."""
    if len(parts) != len(expected_parts):
        return False
    return all(map(np.array_equal, parts, expected_parts))


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
    ("alpha", "draw_count", "smallest", "largest"),
    [(0.1, 2, 22, 2349), (0.3, 1, 34, 1317), (0.5, 1, 134, 1004)],
)
def test_dirichlet_gives_the_official_sizes(cifar10, draws, alpha, draw_count, smallest, largest):
    parts = p.dirichlet(cifar10, 100, alpha, SEED)
    assert len(draws) == draw_count
    assert min(sizes(parts)) == smallest
    assert max(sizes(parts)) == largest


@pytest.mark.slow
def test_dirichlet_005_is_accepted_at_the_19126th_draw(draws):
    parts = p.dirichlet(BALANCED, 100, 0.05, SEED)
    assert len(draws) == 19_126
    assert min(sizes(parts)) == 12
    assert max(sizes(parts)) == 2_731


@pytest.mark.parametrize("shards", [2, 3, 5, 10])
def test_sharding_deals_equal_clients_of_few_classes(cifar10, shards):
    parts = p.sharding(cifar10, 100, shards, SEED)

    # A class of 5,000 examples is cut into 10 * shards shards, whose sizes differ by at most 1.
    shards_are_equal = 5_000 % (10 * shards) == 0
    largest_deviation = max(abs(size - 500) for size in sizes(parts))
    if shards_are_equal:
        assert largest_deviation == 0
    assert largest_deviation <= shards
    assert max(class_counts(parts, cifar10)) <= shards
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
    smallest = len(skewed[0])
    assert smallest == pytest.approx(320, abs=2)
    # the paper's accuracies there are multiples of 1/64
    assert smallest - smallest * 4 // 5 == 64


@pytest.mark.parametrize("alpha", [0.5, 10.0, 100.0])
def test_extended_dirichlet_succeeds_where_the_papers_use_it(alpha):
    parts = p.extended_dirichlet(BALANCED, 100, 2, alpha, SEED)
    assert max(class_counts(parts, BALANCED)) <= 2
    assert min(sizes(parts)) >= 10


# The official streams, re-derived with plain loops


def cut_points(shares, size):
    """Where the examples of a class are cut so that clients get their shares of it."""
    return (np.cumsum(shares / shares.sum()) * size).astype(int)[:-1]


def test_dirichlet_draws_what_the_official_code_draws():
    labels = np.random.RandomState(3).randint(0, 5, 2000)
    stream = np.random.RandomState(SEED)
    smallest = 0
    while smallest < 10:
        clients = [[] for _ in range(12)]
        for label in range(5):
            examples = np.where(labels == label)[0]
            stream.shuffle(examples)
            shares = stream.dirichlet([0.3] * 12)
            # A client with an even share of all examples gets no more.
            for k, client in enumerate(clients):
                if len(client) >= 2000 / 12:
                    shares[k] = 0.0
            pieces = np.split(examples, cut_points(shares, len(examples)))
            for client, piece in zip(clients, pieces, strict=True):
                client += piece.tolist()
        smallest = min(sizes(clients))
    for client in clients:
        stream.shuffle(client)

    assert same(p.dirichlet(labels, 12, 0.3, SEED), clients)


def test_sharding_draws_what_the_official_code_draws():
    labels = np.random.RandomState(4).randint(0, 4, 503)
    deck = [0, 1, 2, 3] * 5
    random.Random(SEED).shuffle(deck)
    stream = np.random.RandomState(SEED)
    blocks = {}
    for label in range(4):
        examples = np.where(labels == label)[0].tolist()
        size = len(examples) // 5
        # The examples behind the fifth block go to the first blocks, one to each of them.
        tail = examples[5 * size :]
        runs = np.reshape(examples[: 5 * size], (5, size)).tolist()
        blocks[label] = [run + tail[k : k + 1] for k, run in enumerate(runs)]
    expected = []
    for client in range(10):
        client_examples = []
        for label in deck[2 * client : 2 * client + 2]:
            position = stream.choice(len(blocks[label]), replace=False)
            client_examples += blocks[label].pop(position)
        expected.append(client_examples)

    assert same(p.sharding(labels, 10, 2, SEED), expected)


def holders_of_classes(stream):
    """The clients that hold each of six classes, drawn until all classes have two or more."""
    holders = [[] for _ in range(6)]
    while min(map(len, holders)) < 2:  # max(2 * 30 // 6 // 5, 1)
        holders = [[] for _ in range(6)]
        for client in range(30):
            for label in stream.choice(range(6), 2, replace=False):
                holders[label].append(client)
    return holders


def test_extended_dirichlet_draws_what_the_official_code_draws():
    labels = np.random.RandomState(5).randint(0, 6, 3000)
    stream = np.random.RandomState(7)
    holders = holders_of_classes(stream)
    smallest = 0
    while smallest < 10:
        clients = [[] for _ in range(30)]
        for label in range(6):
            examples = np.where(labels == label)[0]
            stream.shuffle(examples)
            shares = stream.dirichlet([1.0] * 30)
            for k, client in enumerate(clients):
                if k not in holders[label] or len(client) >= 3000 / 30:
                    shares[k] = 0.0
            ends = cut_points(shares, len(examples))
            if ends[-1] != len(examples):
                ends[holders[label][-1] :] = len(examples)
            for client, piece in zip(clients, np.split(examples, ends), strict=True):
                client += piece.tolist()
        smallest = min(sizes(clients))
    for client in clients:
        stream.shuffle(client)

    assert same(p.extended_dirichlet(labels, 30, 2, 1.0, 7), clients)


def test_hiper_draws_what_the_notebook_draws():
    labels = np.random.RandomState(6).randint(0, 3, 400)
    matrix = np.random.RandomState(42).dirichlet([1.0] * 4, size=3)
    expected = [[] for _ in range(4)]
    for label in range(3):
        examples = np.where(labels == label)[0]
        start = 0
        for k in range(3):
            end = start + int(matrix[label, k] * len(examples))
            expected[k] += examples[start:end].tolist()
            start = end
        expected[3] += examples[start:].tolist()
    for k, client_examples in enumerate(expected):
        np.random.RandomState(42 + k).shuffle(client_examples)

    assert same(p.hiper(labels, 4, 1.0, 42), expected)


def test_the_fast_dirichlet_stream_is_sizes_first_then_one_shuffle():
    labels = np.random.RandomState(8).randint(0, 3, 300)
    rng = numpy_generator(SEED)
    examples_by_class = [np.where(labels == label)[0] for label in range(3)]

    # 64 drafts at a time: the sizes alone. A row is a draft, a column a client.
    client_sizes = np.zeros((64, 7), dtype=int)
    drafts_by_class = []
    for examples in examples_by_class:
        shares = rng.dirichlet([2.0] * 7, 64) * (client_sizes < 300 / 7)
        shares /= shares.sum(1, keepdims=True)
        ends = (np.cumsum(shares, axis=1) * len(examples)).astype(int)[:, :-1]
        counts = np.diff(ends, prepend=0, append=len(examples), axis=1)
        drafts_by_class.append(counts)
        client_sizes += counts
    first = int(np.flatnonzero(client_sizes.min(1) >= 5)[0])

    # The first draft whose clients are all large enough is filled with examples.
    pieces = []
    for examples, counts in zip(examples_by_class, drafts_by_class, strict=True):
        ends = np.cumsum(counts[first])[:-1]
        pieces.append(np.split(rng.permutation(examples), ends))
    parts = map(np.concatenate, zip(*pieces, strict=True))
    expected = [rng.permutation(part) for part in parts]

    assert same(p.dirichlet(labels, 7, 2.0, SEED, min_size=5, stream="fast"), expected)


@pytest.mark.parametrize("rule", ["random", "pfllib"])
def test_pathological_draws_owners_then_cuts_each_class(rule):
    labels = np.random.RandomState(9).randint(0, 4, 700)
    stream = np.random.RandomState(SEED)
    owners = [[] for _ in range(4)]
    if rule == "random":
        for client in range(11):
            for label in stream.choice(4, 2, replace=False):
                owners[label].append(client)
    else:
        # The classes that a client still lacks; those with the most choose first.
        needs = [2] * 11
        for label in range(4):
            order = sorted(stream.permutation(11).tolist(), key=lambda k: -needs[k])
            classes_ahead = 4 - label
            even_count = math.ceil(sum(needs) / classes_ahead)
            urgent_count = sum(need >= classes_ahead for need in needs)
            candidates = order[: max(even_count, urgent_count)]
            owners[label] = sorted(k for k in candidates if needs[k] > 0)
            for k in owners[label]:
                needs[k] -= 1

    expected = [[] for _ in range(11)]
    for label in range(4):
        *first_owners, last_owner = owners[label]
        remaining = stream.permutation(np.where(labels == label)[0]).tolist()
        even_size = len(remaining) / len(owners[label])
        smallest = max(1, math.ceil(even_size / 10))
        drawn_sizes = stream.randint(smallest, math.ceil(even_size), len(first_owners))
        for k, size in zip(first_owners, drawn_sizes, strict=True):
            expected[k] += remaining[:size]
            remaining = remaining[size:]
        expected[last_owner] += remaining

    assert same(p.pathological(labels, 11, 2, SEED, rule), expected)


def test_hybrid_deals_odd_examples_in_turn_and_splits_the_rest_by_dirichlet():
    labels = np.random.RandomState(10).randint(0, 3, 400)
    stream = np.random.RandomState(SEED)
    iid_clients = 5
    turn = 0
    expected = [[] for _ in range(iid_clients)]
    dirichlet_pool = []
    for label in range(3):
        remaining = stream.permutation(np.where(labels == label)[0]).tolist()
        iid_count = round(len(remaining) * iid_clients / 12)
        counts = [iid_count // iid_clients] * iid_clients
        odd_examples = iid_count % iid_clients
        for _ in range(odd_examples):
            counts[turn] += 1
            turn = (turn + 1) % iid_clients
        for k, count in enumerate(counts):
            expected[k] += remaining[:count]
            remaining = remaining[count:]
        dirichlet_pool += remaining
    dirichlet_pool = np.sort(dirichlet_pool)
    dirichlet_parts = p.dirichlet(labels[dirichlet_pool], 7, 1.0, SEED, min_size=1)
    expected += [dirichlet_pool[part] for part in dirichlet_parts]

    assert same(p.hybrid(labels, 12, iid_clients / 12, SEED, alpha=1.0), expected)


def test_iid_cuts_one_permutation_into_equal_parts():
    order = np.random.RandomState(SEED).permutation(23)
    assert same(p.iid(np.zeros(23, dtype=int), 5, SEED), np.array_split(order, 5))


@pytest.mark.parametrize(
    "name", ["iid", "dirichlet", "extended_dirichlet", "hybrid", "pathological", "hiper"]
)
def test_all_clients_are_views_of_one_array(name):
    partition = lookup("partition", name).target
    parts = partition(labels=BALANCED[::100], clients=10, seed=3, **FIELDS[name])
    assert isinstance(parts, ClientSplit)
    assert all(np.shares_memory(part, parts.positions) for part in parts)


def test_public_split_is_torch_random_split():
    generator = torch.Generator().manual_seed(42)
    pool, public = torch.utils.data.random_split(range(100), [90, 10], generator=generator)
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
    original_labels = labels.copy()
    numpy_state = np.random.get_state()[1].copy()
    python_state = random.getstate()
    torch_state = torch.get_rng_state()
    entry = lookup("partition", name)
    fields = {**FIELDS[name], **options, "labels": labels, "clients": clients, "seed": seed}
    try:
        parts = entry.build(**fields)
    except InfeasiblePartition:
        reject()

    assert len(parts) == clients
    assert {part.dtype for part in parts} == {np.dtype(np.int64)}
    assert min(sizes(parts)) > 0
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert same(parts, entry.build(**fields))
    assert np.array_equal(labels, original_labels)
    assert np.array_equal(numpy_state, np.random.get_state()[1])
    assert python_state == random.getstate()
    assert torch.equal(torch_state, torch.get_rng_state())


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
    for part in parts[:10]:
        assert np.bincount(BALANCED[part]).tolist() == [50] * 10
    equal = p.hybrid(BALANCED, 100, 0.1, 5, hybrid_share="equal_per_client")
    assert set(sizes(equal)) == {500}


def test_pathological_keeps_to_its_classes():
    for rule in ("random", "pfllib"):
        for seed in range(20):
            parts = p.pathological(BALANCED, 10, 3, seed, path_rule=rule)
            assert set(class_counts(parts, BALANCED)) == {3}


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


def test_extended_dirichlet_lowers_a_minimum_that_the_examples_do_not_allow():
    fields = {"clients": 20, "classes_per_client": 2, "alpha": 1.0, "seed": 0}
    labels = np.arange(100) % 5
    with pytest.raises(InfeasiblePartition, match="need 200 examples"):
        p.extended_dirichlet(labels, **fields)
    parts = p.extended_dirichlet(labels, **fields, lower_min_size=True)
    assert 1 <= min(sizes(parts)) <= 5
    with pytest.raises(InfeasiblePartition, match=r"lower clients$"):
        p.extended_dirichlet(labels[:10], **fields, lower_min_size=True)


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


def of_a_file(partition):
    """A partition, as if a config named this file. The cache only stores splits of such files."""
    partition.__module__ = f"{USER}rules"
    return partition


@pytest.mark.parametrize("as_groups", [np.asarray, torch.from_numpy, lambda a: a.astype(object)])
def test_the_cache_tells_long_columns_of_owners_apart(as_groups, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    labels = np.zeros(2000, dtype=np.int64)
    first = np.repeat([0, 1], 1000)
    second = first.copy()
    second[[500, 1500]] = [1, 0]

    @of_a_file
    def by_owner(labels, clients, groups):
        return [np.flatnonzero(np.asarray(groups) == owner) for owner in range(clients)]

    for groups in (first, second):
        parts = p.cached_split(
            by_owner, labels, slow_seconds=0, clients=2, groups=as_groups(groups)
        )
        assert same(parts, by_owner(labels, 2, groups))
    assert len(list((tmp_path / "partitions").iterdir())) == 2


def test_splits_of_a_module_that_may_be_older_than_its_file_are_not_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))

    def halves(labels, clients):
        return np.array_split(np.arange(len(labels)), clients)

    p.cached_split(halves, BALANCED, slow_seconds=0, clients=2)
    assert not (tmp_path / "partitions").exists()


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
def test_only_splits_are_cached(parts, tmp_path, monkeypatch):
    """A file would hold other results as whole numbers, and the next call would return these."""
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))

    @of_a_file
    def slow(labels, clients, result):
        return result

    fields = {"clients": 2, "result": parts}
    assert p.cached_split(slow, BALANCED, slow_seconds=0, **fields) is parts
    assert not (tmp_path / "partitions").exists()


def rotation(shift):
    """A partition that depends on a variable of this function."""

    @of_a_file
    def rotated(labels, clients):
        turns = (np.arange(len(labels)) + shift) % clients
        return [np.flatnonzero(turns == client) for client in range(clients)]

    return rotated


class Rotation:
    def __init__(self, shift):
        self.shift = shift

    def split(self, labels, clients):
        return rotation(self.shift)(labels, clients)


@pytest.mark.parametrize("make", [rotation, lambda shift: Rotation(shift).split])
def test_the_cache_tells_functions_with_other_variables_apart(make, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path))
    labels = np.zeros(10, dtype=np.int64)
    for shift in (0, 1):
        parts = p.cached_split(make(shift), labels, slow_seconds=0, clients=2)
        assert same(parts, rotation(shift)(labels, 2))


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
@pytest.mark.parametrize("alpha", [1e-4, 1e-6])
def test_equal_parts_of_hybrid_refuse_shares_that_underflow(alpha):
    """Such clients would have almost IID data, and not one class each."""
    labels = np.repeat(np.arange(10), 100)
    with pytest.raises(InfeasiblePartition, match=f"hybrid: with alpha {alpha:g}"):
        p.hybrid(labels, 20, 0.5, 3, alpha=alpha, hybrid_share="equal_per_client")


@pytest.mark.filterwarnings("error")
def test_class_mixes_of_a_column_may_underflow():
    groups = np.arange(100) % 4
    parts = p.column(np.arange(100) % 3, 4, groups, alpha=1e-6, seed=0)
    assert all(len(part) > 0 for part in parts)
