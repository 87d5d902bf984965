"""Every registered measure runs, resumes to the same bits, and reports its cost; its numbers are
derived again here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import toys
from double import NEAR, Wide, widened
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core import descriptions, registry, trees
from fedstill.core.errors import ConfigError, FedstillError
from fedstill.core.extensions import StageResult
from fedstill.core.records import Payload, Tensors
from fedstill.core.registry import register
from fedstill.data.inputs import Inputs
from fedstill.flower.site_settings import code_in
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.measures.choice import MeasuredRun, measures, unsuited_measures
from fedstill.measures.features import directions, tsne_embedding
from fedstill.metrics.local_models import by_epoch
from fedstill.running.journal import without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from journals import journal_events
from run_bits import assert_same_bits, bits, model_bytes, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

APART = {"boundaries"}
"""The measure of a single client with a query, in a run of one round; test_boundaries.py tests
it.
"""

MEASURES = [
    name for name in registry.names("measure") if not name.startswith("toy_") and name not in APART
]
WITH_REPLIES = {"local", "epochs", "personal", "private_public"}
"""Measured by clients within their stage."""

ON_CIRCLE = {"sphere": "sphere_digits_cnn"}
"""Measures of a network whose features are on a circle, and such a network."""

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 1}
MIXED = {"rounds": 1, "clients": {"models": ["mlp", "logistic"]}}


@dataclass(frozen=True)
class Look:
    """What a measure gets to see of a stage."""

    result: StageResult
    context: EvaluationContext


LOOKS: list[Look] = []
"""Everything that the measure ``toy_spy`` has seen."""


@register("measure", "toy_spy")
class Spy(Measure):
    """Remembers what it was shown."""

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        LOOKS.append(Look(result, context))
        return None


@register("measure", "toy_broken")
class Broken(Measure):
    """Fails when it looks."""

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers | None:
        raise ZeroDivisionError("nothing\nto divide")


def measured(*names: str, **changes: Any) -> Experiment:
    """A toy experiment with these measures, and with the network, topology and data that they
    need.
    """
    values: dict[str, Any] = {"measure": list(names), "model": {"name": "mlp", "hidden": (8,)}}
    for name in ON_CIRCLE.keys() & set(names):
        values["model"] = ON_CIRCLE[name]
    if "chain" in names:
        values["topology"] = CHAIN
    if "private_public" in names:
        values["data"] = {"public": toys.PUBLIC}
    if names == ("tsne",):
        # Its time is quadratic in the examples.
        values["data"] = {"test_size": 40}
    return toys.toy(**{**values, **changes})


def measure_of(name: str) -> Measure:
    """A registered measure."""
    return measures([name])[name]


@dataclass(frozen=True)
class MeasuredFolder:
    """The directory of a finished run with one measure."""

    measure: str
    folder: Path


@pytest.fixture(scope="module", params=MEASURES)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MeasuredFolder:
    """A finished run with each of the measures."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    run(measured(request.param), folder, data=toys.blobs())
    return MeasuredFolder(request.param, folder)


def test_it_runs_and_reports_its_cost(finished: MeasuredFolder) -> None:
    name = finished.measure
    looks = journal_events(finished.folder, event="measure")

    if name in WITH_REPLIES:
        assert not looks
    else:
        rounds = [2, 3]
        if measure_of(name).only_last:
            rounds = [3]
        assert [event["round"] for event in looks] == rounds
        assert {event["measure"] for event in looks} == {name}
        assert {event["name"] for event in looks} == {"train"}
        assert all(event["seconds"] > 0 for event in looks)
        seconds = {event["round"]: event["seconds"] for event in looks}
        for event in journal_events(finished.folder, event="round"):
            assert event["seconds_measuring"] > seconds.get(event["round"], 0)

    result = resume(finished.folder)
    assert result.summary["seconds_measures"][name] > 0
    assert result.measures == looks


