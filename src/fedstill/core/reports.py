"""What clients report beside their replies' content: numbers for the journal, and their checks.

A reply's metrics are the engine's fields (``ENGINE``), the fields of measures, and under ``report``
the fields that the method reports. In the journal, all of them are fields of the client's event, so
their names must differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_COUNT = 2**53  # up to here, a float holds every integer
MAX_SECONDS = 1e9
MAX_WORD = 300  # characters in a text
MAX_FIELD = 64  # characters in the name of a field
MAX_NAMES = 10_000  # entries in a list or a table of names
MAX_NUMBERS = 1 << 17  # numbers in a list
MAX_REASONS = 8  # reasons to ask for a class
MAX_REPORT = 1 << 17  # characters in a method's report, as JSON

METHOD_REPORT = "report"
"""The key of the method's report in a reply's metrics."""

SERVER_FIELDS = frozenset(
    {
        "event",
        "round",
        "stage",
        "name",
        "client",
        "examples",
        "bytes_up",
        "bytes_down",
        "refused",
        "idle",
    }
    | {"noised_rows", "private_steps", "private_rate", METHOD_REPORT}
)
"""Fields of a client's event in the journal that only the server may set."""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that fits in 64 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, int):
        return abs(value) <= 2**63
    return math.isfinite(value)


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2**53."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def _number_or_none(value: Any) -> bool:
    # A number that is not finite is null in the journal.
    return value is None or isinstance(value, float) or is_number(value)


def _seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MAX_SECONDS


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_WORD and value.isprintable()


def _losses(value: Any) -> bool:
    if not isinstance(value, Mapping) or len(value) > MAX_NAMES:
        return False
    return all(_name(term) and _number_or_none(loss) for term, loss in value.items())


def _share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def _list_of(check: Callable[[Any], bool], most: int = MAX_NUMBERS) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, (list, tuple)) and len(value) <= most and all(map(check, value))
    )


def _table(value: Any) -> bool:
    """A table of numbers. The server checks its entries when it reads them."""
    return isinstance(value, Mapping) and _is_plain(value, 4, MAX_FIELD)


counts = _list_of(is_count)

ENGINE: Mapping[str, Callable[[Any], bool]] = {
    "loss": _losses,
    "steps": is_count,
    "epochs": is_count,
    "scores": _list_of(_number_or_none),
    "teachers": _list_of(lambda v: is_count(v) or _name(v), MAX_NAMES),
    "seconds": _seconds,
    "seconds_training": _seconds,
    "seconds_measuring": _seconds,
    "seconds_reused": _seconds,
    "site_accuracy": _share,
    "site_test_examples": is_count,
    "held_out_accuracy": _share,
    "held_out_examples": is_count,
    "held_out_score": _number_or_none,
    "held_out_histograms": _table,
    "site_by_task": _list_of(lambda v: v is None or _share(v)),
    "site_metrics": _table,
    "site_scores": _table,
}
"""The fields that the engine reports, with the check of each form."""

COUNTED: Mapping[str, Callable[[Any], bool]] = {
    "label_counts": counts,
    "correct_by_class": counts,
    "correct_by_epoch": _list_of(counts),
}
"""Fields of measures that other parts of the library read, too."""

PROBE = "probe"
"""A field of the stage ``fit`` for figures: a number for each class."""

REASONS = "why_asked"
"""A field of the stage ``fit``: the client's reasons to ask for classes. By class and by reason, a
number or None.
"""


def _reasons_by_class(value: Any) -> bool:
    """A table by class of tables by reason, with numbers."""
    if not isinstance(value, Mapping) or not all(_name(c) and c.isdecimal() for c in value):
        return False
    return all(_are_reasons(reasons) for reasons in value.values())


def _are_reasons(value: Any) -> bool:
    if not isinstance(value, Mapping) or len(value) > MAX_REASONS:
        return False
    return all(_name(reason) and _number_or_none(number) for reason, number in value.items())


_FORMS: Mapping[str, Callable[[Any], bool]] = {
    **ENGINE,
    **COUNTED,
    PROBE: _list_of(is_number),
    REASONS: _reasons_by_class,
}


def wrong_report(metrics: Mapping[str, Any]) -> str:
    """Why a reply's metrics are invalid; empty if they are valid.

    >>> wrong_report({"steps": 3, "report": {"helper": 2}})
    ''
    >>> wrong_report({"seconds_training": 10**400})
    "its report 'seconds_training' is malformed"
    """
    for name, value in metrics.items():
        if name == METHOD_REPORT:
            continue
        problem = _wrong_field(name, value)
        if problem:
            return problem
    return _wrong_method_report(metrics.get(METHOD_REPORT, {}), metrics)


def _wrong_method_report(report: Any, metrics: Mapping[str, Any]) -> str:
    """Why the method's report is invalid; metrics: all metrics of the reply."""
    if not isinstance(report, Mapping):
        return f"its report {METHOD_REPORT!r} is malformed"
    for name, value in report.items():
        # A method may report its teachers in place of the engine.
        if name != "teachers" and (name in ENGINE or name in COUNTED or name in metrics):
            return f"its method's report has {name!r}, a field of the engine or of a measure"
        problem = _wrong_field(name, value)
        if problem:
            return problem
    if report:
        size = len(json.dumps(json_value(report)))
        if size > MAX_REPORT:
            return f"its method's report has {size} characters, over the limit of {MAX_REPORT}"
    return ""


def _wrong_field(name: Any, value: Any) -> str:
    if not isinstance(name, str) or not (0 < len(name) <= MAX_FIELD and name.isprintable()):
        return f"its report has a name that is no short text, {str(name)[:40]!r}"
    if name in SERVER_FIELDS:
        return f"its report has {name!r}, a field that only the server may set"
    if not has_valid_form(name, value):
        return f"its report {name!r} is malformed"
    return ""


def has_valid_form(name: str, value: Any, depth: int = 3, word: int = MAX_WORD) -> bool:
    """Whether a field has the form that belongs to its name. A field of any other name must consist
    of numbers, short texts, and lists and tables of them.

    depth: how deep lists and tables may be nested. word: the most characters in a text.
    """
    if name in _FORMS:
        return _FORMS[name](value)
    if name.startswith("seconds"):
        return _seconds(value)
    return _is_plain(value, depth, word)


def _is_plain(value: Any, depth: int, word: int) -> bool:
    if isinstance(value, Mapping):
        items = [*value.keys(), *value.values()]
        return depth > 0 and all(_is_plain(item, depth - 1, word) for item in items)
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1, word) for item in value)
    if isinstance(value, str):
        # No file can hold a text with half of a surrogate pair.
        return len(value) <= word and not any("\ud800" <= c <= "\udfff" for c in value)
    return isinstance(value, bool) or _number_or_none(value)


def json_value(value: Any) -> Any:
    """A value for JSON: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(k): json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
