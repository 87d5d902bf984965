"""What a run will not do, or not measure, though nothing is wrong with its settings: said when one begins."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import torch

from fedstill.experiment.preparing.prepared import Prepared

log = logging.getLogger("fedstill.run")

NAMED = 5
"""The most classes that are named in one sentence."""


def cautions(prepared: Prepared) -> Iterator[str]:
    """What of a run's method does nothing there (``Method.caution``), and which classes cannot be learned or tested.

    Of real sites' data nothing is known.
    """
    if caution := prepared.settings.method.caution(prepared.world):
        yield f"method {prepared.settings.named.method.label}: {caution}"
    sites, names = prepared.sites, prepared.dataset.classes
    if prepared.settings.on_sites:
        return
    trained, test = _counts(sites.train.labels, len(names)), sites.common_test
    if test is None or not len(test):
        if not sites.own_tests:
            yield "data: there are no test examples, so no accuracy is measured; give some to the split 'test'"
        return
    tested = _counts(test.labels, len(names))
    if unseen := [name for name, n, t in zip(names, trained, tested, strict=True) if t and not n]:
        yield f"data: no training example is of {_named(unseen)}, so no model can learn it"
    if untested := [name for name, n, t in zip(names, trained, tested, strict=True) if n and not t]:
        yield f"data: no test example is of {_named(untested)}, so whether it is forgotten is not measured"


def say_cautions(prepared: Prepared) -> None:
    """Say them when a run begins."""
    for caution in cautions(prepared):
        say_once(caution)


def _counts(labels: torch.Tensor, classes: int) -> list[int]:
    counts: list[int] = torch.bincount(labels.cpu(), minlength=classes).tolist()
    return counts


def _named(classes: Sequence[str]) -> str:
    """``class 'cat'``, or several, the first few by name."""
    some = ", ".join(map(repr, classes[:NAMED]))
    more = f" and {len(classes) - NAMED} more" if len(classes) > NAMED else ""
    return f"class{'es' * (len(classes) > 1)} {some}{more}"


@functools.cache
def say_once(caution: str) -> None:
    """Once a process: the runs of a comparison are alike."""
    log.warning("%s", caution)
