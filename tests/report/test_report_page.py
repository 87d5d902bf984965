from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch
from bs4 import BeautifulSoup
from run_journals import events, stop_after

import toys
from fedstill import manifest
from fedstill.core.errors import ConfigError
from fedstill.data.sources import from_tensors
from fedstill.report.blocks import Label, Slider
from fedstill.report.figures import NUMBER, PERCENT, Line, Style, curves
from fedstill.report.page import section_parts, write_page
from fedstill.report.series import Series
from fedstill.running import runner
from fedstill.running.runs import Spread, groups
from pages import as_html, as_plotly, figures_in, sections_of
from run_bits import with_changed_config

NASTY = "<script>alert(1)</script>"


def page_of(folder: Path, out: Path) -> str:
    return write_page([folder], out / "report.html").read_text()


def test_the_page_holds_all_sections_and_valid_figures(finished: Path, tmp_path: Path) -> None:
    text = page_of(finished, tmp_path)
    assert sections_of(text) == [
        "results",
        "rounds",
        "classes",
        "split",
        "knowledge",
        "targets",
        "cost",
        "failures",
        "settings",
    ]
    drawn = figures_in(text)
    for figure in drawn:
        go.Figure(figure)
    names = {t.get("name") for f in drawn for t in f["data"]}
    assert {"fedavg", "toy_failing"} <= names
    assert sum(t["type"] == "heatmap" for f in drawn for t in f["data"]) == 2 * (3 + 1) + 2 * 3


def test_lines_are_means_of_the_journals(finished: Path, tmp_path: Path) -> None:
    journals = [events(finished / n) for n in ("avg7", "avg8")]
    both = [[e["accuracy"] for e in j if e["event"] in ("initial", "round")] for j in journals]
    means = [sum(pair) / 2 for pair in zip(*both, strict=True)]
    accuracy = figures_in(page_of(finished, tmp_path))[0]
    (line,) = [t for t in accuracy["data"] if t.get("name") == "fedavg"]
    assert line["x"] == [0, 1, 2, 3]
    assert line["y"] == pytest.approx(means, abs=1e-5)


def test_ticks_of_shares_have_the_digits_that_tell_them_apart(
    finished: Path, tmp_path: Path
) -> None:
    axes = [
        axis
        for f in figures_in(page_of(finished, tmp_path))
        for name, axis in f["layout"].items()
        if "axis" in name
    ]
    formats = {axis["tickformat"] for axis in axes if "tickformat" in axis}
    assert formats == {".3~%", ".3~f"}, "12.5 %, and no zeros at the end of 15 %"


def test_an_axis_of_one_value_stays_near_it() -> None:
    for value, low, high in (
        (0.5, 0.45, 0.55),
        (0.98, 0.93, 1),
        (0, 0, 0.05),
        (-0.2, -0.25, -0.15),
    ):
        around = PERCENT.flat_range([value, None, value])
        assert around["range"] == pytest.approx([low, high])
    assert NUMBER.flat_range([20.0])["range"] == pytest.approx([18, 22])
    assert PERCENT.flat_range([0.1, 0.2]) == {}


def test_one_measured_round_has_such_an_axis(finished: Path) -> None:
    compared = groups([finished / "avg7"])
    alone = [Line(compared[0], Series([2], [Spread(0.4, 0.0, 1)]))]
    drawn = as_plotly(curves(alone, Style(compared), "round", PERCENT))
    assert drawn.layout.yaxis.range == pytest.approx([0.35, 0.45])


def test_a_group_has_one_colour_everywhere(finished: Path, tmp_path: Path) -> None:
    colours: dict[str, set[str]] = {}
    for figure in figures_in(page_of(finished, tmp_path)):
        for trace in figure["data"]:
            if "line" in trace and trace.get("legendgroup"):
                colours.setdefault(trace["legendgroup"], set()).add(trace["line"]["color"])
    assert all(len(c) == 1 for c in colours.values())
    assert colours["fedavg"] != colours["toy_failing"]


def test_a_list_leads_to_all_sections_and_parses_without_javascript(
    finished: Path, tmp_path: Path
) -> None:
    text = page_of(finished, tmp_path)
    document = BeautifulSoup(text, "html.parser")
    (nav,) = document.find_all("nav")
    links = [(link["href"], link.text) for link in nav.find_all("a")]
    assert links == [(f"#{s['id']}", s.h2.text) for s in document.find_all("section")]
    ids = [element["id"] for element in document.find_all(id=True)]
    assert len(ids) == len(set(ids))
    assert nav["aria-label"]


def test_browsers_restore_no_selector_or_slider(finished: Path, tmp_path: Path) -> None:
    document = BeautifulSoup(page_of(finished, tmp_path), "html.parser")
    slider = BeautifulSoup(as_html(Slider("maps", "Round", ["1", "2"])), "html.parser")
    controls = [*document.select("[data-controls]"), *slider.select("[data-controls]")]
    assert {control.name for control in controls} == {"select", "input"}
    assert {control["autocomplete"] for control in controls} == {"off"}


