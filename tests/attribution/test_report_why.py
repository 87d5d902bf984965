"""The pictures of who made the model forget: from the journal, and from what was found out
later.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bs4 import BeautifulSoup

import fedstill
import toys
from fedstill.attribution import report
from fedstill.attribution.class_changes import (
    SERVER_ROW,
    Attribution,
    ClassChange,
    advice,
    contribution_table,
    points,
    sentence_of,
)
from fedstill.cli import call
from fedstill.data.client_split import LabelCounts
from fedstill.data.dataset import Dataset
from fedstill.data.sources import from_tensors
from fedstill.report.page import Report, page
from fedstill.running.runs import Group, Run, groups
from pages import as_html


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("why")
    for method in ("fedavg", "fedntd"):
        toy = toys.toy(
            method,
            rounds=4,
            measure=("contributions",),
            measure_every=1,
            plan={"epochs": 3, "lr": 0.3},
        )
        fedstill.run(toy, folder / method, data=toys.blobs())
    chain: dict[str, Any] = {"kind": "sequential", "clients": 6, "sampled": 3}
    toy = toys.toy(
        "fedseq",
        rounds=3,
        topology=chain,
        measure=("contributions",),
        measure_every=1,
        plan={"lr": 0.3},
    )
    fedstill.run(toy, folder / "fedseq", data=toys.blobs())
    return folder


def figures(text: str, name: str) -> list[list[dict[str, Any]]]:
    parts = text.split(f'data-name="{name}"')[1:]
    return [
        json.loads(part.partition(">")[2].partition('json">')[2].partition("</script>")[0])
        for part in parts
    ]


def test_a_map_for_each_measured_round_and_a_fall_for_each_moment(runs: Path) -> None:
    compared = groups([runs / "fedavg", runs / "fedntd"])
    text = page(compared)
    assert 'id="why"' in text
    assert 'type="range" min="0" max="3"' in text
    maps, falls = figures(text, "contributors"), figures(text, "falls")
    assert [len(variants) for variants in maps] == [4, 4]
    looks = [e for e in compared[0].started[0].measures if e["measure"] == "contributions"]
    for variant, look in zip(maps[0], looks, strict=True):
        if look["classes"]:
            (trace,) = variant["data"]
            assert trace["x"] == [f"client {c}" for c in look["clients"]]
            first = look["classes"][0]
            assert trace["z"][first] == pytest.approx(
                [100 * v for v in look["values"][0]], abs=1e-3
            )
    assert len(falls) == 2
    for variant in falls[0]:
        for trace in variant["data"]:
            ends = {
                name: (base, height)
                for name, base, height in zip(trace["x"], trace["base"], trace["y"], strict=True)
            }
            assert sum(ends["rest"]) == pytest.approx(ends["after"][1], abs=1e-4), (
                "clients and the rest end there"
            )
            assert sum(ends["averaging"]) == pytest.approx(ends["after"][1], abs=1e-4)
            assert ends["local training"][0] == pytest.approx(ends["before"][1], abs=1e-4)


def test_a_chain_has_a_column_for_each_link(runs: Path) -> None:
    compared = groups([runs / "fedseq"])
    section = as_html(report.contributors(Report(compared)))
    (variants,) = figures(section, "contributors")
    acted = [e["clients"][0] for e in compared[0].started[0].measures if e["round"] == 2]
    assert variants[1]["data"][0]["x"] == [f"client {c}" for c in acted]


def test_falls_are_of_the_global_model_where_clients_have_their_own_beside_it(
    tmp_path: Path,
) -> None:
    often: dict[str, Any] = {"rounds": 4, "measure": ("contributions",), "measure_every": 1}
    asked = toys.toy("ditto", **{**toys.suited("ditto"), **often, "plan": {"epochs": 3, "lr": 0.3}})
    fedstill.run(asked, tmp_path / "ditto", data=toys.blobs())
    compared = groups([tmp_path / "ditto"])
    falls = [
        (e["round"], c, before, after)
        for e in compared[0].started[0].measures
        if e["name"] == "train" and e["round"] > 1
        for c, (before, after) in enumerate(zip(e["before"], e["after"], strict=True))
        if after < before
    ]
    assert falls
    moments = report._losses(compared[0].started[0])
    assert [
        (m.round, m.label, m.accuracy_before, m.accuracy_after)
        for m in sorted(moments, key=lambda m: (m.round, m.label))
    ] == falls


def test_what_a_server_with_momentum_does_by_itself_is_a_bar_and_a_row(tmp_path: Path) -> None:
    often: dict[str, Any] = {"rounds": 4, "measure": ("contributions",), "measure_every": 1}
    fedstill.run(
        toys.toy("fedavgm", **often, plan={"epochs": 3, "lr": 0.3}),
        tmp_path / "run",
        data=toys.blobs(),
    )
    compared = groups([tmp_path / "run"])
    section = as_html(report.contributors(Report(compared)))
    (variants,) = figures(section, "falls")
    bars = [trace for variant in variants for trace in variant["data"] if SERVER_ROW in trace["x"]]
    assert bars
    for trace in bars:
        named = list(zip(trace["x"], trace["base"], trace["y"], strict=True))
        steps = named[1 : trace["x"].index("rest") + 1]
        assert steps[-2][0] == SERVER_ROW
        for (_, base, height), (_, then, _) in pairwise(steps):
            assert base + height == pytest.approx(then, abs=2e-4)
    without = told({"train": -0.5})
    rows = contribution_table(compared[0].started[0], replace(without, server=-0.2)).lines
    assert [row[:2] for row in rows[-2:]] == [[SERVER_ROW, "-20.0"], ["together", "-40.4"]]
    assert [row[:2] for row in contribution_table(compared[0].started[0], without).lines[-2:]] == [
        ["client 4", "+10.0"],
        ["together", "-20.4"],
    ]


def test_the_first_measured_seed_of_a_group_is_drawn_and_named(runs: Path) -> None:
    (group,) = groups([runs / "fedavg"])
    measured = group.runs[0]
    settings = {**measured.settings, "seed": measured.seed - 1}
    earlier = replace(measured, settings=settings, measures=())
    section = as_html(report.contributors(Report([Group("fedavg", [earlier, measured])])))
    alone = as_html(report.contributors(Report([group])))
    for name in ("contributors", "falls"):
        assert figures(section, name) == figures(alone, name)
    assert f"seed {measured.seed}" in section
    assert f"seed {earlier.seed}" not in section


def test_losses_are_listed_by_the_classes_of_their_runs(runs: Path, tmp_path: Path) -> None:
    often: dict[str, Any] = {"rounds": 4, "measure": ("contributions",), "measure_every": 1}
    few = toys.toy(**often, plan={"epochs": 3, "lr": 0.3})
    fedstill.run(few, tmp_path / "two", data=two_classes())
    compared = groups([tmp_path / "two", runs / "fedavg"])
    section = as_html(report.contributors(Report(compared)))
    document = BeautifulSoup(section, "html.parser")
    selectors = document.find_all("select")
    assert len(selectors) == 2
    names = [selector["data-controls"] for selector in selectors]
    assert len(set(names)) == 2
    for selector, group in zip(selectors, compared, strict=True):
        options = [option.text for option in selector.find_all("option")]
        assert options
        assert all(any(f"class {name}, " in text for name in group.classes) for text in options)
        (variants,) = figures(section, selector["data-controls"])
        assert len(variants) == len(options)


def two_classes() -> Dataset:
    """Images of noise with two labels, which no model keeps."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (90, 1, 4, 4), generator=draw, dtype=torch.uint8)
    examples = (images, torch.arange(90) % 2)
    return from_tensors("two", examples, examples, classes=["left", "right"])


