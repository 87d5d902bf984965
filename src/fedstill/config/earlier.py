"""Configs of runs that an earlier version began: what they lack or have too much, so that they go
on as they began.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DID: Mapping[str, Mapping[str, Any]] = {
    "naive_kd": {"over_teachers": "sum"},
    **{f"qkt_light{of}": {"phase1_over": "same"} for of in ("", "_volunteer", "_server")},
}
"""By method: fields that came later with another default, and what was done before there was a
choice.
"""

UNSAID: Mapping[str, Any] = {"clients.failures": "tolerate"}
"""Dotted keys that came later with another default, and what was done before; a whole run's numbers
don't tell.
"""


def as_it_began(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config with what its version did.

    >>> as_it_began({"method": {"name": "naive_kd", "alpha": 1.0}, "clients": {}})
    {'method': {'over_teachers': 'sum', 'name': 'naive_kd', 'alpha': 1.0}, 'clients': {'failures': 'tolerate'}}
    """  # noqa: E501
    # of 0.1; the run goes on alone, up to rounding
    kept = {k: v for k, v in tree.items() if k != "stacked_seeds"}
    method = kept.get("method")
    if isinstance(method, Mapping) and isinstance(method.get("name"), str):
        kept["method"] = {**DID.get(method["name"], {}), **method}
    for dotted, value in UNSAID.items():
        table, _, key = dotted.partition(".")
        if isinstance(there := kept.get(table, {}), Mapping):
            kept[table] = {key: value, **there}
    return kept


def unsaid(tree: Mapping[str, Any]) -> set[str]:
    """The dotted keys of which a run's config says nothing, as there were none when it began.

    >>> unsaid({"clients": {"quorum": 0.5}}), unsaid({"clients": {"failures": "stop"}})
    ({'clients.failures'}, set())
    """
    return {
        dotted
        for dotted in UNSAID
        if dotted.partition(".")[2] not in tree.get(dotted.partition(".")[0], {})
    }
