"""Recipes of papers' figures draw them in the sections of the report that docs/papers.md names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.cli import call

PEERS = (
    "model.name=resnet10",
    "model.norm=group",
    "topology.clients=4",
    "query.fewer_than=5",
    "data.train_size=120",
)
CHAIN = (
    "model.name=digits_cnn",
    "topology.clients=6",
    "topology.sampled=3",
    "partition.min_size=1",
)


@pytest.mark.uses("benchmark")
@pytest.mark.parametrize(
    ("name", "cells", "titles", "changes"),
    [
        (
            "sfedkd/figure1",
            "*:CIFAR-10 alpha *1",
            ["Forgetting along the chain", "Effect of uneven data"],
            CHAIN,
        ),
        ("sfedkd/figure3", "gamma [12]:*", ["Effect of a hyper-parameter"], CHAIN),
        ("sfedkd/figure6", "K = 3:CIFAR*", ["Time to target"], CHAIN),
        (
            "hiper/table1",
            "[bH]*:alpha 1.0",
            ["Client by client", "Accuracy on public data by client", "Accuracy of the server"],
            ("model.name=tiny_cnn", "data.public=60"),
        ),
        pytest.param(
            "qkt/figure2",
            "*:*",
            [
                "Queries: gain and forgetting",
                "Forgetting against gain",
                "naive_kd: accuracy by class, before the query and after each phase",
                "Decision boundaries",
                "Noise probe and label shares",
            ],
            PEERS,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qkt/figure7",
            "*:*",
            ["Accuracy by epoch"],
            (*PEERS, "data.public=60"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_figures_picture_is_where_its_row_says(
    name: str,
    cells: str,
    titles: list[str],
    changes: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {
        "data.train_size": "200",
        "data.test_size": "60",
        "data.augment": "[]",
        "plan.epochs": "1",
    }
    small |= dict(change.split("=", 1) for change in changes)
    settings = [word for key, value in small.items() for word in ("-s", f"{key}={value}")]
    rounds = "1" if name.startswith("qkt/") else "2"
    words = [
        "reproduce",
        name,
        "--data",
        "digits",
        "--rounds",
        rounds,
        "--seeds",
        "1",
        "-q",
        "--cells",
        cells,
    ]
    assert call([*words, "--out", "r", *settings]) == 0
    page = (tmp_path / "r" / "report.html").read_text().replace("&#x27;", "'").replace("&#39;", "'")
    assert [title for title in titles if title not in page] == []