def test_it_resumes_to_the_same_bits(finished: MeasuredFolder, tmp_path: Path) -> None:
    for stages in (2, 3):
        folder = stopped(measured(finished.measure), tmp_path / str(stages), stages)
        resume(folder, data=toys.blobs())

        assert_same_bits(bits(folder), bits(finished.folder))


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """By measure, the model of the same run without it: few measures need one of their own."""
    models: dict[str, bytes] = {}

    def model(name: str) -> bytes:
        tree = resolve(measured(name)).tree
        setting = {key: tree[key] for key in ("model", "topology", "data")}
        key = repr(setting)
        if key not in models:
            folder = tmp_path_factory.mktemp("unmeasured") / "run"
            run(measured(**setting), folder, data=toys.blobs())
            models[key] = model_bytes(folder)
        return models[key]

    return model


def test_it_does_not_change_the_model(
    finished: MeasuredFolder, unmeasured: Callable[[str], bytes]
) -> None:
    assert model_bytes(finished.folder) == unmeasured(finished.measure)


def test_it_is_documented(finished: MeasuredFolder) -> None:
    """Of a larger test set, it does not take fewer examples."""
    entry = registry.lookup("measure", finished.measure)
    measure = measure_of(finished.measure)

    assert descriptions.summary(entry).endswith(".")
    assert 0 < measure.examples(100, 10, 5000) <= measure.examples(1000, 10, 5000)


@dataclass(frozen=True)
class LastRound:
    """The last round of a run with all measures that suit one network."""

    result: StageResult
    context: EvaluationContext
    looks: dict[str, dict[str, Any]]
    """The events of measures."""
    reports: dict[int, dict[str, Any]]
    """The events of clients."""
    event: dict[str, Any]
    """The event of the round."""

    @property
    def received(self) -> Tensors:
        """The parameters that clients received."""
        return self.result.before.params

    @property
    def aggregated(self) -> Tensors:
        """The parameters after the round."""
        return self.result.after.params


@pytest.fixture(scope="module")
def last_round(tmp_path_factory: pytest.TempPathFactory) -> LastRound:
    """The last round of such a run."""
    unsuited = {"landscape", "chain", "private_public", *ON_CIRCLE}
    names = [name for name in MEASURES if name not in unsuited]
    LOOKS.clear()
    folder = tmp_path_factory.mktemp("looks") / "run"
    experiment = measured("toy_spy", *names)
    result = run(experiment, folder, data=toys.blobs())
    (look,) = [
        look
        for look in LOOKS
        if look.result.ends_round and look.result.stage.round == experiment.rounds
    ]
    clients = journal_events(folder, event="client", round=3)
    looks = journal_events(folder, event="measure", round=3)
    return LastRound(
        result=look.result,
        context=look.context,
        looks={event["measure"]: event for event in looks},
        reports={event["client"]: event for event in clients},
        event=result.history[-1],
    )


def hidden(params: Tensors, inputs: Tensor) -> Tensor:
    """The features of the network, in float64."""
    weight = params["body.1.weight"].double()
    return (inputs.flatten(1).double() @ weight.T + params["body.1.bias"].double()).relu()


def logits(params: Tensors, inputs: Tensor) -> Tensor:
    """The logits of the network, in float64."""
    weight = params["head.weight"].double()
    return hidden(params, inputs) @ weight.T + params["head.bias"].double()


@dataclass(frozen=True)
class Labelled:
    """Standardised inputs and their labels."""

    inputs: Tensor
    labels: Tensor

    def is_correct(self, params: Tensors) -> Tensor:
        """Whether a model predicts each label."""
        return logits(params, self.inputs).argmax(1) == self.labels

    def accuracy_by_class(self, params: Tensors) -> np.ndarray:
        """A model's accuracy on each class."""
        is_correct = self.is_correct(params).double()
        return np.array([is_correct[self.labels == c].mean() for c in range(toys.CLASSES)])


def common_test() -> Labelled:
    """The common test set."""
    sites = prepare(resolve(measured()), toys.blobs()).sites
    test = sites.common_test
    assert test is not None
    return Labelled(sites.inputs.plain(test.values), test.labels)


def training_data(client: int, inputs: type[Inputs] = Inputs) -> Labelled:
    """A client's training examples."""
    sites = prepare(resolve(measured()), toys.blobs()).sites
    examples = sites.train.take(sites.positions(client))
    standardised = inputs(sites.inputs.mean, sites.inputs.std).plain(examples.values)
    return Labelled(standardised, examples.labels)


