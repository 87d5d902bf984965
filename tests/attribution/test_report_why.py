"""The figures of contributions to forgetting: from the journal, and from later replays."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import chain, pairwise
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


def contributions_run(
    folder: Path, method: str = "fedavg", dataset: Dataset | None = None, **changes: Any
) -> None:
    """Run a method that forgets; contributions are measured in each of its four rounds."""
    values = {
        "rounds": 4,
        "measure": ("contributions",),
        "measure_every": 1,
        "plan": {"epochs": 3, "lr": 0.3},
        **changes,
    }
    fedstill.run(toys.toy(method, **values), folder, dataset or toys.blobs())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of fedavg and fedntd, and of the chain fedseq, that measured contributions."""
    folder = tmp_path_factory.mktemp("why")
    contributions_run(folder / "fedavg", "fedavg")
    contributions_run(folder / "fedntd", "fedntd")
    topology = {"kind": "sequential", "clients": 6, "sampled": 3}
    contributions_run(folder / "fedseq", "fedseq", rounds=3, topology=topology, plan={"lr": 0.3})
    return folder


@pytest.fixture(scope="module")
def averaging_run(runs: Path) -> Run:
    """The run of fedavg."""
    return only_run(groups([runs / "fedavg"]))


def only_run(compared: list[Group]) -> Run:
    """The first run of the first group."""
    return compared[0].started[0]


def figures(text: str, name: str) -> list[list[dict[str, Any]]]:
    """The variants of each figure of this name on a page."""
    charts = []
    for part in text.split(f'data-name="{name}"')[1:]:
        variants = part.partition('json">')[2].partition("</script>")[0]
        charts.append(json.loads(variants))
    return charts


def section_of(compared: list[Group]) -> str:
    """The section on contributions of a report."""
    return as_html(report.contributors(Report(compared)))


@dataclass(frozen=True)
class Bar:
    """A bar of a fall."""

    name: str
    base: float
    height: float

    @property
    def end(self) -> float:
        """The accuracy at which the bar ends."""
        return self.base + self.height


def bars_of(trace: dict[str, Any]) -> list[Bar]:
    """The bars of a fall, in their order."""
    return list(map(Bar, trace["x"], trace["base"], trace["y"]))


def test_each_group_has_a_map_for_each_measured_round(runs: Path) -> None:
    compared = groups([runs / "fedavg", runs / "fedntd"])
    text = page(compared)
    assert 'id="why"' in text
    assert 'type="range" min="0" max="3"' in text

    maps = figures(text, "contributors")
    assert [len(variants) for variants in maps] == [4, 4]
    measured = only_run(compared).measures
    looks = [event for event in measured if event["measure"] == "contributions"]
    for variant, look in zip(maps[0], looks, strict=True):
        if not look["classes"]:
            continue
        (trace,) = variant["data"]
        assert trace["x"] == [f"client {client}" for client in look["clients"]]
        points_of_class = [100 * value for value in look["values"][0]]
        first_class = look["classes"][0]
        assert trace["z"][first_class] == pytest.approx(points_of_class, abs=1e-3)


def test_the_bars_of_each_fall_lead_from_the_first_accuracy_to_the_last(runs: Path) -> None:
    text = page(groups([runs / "fedavg", runs / "fedntd"]))
    falls = figures(text, "falls")
    assert len(falls) == 2
    traces = chain.from_iterable(variant["data"] for variant in falls[0])
    for trace in traces:
        bars = {bar.name: bar for bar in bars_of(trace)}
        accuracy_before = bars["before"].height
        accuracy_after = bars["after"].height
        assert bars["local training"].base == pytest.approx(accuracy_before, abs=1e-4)
        assert bars["averaging"].end == pytest.approx(accuracy_after, abs=1e-4)
        assert bars["rest"].end == pytest.approx(accuracy_after, abs=1e-4), "after all clients"


def test_a_chain_has_a_column_for_each_link(runs: Path) -> None:
    compared = groups([runs / "fedseq"])
    (variants,) = figures(section_of(compared), "contributors")
    links = [event for event in only_run(compared).measures if event["round"] == 2]
    columns = [f"client {event['clients'][0]}" for event in links]
    assert variants[1]["data"][0]["x"] == columns


def test_falls_are_of_the_global_model_if_clients_have_models_of_their_own_too(
    tmp_path: Path,
) -> None:
    values = {**toys.suited("ditto"), "rounds": 4}
    contributions_run(tmp_path / "ditto", "ditto", **values)
    run = only_run(groups([tmp_path / "ditto"]))
    falls = []
    for event in run.measures:
        if event["name"] != "train" or event["round"] == 1:
            continue
        pairs = zip(event["before"], event["after"], strict=True)
        for label, accuracies in enumerate(pairs):
            change = ClassChange(event["round"], label, *accuracies)
            if change.change < 0:
                falls.append(change)
    assert falls

    losses = report._losses(run)
    assert sorted(losses, key=lambda loss: (loss.round, loss.label)) == falls


