"""For the site: examples in docstrings are shown as code, not read as Markdown quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)", re.MULTILINE)


class Fenced(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            text = EXAMPLE.sub(
                lambda m: f"```pycon\n{m.group(0).rstrip()}\n```\n", obj.docstring.value
            )
            obj.docstring.value = text
