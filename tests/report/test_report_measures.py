"""The pictures of measures: there when a run has looked, drawn from its journal, and named when
that is damaged.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from run_journals import events

import toys
from fedstill.core.errors import CorruptFile
from fedstill.report.class_regions import smoothed
from fedstill.report.leaks import leak_rows
from fedstill.report.page import write_page
from fedstill.running import runner
from fedstill.running.runs import groups
from pages import figures_in

ALL = [
    "local",
    "epochs",
    "alignment",
    "divergence",
    "diversity",
    "personal",
    "units",
    "tsne",
    "landscape",
    "sphere",
]
ALL += ["leakage"]
SECTIONS = [
    "heterogeneity",
    "knowledge",
    "epochs",
    "personal",
    "weights",
    "units",
    "tsne",
    "sphere",
    "landscape",
]
SECTIONS += ["leakage"]


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with every measure, over two splits; and one without any."""
    folder = tmp_path_factory.mktemp("looked")
    for alpha in (0.5, 5.0):
        changes = {
            "partition": {"kind": "dirichlet", "alpha": alpha, "min_size": 4},
            "model": "sphere_digits_cnn",
        }
        few = {"test_size": 40}  # t-SNE's time grows with the square
        experiment = toys.toy(measure=ALL, rounds=2, measure_every=1, data=few, **changes)
        runner.run(experiment, folder / "all" / f"a{alpha}", data=toys.blobs())
    runner.run(toys.toy(measure=[], rounds=2), folder / "none", data=toys.blobs())
    return folder


