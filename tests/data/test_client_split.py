"""Parts in one array, and label counts by client: what lists and tables of them would be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.data.client_split import ClientSplit, LabelCounts
from fedstill.metrics.local_models import personal_accuracies
from fedstill.running.split_file import StoredSplit

LISTS = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=6)
"""Labels by client, of four classes."""


def split_of(lists: list[list[int]]) -> ClientSplit:
    return ClientSplit.of_parts([np.array(each, dtype=np.int64) for each in lists])


@given(LISTS)
@settings(max_examples=50, deadline=None)
def test_a_split_is_what_the_list_is(lists: list[list[int]]) -> None:
    parts = split_of(lists)
    assert [part.tolist() for part in parts] == lists
    assert [part.tolist() for part in parts[1:]] == lists[1:]
    assert [part.tolist() for part in parts.tensors()] == lists
    assert (len(parts), parts[-1].tolist(), parts.sizes.tolist()) == (
        len(lists),
        lists[-1],
        [*map(len, lists)],
    )
    assert ClientSplit.of_parts(parts) is parts
    assert parts.owners.tolist() == [c for c, each in enumerate(lists) for _ in each]
    with pytest.raises(IndexError, match=f"client {len(lists)}"):
        parts[len(lists)]
    more = parts.with_examples(0, np.array([9, 8]))
    assert [part.tolist() for part in more] == [[*lists[0], 9, 8], *lists[1:]]
    assert [part.tolist() for part in parts] == lists, "the parts before stay as they were"


@given(LISTS)
@settings(max_examples=50, deadline=None)
def test_label_counts_are_what_the_table_is(lists: list[list[int]]) -> None:
    table = [[each.count(c) for c in range(4)] for each in lists]
    parts = split_of(lists)
    positions = ClientSplit(np.arange(len(parts.positions)), parts.ends)
    counts = positions.label_counts(parts.positions, 4)
    assert [*counts] == counts[:] == table == counts.table().tolist()
    assert counts.key == LabelCounts.of_table(table, 4).key
    assert counts.sizes.tolist() == [*map(len, lists)]
    assert counts.classes_held.tolist() == [len(set(each)) for each in lists]
    assert positions.label_table(torch.from_numpy(parts.positions), 4).tolist() == table


@given(LISTS, st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_mean_shares_give_what_a_shared_model_is_worth_to_the_clients(
    lists: list[list[int]], known: list[bool]
) -> None:
    parts, accuracy = split_of(lists), np.array([0.1, 0.25, 0.6, 1.0])
    counts = LabelCounts.of_labels(parts.positions, parts.ends, 4)
    worth = float(counts.mean_shares(np.array(known)) @ accuracy)
    shared = dict.fromkeys(range(len(lists)), np.where(known, accuracy, np.nan))
    each = list(personal_accuracies(shared, counts.table().tolist()).values())
    assert worth == pytest.approx(np.mean(each) if each else np.nan, nan_ok=True)


def test_another_data_set_does_not_fit_a_split() -> None:
    split = StoredSplit(ClientSplit(np.array([2, 0]), np.array([1, 2])), np.array([7, 5]))
    assert split.fits(np.array([5, 6, 7]), 2)
    assert not split.fits(np.array([5, 6, 7]), 3), "another number of clients"
    assert not split.fits(np.array([7, 6, 5]), 2), "other labels"
    assert not split.fits(np.array([5, 6]), 2), "fewer examples"
