"""What each client's own model knows of its held-out data and of the public images: the measure
``private_public``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SERVER_ID = -1


def private_public(clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy of every client's model on its held-out data and on the public images, and the
    server's on the latter.

    clients: events of one round in order, with ``private`` and ``public`` as
    ``{"counts", "before", "after"}`` by class (``before`` only in stages on public data); others
    are passed over. Gives ``private_by_client`` and ``public_by_client`` (client id to accuracy at
    the end of the round), ``private_before_by_client`` and ``public_before_by_client`` (before the
    last stage on public data), means over clients ``private_accuracy`` and ``public_accuracy``, and
    ``server_public_accuracy``. What was not measured is left out: data without labels, clients
    without held-out data. Source: HiPer-FedKD, table 1 and its notebooks.
    """
    out: dict[str, Any] = {}
    for kind in ("private", "public"):
        after, before = dict[str, float](), dict[str, float]()
        for event in clients:
            counted = event.get(kind, {}) if isinstance(event.get(kind), Mapping) else {}
            total = sum(counted.get("counts", ()))
            if not total or event["client"] == SERVER_ID:
                continue
            name = str(event["client"])
            after[name] = sum(counted["after"]) / total
            if "before" in counted:
                before[name] = sum(counted["before"]) / total
        if after:
            out[f"{kind}_accuracy"] = sum(after.values()) / len(after)
            out[f"{kind}_by_client"] = after
        if before:
            out[f"{kind}_before_by_client"] = before
    on_public = [
        e for e in clients if e["client"] == SERVER_ID and isinstance(e.get("public"), Mapping)
    ]
    taught = [e["public"] for e in on_public if sum(e["public"].get("counts", ()))]
    if taught:
        out["server_public_accuracy"] = sum(taught[-1]["after"]) / sum(taught[-1]["counts"])
    return out
