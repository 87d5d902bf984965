"""Every registered measure runs, resumes to the same bits, and says what it cost; what it gives is
re-derived here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from fedstill.core.records import Payload
from fedstill.core.registry import register
from fedstill.data.inputs import Inputs
from fedstill.flower.site_settings import code_in
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.measures.choice import MeasuredRun, measures, unsuited_measures
from fedstill.measures.features import directions
from fedstill.metrics.local_models import by_epoch
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

APART = {"boundaries"}
"""Of clients that asked, in one round: test_boundaries.py."""
MEASURES = [n for n in registry.names("measure") if not n.startswith("toy_") and n not in APART]
WITH_REPLIES = {"local", "epochs", "personal", "private_public"}
"""Measured by clients within their stage."""
ON_CIRCLE = {"sphere": "sphere_digits_cnn"}
ONE_BY_ONE = {"kind": "sequential", "clients": 6, "sampled": 1}
MIXED = {"rounds": 1, "clients": {"models": ["mlp", "logistic"]}}
STAGES: list[tuple[StageResult, EvaluationContext]] = []


@register("measure", "toy_spy")
class Spy(Measure):
    """Remembers what it was shown."""

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        STAGES.append((seen, context))
        return None


@register("measure", "toy_broken")
class Broken(Measure):
    """Fails when it looks."""

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers | None:
        raise ZeroDivisionError("nothing\nto divide")


def measured(*names: str, **changes: Any) -> Experiment:
    model = {
        "model": next(
            (ON_CIRCLE[n] for n in names if n in ON_CIRCLE), {"name": "mlp", "hidden": (8,)}
        )
    }
    chain = {"topology": ONE_BY_ONE} if "chain" in names else {}
    more = {"data": {"public": toys.PUBLIC}} if "private_public" in names else {}
    # whose time grows with the square
    more |= {"data": {"test_size": 40}} if names == ("tsne",) else {}
    return toys.toy(**{"measure": list(names), **model, **chain, **more, **changes})


@pytest.fixture(scope="module", params=MEASURES)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    run(measured(request.param), folder, data=toys.blobs())
    return request.param, folder


def test_it_runs_and_says_what_it_cost(whole: tuple[str, Path]) -> None:
    name, folder = whole
    events, measure = read_journal(folder / "journal.jsonl"), measures([name])[name]
    found = [e for e in events if e["event"] == "measure"]
    if name in WITH_REPLIES:
        assert not found
    else:
        assert [(e["measure"], e["round"]) for e in found] == [
            (name, r) for r in ([3] if measure.only_last else [2, 3])
        ]
        assert all(e["seconds"] > 0 and e["name"] == "train" for e in found)
        spent = {e["round"]: e["seconds"] for e in found}
        every = [e for e in events if e["event"] == "round"]
        assert all(e["seconds_measuring"] > spent.get(e["round"], 0) for e in every)
    summary = resume(folder).summary
    assert summary["seconds_measures"][name] > 0
    assert resume(folder).measures == found


def test_it_resumes_to_the_same_bits(whole: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = whole
    for stages in (2, 3):
        other = stopped(measured(name), tmp_path / str(stages), stages)
        resume(other, data=toys.blobs())
        assert_same_bits(bits(other), bits(folder))


@pytest.fixture(scope="module")
def unmeasured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """By measure, the model of the same run without it: few measures need one of their own."""
    models: dict[str, bytes] = {}

    def model(name: str) -> bytes:
        tree = resolve(measured(name)).tree
        same = {key: tree[key] for key in ("model", "topology", "data")}
        if repr(same) not in models:
            folder = tmp_path_factory.mktemp("unmeasured") / "run"
            run(measured(**same), folder, data=toys.blobs())
            models[repr(same)] = (folder / "model.safetensors").read_bytes()
        return models[repr(same)]

    return model


def test_it_looks_without_leaving_a_trace(
    whole: tuple[str, Path], unmeasured: Callable[[str], bytes]
) -> None:
    name, folder = whole
    assert (folder / "model.safetensors").read_bytes() == unmeasured(name)


def test_it_is_documented(whole: tuple[str, Path]) -> None:
    entry = registry.lookup("measure", whole[0])
    assert descriptions.summary(entry).endswith(".")
    images = [measures([whole[0]])[whole[0]].examples(n, 10, 5000) for n in (100, 1000)]
    assert 0 < images[0] <= images[1]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageResult, dict[str, Any]]:
    """The last stage of a run with all measures that fit one model, and what they gave there."""
    names = [n for n in MEASURES if n not in ("landscape", "chain", "private_public", *ON_CIRCLE)]
    STAGES.clear()
    found = run(
        measured("toy_spy", *names), tmp_path_factory.mktemp("seen") / "run", data=toys.blobs()
    )
    (last,) = [s for s, context in STAGES if s.ends_round and s.stage.round == context.world.rounds]
    events = [e for e in read_journal(found.directory / "journal.jsonl") if e.get("round") == 3]
    reports = {e["client"]: e for e in events if e["event"] == "client"}
    looks = {e["measure"]: e for e in events if e["event"] == "measure"}
    return last, {**looks, "reports": reports, "round": found.history[-1]}


def hidden(params: Any, x: Tensor) -> Tensor:
    return (
        x.flatten(1).double() @ params["body.1.weight"].double().T + params["body.1.bias"].double()
    ).relu()


def logits(params: Any, x: Tensor) -> Tensor:
    return hidden(params, x) @ params["head.weight"].double().T + params["head.bias"].double()


def common_test() -> tuple[Tensor, Tensor]:
    ready = prepare(resolve(measured()), toys.blobs())
    test = ready.sites.common_test
    assert test is not None
    return ready.sites.inputs.plain(test.values), test.labels


def trained(client: int, inputs: type[Inputs] = Inputs) -> tuple[Tensor, Tensor]:
    sites = prepare(resolve(measured()), toys.blobs()).sites
    own = sites.train.take(sites.positions(client))
    return inputs(sites.inputs.mean, sites.inputs.std).plain(own.values), own.labels


def shares(client: int) -> np.ndarray:
    counts = np.bincount(trained(client)[1], minlength=toys.CLASSES)
    return counts / counts.sum()


def test_the_stage_is_shown_with_its_start_and_end(
    seen: tuple[StageResult, dict[str, Any]],
) -> None:
    last, _ = seen
    assert last.ends_round
    assert all(d.params is last.before.params for d in last.payloads.values())
    assert set(last.local_models) == set(last.stage.clients)
    sizes = {r.client: r.examples for r in last.accepted}
    mean = trees.mean(list(last.local_models.values()), [sizes[c] for c in last.local_models])
    assert all(torch.equal(last.after.params[k], v) for k, v in mean.items())


def test_alignment_as_a_plain_loop(seen: tuple[StageResult, dict[str, Any]]) -> None:
    last, found = seen
    x, y = common_test()

    def classes(params: Any, layer: Any) -> np.ndarray:
        return np.stack(
            [layer(params, x)[y == c].mean(0).numpy() for c in range(toys.CLASSES)]
        ).argmax(0)

    for name, layer in (("features", hidden), ("classifier", logits)):
        start = classes(last.before.params, layer)
        each = [float(np.mean(start == classes(p, layer))) for p in last.local_models.values()]
        got = found["alignment"]["layers"][name]
        assert got["clients"] == each
        assert got["local"] == pytest.approx(np.mean(each))
        assert got["local_std"] == pytest.approx(np.std(each))
        assert got["global"] == float(np.mean(start == classes(last.after.params, layer)))
    units = found["units"]
    assert units["models"] == [
        "received",
        *(f"client {c}" for c in sorted(last.local_models)),
        "aggregated",
    ]
    assert units["classes"][0] == classes(last.before.params, hidden).tolist()
    assert units["classes"][-1] == classes(last.after.params, hidden).tolist()


def test_divergence_as_a_plain_loop(seen: tuple[StageResult, dict[str, Any]]) -> None:
    last, found = seen
    x, y = common_test()
    right = (logits(last.before.params, x).argmax(1) == y).numpy()
    accuracy = np.array([right[y.numpy() == c].mean() for c in range(toys.CLASSES)])
    got = found["divergence"]
    assert got["clients"] == list(last.local_models)
    for i, (client, params) in enumerate(last.local_models.items()):
        gap = np.concatenate(
            [(params[k].double() - last.before.params[k].double()).numpy().ravel() for k in params]
        )
        assert got["l1"][i] == pytest.approx(np.abs(gap).sum())
        assert got["l2"][i] == pytest.approx(np.sqrt((gap**2).sum()))
        assert got["distance"][i] == pytest.approx(
            np.abs(accuracy / accuracy.sum() - shares(client)).sum()
        )
    assert got["mean_l2"] == pytest.approx(np.mean(got["l2"]))


def test_personalised_accuracy_as_a_plain_loop(seen: tuple[StageResult, dict[str, Any]]) -> None:
    last, found = seen
    x, y = common_test()
    local_train, personalised = [], []
    for client, params in last.local_models.items():
        own_x, own_y = trained(client)
        report, right = found["reports"][client], logits(params, own_x).argmax(1) == own_y
        assert report["trained_right"] == [
            int(right[own_y == c].sum()) for c in range(toys.CLASSES)
        ]
        assert report["trained_counts"] == [int((own_y == c).sum()) for c in range(toys.CLASSES)]
        local_train.append(float(right.double().mean()))
        tested = (logits(params, x).argmax(1) == y).double()
        personalised.append(
            np.array([tested[y == c].mean() for c in range(toys.CLASSES)]) @ shares(client)
        )
    sizes, got = [len(trained(c)[1]) for c in last.local_models], found["round"]
    assert got["local_train_accuracy"] == pytest.approx(np.mean(local_train))
    assert got["local_train_accuracy_weighted"] == pytest.approx(
        np.average(local_train, weights=sizes)
    )
    assert got["personalised_accuracy"] == pytest.approx(np.mean(personalised))
    assert got["personalised_accuracy_std"] == pytest.approx(np.std(personalised))


def test_diversity_as_a_plain_loop(seen: tuple[StageResult, dict[str, Any]]) -> None:
    last, found = seen

    def ratio(rows: list[np.ndarray]) -> float:
        return float(np.mean([(r**2).sum() for r in rows]) / (np.mean(rows, axis=0) ** 2).sum())

    (context,) = [r for s, r in STAGES if s is last]
    again = measures(["diversity"])["diversity"].look(last, context)
    assert again is not None
    assert {k: found["diversity"][k] for k in again} == again, (
        "what is looked at in float64 below is what is journaled"
    )
    replies = [replace(r, content=Payload(params=widened(r.content.params))) for r in last.accepted]
    start = widened(last.before.params)
    wide = replace(last, before=replace(last.before, params=start), accepted=replies)
    exact = measures(["diversity"])["diversity"].look(
        wide, replace(context, inputs=Wide(context.inputs.mean, context.inputs.std))
    )
    assert exact is not None
    gradients, updates = [], []
    for client, params in last.local_models.items():
        x, y = trained(client, Wide)
        leaves = {k: v.clone().requires_grad_() for k, v in start.items()}
        torch.nn.functional.cross_entropy(logits(leaves, x), y).backward()
        gradients.append(np.concatenate([v.grad.numpy().ravel() for v in leaves.values()]))
        updates.append(
            np.concatenate([(start[k] - params[k].double()).numpy().ravel() for k in params])
        )
    assert exact["gradients"] == pytest.approx(ratio(gradients), rel=NEAR)
    assert exact["updates"] == pytest.approx(ratio(updates), rel=NEAR)
    assert exact["gradients"] > 1


@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised", "flower"])
def test_accuracy_after_an_epoch_is_that_of_training_so_long(engine: str, tmp_path: Path) -> None:
    """A model after its e-th epoch is the one that a run of e epochs sends; epoch 0 is the model
    received.
    """

    def last(epochs: int, *names: str) -> dict[str, Any]:
        plan = {"epochs": epochs, "batch": 8, "lr": 0.1, "momentum": 0.9}
        same = measured(*names, rounds=1, plan=plan, engine=engine)
        return run(same, tmp_path / f"{epochs}{len(names)}", data=toys.blobs()).history[-1]

    found = last(3, "local", "epochs")["by_epoch"]["train"]
    shorter = [last(epochs, "local") for epochs in (1, 2, 3)]
    for side in ("in_local_accuracy", "out_local_accuracy"):
        assert found[side] == pytest.approx(
            [shorter[0][f"received_{side}"], *(e[side] for e in shorter)], abs=1e-12
        )
        assert found[f"{side}_std"][1:] == pytest.approx(
            [e[f"{side}_std"] for e in shorter], abs=1e-12
        )
    assert len(set(found["in_local_accuracy"])) > 1
    assert found["clients"] == 4


def test_clients_that_stop_earlier_leave_the_later_epochs(tmp_path: Path) -> None:
    """By hand: two clients of two classes, of which one trains one epoch and the other two."""
    one = {"name": "train", "label_counts": [3, 1], "correct_by_epoch": [[0, 4], [4, 0]]}
    two = {"name": "train", "label_counts": [0, 8], "correct_by_epoch": [[4, 0], [2, 2], [0, 4]]}
    found = by_epoch([one, two, {"name": "other"}], [4, 4])["by_epoch"]["train"]
    assert found["in_local_accuracy"] == [0.125, 0.625, 1.0]
    assert found["out_local_accuracy"] == [0.875, 0.375, 0.0]
    assert found["in_local_accuracy_std"] == [0.125, 0.125, 0.0]
    assert by_epoch([{"name": "other"}], [4, 4]) == {}


def test_a_joint_tsne_keeps_classes_together(seen: tuple[StageResult, dict[str, Any]]) -> None:
    got = seen[1]["tsne"]
    labels, x, y = np.array(got["labels"]), np.array(got["x"][-1]), np.array(got["y"][-1])
    assert np.array(got["x"]).shape == (len(got["models"]), 100)
    gaps = np.hypot(x[:, None] - x, y[:, None] - y)
    same = labels[:, None] == labels
    assert gaps[same].mean() < 0.7 * gaps[~same].mean()


def test_directions_are_counts_of_angles() -> None:
    angles = np.random.default_rng(0).uniform(-np.pi, np.pi, 500)
    labels = np.arange(500) % 3
    points = torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1))
    found = directions(points, torch.from_numpy(labels), 3)
    for c in range(3):
        np.testing.assert_array_equal(
            found[c], np.histogram(angles[labels == c], 72, (-np.pi, np.pi))[0]
        )


def test_landscapes_meet_at_the_model_itself(tmp_path: Path) -> None:
    (found,) = run(
        measured("landscape", rounds=1, plan={"lr": 0.1}), tmp_path / "run", data=toys.blobs()
    ).measures
    for around in found["models"].values():
        middle = len(found["axis"]) // 2
        assert (
            around["random"][middle][middle]
            == around["hessian"][middle][middle]
            == around["noise"][0]
        )
        assert abs(around["eigenvalues"][0]) >= abs(around["eigenvalues"][1])
        assert around["noise"][-1] > around["noise"][0]


def test_in_a_chain_each_link_is_looked_at(tmp_path: Path) -> None:
    found = run(
        measured("alignment", method="toy_chain", rounds=1), tmp_path / "run", data=toys.blobs()
    ).measures
    assert [(e["round"], e["stage"], e["clients"]) for e in found] == [
        (1, i, found[i]["clients"]) for i in range(4)
    ]
    assert all(len(e["clients"]) == 1 for e in found)
    assert all(e["layers"]["features"]["local"] == e["layers"]["features"]["global"] for e in found)


@pytest.mark.parametrize(
    ("changes", "words"),
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
def test_a_measure_that_cannot_look_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        run(toys.toy(**changes), tmp_path / "run", data=toys.blobs())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


AT_HOME = {"client_data", "test_at_clients"}


@pytest.mark.parametrize("name", [n for n in MEASURES if AT_HOME & measures([n])[n].needs])
def test_outside_of_a_simulation_clients_data_cannot_be_looked_at(name: str) -> None:
    ready = prepare(resolve(measured(name)), toys.blobs())
    schedule = ready.settings.schedule
    setting = MeasuredRun(
        schedule, "fedavg", schedule(1, ready.world), ready.world, simulated=False
    )
    problem = unsuited_measures(measures([name]), setting)
    assert problem.startswith(f"measure {name}: ")
    assert "flower.data = 'sites'" in problem
    assert unsuited_measures(measures(["alignment", "local"]), setting) == ""


def one_by_one(setting: MeasuredRun) -> MeasuredRun:
    """The same with its clients in a chain."""
    return replace(setting, stages=[replace(s, sequential=True) for s in setting.stages])


def test_without_a_test_set_nothing_can_be_looked_at_but_what_clients_send() -> None:
    ready = prepare(resolve(measured()), toys.blobs())
    setting = MeasuredRun(
        ready.settings.schedule,
        "fedavg",
        ready.settings.schedule(1, ready.world),
        ready.world,
        tested=False,
    )
    for name in MEASURES:
        if name not in WITH_REPLIES and name not in ON_CIRCLE:
            fitting = one_by_one(setting) if name == "chain" else setting
            problem = unsuited_measures(measures([name]), fitting)
            assert problem.startswith(f"measure {name}: it needs a common test set")
    assert unsuited_measures(measures(sorted(WITH_REPLIES)), setting) == ""


def test_a_site_runs_no_measure_that_a_server_names_by_file() -> None:
    assert code_in({"measure": ["local", "evil.py:Evil"]}) == ["evil.py:Evil"]
    assert code_in({"measure": "pack.mod:Evil"}) == ["pack.mod:Evil"]


def test_a_measure_that_fails_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        FedstillError, match="round 2, stage 'train': measure toy_broken failed: ZeroDivisionError"
    ):
        run(measured("toy_broken"), tmp_path / "run", data=toys.blobs())


def test_a_measure_of_ones_own_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedstill.measures.base import Measure\n\n\n"
        "class Clients(Measure):\n    def look(self, seen, context):\n        return {'clients': "
        "len(seen.accepted)}\n"
    )
    (tmp_path / "other.py").write_text("def look():\n    return 3\n")
    own = f"{tmp_path / 'mine.py'}:Clients"
    found = run(measured(own), tmp_path / "run", data=toys.blobs())
    assert [(e["measure"], e["clients"]) for e in found.measures] == [("mine.py:Clients", 4)] * 2
    assert str(tmp_path) not in (tmp_path / "run" / "journal.jsonl").read_text().partition("\n")[2]
    with pytest.raises(ConfigError, match="not a Measure"):
        resolve(measured(f"{tmp_path / 'other.py'}:look"))


def test_explain_shows_the_cost_and_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text('measure = ["local", "landscape"]\nrounds = 2\n')
    assert call(["explain", str(tmp_path / "c.toml")]) == 0
    said = capsys.readouterr().out
    assert "of training" in said
    assert "measure landscape" in said
    assert "warning: measure local" not in said


def test_events_are_equal_but_for_their_times(tmp_path: Path) -> None:
    events = []
    for name in ("a", "b"):
        run(measured("alignment", rounds=2), tmp_path / name, data=toys.blobs())
        events.append(without_times(read_journal(tmp_path / name / "journal.jsonl")))
    assert events[0] == events[1]


def test_a_measure_of_before_is_still_asked_how_many_examples_it_takes() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.images .*examples"):

        class Old(Measure):
            def images(self, test: int, clients: int, own: int) -> int:
                return test + own

    assert Old().examples(3, 1, 4) == 7