def test_sections_of_packages_follow_the_ones_that_they_name() -> None:
    names = [part.name for part in section_parts()]
    assert len(names) == len(set(names))
    for part in manifest.report_sections():
        assert names.index(part.follows) < names.index(part.name)
    assert all(callable(part.load()) for part in section_parts())


def test_nothing_is_loaded_and_plotly_is_there_once(finished: Path, tmp_path: Path) -> None:
    text = page_of(finished, tmp_path)
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', text)
    assert addresses[0] == "data:,", "of an empty icon"
    assert all(address.startswith("#") for address in addresses[1:]), "of the list of sections"
    assert "http:" not in text
    assert "https:" not in text
    (packed,) = re.findall(r'id="plotly">([^<]+)<', text)
    assert b"plotly.js v" in gzip.decompress(base64.b64decode(packed))[:200]
    assert len(text) < 3e6


def test_failures_are_told_with_their_reasons(finished: Path, tmp_path: Path) -> None:
    text = page_of(finished, tmp_path)
    failures = text[text.index('id="failures"') :]
    assert "finite" in failures
    alone = write_page([finished / "avg7"], tmp_path / "alone.html").read_text()
    assert "failures" not in sections_of(alone)


def test_a_round_that_stopped_did_not_go_on(some_runs: Path, tmp_path: Path) -> None:
    place = some_runs / "deeper" / "failing7"
    assert (
        "The rounds continued without them."
        in write_page([place], tmp_path / "all.html").read_text()
    )
    lines = events(place)
    # where one was refused
    end = next(i for i, e in enumerate(lines) if e["event"] == "round" and e["round"] == 3)
    (place / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines[:end]))
    (place / "summary.json").unlink()
    both = write_page([place.parent], tmp_path / "both.html").read_text()
    assert "Finished rounds continued without them." in both
    stopped = write_page([place], tmp_path / "stopped.html").read_text()
    assert "failures" in sections_of(stopped)
    assert "continued without them" not in stopped


def test_unfinished_runs_are_labelled(some_runs: Path, tmp_path: Path) -> None:
    stop_after(some_runs / "avg8", 2)
    text = page_of(some_runs, tmp_path)
    assert "1 of 4 runs are unfinished" in text
    assert "at round 2 of 3" in text
    assert "fedavg (unfinished)" in text


def test_runs_without_a_round_give_a_page_all_the_same(some_runs: Path, tmp_path: Path) -> None:
    stop_after(some_runs / "avg8", 0)
    text = write_page([some_runs / "avg8"], tmp_path / "report.html").read_text()
    assert sections_of(text) == ["results", "split", "settings"]
    (some_runs / "avg8" / "journal.jsonl").write_text("")
    text = write_page([some_runs / "avg8"], tmp_path / "report.html").read_text()
    assert sections_of(text) == ["results", "settings"]
    assert sections_of(page_of(some_runs, tmp_path))[:3] == ["results", "rounds", "classes"]


def test_other_classes_and_rounds_stand_side_by_side(some_runs: Path, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (90, 1, 4, 4), generator=draw, dtype=torch.uint8)
    data = from_tensors(
        "three",
        (images, torch.arange(90) % 3),
        (images, torch.arange(90) % 3),
        classes=[NASTY, "b", "c"],
    )
    runner.run(toys.toy("fedavg", rounds=1, seed=3), some_runs / "three", data=data)
    text = page_of(some_runs, tmp_path)
    assert NASTY not in text
    assert "rounds=1" in text
    heat = [t for f in figures_in(text) for t in f["data"] if t["type"] == "heatmap"]
    assert {len(t["y"]) for t in heat} == {3, 5}
    for figure in figures_in(text):
        go.Figure(figure)


def test_names_are_escaped(some_runs: Path, tmp_path: Path) -> None:
    for name in ("avg7", "avg8"):
        text = (some_runs / name / "config.toml").read_text()
        with_changed_config(some_runs / name, text.replace('name = "fedavg"', f"name = '{NASTY}'"))
    assert NASTY not in page_of(some_runs, tmp_path)
    assert NASTY not in as_html(Label("#000000", NASTY, NASTY))


def test_measures_that_are_null_are_left_out(some_runs: Path, tmp_path: Path) -> None:
    path = some_runs / "avg7" / "journal.jsonl"
    lines = events(path.parent)
    for event in lines:
        if event["event"] in ("round", "initial"):
            event |= {
                "accuracy": None,
                "class_accuracy": [None] * 5,
                "forgetting": None,
                "consistency": None,
            }
            event.pop("in_local_accuracy", None)
            event.pop("out_local_accuracy", None)
    path.write_text("".join(json.dumps(e) + "\n" for e in lines))
    summary = path.with_name("summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"accuracy": None}))
    text = write_page([some_runs / "avg7"], tmp_path / "report.html").read_text()
    assert sections_of(text) == ["results", "split", "cost", "settings"]


def test_a_report_that_cannot_be_written_is_named(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        write_page([finished], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="report"):
        write_page([finished], tmp_path / "file" / "report.html")