@pytest.fixture(scope="module")
def momentum_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """A run whose server has momentum."""
    folder = tmp_path_factory.mktemp("momentum")
    contributions_run(folder / "run", "fedavgm")
    return groups([folder / "run"])


def test_the_momentum_of_a_server_is_a_bar(momentum_runs: list[Group]) -> None:
    (variants,) = figures(section_of(momentum_runs), "falls")
    traces = chain.from_iterable(variant["data"] for variant in variants)
    with_server = [trace for trace in traces if SERVER_ROW in trace["x"]]
    assert with_server
    for trace in with_server:
        steps = bars_of(trace)[1 : trace["x"].index("rest") + 1]
        assert steps[-2].name == SERVER_ROW
        for step, following in pairwise(steps):
            assert step.end == pytest.approx(following.base, abs=2e-4)


def test_the_momentum_of_a_server_is_a_row(momentum_runs: list[Group]) -> None:
    run = only_run(momentum_runs)
    without_server = attribution({"train": -0.5})
    rows = contribution_table(run, without_server).lines
    assert [row[:2] for row in rows[-2:]] == [["client 4", "+10.0"], ["together", "-20.4"]]

    with_server = replace(without_server, server=-0.2)
    rows = contribution_table(run, with_server).lines
    assert [row[:2] for row in rows[-2:]] == [[SERVER_ROW, "-20.0"], ["together", "-40.4"]]


def test_the_first_measured_seed_of_a_group_is_drawn_and_named(runs: Path) -> None:
    (group,) = groups([runs / "fedavg"])
    measured = group.runs[0]
    settings = {**measured.settings, "seed": measured.seed - 1}
    earlier = replace(measured, settings=settings, measures=())

    section = section_of([Group("fedavg", [earlier, measured])])

    alone = section_of([group])
    for name in ("contributors", "falls"):
        assert figures(section, name) == figures(alone, name)
    assert f"seed {measured.seed}" in section
    assert f"seed {earlier.seed}" not in section


