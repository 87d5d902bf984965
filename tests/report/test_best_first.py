"""The order of a comparison's lines where some methods leave each client a model of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedstill
import toys
from fedstill.report.summary import order_note, ranked, ranking_column
from fedstill.report.table_files import results_table
from fedstill.report.terminal import comparison_table
from fedstill.running.runs import Group, groups


def compared(folder: Path, *methods: str, **changes: object) -> list[Group]:
    for name in methods:
        fedstill.run(
            toys.toy(name, **toys.suited(name), **changes), folder / name, data=toys.blobs()
        )
    return groups([folder / name for name in methods])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    return compared(tmp_path_factory.mktemp("three"), "fedavg", "lg_fedavg", "ditto")


def test_lines_are_best_first_by_what_clients_have_of_it(three: list[Group]) -> None:
    ordered = ranked(three)
    by = ranking_column(three)
    assert by is not None
    assert by.key == "personal_accuracy"
    worth = [g.values("personal_accuracy")[0] for g in ordered]
    assert worth == sorted(worth, reverse=True)
    assert {g.label for g in ordered} == {"fedavg", "lg_fedavg", "ditto"}
    assert 'ranked by "for the clients"' in order_note(by)
    assert [line[0] for line in results_table(three).lines] == [g.label for g in ordered]
    assert [row[0] for row in comparison_table(three).rows] == [g.label for g in ordered]


def test_own_tests_count_before_the_mix_of_classes(
    three: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_tests = {"fedavg": [0.9], "lg_fedavg": [0.2], "ditto": []}
    values = Group.values

    def own(group: Group, key: str) -> list[float]:
        return on_tests[group.label] if key == "own_test_accuracy" else values(group, key)

    monkeypatch.setattr(Group, "values", own)
    ordered = ranked(three)
    by = ranking_column(three)
    assert by is not None
    assert by.key == "own_test_accuracy"
    assert [g.label for g in ordered] == ["fedavg", "lg_fedavg", "ditto"]
    assert comparison_table(three).head[1] == "own tests [%]"


def test_where_there_is_one_model_lines_stay_as_asked_for(tmp_path: Path) -> None:
    two = compared(tmp_path, "fedprox", "fedavg")
    assert ranked(two) == two
    assert ranking_column(two) is None
    assert order_note(None) == ""
