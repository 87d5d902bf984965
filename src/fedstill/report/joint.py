"""Runs that started from one model, in one t-SNE: what each method, or each split, does with the
same features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedstill.data.examples import stratified
from fedstill.errors import CorruptFile
from fedstill.experiment.measures.base import MEASURES_FOLDER
from fedstill.experiment.measures.tsne import embedded
from fedstill.report.features import GLOBALS, class_colour, class_name, dots, on_plane
from fedstill.report.figures import Figure, Style, named, plain
from fedstill.report.groups import Group
from fedstill.report.markup import Html, choice, escape, figure, section, sentence
from fedstill.report.measured import Look, last_looks, reading

RECEIVED, AGGREGATED = "received", "aggregated"
POINTS = 3000
"""So many points are embedded at most: the time grows faster than their number."""

ABOUT_JOINT = (
    "One t-SNE of the test examples' features: of the model that all these runs received, and of "
    "the local "
    "models of each run. By run: where a run's points lie on those of the received model, training "
    "kept "
    "its features; where they lie apart, training changed them. By class: whether the images of a "
    "class "
    "stay together."
)


@dataclass(frozen=True)
class Kept:
    """The features of one look: (n, D) of each model, and the images' labels (n,)."""

    look: Look
    features: Mapping[str, Tensor]
    labels: Tensor

    @property
    def group(self) -> Group:
        """The group of the run."""
        return self.look.group


def joint(groups: Sequence[Group], style: Style) -> Html | None:
    """A figure for each model from which several groups' runs started; None if there is no such
    model.
    """
    families = _families(
        [k for look in last_looks(groups, "tsne") if (k := _kept(look)) is not None]
    )
    if not families:
        return None
    figures = [
        figure(_figures(family, style), ABOUT_JOINT, _title(family), "joint") for family in families
    ]
    parts = [choice("joint", "Colour by", ["run", "class"]), *figures]
    return section("Runs that started from one model", sentence(ABOUT_JOINT), *parts, name="joint")


def _title(family: Sequence[Kept]) -> Html:
    """Which runs, and of which seed; the section says the rest."""
    return Html(
        escape(f"{', '.join(k.group.label for k in family)} (seed {family[0].look.run.seed})")
    )


def _kept(look: Look) -> Kept | None:
    """What the measure kept beside the journal; None where nothing was kept, or the file was left
    behind.
    """
    with reading(look) as event:
        name, labels = (
            Path(str(event.get("features") or "")).name,
            [int(v) for v in event["labels"]],
        )
    path = look.run.folder / MEASURES_FOLDER / name
    if not name or not path.is_file():
        return None
    try:
        features = safetensors.torch.load(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    shapes = {tuple(v.shape) for v in features.values()}
    if (
        RECEIVED not in features
        or len(shapes) != 1
        or features[RECEIVED].dim() != 2
        or len(features[RECEIVED]) != len(labels)
    ):
        raise CorruptFile(
            f"{path} is damaged: it must hold features of {len(labels)} images for each model"
        )
    return Kept(look, features, torch.tensor(labels))


def _families(kept: Sequence[Kept]) -> list[list[Kept]]:
    """Looks whose runs received the same model, two groups or more."""
    families: list[list[Kept]] = []
    for one in kept:
        own = one.features[RECEIVED]
        for family in families:
            first = family[0].features[RECEIVED]
            if first.shape == own.shape and torch.equal(first, own):
                family.append(one)
                break
        else:
            families.append([one])
    return [family for family in families if len(family) > 1]


def _figures(family: Sequence[Kept], style: Style) -> list[Figure]:
    """The embedding, coloured by run and by class."""
    models = [
        (None, RECEIVED),
        *((k, m) for k in family for m in k.features if m not in (RECEIVED, AGGREGATED)),
    ]
    labels = family[0].labels
    few = min(len(labels), max(1, POINTS // len(models)))
    some = torch.arange(len(labels)) if few == len(labels) else stratified(labels, few, seed=0)
    rows = torch.cat([(k or family[0]).features[m][some] for k, m in models])
    places = embedded(rows.float(), seed=0).reshape(len(models), few, 2)
    own = {
        id(k): [p for (o, _), p in zip(models, places, strict=True) if o is k]
        for k in (None, *family)
    }
    by_run = [
        dots(named(k.group), _pairs(torch.cat(own[id(k)])), style.colour(k.group), 4)
        for k in sorted(family, key=lambda k: -len(own[id(k)]))
    ]
    by_run.append(dots("the model received", _pairs(own[id(None)][0]), GLOBALS[RECEIVED], 5))
    classes = labels[some]
    by_class = [
        dots(
            plain(class_name(family[0].look, c)),
            _pairs(places[:, classes == c].reshape(-1, 2)),
            class_colour(c),
            4,
        )
        for c in sorted(set(classes.tolist()))
    ]
    return [on_plane(by_run), on_plane(by_class)]


def _pairs(places: Tensor) -> list[tuple[float, float]]:
    return [(round(x, 1), round(y, 1)) for x, y in places.tolist()]
