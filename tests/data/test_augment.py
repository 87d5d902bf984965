"""Augmentation: exact pixels, the papers' order of steps, and draws that come from the given
generator alone.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import ConfigError, UnknownName
from fedstill.data.inputs import STEPS, augment, check_steps, normalise

MEAN = (0.1, 0.2, 0.3)
STD = (0.5, 0.6, 0.7)
PLAIN = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
CHOSEN = ("rotation", "flip", "crop", "cutout")


def batch(count=64, side=32):
    """Random images of three channels without a black pixel."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, 3, side, side)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)


def run(images, steps, seed=0, mean=MEAN, std=STD):
    """The images after augmentation and normalisation."""
    return augment(images, steps, mean, std, torch.Generator().manual_seed(seed))


def pixels(images, steps, seed=0):
    """The augmented images as bytes again."""
    return (run(images, steps, seed, *PLAIN) * 255).round().to(torch.uint8)


def test_normalise_is_the_formula():
    images = batch()
    mean = torch.tensor(MEAN).double().view(3, 1, 1)
    std = torch.tensor(STD).double().view(3, 1, 1)
    expected = (images.double() / 255 - mean) / std

    normalised = normalise(images, MEAN, STD)

    assert normalised.dtype == torch.float32
    # Five roundings to float32 (of the mean, the spread and each operation), 2^-24 each, on numbers
    # of less than 3.
    assert (normalised.double() - expected).abs().max() < 5 * 3 * 2**-24
    assert torch.equal(run(images, ()), normalised)


def test_flip_mirrors_about_half_of_the_images():
    images = batch(400, side=8)
    out = pixels(images, ["flip"])
    unchanged = (out == images).flatten(1).all(1)
    turned = (out == images.flip(3)).flatten(1).all(1)
    assert bool((unchanged | turned).all())
    assert 150 < int(turned.sum()) < 250


@pytest.mark.parametrize(("step", "mode"), [("crop", "constant"), ("crop_reflect", "reflect")])
def test_crop_is_a_window_of_the_padded_image(step, mode):
    images = batch(300)
    padded = torch.nn.functional.pad(images.float(), (4, 4, 4, 4), mode=mode).to(torch.uint8)
    windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # (B, C, 9, 9, H, W)

    cropped = pixels(images, [step])[:, :, None, None]

    matches = (cropped == windows).flatten(4).all(4).all(1)  # (B, 9, 9)
    assert bool(matches.flatten(1).any(1).all())
    offsets = matches.any(0)
    assert bool(offsets.any(0).all()), "every column offset occurs"
    assert bool(offsets.any(1).all()), "every row offset occurs"


def test_cutout_is_one_square_of_16_that_is_zero_after_normalisation():
    images = batch(200)
    out = run(images, ["cutout"])
    uncut = normalise(images, MEAN, STD)

    hole = (out == 0).all(1)
    assert torch.equal(out, torch.where(hole[:, None], torch.zeros(()), uncut))
    rows = hole.any(2).sum(1)
    columns = hole.any(1).sum(1)
    assert torch.equal(hole.flatten(1).sum(1), rows * columns)
    assert int(rows.max()) == int(columns.max()) == 16
    assert int(rows.min()) >= 8
    assert len(torch.unique(hole.flatten(1).int(), dim=0)) > 100


def test_padding_is_black_before_normalisation():
    white = torch.full((100, 3, 32, 32), 255, dtype=torch.uint8)
    values = torch.unique(run(white, ["crop"]).transpose(0, 1).flatten(1), dim=1)
    black = normalise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), MEAN, STD).view(3)
    bright = normalise(white[:1, :, :1, :1], MEAN, STD).view(3)
    assert torch.equal(values, torch.stack([black, bright], 1))


def test_rotation_turns_by_at_most_15_degrees_about_the_centre():
    spot = torch.zeros(500, 1, 33, 33, dtype=torch.uint8)
    spot[:, :, 16, 16] = 255
    turned_spot = run(spot, ["rotation"], mean=(0.0,), std=(1.0,)).round() * 255
    assert torch.equal(turned_spot.to(torch.uint8), spot)

    bar = torch.zeros(500, 1, 33, 33, dtype=torch.uint8)
    bar[:, :, 16, 28] = 255  # 12 to the right of the centre
    out = run(bar, ["rotation"], mean=(0.0,), std=(1.0,))[:, 0] > 0.5
    _, rows, columns = out.nonzero(as_tuple=True)
    assert int((rows - 16).abs().max()) == 3  # 12 · sin 15° = 3.1
    assert int((columns - 16).min()) >= 11
    assert len(torch.unique(rows)) == 7


def test_rotation_leaves_black_corners_and_crop_moves_them():
    white = torch.full((50, 3, 32, 32), 255, dtype=torch.uint8)
    brightness = float(run(white, ["rotation"], 0, *PLAIN).mean())
    brightness_of_crops = float(run(white, ["crop", "rotation"], 0, *PLAIN).mean())
    assert 0.9 < brightness < 1
    assert brightness_of_crops < brightness


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["crop", "flip", "rotation", "cutout"]), unique=True),
    seed=st.integers(0, 2**63 - 1),
    side=st.sampled_from([8, 28, 32]),
)
def test_draws_come_from_the_generator_alone(steps, seed, side):
    images = batch(6, side)
    original_images = images.clone()
    state = torch.get_rng_state()

    out = run(images, steps, seed)

    assert out.shape == images.shape
    assert out.dtype == torch.float32
    assert torch.equal(out, run(images, steps, seed))
    assert torch.equal(out, run(images, steps[::-1], seed))
    assert torch.equal(images, original_images)
    assert torch.equal(state, torch.get_rng_state())


def test_every_image_has_its_own_draw():
    copies = batch(1).expand(64, -1, -1, -1)
    assert len(torch.unique(pixels(copies, ["crop"]).flatten(1), dim=0)) > 30


def test_read_only_and_strided_images_are_taken():
    images = batch(4).to(memory_format=torch.channels_last)
    steps = ["crop", "flip", "cutout"]
    assert torch.equal(run(images, steps), run(images.contiguous(), steps))


def test_illegal_steps_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'flip'"):
        check_steps(["flipp"])
    with pytest.raises(ConfigError, match="crop_reflect"):
        check_steps(["crop", "crop_reflect"])
    check_steps([step for step in STEPS if step != "crop"])


def test_without_a_generator_each_batch_differs_and_torchs_generator_is_not_used():
    images = batch(64)
    torch_state = torch.get_rng_state()

    first = augment(images, CHOSEN, MEAN, STD, None)
    second = augment(images, CHOSEN, MEAN, STD, None)

    assert not torch.equal(first, second)
    assert torch.equal(torch_state, torch.get_rng_state())

    mirrored = augment(images, ("flip",), *PLAIN, None)
    unchanged = (mirrored == run(images, (), 0, *PLAIN)).flatten(1).all(1)
    assert 10 < int(unchanged.sum()) < 54
