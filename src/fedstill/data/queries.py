"""Queries: which client asks its peers for which classes, drawn from the split, or written and checked against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedstill.errors import ConfigError
from fedstill.keys import generator, seed_for

Queries = dict[int, tuple[int, ...]]
"""The classes that a client asks for, sorted, by client."""


def draw(
    counts: Tensor, kind: Literal["single", "multi"], seed: int, fewer_than: int = 50, least: int = 2, most: int = 3
) -> Queries:
    """A query for every client that lacks a class which another client has.

    counts: (clients, C) int64 label counts; a client lacks the classes of which it has fewer than ``fewer_than``
    examples. "single": one of them, uniform; "multi": a uniform number from ``least`` to ``most``, at most all of them,
    uniform without repetition. A pure function of the seed. Raises ConfigError if ``least`` is over ``most``.

    Source: QKT, section 4.1.
    Reading: "a random number of classes" has no range; the published mean of 1 / (1 + number) is that of 2 and 3.

    >>> draw(torch.tensor([[90, 0], [0, 90]]), "single", seed=1)
    {0: (1,), 1: (0,)}
    """
    if least > most:
        raise ConfigError(f"query.least = {least} is more than query.most = {most}")
    drawn: Queries = {}
    for client in range(len(counts)):
        own = counts[client]
        wanted = ((own < fewer_than) & (counts.sum(0) - own > 0)).nonzero().flatten()
        pick = generator(seed_for(seed, 0, 0, client, "query"))
        number = 1 if kind == "single" else int(torch.randint(least, most + 1, (), generator=pick))
        chosen = wanted[torch.randperm(len(wanted), generator=pick)[:number]]
        if len(chosen):
            drawn[client] = tuple(sorted(chosen.tolist()))
    return drawn


def check_queries(queries: Mapping[int, Sequence[int]], counts: Tensor, fewer_than: int = 50) -> Queries:
    """Queries as they were written, each sorted; raises ConfigError, in one line, for one that no client can answer.

    counts: (clients, C). Refused are clients and classes that do not exist, an empty query, a class that the client has
    (``fewer_than`` examples of it or more), and one of which no other client has an example.
    """
    checked: Queries = {}
    for client, classes in sorted(queries.items()):
        if not 0 <= client < len(counts):
            raise ConfigError(f"query: there is no client {client}; clients are 0 to {len(counts) - 1}")
        if not classes:
            raise ConfigError(f"query: client {client} asks for no class; name one, or leave the client out")
        for c in classes:
            _refuse(client, c, counts, fewer_than)
        checked[client] = tuple(sorted(set(classes)))
    return checked


def _refuse(client: int, c: int, counts: Tensor, fewer_than: int) -> None:
    if not 0 <= c < counts.shape[1]:
        raise ConfigError(f"query of client {client}: there is no class {c}; classes are 0 to {counts.shape[1] - 1}")
    own, others = int(counts[client, c]), int(counts[:, c].sum() - counts[client, c])
    if own >= fewer_than:
        raise ConfigError(
            f"query of client {client}: it has class {c} itself, {own} examples of it; ask for one of which it has "
            f"fewer than {fewer_than} (query.fewer_than)"
        )
    if others == 0:
        raise ConfigError(f"query of client {client}: no other client has an example of class {c}; ask for another")
