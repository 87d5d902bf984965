"""A site's own data as the run has them: read by the run's keys, checked against its facts,
standardised by these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.data.examples import Dataset, examples_digest
from fedstill.data.form import MANY
from fedstill.data.sources import load_dataset
from fedstill.errors import Refused
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.on_flower.facts import Facts
from fedstill.experiment.preparing.alike import form_like
from fedstill.experiment.preparing.moments import moments
from fedstill.experiment.preparing.public_data import NOISE, Wanted, copied
from fedstill.experiment.preparing.standardising import STANDARDISED, Standard, unscaled
from fedstill.files import digest
from fedstill.records import Examples


@dataclass(frozen=True)
class OwnData:
    """What a site has: the data set as it was read, its examples as the run has them, and the
    public set.

    ``by``: how numbers were standardised; of sums that are still to be sent, mean and spread are
    empty.
    """

    read: Dataset
    train: Examples
    test: Examples
    public: Examples | None
    by: Standard


def own_data(settings: Settings, facts: Facts, data: str, public: str, tokenizer: str) -> OwnData:
    """A site's data, given the places of its own file or folder, its copy of the public set, and of
    the tokenizer.

    Raises Refused in one line for examples that are not of the kind, shape, columns, vocabulary or
    classes of the run, and for copies that are not the server's.
    """
    form = form_of(settings, facts, tokenizer)
    own = read_alike(settings, facts, data, form)
    by = standard_of(settings, own, facts)
    if by.origin == "summed" and not by.mean:  # the sums come first, and count what is known only
        return OwnData(own, own.train, own.test, None, by)
    return OwnData(
        own, by.of(own.train), by.of(own.test), public_of(settings, public, facts, form, by), by
    )


def read_alike(
    settings: Settings, facts: Facts, data: str, form: Mapping[str, Any], **more: Any
) -> Dataset:
    """A file or folder of a site as the run's form says, its labels as the ids that all sites
    share.

    more: further options of reading. Raises Refused for other examples than the run's.
    """
    label = (
        {"label_column": settings.data.label_column} if settings.data.label_column and form else {}
    )
    size = {"size": settings.data.size} if settings.data.size else {}
    own = load_dataset(data, **({} if ".py:" in data else {**form, **label, **size, **more}))
    _refuse_unlike(own, facts)
    train, test = (replace(e, labels=labels_of(own, e, facts)) for e in (own.train, own.test))
    return replace(own, train=train, test=test)


def form_of(settings: Settings, facts: Facts, tokenizer: str) -> dict[str, Any]:
    """How the site reads its own file: as the run's ``[data]`` says, with the columns and names of
    the facts.
    """
    form = form_like(settings.data, facts.about)
    if facts.kind == "text" and form["tokenizer"].endswith(".json"):
        form["tokenizer"] = _own_tokenizer(tokenizer, facts)
    return form


def _own_tokenizer(copy: str, facts: Facts) -> str:
    if not copy:
        raise Refused(
            "texts of this run need a tokenizer's file: set tokenizer, your copy of it, in this "
            "site's site.toml"
        )
    try:
        same = digest(Path(copy).read_bytes()) == facts.tokenizer
    except OSError as error:
        raise Refused(
            f"this site's tokenizer cannot be read: {error.strerror}; correct it in site.toml"
        ) from error
    if not same:
        raise Refused(
            "the tokenizer at this site is not the server's: copy the server's file again"
        )
    return copy


def _refuse_unlike(own: Dataset, facts: Facts) -> None:
    """Raise Refused for examples of another kind, vocabulary or inputs than the run's."""
    many = MANY[facts.kind]
    if own.about.kind != facts.kind:
        raise Refused(
            f"this site has {own.many}, and the run is about {many}; correct data in its site.toml"
        )
    if own.vocabulary != facts.vocabulary:
        raise Refused(
            f"texts at this site have {own.vocabulary:,} token ids, not {facts.vocabulary:,}"
        )
    if facts.features and own.about.features != facts.features:
        theirs = next(name for name in facts.features if name not in own.about.features)
        raise Refused(f"tables at this site have no input {theirs!r}; correct its columns")


def standard_of(settings: Settings, own: Dataset, facts: Facts) -> Standard:
    """By what this site's numbers are standardised: the facts' mean and spread, or its own where
    the run says so.

    Raises Refused where the request says otherwise than the run's configuration.
    """
    if facts.kind in ("image", "text"):
        return Standard()
    asked = settings.data.standardise or (
        "declared" if facts.kind in STANDARDISED or facts.mean else "none"
    )
    if facts.origin != asked:
        raise Refused(
            f"the request has data.standardise = {facts.origin!r}, and the run's configuration "
            f"{asked!r}"
        )
    if facts.origin == "own":
        mine = moments(own.train.values, own.about.marks)
        return Standard("own", mine.mean, mine.std)
    if facts.origin == "none":
        return unscaled(settings, own.train)
    if not facts.mean and facts.origin != "summed":
        raise Refused(
            f"the request has no mean and spread, by which {MANY[facts.kind]} are standardised"
        )
    return Standard(facts.origin, facts.mean, facts.std)


def labels_of(own: Dataset, examples: Examples, facts: Facts) -> Tensor:
    """A site's labels as the ids that all sites share: by class name, or as they are where the site
    has numbers only.

    Raises Refused for examples of another shape, or a class that the others don't know.
    """
    if tuple(examples.values.shape[1:]) != facts.shape:
        raise Refused(
            f"{MANY[facts.kind]} at this site have shape {tuple(examples.values.shape[1:])}, not "
            f"{facts.shape}"
        )
    numbered = own.classes == tuple(str(i) for i in range(len(own.classes)))
    if numbered and len(own.classes) <= len(facts.classes):
        return examples.labels
    unknown = [c for c in own.classes if c not in facts.classes]
    if unknown:
        raise Refused(f"this site has a class {unknown[0]!r} that the server does not list")
    ids = torch.tensor([facts.classes.index(c) for c in own.classes], dtype=torch.int64)
    return ids[examples.labels]


def public_of(
    settings: Settings, copy: str, facts: Facts, form: Mapping[str, Any], by: Standard
) -> Examples | None:
    """The public set at a site, read from its own copy; None in a run that has none.

    form: how the site reads files that hold no images. Raises Refused if there is no copy here, or
    it is not the server's set, example by example.
    """
    if not facts.public:
        return None
    if not facts.shape:
        raise Refused(f"the request's facts about data are malformed: shape {facts.shape}")
    wanted = Wanted(facts.shape, len(facts.classes), facts.mean, facts.std, facts.about, form)
    public = copied(settings, copy, wanted)
    if public is None:
        raise Refused(
            "the run has a public set: set public, your copy of it, in this site's site.toml"
        )
    if settings.data.public_from != NOISE:
        public = by.of(public)
    if examples_digest(public) != facts.public:
        raise Refused(
            "the public set at this site is not the server's: copy the server's folder again"
        )
    return public