def class_shares(client: int) -> np.ndarray:
    """The shares of classes in a client's training data."""
    counts = np.bincount(training_data(client).labels, minlength=toys.CLASSES)
    return counts / counts.sum()


def difference(params: Tensors, start: Tensors) -> np.ndarray:
    """The change of all parameters, as one vector in float64."""
    changes = [(params[name].double() - start[name].double()).numpy() for name in params]
    return np.concatenate([change.ravel() for change in changes])


def test_a_measure_sees_a_stage_with_its_start_and_end(last_round: LastRound) -> None:
    result = last_round.result
    examples = {reply.client: reply.examples for reply in result.accepted}

    assert result.ends_round
    assert all(payload.params is last_round.received for payload in result.payloads.values())
    assert set(result.local_models) == set(result.stage.clients)
    weights = [examples[client] for client in result.local_models]
    mean = trees.mean(list(result.local_models.values()), weights)
    for name, value in mean.items():
        assert torch.equal(last_round.aggregated[name], value)


def preferred_classes(
    layer: Callable[[Tensors, Tensor], Tensor], params: Tensors, test: Labelled
) -> np.ndarray:
    """For each unit of a layer, the class with the largest mean activation."""
    activations = layer(params, test.inputs)
    means = [activations[test.labels == c].mean(0).numpy() for c in range(toys.CLASSES)]
    return np.stack(means).argmax(0)


@pytest.mark.parametrize(("name", "layer"), [("features", hidden), ("classifier", logits)])
def test_alignment_as_a_plain_loop(
    name: str, layer: Callable[[Tensors, Tensor], Tensor], last_round: LastRound
) -> None:
    test = common_test()
    start = preferred_classes(layer, last_round.received, test)
    end = preferred_classes(layer, last_round.aggregated, test)
    by_client = []
    for params in last_round.result.local_models.values():
        classes = preferred_classes(layer, params, test)
        by_client.append(float(np.mean(start == classes)))

    numbers = last_round.looks["alignment"]["layers"][name]

    assert numbers["clients"] == by_client
    assert numbers["local"] == pytest.approx(np.mean(by_client))
    assert numbers["local_std"] == pytest.approx(np.std(by_client))
    assert numbers["global"] == float(np.mean(start == end))


def test_units_are_the_preferred_classes_of_all_models(last_round: LastRound) -> None:
    test = common_test()

    numbers = last_round.looks["units"]

    clients = [f"client {client}" for client in sorted(last_round.result.local_models)]
    assert numbers["models"] == ["received", *clients, "aggregated"]
    received = preferred_classes(hidden, last_round.received, test)
    aggregated = preferred_classes(hidden, last_round.aggregated, test)
    assert numbers["classes"][0] == received.tolist()
    assert numbers["classes"][-1] == aggregated.tolist()


def test_divergence_as_a_plain_loop(last_round: LastRound) -> None:
    local_models = last_round.result.local_models
    accuracy = common_test().accuracy_by_class(last_round.received)

    numbers = last_round.looks["divergence"]

    assert numbers["clients"] == list(local_models)
    for index, (client, params) in enumerate(local_models.items()):
        change = difference(params, last_round.received)
        distance = np.abs(accuracy / accuracy.sum() - class_shares(client)).sum()
        assert numbers["l1"][index] == pytest.approx(np.abs(change).sum())
        assert numbers["l2"][index] == pytest.approx(np.sqrt((change**2).sum()))
        assert numbers["distance"][index] == pytest.approx(distance)
    assert numbers["mean_l2"] == pytest.approx(np.mean(numbers["l2"]))


def test_personalised_accuracy_as_a_plain_loop(last_round: LastRound) -> None:
    test = common_test()
    train_accuracies = []
    personalised = []
    sizes = []
    for client, params in last_round.result.local_models.items():
        train = training_data(client)
        is_correct = train.is_correct(params)
        correct_labels = train.labels[is_correct]
        report = last_round.reports[client]
        correct = torch.bincount(correct_labels, minlength=toys.CLASSES)
        counts = torch.bincount(train.labels, minlength=toys.CLASSES)
        assert report["trained_right"] == correct.tolist()
        assert report["trained_counts"] == counts.tolist()
        sizes.append(len(train.labels))
        train_accuracies.append(float(is_correct.double().mean()))
        personalised.append(test.accuracy_by_class(params) @ class_shares(client))

    event = last_round.event
    weighted = np.average(train_accuracies, weights=sizes)
    assert event["local_train_accuracy"] == pytest.approx(np.mean(train_accuracies))
    assert event["local_train_accuracy_weighted"] == pytest.approx(weighted)
    assert event["personalised_accuracy"] == pytest.approx(np.mean(personalised))
    assert event["personalised_accuracy_std"] == pytest.approx(np.std(personalised))


