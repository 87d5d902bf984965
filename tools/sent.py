"""The table of docs/privacy.md on what clients send beside models: every method, from what its code
expects and does.

``tools.docs_check`` compares it with the page; row P4 of the scorecard looks in the same way.
"""

from __future__ import annotations

from fedstill.core import registry
from fedstill.core.capabilities import Permit
from tools.fitting_runs import own_methods
from tools.what_is_sent import cells


def sent_table() -> str:
    """The table, in Markdown: methods that send the same share a row."""
    rows = dict[tuple[str, str, str], list[str]]()
    for method in own_methods():
        summed = Permit.LINEAR_AGGREGATE in registry.lookup("method", method).build().permits
        rows.setdefault((*cells(method), "yes" if summed else "no"), []).append(f"`{method}`")
    lines = [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    head = "| method | in addition to models | made from labels | models as a secure sum |"
    return "\n".join([head, "|---|---|---|---|", *lines, ""])
