"""The table of docs/privacy.md on what clients send beside models: every method, from what its code
expects and does.

``python -m tools.sent`` writes it anew, between its two marks; row P4 of the scorecard looks in the
same way.
"""

from __future__ import annotations

from pathlib import Path

from fedstill import registry
from tools.fitting_runs import own_methods
from tools.what_is_sent import cells

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"
MARKS = ("<!-- sent -->\n", "<!-- end of sent -->\n")


def sent_table() -> str:
    """The table, in Markdown: methods that send the same share a row."""
    rows = dict[tuple[str, str, str], list[str]]()
    for method in own_methods():
        summed = "linear_fold" in registry.lookup("method", method).build().permits
        rows.setdefault((*cells(method), "yes" if summed else "no"), []).append(f"`{method}`")
    lines = [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    head = "| method | beside models | of it, made from labels | models as a secure sum |"
    return "\n".join([head, "|---|---|---|---|", *lines, ""])


def with_table(text: str) -> str:
    """The page with the table of now between the marks."""
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    return f"{text[:start]}\n{sent_table()}\n{text[end:]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
