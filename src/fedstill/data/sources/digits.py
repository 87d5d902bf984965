"""Digits: scikit-learn's 1,797 handwritten digits, which ship inside the library."""

from __future__ import annotations

import numpy as np

from fedstill.data.sources.decoded import Decoded
from fedstill.data.sources.held_out import hold_out


def read_digits() -> Decoded:
    """The digits as (1, 8, 8) images, a fifth of every class held out for the test.

    Reading: scikit-learn has no train/test split and values 0 to 16; they are scaled to 0 to 255
    and rounded.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    whole = Decoded({"train": (images, bunch.target.astype(np.int64))}, tuple(map(str, range(10))))
    return hold_out(whole)
