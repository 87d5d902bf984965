"""Streams of real sites: each site's own data say what belongs to a task, by folder or by a time
column.
"""

from __future__ import annotations

from fedstill.core.errors import ConfigError
from fedstill.core.registry import register
from fedstill.core.stream import Cut


@register("stream", "sites")
def site_stream(
    tasks: int, classes: int, order: tuple[tuple[int, ...], ...] = (), cuts: tuple[str, ...] = ()
) -> Cut:
    """Tasks of real sites, which have data of their own: a folder for each, or a time column that
    is cut.

    order: The classes of each task, by number, where tasks differ in these; empty: all classes in
    each.
    cuts: The date on which each task but the first begins, for sites with a time column.

    Raises ConfigError where the order is not of as many tasks.
    """
    if order and len(order) != tasks:
        raise ConfigError(
            f"stream.order names the classes of {len(order)} tasks, and stream.tasks = {tasks}"
        )
    return Cut(None, order or (tuple(range(classes)),) * tasks)
