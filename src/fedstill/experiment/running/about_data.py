"""What the first event of a journal says of the data: classes, inputs, the clients' names, what was
left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedstill.data.examples import examples_digest
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.preparing.standardising import Standard

MOST_NAMES = 10_000
"""Clients of more are known by their numbers alone."""


def told_of_data(
    prepared: Prepared, test_counts: Sequence[int], asked: Mapping[str, Any], split: bool
) -> dict[str, Any]:
    """Classes, label counts of the test set, what makes inputs of examples; who asks for what;
    networks and names.

    split: whether a split stands beside the journal, which then says who has which network.
    """
    data, networks, names = prepared.dataset, prepared.world.client_models, prepared.names
    told: dict[str, Any] = {
        "classes": list(data.classes),
        "inputs": {**prepared.sites.inputs.stored(data.train.values), **_standardised(prepared.by)},
        "test_counts": test_counts,
        **asked,
    }
    if data.before is not None:
        told["backbone_inputs"] = data.before
    if not split and len(set(networks)) > 1:
        told["models"] = [spec.label for spec in networks]
    if 0 < len(names) <= MOST_NAMES:
        told["client_names"] = list(names)
    if prepared.notes:
        told["notes"] = list(prepared.notes)
    return told


def sealed_examples(prepared: Prepared) -> dict[str, Any]:
    """The SHA-256 of all examples by split; none of real sites' own, nor of features, which differ
    by the processor.
    """
    data = prepared.dataset
    if prepared.settings.on_sites or data.before is not None:
        return {}
    splits = {"train": data.train, "test": data.test, "public": prepared.sites.public}
    return {
        "examples_sha256": {
            name: examples_digest(each) for name, each in splits.items() if each is not None
        }
    }


def _standardised(by: Standard) -> dict[str, Any]:
    """Whose mean and spread standardises; and each client's own, where clients have such."""
    if by.origin == "none":
        return {}
    own = by.by_client or {}
    each = {str(c): {"mean": list(m.mean), "std": list(m.std)} for c, m in sorted(own.items())}
    return {
        "standardise": by.origin,
        **({"by_client": each} if 0 < len(each) <= MOST_NAMES else {}),
    }
