"""The files of the benchmark of reading are data sets, and each cost is of all their examples."""

import dataclasses

import pytest
from benchmarks.reading import CASES, FEDSTILL, cells, measure

import fedstill

COUNT = 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_is_a_data_set_of_its_size(case, tmp_path):
    case.write(tmp_path / case.file, COUNT)
    data = fedstill.load_dataset(tmp_path / case.file)
    assert len(data.train) + len(data.test) == COUNT
    assert len(data.classes) == 10


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=lambda case: case.name)
@pytest.mark.slow
def test_costs_are_measured_in_processes_of_their_own(case):
    row = measure(case, COUNT)
    for cost in (row.fedstill, row.yardstick_cost):
        assert cost.examples == COUNT
        assert 0 < cost.start_peak <= cost.peak
        assert cost.seconds > 0
        assert cost.start_seconds > 0
    assert row.fedstill.start_peak > row.yardstick_cost.start_peak, "torch is imported"
    assert row.file_bytes > COUNT
    assert len(cells(row)) == 9


@pytest.mark.slow
def test_a_program_that_reads_only_a_part_is_an_error():
    half = dataclasses.replace(FEDSTILL, read="examples = len(open(path).readlines()) // 2\n")
    case = dataclasses.replace(CASES[1], yardstick=half)
    with pytest.raises(RuntimeError, match="of 40"):
        measure(case, COUNT)