def test_what_was_found_out_later_is_on_the_page(tmp_path: Path) -> None:
    fedstill.run(
        toys.toy(rounds=3, measure=(), data={"name": "digits", "train_size": 100, "test_size": 60}),
        tmp_path / "a",
    )
    assert 'id="why"' not in page(groups([tmp_path / "a"]))
    assert call(["why", str(tmp_path / "a"), "-q"]) == 0
    assert 'id="why"' in page(groups([tmp_path / "a"]))


def told(parts: dict[str, float], drawn: float | None = 1.0, change: float = -0.5) -> Attribution:
    return Attribution(
        change=ClassChange(3, 1, 0.8, 0.8 + change),
        parts=parts,
        clients={2: -0.3, 4: 0.1, 5: -0.004},
        error=0.01,
        game="idle",
        rule="path",
        sampled_share=drawn,
    )


def test_the_sentence_names_those_above_their_error_and_the_hint_fits_the_larger_part(
    runs: Path,
) -> None:
    run = groups([runs / "fedavg"])[0].started[0]
    said = sentence_of(run, told({"local training": -0.4, "averaging": -0.1}))
    name = run.classes[1]
    for part in (repr(name), "80.0 % to 30.0 %", "round 3", "averaging -10.0", "client 2 -30.0"):
        assert part in said
    assert "client 4" not in said, "its part is not above its error"
    assert "client 4 +10.0" in sentence_of(run, told({}, change=0.1))
    still = sentence_of(run, told({"local training": -0.1, "averaging": 0.1}, change=0.0))
    for part in (repr(name), "at 80.0 %", "round 3", "local training -10.0", "averaging +10.0"):
        assert part in still
    by_training = told({"local training": -0.4, "averaging": -0.1})
    assert "fedntd" in advice(with_counts(run, of_client_2=0), by_training)
    by_averaging = told({"local training": 0.1, "averaging": -0.6})
    lacks = with_counts(run, of_client_2=0)
    assert advice(lacks, by_averaging).startswith("Averaging")
    assert "0.20 times" in advice(run, told({"local training": -0.5, "averaging": 0.0}, drawn=0.2))
    assert "sfedkd" in advice(run, told({"client 3": -0.5, "client 1": 0.0}))
    assert advice(run, told({"train": -0.5})) == "", "side by side, but not averaged"
    assert advice(run, told({}, change=0.2)) == ""
    assert points(-0.0004) == "0.0"


