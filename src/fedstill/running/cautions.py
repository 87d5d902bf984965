"""What a run will not do, or not measure, though nothing is wrong with its settings: said when one
begins.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import torch

from fedstill.running.network_checks import notes_on_network
from fedstill.running.preparation import Prepared

log = logging.getLogger("fedstill.run")

TOO_FAST = 10
"""How many times a stage's own learning rate makes one doubtful where the optimiser is not SGD, as
Adam is: ``[plan]`` reaches every stage.
"""

NAMED = 5
"""The most classes that are named in one sentence."""


def cautions(prepared: Prepared) -> Iterator[str]:
    """What of a run's method does nothing there (``Method.setting_warnings``), and which classes
    cannot be learned or tested.

    Of real sites' data nothing is known. What reading the data left out is in ``Prepared.notes``.
    """
    if caution := prepared.settings.method.setting_warnings(prepared.world):
        yield f"method {prepared.settings.named.method.label}: {caution}"
    sites, names, world = prepared.sites, prepared.dataset.classes, prepared.world
    for spec in dict.fromkeys((world.server_model, *world.client_models)):
        yield from notes_on_network(spec, sites)
    for stage, plan in world.plans.items():
        if plan.patience and not plan.validation:
            how = f"set plan.{stage}.validation, 0.1 say"
            yield (
                f"plan.{stage}.patience = {plan.patience} does nothing without held-out data to "
                f"score by; {how}"
            )
        own = prepared.settings.method.plans.get(stage, plan)
        if plan.optimiser == own.optimiser != "sgd" and plan.lr >= TOO_FAST * own.lr:
            how = f"set plan.{stage}.lr, or plan.{stage}.optimiser = 'sgd'"
            yield (
                f"plan.{stage}.lr = {plan.lr} is for {plan.optimiser} here, which has {own.lr} by "
                f"default; {how}"
            )
    if prepared.settings.on_sites:
        return
    yield from _of_names(prepared)
    trained, test = _counts(sites.train.labels, len(names)), sites.common_test
    if test is None or not len(test):
        if not sites.own_tests:
            yield (
                "data: there are no test examples, so no accuracy is measured; give some to the "
                "split 'test'"
            )
        return
    tested = _counts(test.labels, len(names))
    if unseen := [name for name, n, t in zip(names, trained, tested, strict=True) if t and not n]:
        yield f"data: no training example is of {_named(unseen)}, so no model can learn it"
    if untested := [name for name, n, t in zip(names, trained, tested, strict=True) if n and not t]:
        yield (
            f"data: no test example is of {_named(untested)}, so whether it is forgotten is not "
            "measured"
        )


def _of_names(prepared: Prepared) -> Iterator[str]:
    """Classes that no example is of; names of classes, clients or values alike but for blanks and
    capitals.
    """
    data = prepared.dataset
    splits = [own for own in (data.train, data.test, data.validation) if own is not None]
    counts = _counts(torch.cat([own.labels for own in splits]), len(data.classes))
    if absent := [name for name, n in zip(data.classes, counts, strict=True) if not n]:
        begins = next((name for name, n in zip(data.classes, counts, strict=True) if n), "")
        numbered = data.classes == tuple(map(str, range(len(counts)))) and begins
        why = f"labels from 0 to {len(counts) - 1} are {len(counts)} classes" if counts[0] else ""
        why = why or f"labels count from 0, and yours begin at {begins}"
        yield f"data: no example is of {_named(absent)}{f'; {why}' if numbered else ''}"
    each = {"classes": data.classes, "clients": prepared.client_names}
    each |= {f"values of {column!r}": values for column, values in data.about.categories}
    for what, own in each.items():
        plain: dict[str, str] = {}
        for name in own:
            if (other := plain.setdefault(" ".join(name.split()).lower(), name)) != name:
                yield (
                    f"data: {what} {other!r} and {name!r} differ only in blanks or capitals, and "
                    "count as two"
                )


def say_cautions(prepared: Prepared) -> None:
    """Say them when a run begins, and what reading the data left out."""
    for caution in (
        *(f"data: {said}" for said in prepared.dataset.about.cautions),
        *cautions(prepared),
    ):
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
