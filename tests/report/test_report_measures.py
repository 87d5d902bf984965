"""The figures of measures: a run that was measured has them, they show the numbers of its journal,
and a damaged journal is named.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from run_journals import Event, editable_copy, events, measure_events, round_events, write_events

import toys
from fedstill.core.errors import CorruptFile
from fedstill.report.class_regions import smoothed
from fedstill.report.leaks import leak_rows
from fedstill.report.page import write_page
from fedstill.running import runner
from fedstill.running.runs import groups
from pages import figures_in

MEASURES = (
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
    "leakage",
)
SECTIONS = (
    "heterogeneity",
    "knowledge",
    "epochs",
    "personal",
    "weights",
    "units",
    "tsne",
    "sphere",
    "landscape",
    "leakage",
)
ALPHAS = (0.5, 5.0)
"""The concentrations of the two splits."""

Page = dict[str, list[dict[str, Any]]]
"""The figures of each section of a page, in all variants."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with every measure, ``all/``, over two splits; and one without any, ``none``."""
    folder = tmp_path_factory.mktemp("measured")
    for alpha in ALPHAS:
        experiment = toys.toy(
            partition={"kind": "dirichlet", "alpha": alpha, "min_size": 4},
            model="sphere_digits_cnn",
            measure=MEASURES,
            rounds=2,
            measure_every=1,
            data={"test_size": 40},  # t-SNE's time grows with the square
        )
        runner.run(experiment, folder / "all" / f"a{alpha}", data=toys.blobs())
    runner.run(toys.toy(measure=[], rounds=2), folder / "none", data=toys.blobs())
    return folder


@pytest.fixture(scope="module")
def measured_run(measured: Path) -> Path:
    """The run over the first split."""
    return measured / "all" / "a0.5"


@pytest.fixture
def damaged_run(measured_run: Path, tmp_path: Path) -> Path:
    """A copy of the run over the first split, for a test to damage its journal."""
    return editable_copy(measured_run, tmp_path / "run")


