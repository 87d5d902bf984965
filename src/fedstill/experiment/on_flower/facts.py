"""Facts that all sites must agree on, though none sees all data: classes, shapes, pixels, the public set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.data.examples import Dataset, examples_digest
from fedstill.data.inputs import Inputs
from fedstill.errors import Refused
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.preparing.public_data import Wanted, copied
from fedstill.records import Examples


@dataclass(frozen=True)
class Facts:
    """What every site must share.

    ``classes``: names, in the order of their ids. ``shape``: (channels, height, width) of an image. ``mean``, ``std``:
    what normalises its pixels. ``public``: SHA-256 of the public set, empty if there is none.
    """

    classes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    public: str = ""

    @staticmethod
    def known_by(prepared: Prepared) -> Facts:
        """What the server knows, and every site must share."""
        data, public = prepared.dataset, prepared.sites.public
        shape = tuple(data.train.values.shape[1:])
        return Facts(data.classes, shape, data.mean, data.std, examples_digest(public) if public is not None else "")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Facts:
        """The facts in a request; raises Refused if they are none."""
        try:
            texts = [str(c) for c in given.get("classes", ())]
            shape = tuple(int(v) for v in given.get("shape", ()))
            mean, std = (tuple(float(v) for v in given.get(k, ())) for k in ("mean", "std"))
            return Facts(tuple(texts), shape, mean, std, str(given.get("public", "")))
        except (TypeError, ValueError) as error:
            raise Refused(f"the request's facts about data are malformed: {error}") from error

    def plain(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)

    def inputs(self, settings: Settings) -> Inputs:
        """How images become inputs, the same at every site."""
        return Inputs(self.mean, self.std, tuple(settings.data.augment))


def labels_of(own: Dataset, examples: Examples, facts: Facts) -> Tensor:
    """A site's labels as the ids that all sites share: by class name, or as they are where the site has numbers only.

    Raises Refused for images of another shape, or a class that the others don't know.
    """
    if tuple(examples.values.shape[1:]) != facts.shape:
        raise Refused(f"images at this site have shape {tuple(examples.values.shape[1:])}, not {facts.shape}")
    numbered = own.classes == tuple(str(i) for i in range(len(own.classes)))
    if numbered and len(own.classes) <= len(facts.classes):
        return examples.labels
    unknown = [c for c in own.classes if c not in facts.classes]
    if unknown:
        raise Refused(f"this site has a class {unknown[0]!r} that the server does not list")
    ids = torch.tensor([facts.classes.index(c) for c in own.classes], dtype=torch.int64)
    return ids[examples.labels]


def public_of(settings: Settings, copy: str, facts: Facts) -> Examples | None:
    """The public set at a site, read from its own copy; None in a run that has none.

    Raises Refused if there is no copy here, or it is not the server's set, image by image.
    """
    if not facts.public:
        return None
    if not facts.shape:
        raise Refused(f"the request's facts about data are malformed: shape {facts.shape}")
    public = copied(settings, copy, Wanted(facts.shape, len(facts.classes), facts.mean, facts.std))
    if public is None:
        raise Refused("the run has a public set: set public, your copy of it, in this site's site.toml")
    if examples_digest(public) != facts.public:
        raise Refused("the public set at this site is not the server's: copy the server's folder again")
    return public
