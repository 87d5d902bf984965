"""What normalises pixels, and which of its data a client holds out, where a config says it."""

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
    experiment = toys.toy(method, data={"public": 50, **data}, topology={"clients": 4})
    return prepare(resolve(experiment), dataset or toys.blobs())


def colour() -> Dataset:
    draw = np.random.default_rng(0)

    def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(draw.integers(0, 256, (n, 3, 4, 4), dtype=np.uint8)), torch.arange(
            n
        ) % 5

    return from_tensors("colour", some(300), some(50), mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("given", "mean", "std"),
    [
        ({}, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        ({"mean": (0.5,)}, (0.5, 0.5, 0.5), (0.4, 0.5, 0.6)),
        ({"std": (0.25, 0.5, 1)}, (0.1, 0.2, 0.3), (0.25, 0.5, 1.0)),
        ({"mean": (0.5,), "std": (0.5,)}, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ],
)
def test_every_image_is_normalised_by_what_the_config_says(
    given: dict[str, object], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    prepared = ready(colour(), **given)
    assert prepared.sites.public is not None
    assert prepared.sites.common_test is not None
    centre, spread = (np.array(v, dtype=np.float64).reshape(3, 1, 1) for v in (mean, std))
    for examples in (prepared.sites.train, prepared.sites.public, prepared.sites.common_test):
        expected = (examples.values.numpy() / 255 - centre) / spread
        np.testing.assert_allclose(
            prepared.sites.inputs.plain(examples.values).numpy(), expected, atol=2e-6
        )
    facts = Facts.known_by(prepared)
    assert (facts.mean, facts.std) == (mean, std), "sites with data of their own are told the same"
    assert facts.inputs(prepared.settings) == prepared.sites.inputs


def test_noise_is_standard_normal_after_this_normalisation() -> None:
    found = ready(
        method="toy_logits", public=2000, public_from="noise", mean=(0.4,), std=(0.1,)
    ).sites.public
    assert found is not None
    values = (found.values.double() / 255 - 0.4) / 0.1
    assert float(values.std()) == pytest.approx(1.0, abs=0.02)
    assert float(values.mean()) == pytest.approx(0.0, abs=0.02)


def test_training_sees_them(tmp_path: Path) -> None:
    def model(name: str, **data: object) -> bytes:
        run(toys.toy(data=data), tmp_path / name, data=toys.blobs())
        return (tmp_path / name / "model.safetensors").read_bytes()

    own = model("own")
    assert model("same", mean=(0.5,), std=(0.5,)) == own, "the blobs' own are .5 and .5"
    assert model("others", mean=(0.3,), std=(0.2,)) != own


def test_a_key_that_is_unset_is_not_written(tmp_path: Path) -> None:
    assert not {"mean", "std", "held_out"} & set(tomllib.loads(resolve(toys.toy()).toml)["data"])
    said = {"mean": (0.5,), "std": (0.25,), "held_out": "last"}
    written = tomllib.loads(resolve(toys.toy(data=said)).toml)["data"]
    assert {k: written[k] for k in said} == {"mean": [0.5], "std": [0.25], "held_out": "last"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"mean": (0.5, 0.5)},
            r"^data.mean has 2 numbers, and images of colour have 3 channel\(s\); give 1 or 3$",
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
def test_what_cannot_normalise_is_refused_in_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        ready(colour(), **given)


SPLIT = {"kind": "hiper", "alpha": 1.0, "seed": 42}


def halves(prepared: Prepared, client: int) -> list[tuple[list[int], list[int]]]:
    """(trained on, held out) of a client in each of its stages, as positions among all."""
    found = []
    for stage in prepared.settings.schedule(1, prepared.world):
        if client in stage.clients:
            share = prepared.settings.plans[stage.name].validation
            division = prepared.sites.division(client, share)
            found.append((division.train.tolist(), division.held_out.tolist()))
    return found


def test_held_out_are_the_last_of_each_part_whatever_the_seed() -> None:
    for seed in (1, 2):
        experiment = toys.toy(
            "hiper_fedkd", data={"public": 50, "held_out": "last"}, topology={"clients": 4}
        )
        prepared = prepare(resolve(replace(experiment, seed=seed, partition=SPLIT)), toys.blobs())
        for client, part in enumerate(prepared.sites.split.tensors()):
            cut = len(part) * 4 // 5
            assert halves(prepared, client) == [(part[:cut].tolist(), part[cut:].tolist())] * 2


def test_held_out_are_drawn_from_the_seed_where_nothing_is_said() -> None:
    experiment = toys.toy(
        "hiper_fedkd", data={"public": 50}, topology={"clients": 4}, partition=SPLIT
    )
    one, two = (prepare(resolve(replace(experiment, seed=s)), toys.blobs()) for s in (1, 2))
    assert halves(one, 0) == halves(prepare(resolve(replace(experiment, seed=1)), toys.blobs()), 0)
    kept, held = halves(one, 0)[0]
    assert sorted(kept + held) == sorted(one.sites.positions(0).tolist())
    assert halves(one, 0)[0] != halves(two, 0)[0]


def test_a_client_keeps_one_example_and_holds_one_out(tmp_path: Path) -> None:
    split = ClientSplit.of_parts([np.arange(2), np.arange(1)])
    sites = replace(ready(held_out="last").sites, split=split)
    for share, kept in ((0.1, 1), (0.5, 1), (0.9, 1), (0.0, 2)):
        division = sites.division(0, share)
        assert [len(division.train), len(division.held_out)] == [kept, 2 - kept]
    one = sites.division(1, 0.5)
    assert [len(one.train), len(one.held_out)] == [1, 0], "of one example none is held out"


def test_hipers_recipe_has_the_notebooks_pixels_and_their_split_for_every_seed(
    tmp_path: Path,
) -> None:
    """The public images, the clients' parts and their validation sets, from NumPy and torch
    alone.
    """
    recipe, blobs = recipes.load_recipe("hiper/table1"), toys.blobs_of(8, size=600)
    pool, public = public_split(600, 100, seed=42)
    parts = hiper(blobs.train.labels[torch.from_numpy(pool)].numpy(), 4, 1.0, seed=42)
    for variant in recipe.variants(
        [("Imp. 2", "alpha 1.0")], [1, 2], {"data.public": 100}, tmp_path
    ):
        prepared = prepare(variant.settings, blobs)
        assert (prepared.sites.inputs.mean, prepared.sites.inputs.std) == ((0.5,), (0.5,))
        assert prepared.sites.public is not None
        assert torch.equal(
            prepared.sites.public.values, blobs.train.values[torch.from_numpy(public)]
        )
        for client, part in enumerate(parts):
            cut = int(0.8 * len(part))
            assert halves(prepared, client) == [(part[:cut].tolist(), part[cut:].tolist())] * 2