def in_float64(last_round: LastRound) -> Look:
    """What a measure sees of the same round if all numbers are in float64."""
    result = last_round.result
    received = replace(result.before, params=widened(last_round.received))
    replies = [
        replace(reply, content=Payload(params=widened(reply.content.params)))
        for reply in result.accepted
    ]
    inputs = last_round.context.inputs
    return Look(
        replace(result, before=received, accepted=replies),
        replace(last_round.context, inputs=Wide(inputs.mean, inputs.std)),
    )


def gradient_on(params: Tensors, data: Labelled) -> np.ndarray:
    """The gradient of the mean cross-entropy, as one vector."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = torch.nn.functional.cross_entropy(logits(leaves, data.inputs), data.labels)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return np.concatenate([gradient.numpy().ravel() for gradient in gradients])


def norm_ratio(vectors: list[np.ndarray]) -> float:
    """The mean squared norm over the squared norm of the mean."""
    squared_norms = [(vector**2).sum() for vector in vectors]
    mean_vector = np.mean(vectors, axis=0)
    return float(np.mean(squared_norms) / (mean_vector**2).sum())


def test_diversity_as_a_plain_loop(last_round: LastRound) -> None:
    """The journal has the numbers of the measure, which are compared in float64."""
    diversity = measure_of("diversity")
    numbers = diversity.look(last_round.result, last_round.context)
    assert numbers is not None
    assert numbers.items() <= last_round.looks["diversity"].items()

    exact_look = in_float64(last_round)
    exact = diversity.look(exact_look.result, exact_look.context)

    assert exact is not None
    start = exact_look.result.before.params
    gradients = []
    updates = []
    for client, params in last_round.result.local_models.items():
        gradients.append(gradient_on(start, training_data(client, Wide)))
        updates.append(difference(params, start))
    assert exact["gradients"] == pytest.approx(norm_ratio(gradients), rel=NEAR)
    assert exact["updates"] == pytest.approx(norm_ratio(updates), rel=NEAR)
    assert exact["gradients"] > 1


@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised", "flower"])
def test_accuracy_after_an_epoch_is_that_of_training_for_so_many_epochs(
    engine: str, tmp_path: Path
) -> None:
    """A model after its e-th epoch is the one that a run of e epochs sends; epoch 0 is the model
    received.
    """

    def round_event(epochs: int, *names: str) -> dict[str, Any]:
        plan = {"epochs": epochs, "batch": 8, "lr": 0.1, "momentum": 0.9}
        experiment = measured(*names, rounds=1, plan=plan, engine=engine)
        folder = tmp_path / f"{epochs} epochs, {len(names)} measures"
        return run(experiment, folder, data=toys.blobs()).history[-1]

    by_epoch = round_event(3, "local", "epochs")["by_epoch"]["train"]
    runs = [round_event(epochs, "local") for epochs in (1, 2, 3)]

    for side in ("in_local_accuracy", "out_local_accuracy"):
        accuracies = [runs[0][f"received_{side}"], *(event[side] for event in runs)]
        deviations = [event[f"{side}_std"] for event in runs]
        assert by_epoch[side] == pytest.approx(accuracies, abs=1e-12)
        assert by_epoch[f"{side}_std"][1:] == pytest.approx(deviations, abs=1e-12)
    assert len(set(by_epoch["in_local_accuracy"])) > 1
    assert by_epoch["clients"] == 4


def test_clients_that_stop_earlier_are_left_out_of_later_epochs() -> None:
    """By hand: two clients of two classes, of which one trains one epoch and the other two."""
    one_epoch = {"name": "train", "label_counts": [3, 1], "correct_by_epoch": [[0, 4], [4, 0]]}
    two_epochs = {
        "name": "train",
        "label_counts": [0, 8],
        "correct_by_epoch": [[4, 0], [2, 2], [0, 4]],
    }
    unmeasured = {"name": "other"}

    numbers = by_epoch([one_epoch, two_epochs, unmeasured], [4, 4])["by_epoch"]["train"]

    assert numbers["in_local_accuracy"] == [0.125, 0.625, 1.0]
    assert numbers["out_local_accuracy"] == [0.875, 0.375, 0.0]
    assert numbers["in_local_accuracy_std"] == [0.125, 0.125, 0.0]
    assert by_epoch([unmeasured], [4, 4]) == {}


def test_a_joint_tsne_places_classes_together(last_round: LastRound) -> None:
    numbers = last_round.looks["tsne"]
    labels = np.array(numbers["labels"])
    x = np.array(numbers["x"][-1])
    y = np.array(numbers["y"][-1])

    distances = np.hypot(x[:, None] - x, y[:, None] - y)
    is_same_class = labels[:, None] == labels

    assert np.array(numbers["x"]).shape == (len(numbers["models"]), 100)
    assert distances[is_same_class].mean() < 0.7 * distances[~is_same_class].mean()


def test_a_tsne_of_equal_features_has_one_place() -> None:
    places = tsne_embedding(torch.full((40, 8), 0.5), seed=0)
    assert torch.equal(places, torch.zeros(40, 2))


def test_directions_are_counts_of_angles() -> None:
    angles = np.random.default_rng(0).uniform(-np.pi, np.pi, 500)
    labels = np.arange(500) % 3
    points = torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1))

    counts = directions(points, torch.from_numpy(labels), 3)

    for label in range(3):
        expected, _ = np.histogram(angles[labels == label], 72, (-np.pi, np.pi))
        np.testing.assert_array_equal(counts[label], expected)


def test_landscapes_meet_at_the_model_itself(tmp_path: Path) -> None:
    experiment = measured("landscape", rounds=1, plan={"lr": 0.1})

    (event,) = run(experiment, tmp_path / "run", data=toys.blobs()).measures

    middle = len(event["axis"]) // 2
    for landscape in event["models"].values():
        loss = landscape["noise"][0]
        assert landscape["random"][middle][middle] == loss
        assert landscape["hessian"][middle][middle] == loss
        assert landscape["noise"][-1] > loss
        assert abs(landscape["eigenvalues"][0]) >= abs(landscape["eigenvalues"][1])


def test_in_a_chain_each_link_is_measured(tmp_path: Path) -> None:
    """The model after a link is that of its client."""
    experiment = measured("alignment", method="toy_chain", rounds=1)

    looks = run(experiment, tmp_path / "run", data=toys.blobs()).measures

    assert [event["round"] for event in looks] == [1] * 4
    assert [event["stage"] for event in looks] == [0, 1, 2, 3]
    for event in looks:
        features = event["layers"]["features"]
        assert len(event["clients"]) == 1
        assert features["local"] == features["global"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"measure": ["alignment"], "method": "toy_logits", "data": {"public": toys.PUBLIC}},
            "measure alignment: clients of method toy_logits",
        ),
        (
            {"measure": ["sphere"]},
            r"measure sphere: model mlp\(.*\) .*sphere_cnn",
        ),
        (
            {"measure": ["tsne"], "method": "toy_peers", "topology": {"clients": 6}, **MIXED},
            "measure tsne: .*clients.models",
        ),
        ({"measure": ["local", "local"]}, "'local'"),
        (
            {"measure": ["epochs"], "plan": {"epochs": 0}},
            r"measure epochs: .*plan\.epochs",
        ),
    ],
)
def test_an_unsuited_measure_is_refused_by_name(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        run(toys.toy(**changes), tmp_path / "run", data=toys.blobs())

    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def setting(experiment: Experiment, **changes: Any) -> MeasuredRun:
    """What the check of measures knows of a run with FedAvg."""
    ready = prepare(resolve(experiment), toys.blobs())
    schedule = ready.settings.schedule
    return MeasuredRun(schedule, "fedavg", schedule(1, ready.world), ready.world, **changes)


CLIENT_NEEDS = {"client_data", "test_at_clients"}


@pytest.mark.parametrize(
    "name", [name for name in MEASURES if CLIENT_NEEDS & measure_of(name).needs]
)
def test_outside_of_a_simulation_measures_of_clients_data_are_refused(name: str) -> None:
    federation = setting(measured(name), simulated=False)

    problem = unsuited_measures(measures([name]), federation)

    assert problem.startswith(f"measure {name}: ")
    assert "flower.data = 'sites'" in problem
    assert unsuited_measures(measures(["alignment", "local"]), federation) == ""


def in_a_chain(parallel: MeasuredRun) -> MeasuredRun:
    """The same with its clients in a chain."""
    stages = [replace(stage, sequential=True) for stage in parallel.stages]
    return replace(parallel, stages=stages)


def test_without_a_test_set_only_measures_with_replies_are_possible() -> None:
    untested = setting(measured(), tested=False)

    for name in MEASURES:
        if name in WITH_REPLIES or name in ON_CIRCLE:
            continue
        suited = untested
        if name == "chain":
            suited = in_a_chain(untested)
        problem = unsuited_measures(measures([name]), suited)
        assert problem.startswith(f"measure {name}: it needs a common test set")
    assert unsuited_measures(measures(sorted(WITH_REPLIES)), untested) == ""


def test_a_site_runs_no_measure_that_a_server_names_by_file() -> None:
    assert code_in({"measure": ["local", "evil.py:Evil"]}) == ["evil.py:Evil"]
    assert code_in({"measure": "pack.mod:Evil"}) == ["pack.mod:Evil"]


def test_a_measure_that_fails_is_named_with_its_place(tmp_path: Path) -> None:
    failure = "round 2, stage 'train': measure toy_broken failed: ZeroDivisionError"

    with pytest.raises(FedstillError, match=failure):
        run(measured("toy_broken"), tmp_path / "run", data=toys.blobs())


OWN_MEASURE = """
from fedstill.measures.base import Measure


