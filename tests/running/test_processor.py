"""The description of a machine's processor, which a run records."""

from pathlib import Path

import torch

from fedstill.running.same_run import processor

CORE = "processor\t: {}\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"
"""A core as Linux describes it: its number and its model."""


def test_generations_that_share_a_name_differ_in_their_model(tmp_path: Path) -> None:
    description = tmp_path / "cpuinfo"
    instructions = torch.backends.cpu.get_cpu_capability()
    for model in (1, 17):
        description.write_text(CORE.format(0, model) + CORE.format(1, model))
        expected = f"AMD EPYC (family 25, model {model}, {instructions})"
        assert processor(description) == expected


def test_python_names_the_processor_if_linux_does_not_describe_it(tmp_path: Path) -> None:
    name, _, instructions = processor(tmp_path / "nothing").rpartition(" (")
    assert name
    assert instructions == f"{torch.backends.cpu.get_cpu_capability()})"
