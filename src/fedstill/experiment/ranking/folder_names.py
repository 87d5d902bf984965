"""What the folders of rows and columns are called, and that no two of a suite have one folder."""

from __future__ import annotations

from collections.abc import Iterable

from fedstill.errors import ConfigError


def slug(name: str) -> str:
    """A name as a folder's.

    >>> slug("ExDir 2/.5"), slug("FedNTD + ASD")
    ('exdir-2-.5', 'fedntd-+-asd')
    """
    return name.lower().replace("/", "-").replace(":", "-").replace(" ", "-")


def refuse_one_folder(suite: str, what: str, names: Iterable[str]) -> None:
    """Raises ConfigError where two names of a suite's rows or columns would have one folder: one
    replaces the other.

    >>> refuse_one_folder("clinics", "columns", ["even", "Even"])
    Traceback (most recent call last):
    ...
    fedstill.errors.ConfigError: suite clinics: the columns 'even' and 'Even' would have one folder, even; rename one
    """  # noqa: E501
    folders: dict[str, str] = {}
    for name in names:
        if (other := folders.setdefault(slug(name), name)) != name:
            raise ConfigError(
                f"suite {suite}: the {what} {other!r} and {name!r} would have one folder, "
                f"{slug(name)}; rename one"
            )