class Clients(Measure):
    def look(self, result, context):
        return {"clients": len(result.accepted)}
"""


def test_a_measure_of_ones_own_is_a_file(tmp_path: Path) -> None:
    """The journal has the name of the file, and not its folder."""
    (tmp_path / "mine.py").write_text(OWN_MEASURE)
    (tmp_path / "other.py").write_text("def look():\n    return 3\n")
    experiment = measured(f"{tmp_path / 'mine.py'}:Clients")

    looks = run(experiment, tmp_path / "run", data=toys.blobs()).measures

    assert [event["measure"] for event in looks] == ["mine.py:Clients"] * 2
    assert [event["clients"] for event in looks] == [4] * 2
    _, _, after_start = (tmp_path / "run" / "journal.jsonl").read_text().partition("\n")
    assert str(tmp_path) not in after_start
    with pytest.raises(ConfigError, match="not a Measure"):
        resolve(measured(f"{tmp_path / 'other.py'}:look"))


def test_a_measure_that_needs_an_argument_is_refused(tmp_path: Path) -> None:
    constructor = "    def __init__(self, size):\n        self.size = size\n"
    (tmp_path / "mine.py").write_text(OWN_MEASURE + constructor)
    with pytest.raises(ConfigError, match=r"mine\.py:Clients.*'size'"):
        resolve(measured(f"{tmp_path / 'mine.py'}:Clients"))


def test_explain_shows_the_cost_and_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('measure = ["local", "landscape"]\nrounds = 2\n')

    status = call(["explain", str(config)])

    output = capsys.readouterr().out
    assert status == 0
    assert "of training" in output
    assert "measure landscape" in output
    assert "warning: measure local" not in output


def test_events_of_two_equal_runs_differ_in_their_times_only(tmp_path: Path) -> None:
    journals = []
    for name in ("first", "second"):
        run(measured("alignment", rounds=2), tmp_path / name, data=toys.blobs())
        journals.append(without_times(journal_events(tmp_path / name)))

    assert journals[0] == journals[1]


def test_a_measure_with_the_former_method_images_still_limits_its_examples() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.images .*examples"):

        class Old(Measure):
            def images(self, test: int, clients: int, training: int) -> int:
                return test + training

    assert Old().examples(3, 1, 4) == 7