def two_classes() -> Dataset:
    """Images of noise with two labels, which no model keeps."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (90, 1, 4, 4), generator=draw, dtype=torch.uint8)
    examples = (images, torch.arange(90) % 2)
    return from_tensors("two", examples, examples, classes=["left", "right"])


def test_losses_are_listed_by_the_classes_of_their_runs(runs: Path, tmp_path: Path) -> None:
    contributions_run(tmp_path / "two", dataset=two_classes())
    compared = groups([tmp_path / "two", runs / "fedavg"])

    section = section_of(compared)

    selectors = BeautifulSoup(section, "html.parser").find_all("select")
    assert len(selectors) == 2
    names = [selector["data-controls"] for selector in selectors]
    assert len(set(names)) == 2
    for selector, group in zip(selectors, compared, strict=True):
        losses = [option.text for option in selector.find_all("option")]
        assert losses
        classes = [f"class {name}, " for name in group.classes]
        for loss in losses:
            assert any(name in loss for name in classes)
        (variants,) = figures(section, selector["data-controls"])
        assert len(variants) == len(losses)


FEW_DIGITS = {"name": "digits", "train_size": 100, "test_size": 60}


def test_results_of_later_replays_are_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fedstill.run(toys.toy(rounds=3, measure=(), data=FEW_DIGITS), folder)
    assert 'id="why"' not in page(groups([folder]))
    assert call(["why", str(folder), "-q"]) == 0
    assert 'id="why"' in page(groups([folder]))


def attribution(
    parts: dict[str, float], sampled_share: float = 1.0, change: float = -0.5
) -> Attribution:
    """The attribution of a change of class 1 in round 3, to these parts and to three clients."""
    return Attribution(
        change=ClassChange(3, 1, 0.8, 0.8 + change),
        parts=parts,
        clients={2: -0.3, 4: 0.1, 5: -0.004},
        error=0.01,
        game="idle",
        rule="path",
        sampled_share=sampled_share,
    )


MOSTLY_TRAINING = {"local training": -0.4, "averaging": -0.1}
MOSTLY_AVERAGING = {"local training": 0.1, "averaging": -0.6}


def test_the_sentence_names_the_clients_above_their_error(averaging_run: Run) -> None:
    name = repr(averaging_run.classes[1])

    fall = sentence_of(averaging_run, attribution(MOSTLY_TRAINING))
    for part in (name, "80.0 % to 30.0 %", "round 3", "averaging -10.0", "client 2 -30.0"):
        assert part in fall
    assert "client 4" not in fall, "it contributed to a rise"

    rise = sentence_of(averaging_run, attribution({}, change=0.1))
    assert "client 4 +10.0" in rise

    parts = {"local training": -0.1, "averaging": 0.1}
    no_change = sentence_of(averaging_run, attribution(parts, change=0.0))
    for part in (name, "at 80.0 %", "round 3", "local training -10.0", "averaging +10.0"):
        assert part in no_change


@pytest.mark.parametrize(
    ("classes", "note"),
    [([[1], [0]], " (of task 1) fell"), ([[1], [1, 2]], "' fell"), ([[0], [2]], "' fell")],
)
def test_the_sentence_names_the_tasks_of_a_class_if_some_have_it(
    classes: list[list[int]], note: str, averaging_run: Run
) -> None:
    start = {**averaging_run.start, "stream": {"classes": classes}}
    run_with_tasks = replace(averaging_run, start=start)
    assert note in sentence_of(run_with_tasks, attribution(MOSTLY_TRAINING))


def test_the_advice_fits_the_larger_part(averaging_run: Run) -> None:
    run = averaging_run
    run_lacking_class = with_counts(run, of_client_2=0)
    assert "fedntd" in advice(run_lacking_class, attribution(MOSTLY_TRAINING))
    assert advice(run_lacking_class, attribution(MOSTLY_AVERAGING)).startswith("Averaging")

    rarely_sampled = attribution({"local training": -0.5, "averaging": 0.0}, sampled_share=0.2)
    assert "0.20 times" in advice(run, rarely_sampled)
    of_a_chain = attribution({"client 3": -0.5, "client 1": 0.0})
    assert "sfedkd" in advice(run, of_a_chain)

    assert advice(run, attribution({"train": -0.5})) == "", "side by side, but not averaged"
    assert advice(run, attribution({}, change=0.2)) == "", "no fall"


def test_a_contribution_that_rounds_to_zero_has_no_sign() -> None:
    assert points(-0.0004) == "0.0"


@pytest.mark.parametrize("parts", [MOSTLY_TRAINING, MOSTLY_AVERAGING])
def test_a_client_that_holds_the_class_is_to_check_its_labels(
    parts: dict[str, float], averaging_run: Run
) -> None:
    """A client whose labels are wrong is named, and no hint says that it lacks the class."""
    run = averaging_run
    hint = advice(with_counts(run, of_client_2=9), attribution(parts))
    assert hint.startswith("client 2")
    assert "labels" in hint
    assert "do not hold" not in hint

    # It need not be the first client: others that lack the class lose some, too.
    strong = replace(attribution(parts), clients={3: -0.35, 2: -0.3, 4: 0.1})
    others_lack = with_counts(run, of_client_2=9, of_client_3=0)
    assert advice(others_lack, strong).startswith("client 2")
    weak = replace(attribution(parts), clients={3: -0.35, 2: -0.03, 4: 0.1})
    assert "labels" not in advice(others_lack, weak)


def test_if_the_server_knows_no_labels_the_advice_names_both_causes(averaging_run: Run) -> None:
    federation = replace(averaging_run, label_counts=LabelCounts.of_table([], 0))
    hint = advice(federation, attribution(MOSTLY_TRAINING))
    assert "client 2" in hint
    assert "labels" in hint
    assert "fedntd" in hint


def with_counts(run: Run, of_client_2: int, of_client_3: int = 9) -> Run:
    """The run with nine examples of every class at each client, except of class 1 at two."""
    table = [[9, 9, 9, 9, 9] for _ in range(6)]
    table[2][1] = of_client_2
    table[3][1] = of_client_3
    return replace(run, label_counts=LabelCounts.of_table(table, 5))


def test_if_no_class_fell_the_command_begins_with_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "calm"
    fedstill.run(toys.toy(rounds=2, measure=(), plan={"lr": 1e-9}, data=FEW_DIGITS), folder)
    capsys.readouterr()

    assert call(["why", str(folder)]) == 0

    printed = capsys.readouterr()
    first, second = printed.out.splitlines()[:2]
    assert first.startswith("No class lost accuracy")
    assert "stayed at" in second
    assert "contributed most" not in printed.out
    assert "round 2" in printed.err

    assert call(["why", str(folder), "--class", "0", "--round", "1"]) == 0

    printed = capsys.readouterr()
    assert printed.out.startswith("Class '0' did not lose accuracy")
    assert "round 1" in printed.err
