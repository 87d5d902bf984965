"""What is said of the machine that a run was made on."""

from pathlib import Path

import torch

from fedstill.running.same_run import processor

TOLD = "processor\t: {}\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"


def test_generations_that_share_a_name_are_told_apart(tmp_path: Path) -> None:
    described = tmp_path / "cpuinfo"
    named = []
    for model in (1, 17):
        described.write_text("".join(TOLD.format(core, model) for core in range(2)))
        named.append(processor(described))
    instructions = torch.backends.cpu.get_cpu_capability()
    assert named == [f"AMD EPYC (family 25, model {model}, {instructions})" for model in (1, 17)]


def test_where_linux_describes_none_the_name_is_pythons(tmp_path: Path) -> None:
    name, _, instructions = processor(tmp_path / "nothing").rpartition(" (")
    assert name
    assert instructions == f"{torch.backends.cpu.get_cpu_capability()})"