def without_checkpoints(run: Path, folder: Path) -> Path:
    """A copy of a run whose journal may be edited: its checkpoints would know what it was."""
    return Path(shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints")))


def sections(text: str) -> dict[str, list[dict[str, Any]]]:
    """The figures of each section, all variants."""
    out = {}
    for part in text.split('<section id="')[1:]:
        out[part.partition('"')[0]] = figures_in(part)
    return out


@pytest.fixture(scope="module")
def page(looked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return sections(
        write_page([looked / "all"], tmp_path_factory.mktemp("page") / "r.html").read_text()
    )


def seen(folder: Path, measure: str) -> list[dict[str, Any]]:
    return [e for e in events(folder) if e["event"] == "measure" and e["measure"] == measure]


def test_each_measure_has_its_pictures_and_they_are_valid(
    page: dict[str, list[dict[str, Any]]],
) -> None:
    assert set(SECTIONS) < set(page)
    for name in SECTIONS:
        assert page[name], name
        for figure in page[name]:
            assert figure["data"], name
            go.Figure(figure)


def test_pictures_are_there_only_when_there_is_something_to_show(
    looked: Path, tmp_path: Path
) -> None:
    found = sections(write_page([looked / "none"], tmp_path / "r.html").read_text())
    assert not set(found) & (set(SECTIONS) - {"knowledge"})
    assert len(found["knowledge"]) == 1, "prediction consistency only"


def test_lines_and_points_are_the_journals(
    looked: Path, page: dict[str, list[dict[str, Any]]]
) -> None:
    run = looked / "all" / "a0.5"
    line = page["weights"][0]["data"][0]
    assert line["y"] == pytest.approx(
        [e["layers"]["features"]["local"] for e in seen(run, "alignment")], abs=1e-5
    )
    (scatter,) = [f for f in page["weights"] if f["data"][0]["mode"] == "markers"]
    trace = scatter["data"][0]
    pairs = {
        (e["round"], c): w
        for e in seen(run, "divergence")
        for c, w in zip(e["clients"], e["l2"], strict=True)
    }
    assert {(r, c) for c, r in trace["customdata"]} == set(pairs)
    assert trace["y"] == pytest.approx([pairs[r, c] for c, r in trace["customdata"]], abs=1e-5)
    colours = zip(trace["customdata"], trace["marker"]["color"], strict=True)
    shades = {r: float(colour.rpartition(",")[2][:-1]) for (_, r), colour in colours}
    assert shades[1] < shades[2] == 1, "opacity grows with the round"


def test_forgetting_stands_against_the_split(
    looked: Path, page: dict[str, list[dict[str, Any]]]
) -> None:
    forgetting, accuracy = page["heterogeneity"]
    (line,) = forgetting["data"]
    last = [
        [e for e in events(looked / "all" / f"a{a}") if e["event"] == "round"][-1]
        for a in (0.5, 5.0)
    ]
    assert line["x"] == [0.5, 5.0]
    assert line["y"] == pytest.approx([e["forgetting"] for e in last], abs=1e-5)
    assert accuracy["data"][0]["y"] == pytest.approx([e["accuracy"] for e in last], abs=1e-5)
    assert forgetting["layout"]["xaxis"]["type"] == "log"


def test_bars_have_both_forms_and_the_spread_over_clients(
    looked: Path, page: dict[str, list[dict[str, Any]]]
) -> None:
    bars = [f for f in page["knowledge"] if f["data"][0]["type"] == "bar"]
    last = [
        [e for e in events(looked / "all" / f"a{a}") if e["event"] == "round"][-1]
        for a in (0.5, 5.0)
    ]
    for figure, form in zip(bars, ("", "_seen"), strict=True):
        inside, _, everywhere = figure["data"]
        assert inside["y"] == pytest.approx([e[f"in_local_accuracy{form}"] for e in last], abs=1e-5)
        assert inside["error_y"]["array"] == pytest.approx(
            [e[f"in_local_accuracy{form}_std"] for e in last], abs=1e-5
        )
        assert everywhere["y"] == pytest.approx([e["accuracy"] for e in last], abs=1e-5)


def test_every_image_is_a_point_under_every_model(
    looked: Path, page: dict[str, list[dict[str, Any]]]
) -> None:
    (event,) = seen(looked / "all" / "a0.5", "tsne")
    by_class, by_model = page["tsne"][:2]
    points = len(event["models"]) * len(event["labels"])
    assert (
        sum(len(t["x"]) for t in by_class["data"])
        == sum(len(t["x"]) for t in by_model["data"])
        == points
    )
    assert {t["name"] for t in by_model["data"]} == set(event["models"])


def test_units_are_sorted_by_the_received_model(
    looked: Path, page: dict[str, list[dict[str, Any]]]
) -> None:
    (event,) = seen(looked / "all" / "a0.5", "units")
    shown = page["units"][0]["data"][0]["z"]
    assert shown[0] == sorted(event["classes"][0])
    pairs = sorted(zip(*event["classes"], strict=True), key=lambda column: column[0])
    assert [list(row) for row in zip(*pairs, strict=True)] == shown


def test_smoothing_keeps_the_sum_and_goes_round_the_circle() -> None:
    counts = [0.0] * 71 + [10.0]
    found = smoothed(counts)
    assert sum(found) == pytest.approx(10)
    assert found[0] > 0
    assert found[0] == pytest.approx(found[70])
    assert max(found) == found[71]


def test_a_loss_too_large_for_a_number_is_drawn_as_the_largest(
    looked: Path, tmp_path: Path
) -> None:
    folder = without_checkpoints(looked / "all" / "a0.5", tmp_path / "run")
    lines = events(folder)
    (event,) = [e for e in lines if e.get("measure") == "landscape"]
    around = event["models"]["aggregated"]
    around["hessian"][0][0], around["noise"][-1] = None, None
    (folder / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    figures = sections(write_page([folder], tmp_path / "r.html").read_text())["landscape"]
    rows = around["hessian"]
    assert figures[0]["data"][0]["z"][0][0] == max(v for row in rows for v in row if v is not None)
    assert figures[-1]["data"][0]["y"][-1] == max(v for v in around["noise"] if v is not None)


@pytest.mark.parametrize(
    ("measure", "change"),
    [
        ("tsne", {"x": [[1.0]]}),
        ("tsne", {"labels": None}),
        ("sphere", {"counts": [[["a"]]]}),
        ("units", {"classes": []}),
        ("landscape", {"models": {"aggregated": {}}}),
        ("landscape", {"axis": "x"}),
        ("divergence", {"l2": [1.0]}),
        ("divergence", {"distance": ["far"]}),
        (
            "leakage",
            {"seen": {"loss": {"auc": 0.5, "tpr_at_0.01": 0.0, "tpr_at_0.001": 0.0, "roc": [0.5]}}},
        ),
        ("leakage", {"seen": {"loss": {"auc": 0.5, "auc_interval": 3}}}),
        ("alignment", {"round": "2"}),
        ("alignment", {"measure": None}),
        ("alignment", {"seconds": "long"}),
    ],
)
def test_a_damaged_look_is_named_with_its_journal(
    measure: str, change: dict[str, Any], looked: Path, tmp_path: Path
) -> None:
    folder = without_checkpoints(looked / "all" / "a0.5", tmp_path / "run")
    lines = [e | change if e.get("measure") == measure else e for e in events(folder)]
    (folder / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    with pytest.raises(CorruptFile, match=r"journal\.jsonl") as caught:
        write_page([folder], tmp_path / "r.html")
    assert "\n" not in str(caught.value)


def test_leaks_are_the_journals(looked: Path, page: dict[str, list[dict[str, Any]]]) -> None:
    found = seen(looked / "all" / "a0.5", "leakage")
    attacks, leaks = ("loss", "likelihood_ratio"), page["leakage"]
    for attack, by_round, curves in zip(attacks, leaks[:2], leaks[2:4], strict=True):
        assert by_round["data"][0]["y"] == pytest.approx(
            [e["seen"][attack]["auc"] for e in found], abs=1e-5
        )
        coin, drawn, *_ = curves["data"]
        assert coin["x"] == coin["y"]
        assert drawn["y"] == pytest.approx(
            [max(y, 1e-3) for y in found[-1]["seen"][attack]["roc"]], abs=1e-5
        )
        assert len(drawn["x"]) == len(drawn["y"])


def test_what_leaks_before_and_after_privacy_stands_in_the_table(tmp_path: Path) -> None:
    same = {
        "measure": ["leakage"],
        "rounds": 1,
        "data": {"public": toys.PUBLIC},
        "topology": {"clients": 6},
    }
    for noise in (0.1, 5.0):
        experiment = toys.toy("hiper_fedkd", **same, privacy={"clip": 4.0, "noise": noise})
        runner.run(experiment, tmp_path / f"n{noise}", data=toys.blobs())
    text = write_page([tmp_path], tmp_path / "r.html").read_text()
    table = text.partition('<section id="leakage">')[2].partition("</section>")[0]
    for noise in (0.1, 5.0):
        local, ends = seen(tmp_path / f"n{noise}", "leakage")
        for numbers in (
            local["seen"]["loss"],
            local["raw"]["likelihood_ratio"],
            ends["global"]["loss"],
        ):
            low, high = numbers["auc_interval"]
            assert f"{100 * numbers['auc']:.2f} ({100 * low:.2f}–{100 * high:.2f})" in table
        shown = leak_rows(groups([tmp_path / f"n{noise}"]))
        assert [row.plain_cells[:2] for row in shown][::4] == [
            ["what the server sees", "the loss"],
            ["the global model", "the loss"],
        ]
        numbers = local["seen"]["loss"]
        assert shown[0].numbers == [
            f"{100 * numbers[k]:.2f}" for k in ("auc", "tpr_at_0.001", "tpr_at_0.01")
        ]
    dotted = [
        t
        for f in sections(text)["leakage"]
        for t in f["data"]
        if t.get("line", {}).get("dash") == "dot"
    ]
    assert {t["name"] for t in dotted} == {
        f"hiper_fedkd, noise={n}, before privacy" for n in (0.1, 5.0)
    }


@pytest.mark.parametrize(
    "damage", [3, {"train": []}, {"train": {"in_local_accuracy": [1.0]}}, {"train": {}}]
)
def test_damaged_epochs_are_named_with_their_journal(
    damage: Any, looked: Path, tmp_path: Path
) -> None:
    folder = without_checkpoints(looked / "all" / "a0.5", tmp_path / "run")
    lines = [e | {"by_epoch": damage} if e["event"] == "round" else e for e in events(folder)]
    (folder / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line \d+: by_epoch"):
        write_page([folder], tmp_path / "r.html")


def test_epochs_are_the_last_rounds(looked: Path, page: dict[str, list[dict[str, Any]]]) -> None:
    (last,) = [
        e for e in events(looked / "all" / "a0.5") if e["event"] == "round" and e["round"] == 2
    ]
    found = last["by_epoch"]["train"]
    for figure, side in zip(
        page["epochs"], ("in_local_accuracy", "out_local_accuracy"), strict=True
    ):
        first = figure["data"][0]
        assert first["y"] == pytest.approx(found[side], abs=1e-5)
        assert first["error_y"]["array"] == pytest.approx(found[f"{side}_std"], abs=1e-5)
        assert first["customdata"] == list(range(len(first["y"])))