@pytest.mark.parametrize(
    "parts",
    [{"local training": -0.4, "averaging": -0.1}, {"local training": 0.1, "averaging": -0.6}],
)
def test_a_client_that_holds_the_class_is_to_check_its_labels(
    parts: dict[str, float], runs: Path
) -> None:
    """A client whose labels are wrong is named, and no hint says that it lacks the class."""
    run = groups([runs / "fedavg"])[0].started[0]
    hint = advice(with_counts(run, of_client_2=9), told(parts))
    assert hint.startswith("client 2")
    assert "labels" in hint
    assert "do not hold" not in hint

    # It need not be the first client: others that lack the class lose some, too.
    two = replace(told(parts), clients={3: -0.35, 2: -0.3, 4: 0.1})
    others_lack = with_counts(run, of_client_2=9, of_client_3=0)
    assert advice(others_lack, two).startswith("client 2")
    weak = replace(told(parts), clients={3: -0.35, 2: -0.03, 4: 0.1})
    assert "labels" not in advice(others_lack, weak)


def test_where_the_server_knows_no_labels_the_hint_leaves_both_open(runs: Path) -> None:
    run = groups([runs / "fedavg"])[0].started[0]
    federation = replace(run, label_counts=LabelCounts.of_table([], 0))
    hint = advice(federation, told({"local training": -0.4, "averaging": -0.1}))
    assert "client 2" in hint
    assert "labels" in hint
    assert "fedntd" in hint


def with_counts(run: Run, of_client_2: int, of_client_3: int = 9) -> Run:
    """The run with nine examples of every class at each client, except of class 1 at two."""
    table = [[9, 9, 9, 9, 9] for _ in range(6)]
    table[2][1] = of_client_2
    table[3][1] = of_client_3
    return replace(run, label_counts=LabelCounts.of_table(table, 5))


def test_where_no_class_fell_it_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"name": "digits", "train_size": 100, "test_size": 60}
    fedstill.run(toys.toy(rounds=2, measure=(), plan={"lr": 1e-9}, data=data), tmp_path / "calm")
    capsys.readouterr()
    assert call(["why", str(tmp_path / "calm")]) == 0
    shown = capsys.readouterr()
    first, second = shown.out.splitlines()[:2]
    assert first.startswith("No class lost accuracy")
    assert "stayed at" in second
    assert "contributed most" not in shown.out
    assert "round 2" in shown.err
    assert call(["why", str(tmp_path / "calm"), "--class", "0", "--round", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Class '0' did not lose accuracy")
    assert "round 1" in shown.err