@pytest.fixture(scope="module")
def page(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of the two runs with every measure."""
    return page_of(measured / "all", tmp_path_factory.mktemp("page"))


def page_of(runs: Path, folder: Path) -> Page:
    """The page of runs, which is written to a folder."""
    return sections(write_page([runs], folder / "r.html").read_text())


def sections(text: str) -> Page:
    """The figures of each section of a page."""
    page = {}
    for part in text.split('<section id="')[1:]:
        name = part.partition('"')[0]
        page[name] = figures_in(part)
    return page


def last_rounds(measured: Path) -> list[Event]:
    """The last round of the run over each split."""
    return [round_events(measured / "all" / f"a{alpha}")[-1] for alpha in ALPHAS]


def percent(share: float) -> str:
    """A share as a table shows it."""
    return f"{100 * share:.2f}"


def test_each_measure_has_its_figures_and_they_are_valid(page: Page) -> None:
    assert set(SECTIONS) < set(page)
    for name in SECTIONS:
        assert page[name], name
        for figure in page[name]:
            assert figure["data"], name
            go.Figure(figure)


def test_a_run_without_measures_has_no_figures_of_them(measured: Path, tmp_path: Path) -> None:
    page = page_of(measured / "none", tmp_path)
    assert not set(page) & (set(SECTIONS) - {"knowledge"})
    assert len(page["knowledge"]) == 1, "prediction consistency only"


def test_lines_show_the_numbers_of_the_journal(measured_run: Path, page: Page) -> None:
    line = page["weights"][0]["data"][0]
    layers = [event["layers"] for event in measure_events(measured_run, "alignment")]
    alignments = [layer["features"]["local"] for layer in layers]
    assert line["y"] == pytest.approx(alignments, abs=1e-5)


def test_points_are_the_journals_and_their_opacity_grows_with_the_round(
    measured_run: Path, page: Page
) -> None:
    distances = {}
    for event in measure_events(measured_run, "divergence"):
        for client, distance in zip(event["clients"], event["l2"], strict=True):
            distances[client, event["round"]] = distance

    (scatter,) = [figure for figure in page["weights"] if figure["data"][0]["mode"] == "markers"]
    trace = scatter["data"][0]
    points = [(client, round_index) for client, round_index in trace["customdata"]]
    assert set(points) == set(distances)
    assert trace["y"] == pytest.approx([distances[point] for point in points], abs=1e-5)

    opacities = {}
    for (_, round_index), colour in zip(points, trace["marker"]["color"], strict=True):
        opacities[round_index] = float(colour.rpartition(",")[2].removesuffix(")"))
    assert opacities[1] < opacities[2] == 1


def test_forgetting_is_drawn_against_the_concentration_of_the_split(
    measured: Path, page: Page
) -> None:
    rounds = last_rounds(measured)
    forgetting, accuracy = page["heterogeneity"]
    (line,) = forgetting["data"]
    assert line["x"] == list(ALPHAS)
    assert forgetting["layout"]["xaxis"]["type"] == "log"

    forgetting_by_alpha = [event["forgetting"] for event in rounds]
    assert line["y"] == pytest.approx(forgetting_by_alpha, abs=1e-5)
    accuracy_by_alpha = [event["accuracy"] for event in rounds]
    assert accuracy["data"][0]["y"] == pytest.approx(accuracy_by_alpha, abs=1e-5)


def test_bars_have_both_forms_and_the_spread_over_clients(measured: Path, page: Page) -> None:
    rounds = last_rounds(measured)
    bars = [figure for figure in page["knowledge"] if figure["data"][0]["type"] == "bar"]
    for figure, key in zip(bars, ("in_local_accuracy", "in_local_accuracy_seen"), strict=True):
        in_local, _, overall = figure["data"]
        means = [event[key] for event in rounds]
        assert in_local["y"] == pytest.approx(means, abs=1e-5)
        spreads = [event[f"{key}_std"] for event in rounds]
        assert in_local["error_y"]["array"] == pytest.approx(spreads, abs=1e-5)
        accuracies = [event["accuracy"] for event in rounds]
        assert overall["y"] == pytest.approx(accuracies, abs=1e-5)


def test_every_image_is_a_point_under_every_model(measured_run: Path, page: Page) -> None:
    (event,) = measure_events(measured_run, "tsne")
    points = len(event["models"]) * len(event["labels"])
    by_class, by_model = page["tsne"][:2]
    assert sum(len(trace["x"]) for trace in by_class["data"]) == points
    assert sum(len(trace["x"]) for trace in by_model["data"]) == points
    assert {trace["name"] for trace in by_model["data"]} == set(event["models"])


def test_units_are_sorted_by_the_received_model(measured_run: Path, page: Page) -> None:
    (event,) = measure_events(measured_run, "units")
    received = event["classes"][0]
    units = zip(*event["classes"], strict=True)
    sorted_units = sorted(units, key=lambda unit: unit[0])

    drawn = page["units"][0]["data"][0]["z"]
    assert drawn[0] == sorted(received)
    assert [list(row) for row in zip(*sorted_units, strict=True)] == drawn


def test_smoothing_keeps_the_sum_and_continues_around_the_circle() -> None:
    counts = [0.0] * 71 + [10.0]
    smooth = smoothed(counts)
    assert sum(smooth) == pytest.approx(10)
    assert smooth[0] > 0
    assert smooth[0] == pytest.approx(smooth[70])
    assert max(smooth) == smooth[71]


def test_a_loss_too_large_for_a_number_is_drawn_as_the_largest(
    damaged_run: Path, tmp_path: Path
) -> None:
    journal = events(damaged_run)
    (event,) = [event for event in journal if event.get("measure") == "landscape"]
    losses = event["models"]["aggregated"]
    losses["hessian"][0][0] = None
    losses["noise"][-1] = None
    write_events(damaged_run, journal)

    figures = page_of(damaged_run, tmp_path)["landscape"]

    finite_hessian = [loss for loss in chain(*losses["hessian"]) if loss is not None]
    assert figures[0]["data"][0]["z"][0][0] == max(finite_hessian)
    finite_noise = [loss for loss in losses["noise"] if loss is not None]
    assert figures[-1]["data"][0]["y"][-1] == max(finite_noise)


ATTACK_RESULTS = {"auc": 0.5, "tpr_at_0.01": 0.0, "tpr_at_0.001": 0.0}


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
        ("leakage", {"seen": {"loss": {**ATTACK_RESULTS, "roc": [0.5]}}}),
        ("leakage", {"seen": {"loss": {"auc": 0.5, "auc_interval": 3}}}),
        ("alignment", {"round": "2"}),
        ("alignment", {"measure": None}),
        ("alignment", {"seconds": "long"}),
    ],
)
def test_a_damaged_measurement_is_named_with_its_journal(
    measure: str, change: dict[str, Any], damaged_run: Path, tmp_path: Path
) -> None:
    journal = events(damaged_run)
    for event in journal:
        if event.get("measure") == measure:
            event.update(change)
    write_events(damaged_run, journal)

    with pytest.raises(CorruptFile, match=r"journal\.jsonl") as caught:
        write_page([damaged_run], tmp_path / "r.html")
    assert "\n" not in str(caught.value)


def test_leaks_are_the_journals(measured_run: Path, page: Page) -> None:
    attacked = [event["seen"] for event in measure_events(measured_run, "leakage")]
    areas_figures = page["leakage"][:2]
    curve_figures = page["leakage"][2:4]
    attacks = ("loss", "likelihood_ratio")
    for attack, by_round, curves in zip(attacks, areas_figures, curve_figures, strict=True):
        areas = [results[attack]["auc"] for results in attacked]
        assert by_round["data"][0]["y"] == pytest.approx(areas, abs=1e-5)

        random_guess, curve, *_ = curves["data"]
        assert random_guess["x"] == random_guess["y"]
        visible_rates = [max(rate, 1e-3) for rate in attacked[-1][attack]["roc"]]
        assert curve["y"] == pytest.approx(visible_rates, abs=1e-5)
        assert len(curve["x"]) == len(curve["y"])


def test_leaks_before_and_after_privacy_are_in_the_table(tmp_path: Path) -> None:
    noises = (0.1, 5.0)
    for noise in noises:
        experiment = toys.toy(
            "hiper_fedkd",
            measure=["leakage"],
            rounds=1,
            data={"public": toys.PUBLIC},
            topology={"clients": 6},
            privacy={"clip": 4.0, "noise": noise},
        )
        runner.run(experiment, tmp_path / f"n{noise}", data=toys.blobs())

    text = write_page([tmp_path], tmp_path / "r.html").read_text()

    table = text.partition('<section id="leakage">')[2].partition("</section>")[0]
    for noise in noises:
        folder = tmp_path / f"n{noise}"
        local, aggregated = measure_events(folder, "leakage")
        by_loss = local["seen"]["loss"]
        for results in (by_loss, local["raw"]["likelihood_ratio"], aggregated["global"]["loss"]):
            low, high = results["auc_interval"]
            area = percent(results["auc"])
            assert f"{area} ({percent(low)}–{percent(high)})" in table

        rows = leak_rows(groups([folder]))
        first_of_each_target = [row.plain_cells[:2] for row in rows[::4]]
        assert first_of_each_target == [
            ["what the server sees", "the loss"],
            ["the global model", "the loss"],
        ]
        keys = ("auc", "tpr_at_0.001", "tpr_at_0.01")
        assert rows[0].numbers == [percent(by_loss[key]) for key in keys]

    traces = chain(*(figure["data"] for figure in sections(text)["leakage"]))
    dotted = [trace for trace in traces if trace.get("line", {}).get("dash") == "dot"]
    before_privacy = {f"hiper_fedkd, noise={noise}, before privacy" for noise in noises}
    assert {trace["name"] for trace in dotted} == before_privacy


@pytest.mark.parametrize(
    "damage", [3, {"train": []}, {"train": {"in_local_accuracy": [1.0]}}, {"train": {}}]
)
def test_damaged_epochs_are_named_with_their_journal(
    damage: Any, damaged_run: Path, tmp_path: Path
) -> None:
    journal = events(damaged_run)
    for event in journal:
        if event["event"] == "round":
            event["by_epoch"] = damage
    write_events(damaged_run, journal)

    with pytest.raises(CorruptFile, match=r"journal\.jsonl, line \d+: by_epoch"):
        write_page([damaged_run], tmp_path / "r.html")


def test_epochs_are_the_last_rounds(measured_run: Path, page: Page) -> None:
    (last,) = [event for event in round_events(measured_run) if event["round"] == 2]
    by_epoch = last["by_epoch"]["train"]
    sides = ("in_local_accuracy", "out_local_accuracy")
    for figure, side in zip(page["epochs"], sides, strict=True):
        curve = figure["data"][0]
        assert curve["y"] == pytest.approx(by_epoch[side], abs=1e-5)
        assert curve["error_y"]["array"] == pytest.approx(by_epoch[f"{side}_std"], abs=1e-5)
        assert curve["customdata"] == list(range(len(curve["y"])))
