"""The data sets that have a name: one small function each, registered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedstill.core.fields import Count
from fedstill.core.registry import register
from fedstill.data.cache import Decoded, kept
from fedstill.data.dataset import Dataset
from fedstill.data.sources import catalog
from fedstill.data.sources.load import load_known
from fedstill.data.sources.splits import hold_out
from fedstill.data.sources.tensors import as_dataset
from fedstill.data.sources.verify import verified

# Digits: scikit-learn's 1,797 handwritten digits, which ship inside the library.


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


# The data sets that have a name: one small function each, registered.


Folder = str | Path | None


@register("dataset", "digits")
def digits(folder: Folder = None) -> Dataset:
    """1,797 handwritten digits, 8×8 grey, that ship with scikit-learn; a fifth is held out for the
    test.
    """
    known = catalog.DIGITS
    data = kept("digits", {"sums": known.sums}, lambda: verified("digits", read_digits(), known))
    return as_dataset("digits", data, known.mean, known.std)


@register("dataset", "mnist")
def mnist(folder: Folder = None) -> Dataset:
    """MNIST: 70,000 handwritten digits, 28×28 grey, 10 classes."""
    return load_known(catalog.MNIST, folder)


@register("dataset", "fashion-mnist")
def fashion_mnist(folder: Folder = None) -> Dataset:
    """Fashion-MNIST: 70,000 pieces of clothing, 28×28 grey, 10 classes."""
    return load_known(catalog.FASHION_MNIST, folder)


@register("dataset", "cifar10")
def cifar10(folder: Folder = None) -> Dataset:
    """CIFAR-10: 60,000 photographs, 32×32 RGB, 10 classes."""
    return load_known(catalog.CIFAR10, folder)


@register("dataset", "cifar100")
def cifar100(folder: Folder = None) -> Dataset:
    """CIFAR-100: 60,000 photographs, 32×32 RGB, 100 fine classes."""
    return load_known(catalog.CIFAR100, folder)


@register("dataset", "cinic10")
def cinic10(folder: Folder = None) -> Dataset:
    """CINIC-10: 270,000 photographs, 32×32 RGB, CIFAR-10's classes, a third each for train,
    validation and test.
    """
    return load_known(catalog.CINIC10, folder)


@register("dataset", "ham10000")
def ham10000(folder: Folder = None, size: Count = 32) -> Dataset:
    """HAM10000: 10,015 skin lesions, resized to size×size RGB, 7 very uneven classes; a fifth held
    out for the test.

    size: Height and width of an image.

    Reading: there is no official split for this use, and SFedKD does not say the image size.
    """
    return load_known(replace(catalog.HAM10000, shape=(3, size, size)), folder, size)


@register("dataset", "bloodmnist")
def bloodmnist(folder: Folder = None) -> Dataset:
    """BloodMNIST: 17,092 blood cells, 28×28 RGB, 8 classes."""
    return load_known(catalog.BLOODMNIST, folder)


@register("dataset", "pathmnist")
def pathmnist(folder: Folder = None) -> Dataset:
    """PathMNIST: 107,180 patches of colon tissue, 28×28 RGB, 9 classes."""
    return load_known(catalog.PATHMNIST, folder)
