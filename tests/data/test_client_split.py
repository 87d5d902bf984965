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
    """A split whose positions are the numbers of the lists."""
    return ClientSplit.of_parts([np.array(labels, dtype=np.int64) for labels in lists])


@given(LISTS)
@settings(max_examples=50, deadline=None)
def test_a_split_is_what_the_list_is(lists: list[list[int]]) -> None:
    parts = split_of(lists)
    assert [part.tolist() for part in parts] == lists
    assert [part.tolist() for part in parts[1:]] == lists[1:]
    assert [part.tolist() for part in parts.tensors()] == lists
    sizes = [*map(len, lists)]
    assert len(parts) == len(lists)
    assert parts[-1].tolist() == lists[-1]
    assert parts.sizes.tolist() == sizes
    assert ClientSplit.of_parts(parts) is parts
    assert parts.owners.tolist() == np.repeat(np.arange(len(lists)), sizes).tolist()
    with pytest.raises(IndexError, match=f"client {len(lists)}"):
        parts[len(lists)]

    enlarged = parts.with_examples(0, np.array([9, 8]))
    first_list, *further_lists = lists
    assert [part.tolist() for part in enlarged] == [[*first_list, 9, 8], *further_lists]
    assert [part.tolist() for part in parts] == lists, "the parts before stay as they were"


@given(LISTS)
@settings(max_examples=50, deadline=None)
def test_label_counts_are_what_the_table_is(lists: list[list[int]]) -> None:
    table = [[labels.count(label) for label in range(4)] for labels in lists]
    parts = split_of(lists)
    positions = ClientSplit(np.arange(len(parts.positions)), parts.ends)

    counts = positions.label_counts(parts.positions, 4)

    assert [*counts] == counts[:] == table == counts.table().tolist()
    assert counts.key == LabelCounts.of_table(table, 4).key
    assert counts.sizes.tolist() == [*map(len, lists)]
    assert counts.classes_held.tolist() == [len(set(labels)) for labels in lists]
    assert positions.label_table(torch.from_numpy(parts.positions), 4).tolist() == table


@given(LISTS, st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_mean_shares_give_what_a_shared_model_is_worth_to_the_clients(
    lists: list[list[int]], is_known: list[bool]
) -> None:
    parts = split_of(lists)
    accuracy = np.array([0.1, 0.25, 0.6, 1.0])
    counts = LabelCounts.of_labels(parts.positions, parts.ends, 4)
    shared = dict.fromkeys(range(len(lists)), np.where(is_known, accuracy, np.nan))
    client_accuracies = personal_accuracies(shared, counts.table().tolist())
    expected = np.nan
    if client_accuracies:
        expected = np.mean([*client_accuracies.values()])

    worth = float(counts.mean_shares(np.array(is_known)) @ accuracy)

    assert worth == pytest.approx(expected, nan_ok=True)


def test_another_data_set_does_not_fit_a_split() -> None:
    client_split = ClientSplit(np.array([2, 0]), np.array([1, 2]))
    split = StoredSplit(client_split, np.array([7, 5]))
    assert split.fits(np.array([5, 6, 7]), 2)
    assert not split.fits(np.array([5, 6, 7]), 3), "another number of clients"
    assert not split.fits(np.array([7, 6, 5]), 2), "other labels"
    assert not split.fits(np.array([5, 6]), 2), "fewer examples"
