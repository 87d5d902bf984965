"""The names of a table's inputs: of columns of numbers, of categories, and of the marks of missing
numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedstill.data.form import About

MISSING = " is missing"
"""What follows a column's name in that of its mark."""


@dataclass(frozen=True)
class TableInputs:
    """What a table's inputs are made of: its columns, the names in those of names, the columns that
    have a mark.
    """

    columns: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    marked: tuple[str, ...] = ()

    @property
    def about(self) -> About:
        """The same as a data set says it.

        >>> TableInputs(("age", "sex"), {"sex": ("f", "m")}, ("age",)).about.features
        ('age', 'sex=f', 'sex=m', 'age is missing')
        """
        features, marks = list[str](), list[int]()
        for column in self.columns:
            if column not in self.categories:
                features.append(column)
                continue
            names = self.categories[column]
            marks += range(len(features), len(features) + len(names))
            features += [f"{column}={name}" for name in names]
        marks += range(len(features), len(features) + len(self.marked))
        features += [f"{column}{MISSING}" for column in self.marked]
        named = tuple(
            (column, self.categories[column])
            for column in self.columns
            if column in self.categories
        )
        return About(
            "table",
            columns=self.columns,
            categories=named,
            features=tuple(features),
            marks=tuple(marks),
        )

    @staticmethod
    def named_by(
        columns: Sequence[str], features: Sequence[str], marks: Collection[int]
    ) -> TableInputs:
        """What inputs of these names are made of.

        >>> TableInputs.named_by(
        ...     ["age", "sex"], ["age", "sex=f", "sex=m", "age is missing"], [1, 2, 3]
        ... ).categories
        {'sex': ('f', 'm')}
        """
        at, categories = 0, dict[str, tuple[str, ...]]()
        for column in columns:
            first = at
            while at < len(features) and at in marks and features[at].startswith(f"{column}="):
                at += 1
            if at > first:
                categories[column] = tuple(name[len(column) + 1 :] for name in features[first:at])
            else:
                at += 1
        marked = tuple(name.removesuffix(MISSING) for name in features[at:])
        return TableInputs(tuple(columns), categories, marked)
