"""The keys of a config for the mean and spread of pixels, and for the examples that clients hold
out.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import toys
from fedstill.benchmark import recipes
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.data.client_split import ClientSplit
from fedstill.data.dataset import Dataset
from fedstill.data.partition import hiper, public_split
from fedstill.data.sources import from_tensors
from fedstill.flower.facts import Facts
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run


def ready(
    dataset: Dataset | None = None, method: object = "hiper_fedkd", **data: object
) -> Prepared:
    """A prepared run of four clients, with keys of its table ``[data]``."""
    experiment = toys.toy(method, data={"public": 50, **data}, topology={"clients": 4})
    return prepare(resolve(experiment), dataset or toys.blobs())


def colour() -> Dataset:
    """Random colour images of five classes."""
    draw = np.random.default_rng(0)

    def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
        images = draw.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8)
        return images, np.arange(count) % 5

    mean = [0.1, 0.2, 0.3]
    std = [0.4, 0.5, 0.6]
    return from_tensors("colour", examples(300), examples(50), mean=mean, std=std)


@pytest.mark.parametrize(
    ("options", "mean", "std"),
    [
        ({}, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        ({"mean": (0.5,)}, (0.5, 0.5, 0.5), (0.4, 0.5, 0.6)),
        ({"std": (0.25, 0.5, 1)}, (0.1, 0.2, 0.3), (0.25, 0.5, 1.0)),
        ({"mean": (0.5,), "std": (0.5,)}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ],
)
def test_every_image_is_normalised_by_what_the_config_says(
    options: dict[str, object], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    centre = np.array(mean, dtype=np.float64).reshape(3, 1, 1)
    spread = np.array(std, dtype=np.float64).reshape(3, 1, 1)

    prepared = ready(colour(), **options)

    sites = prepared.sites
    assert sites.public is not None
    assert sites.common_test is not None
    for examples in (sites.train, sites.public, sites.common_test):
        normalised = sites.inputs.plain(examples.values).numpy()
        expected = (examples.values.numpy() / 255 - centre) / spread
        np.testing.assert_allclose(normalised, expected, atol=2e-6)
    facts = Facts.known_by(prepared)
    assert (facts.mean, facts.std) == (mean, std), "sites with data of their own are told the same"
    assert facts.inputs(prepared.settings) == prepared.sites.inputs


def test_noise_is_standard_normal_after_this_normalisation() -> None:
    pixels = {"mean": (0.4,), "std": (0.1,)}
    prepared = ready(method="toy_logits", public=2000, public_from="noise", **pixels)
    noise = prepared.sites.public
    assert noise is not None
    values = (noise.values.double() / 255 - 0.4) / 0.1
    assert float(values.std()) == pytest.approx(1.0, abs=0.02)
    assert float(values.mean()) == pytest.approx(0.0, abs=0.02)


def test_training_sees_them(tmp_path: Path) -> None:
    def model(name: str, **data: object) -> bytes:
        run(toys.toy(data=data), tmp_path / name, data=toys.blobs())
        return (tmp_path / name / "model.safetensors").read_bytes()

    unset = model("unset")
    assert model("same", mean=(0.5,), std=(0.5,)) == unset, "the blobs have .5 and .5 themselves"
    assert model("others", mean=(0.3,), std=(0.2,)) != unset


def test_a_key_that_is_unset_is_not_written(tmp_path: Path) -> None:
    default_table = tomllib.loads(resolve(toys.toy()).toml)["data"]
    assert not {"mean", "std", "held_out"} & set(default_table)

    options = {"mean": (0.5,), "std": (0.25,), "held_out": "last"}
    table = tomllib.loads(resolve(toys.toy(data=options)).toml)["data"]
    assert table["mean"] == [0.5]
    assert table["std"] == [0.25]
    assert table["held_out"] == "last"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"mean": (0.5, 0.5)},
            r"^data.mean has 2 numbers, and images of colour have 3 channels; give 1 or 3$",
        ),
        ({"std": (0.5,) * 4}, r"^data.std has 4 numbers, and images of colour have 3"),
        ({"std": (0.5, 0.0, 0.5)}, r"^data.std = 0.0: input should be greater than 0$"),
        ({"std": (-1.0,)}, r"^data.std = -1.0: input should be greater than 0$"),
        (
            {"mean": (123.7,)},
            r"^data.mean = 123.7: input should be less than or equal to 1: pixels are numbers in "
            r"\[0, 1\] here$",
        ),
        (
            {"std": (0.5, 1e-300, 0.5)},
            r"^data.std = 1e-300: pixels are numbers in \[0, 1\] here; give 0.0001 or more$",
        ),
        ({"mean": (float("nan"),)}, r"^data.mean = nan: input should be a finite number$"),
        ({"std": (float("inf"),)}, r"^data.std = inf: input should be a finite number$"),
        ({"mean": ()}, r"^data.mean = \[\]: tuple should have at least 1 item"),
        ({"held_out": "first"}, r"^data.held_out = 'first': input should be 'last'$"),
    ],
)
def test_what_cannot_normalise_is_refused_in_one_line(
    options: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        ready(colour(), **options)


SPLIT = {"kind": "hiper", "alpha": 1.0, "seed": 42}


def halves(prepared: Prepared, client: int) -> list[tuple[list[int], list[int]]]:
    """(trained on, held out) of a client in each of its stages, as positions among all."""
    positions = []
    for stage in prepared.settings.schedule(1, prepared.world):
        if client in stage.clients:
            share = prepared.settings.plans[stage.name].validation
            division = prepared.sites.division(client, share)
            positions.append((division.train.tolist(), division.held_out.tolist()))
    return positions


def with_seed(seed: int, **data: object) -> Prepared:
    """A prepared run of HiPer, whose seed does not change the partition."""
    experiment = toys.toy(
        "hiper_fedkd",
        seed=seed,
        data={"public": 50, **data},
        topology={"clients": 4},
        partition=SPLIT,
    )
    return prepare(resolve(experiment), toys.blobs())


def cut_in_two(part: torch.Tensor, size: int) -> tuple[list[int], list[int]]:
    """The first positions of a part, and all others."""
    return part[:size].tolist(), part[size:].tolist()


def test_held_out_are_the_last_of_each_part_whatever_the_seed() -> None:
    for seed in (1, 2):
        prepared = with_seed(seed, held_out="last")
        for client, part in enumerate(prepared.sites.split.tensors()):
            expected = cut_in_two(part, len(part) * 4 // 5)
            assert halves(prepared, client) == [expected] * 2


def test_held_out_are_drawn_from_the_seed_where_nothing_is_said() -> None:
    prepared = with_seed(1)
    drawn_halves = halves(prepared, 0)
    assert drawn_halves == halves(with_seed(1), 0)
    assert drawn_halves[0] != halves(with_seed(2), 0)[0]

    trained_on, held_out = drawn_halves[0]
    assert sorted(trained_on + held_out) == sorted(prepared.sites.positions(0).tolist())


def test_a_client_keeps_one_example_and_holds_one_out() -> None:
    split = ClientSplit.of_parts([np.arange(2), np.arange(1)])
    sites = replace(ready(held_out="last").sites, split=split)
    for share, train_count in ((0.1, 1), (0.5, 1), (0.9, 1), (0.0, 2)):
        division = sites.division(0, share)
        assert [len(division.train), len(division.held_out)] == [train_count, 2 - train_count]
    division = sites.division(1, 0.5)
    assert [len(division.train), len(division.held_out)] == [1, 0], (
        "of one example none is held out"
    )


def test_hipers_recipe_has_the_notebooks_pixels_and_their_split_for_every_seed(
    tmp_path: Path,
) -> None:
    """The public images, the clients' parts and their validation sets, from NumPy and torch
    alone.
    """
    recipe = recipes.load_recipe("hiper/table1")
    blobs = toys.blobs_of(8, size=600)
    pool, public = map(torch.from_numpy, public_split(600, 100, seed=42))
    parts = hiper(blobs.train.labels[pool].numpy(), 4, 1.0, seed=42)
    cells = [("Imp. 2", "alpha 1.0")]

    for variant in recipe.variants(cells, [1, 2], {"data.public": 100}, tmp_path):
        prepared = prepare(variant.settings, blobs)
        sites = prepared.sites
        assert sites.inputs.mean == (0.5,)
        assert sites.inputs.std == (0.5,)
        assert sites.public is not None
        assert torch.equal(sites.public.values, blobs.train.values[public])
        for client, part in enumerate(parts):
            expected = cut_in_two(part, int(0.8 * len(part)))
            assert halves(prepared, client) == [expected] * 2
