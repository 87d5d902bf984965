"""Retraining is the run configured without the forgotten data, bit for bit."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import toys
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.records import World
from fedstill.core.registry import register
from fedstill.core.topology import Parallel
from fedstill.core.trees import same_bits
from fedstill.data.dataset import Dataset, DatasetInfo
from fedstill.data.sources import from_tensors
from fedstill.running.journal import Event, read_journal, without_times
from fedstill.running.replay import Replay, Without
from fedstill.running.result import Result
from fedstill.running.runner import run
from fedstill.unlearning.request import UnlearningRequest, strategy_named
from fedstill.unlearning.retraining import first_round_of
from fedstill.unlearning.strategy import OriginalRun
from fedstill.unlearning.unlearn import Unlearned, unlearn
from journals import journal_events

CHAIN = {"clients": 6, "sampled": 3}
EXPERIMENTS = {
    "parallel": toys.toy("scaffold", rounds=4, keep_checkpoints_every=1, keep_updates=True),
    "chain": toys.toy("fedseq", rounds=4, topology=CHAIN, keep_checkpoints_every=1),
    "tasks": toys.toy(
        rounds=6,
        topology=CHAIN,
        stream={"kind": "classes", "tasks": 3, "join": 0.5},
        keep_checkpoints_every=1,
    ),
    "drift": toys.toy(
        rounds=4,
        topology=CHAIN,
        partition={"kind": "dirichlet", "alpha": 0.1, "min_size": 1},
        stream={"kind": "drift", "tasks": 4, "lag": 1, "past": "kept"},
        keep_checkpoints_every=1,
    ),
    "public logits": toys.toy("fedmd", rounds=2, data={"public": toys.PUBLIC}),
    "census": toys.toy("fedavg", rounds=2, plan={"epochs": 1, "class_weights": "balanced_overall"}),
}
if toys.has("querying"):
    EXPERIMENTS["peer to peer"] = toys.toy(
        "qkt", rounds=1, topology={"clients": 6}, query={"draw": "all"}, plan={"epochs": 1}
    )
    # With this seed, the client does not act in the first rounds.
    EXPERIMENTS["queries"] = toys.toy(
        seed=3,
        rounds=4,
        topology=CHAIN,
        query={"draw": "all", "fewer_than": 10},
        keep_checkpoints_every=1,
    )


Originals = Callable[[str], Path]
"""The run directory of an experiment by its name."""

RETRAINING = strategy_named("retraining", {})


def trained(experiment: Experiment, folder: Path) -> Path:
    """The directory of a run on blobs."""
    run(experiment, folder, toys.blobs())
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    """Each experiment is trained once: unlearning and replays only read its run."""

    @functools.cache
    def directory(name: str) -> Path:
        return trained(EXPERIMENTS[name], tmp_path_factory.mktemp("original") / "run")

    return directory


def retrained(folder: Path, request: UnlearningRequest, out: Path) -> Unlearned:
    """The retraining of a run on blobs."""
    return unlearn(folder, request, RETRAINING, out, data=toys.blobs())


def events(folder: Path) -> list[Event]:
    """The events of a run, without times."""
    return [without_times(event) for event in read_journal(folder / "journal.jsonl")]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_is_the_run_configured_without_the_client(
    name: str, original: Originals, tmp_path: Path
) -> None:
    request = UnlearningRequest(clients=(3,))
    result = retrained(original(name), request, tmp_path / "new").result
    configured = EXPERIMENTS[name].with_values({"unlearning.clients": [3]}, "test")
    reference = run(configured, tmp_path / "reference", toys.blobs())
    assert same_bits(result.model, reference.model)
    assert events(tmp_path / "new") == events(tmp_path / "reference")


@pytest.mark.parametrize("engine", ["auto", "vectorised"])
def test_a_single_client_may_remain(engine: str, tmp_path: Path) -> None:
    """Whether fedstill or the user has chosen the engine: the remaining client needs no stack."""
    experiment = toys.toy("fedavg", rounds=1, engine=engine, topology={"clients": 3})
    folder = trained(experiment, tmp_path / "run")
    result = retrained(folder, UnlearningRequest(clients=(0, 2)), tmp_path / "new").result
    assert clients_of(result.directory) == {1}


def test_a_round_whose_clients_are_all_forgotten_causes_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topology = {"clients": 3, "sampled": 1}
    folder = trained(toys.toy("fedavg", rounds=4, topology=topology), tmp_path / "run")
    (event,) = journal_events(folder, event="client", round=1)
    client = event["client"]
    retrained(folder, UnlearningRequest(clients=(client,)), tmp_path / "new")
    assert "left the server's model" not in caplog.text


@pytest.mark.parametrize("name", ["parallel", "chain", "tasks", "drift"])
@pytest.mark.parametrize("client", range(6))
def test_it_is_a_replay_in_which_the_client_never_acts(
    name: str, client: int, original: Originals, tmp_path: Path
) -> None:
    folder = original(name)
    result = retrained(folder, UnlearningRequest(clients=(client,)), tmp_path / "new").result
    with Replay.of_round(folder, 1, toys.blobs()).session() as session:
        *_, state = session.rounds(change=Without(frozenset({client})))
    assert same_bits(result.model, state.params)


@pytest.mark.parametrize("name", ["tasks", "drift"])
def test_no_other_client_takes_the_place_of_the_client_in_a_task(
    name: str, original: Originals, tmp_path: Path
) -> None:
    folder = original(name)
    retrained(folder, UnlearningRequest(clients=(3,)), tmp_path / "new")

    def stages_of_others(folder: Path) -> set[tuple[int, str, int]]:
        return {
            (event["round"], event["name"], event["client"])
            for event in journal_events(folder, event="client")
            if event["client"] != 3
        }

    assert stages_of_others(tmp_path / "new") == stages_of_others(folder)


class WithoutClientThree(Parallel):
    """A topology of a user, which leaves client 3 out by itself."""

    def draw(self, round: int, world: World) -> list[int]:
        return [client for client in super().draw(round, world) if client != 3]


def test_it_is_a_run_whose_topology_leaves_the_client_out(
    original: Originals, tmp_path: Path
) -> None:
    """This reference does not use the package ``unlearning``."""
    register("topology", "without_client_three")(WithoutClientThree)
    request = UnlearningRequest(clients=(3,))
    result = retrained(original("parallel"), request, tmp_path / "new").result
    topology = {"kind": "without_client_three", "clients": 6, "sampled": 4}
    configured = toys.toy("scaffold", rounds=4, topology=topology)
    reference = run(configured, tmp_path / "reference", toys.blobs())
    assert same_bits(result.model, reference.model)


def test_training_starts_at_the_last_checkpoint_before_the_client_took_part(
    original: Originals, tmp_path: Path
) -> None:
    folder = original("parallel")
    first_rounds: dict[int, int] = {}
    for event in journal_events(folder, event="client"):
        first_rounds.setdefault(event["client"], event["round"])
    first_round = max(first_rounds.values())
    assert first_round > 1, "a client of the toy run must join late"
    late = next(client for client, round in first_rounds.items() if round == first_round)

    assert first_round_of(OriginalRun.of(folder, toys.blobs()), frozenset({late})) == first_round
    new = retrained(folder, UnlearningRequest(clients=(late,)), tmp_path / "new")
    assert new.certificate["rounds"] == {"first": first_round, "last": 4}


@pytest.fixture
def run_of_few(tmp_path: Path) -> Path:
    """A run in which one client trains in each of two rounds."""
    topology = {"clients": 6, "sampled": 1}
    experiment = toys.toy("fedavg", rounds=2, topology=topology, keep_checkpoints_every=1)
    return trained(experiment, tmp_path / "few")


def clients_of(folder: Path) -> set[int]:
    """The clients that trained in a run."""
    return {event["client"] for event in journal_events(folder, event="client")}


def test_a_client_that_never_trained_leaves_the_model_as_it_is(
    run_of_few: Path, tmp_path: Path
) -> None:
    idle = min(set(range(6)) - clients_of(run_of_few))
    new = retrained(run_of_few, UnlearningRequest(clients=(idle,)), tmp_path / "new").result
    assert same_bits(new.model, Result.of(run_of_few).model)


def test_a_round_without_its_only_client_changes_nothing(run_of_few: Path, tmp_path: Path) -> None:
    client = min(clients_of(run_of_few))
    new = retrained(run_of_few, UnlearningRequest(clients=(client,)), tmp_path / "new").result
    assert client not in {event.get("client") for event in events(tmp_path / "new")}
    assert len(new.history) == 2


@pytest.mark.parametrize(
    "request_", [UnlearningRequest(classes=(2,)), UnlearningRequest(examples=(0, 5, 17))]
)
def test_forgotten_examples_are_in_no_client_s_data(
    request_: UnlearningRequest, tmp_path: Path
) -> None:
    folder = trained(toys.toy("fedavg", rounds=2), tmp_path / "run")
    result = retrained(folder, request_, tmp_path / "new").result
    labels = toys.blobs().train.labels
    forgotten = set(request_.examples)
    for label in request_.classes:
        forgotten.update((labels == label).nonzero().flatten().tolist())

    sites = OriginalRun.of(tmp_path / "new", toys.blobs()).prepared.sites
    assert sites.split is not None
    positions = set(sites.split.positions.tolist())
    assert not positions & forgotten
    assert positions | forgotten == set(range(len(labels)))
    assert not same_bits(result.model, Result.of(folder).model)


@pytest.mark.parametrize(("method", "has_labels"), [("fedmd", True), ("dsfl", False)])
def test_a_forgotten_class_is_not_in_the_public_set(
    method: str, has_labels: bool, tmp_path: Path
) -> None:
    """FedMD's clients first train on the labels of the public set."""
    data = {"public": 40, "public_labels": has_labels}
    experiment = toys.toy(method, rounds=2, data=data, keep_checkpoints_every=1)
    folder = trained(experiment, tmp_path / "run")
    request = UnlearningRequest(classes=(2,))
    new = retrained(folder, request, tmp_path / "new").result
    configured = experiment.with_values({"unlearning.classes": [2]}, "test")
    reference = run(configured, tmp_path / "reference", toys.blobs())
    assert same_bits(new.model, reference.model)

    public = OriginalRun.of(folder, toys.blobs()).prepared.sites.public
    new_public = OriginalRun.of(tmp_path / "new", toys.blobs()).prepared.sites.public
    assert public is not None
    assert new_public is not None
    assert len(public) == 40
    assert len(new_public) < 40
    if has_labels:
        assert 2 in public.labels
        assert 2 not in new_public.labels
    with pytest.raises(IncompatibleMethod, match="public set"):
        unlearn(folder, request, strategy_named("fine_tuning", {}), data=toys.blobs())


@pytest.mark.parametrize("name", ["fedadkd", "dsfl"])
def test_a_client_without_examples_left_is_forgotten_too(name: str, tmp_path: Path) -> None:
    """It has neither label shares nor logits, so it could not reply."""
    experiment = toys.toy(
        name,
        rounds=2,
        data={"public": toys.PUBLIC},
        topology={"clients": 9},
        partition={"kind": "pathological", "classes_per_client": 1},
    )
    folder = trained(experiment, tmp_path / "run")
    original = OriginalRun.of(folder, toys.blobs())
    counts = original.split.label_counts(original.labels, 3)
    holders = {client for client in range(9) if counts[client][2]}
    retrained(folder, UnlearningRequest(classes=(2,)), tmp_path / "new")
    assert holders
    assert set(OriginalRun.of(tmp_path / "new").earlier_request.clients) == holders
    assert not holders & {event.get("client") for event in events(tmp_path / "new")}


def table() -> Dataset:
    """Rows of three numbers, whose mean and spread are those of all clients' rows."""
    draw = torch.Generator().manual_seed(1)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 3
        return labels[:, None] + 5 * torch.randn(count, 3, generator=draw), labels

    data = from_tensors("mine", rows(120), rows(30), kind="table")
    return replace(data, about=DatasetInfo("table", features=("a", "b", "c")))


@pytest.mark.parametrize("standardise", ["pooled", "summed", "own"])
def test_moments_do_without_the_forgotten_rows(standardise: str, tmp_path: Path) -> None:
    """They are computed before round 1, so training starts anew."""
    experiment = toys.toy(
        "fedavg",
        rounds=2,
        topology={"clients": 6, "sampled": 1},
        data={"standardise": standardise},
        keep_checkpoints_every=1,
    )
    run(experiment, tmp_path / "run", table())
    request = UnlearningRequest(clients=(3,))
    new = unlearn(tmp_path / "run", request, RETRAINING, tmp_path / "new", data=table())
    sites = OriginalRun.of(tmp_path / "new", table()).prepared.sites
    assert sites.split is not None
    if standardise != "own":
        rows = table().train.values[torch.from_numpy(sites.split.positions)].double()
        assert sites.inputs.mean == pytest.approx(rows.mean(0).tolist(), rel=1e-6)
    configured = experiment.with_values({"unlearning.clients": [3]}, "test")
    reference = run(configured, tmp_path / "reference", table())
    assert same_bits(new.result.model, reference.model)


@pytest.mark.parametrize("standardise", ["pooled", "summed", "own"])
def test_each_model_is_measured_in_the_scale_of_its_own_run(
    standardise: str, tmp_path: Path
) -> None:
    """One client records in other units, so the mean changes much when it is forgotten."""
    data = table()
    owners = torch.arange(120) // 20
    values = data.train.values.clone()
    values[owners == 3] = 1000 * values[owners == 3] + 5000
    train = replace(data.train, values=values, owners=owners)
    data = replace(data, train=train, about=replace(data.about, owners=tuple("abcdef")))
    experiment = toys.toy(
        "fedavg",
        rounds=3,
        topology={"clients": 6, "sampled": 6},
        partition={"kind": "column", "column": "ward"},
        data={"standardise": standardise},
    )
    run(experiment, tmp_path / "run", data)
    request = UnlearningRequest(clients=(3,))
    new = unlearn(tmp_path / "run", request, RETRAINING, tmp_path / "new", data=data)

    accuracies = new.certificate["measurements"]["accuracy"]
    if standardise == "own":  # these clients have no common test set
        assert accuracies["unlearned"].keys() == {
            "forgotten",
            "forgotten_by_class",
            "remaining",
            "remaining_by_class",
        }
        return
    for name, folder in {"original": "run", "unlearned": "new"}.items():
        last_round = journal_events(tmp_path / folder, event="round")[-1]
        assert accuracies[name]["test"] == pytest.approx(last_round["accuracy"])


def owned_blobs() -> Dataset:
    """Blobs that belong to six owners."""
    data = toys.blobs()
    train = replace(data.train, owners=torch.arange(len(data.train)) % 6)
    return replace(data, train=train, about=replace(data.about, owners=tuple("abcdef")))


@pytest.mark.parametrize(
    "changes", [{}, {"method": "fedrep", "select_on": "test"}], ids=["one model", "personal"]
)
def test_the_client_s_own_tests_are_forgotten_too(
    changes: dict[str, object], tmp_path: Path
) -> None:
    values: dict[str, object] = {
        "rounds": 3,
        "topology": {"clients": 6, "sampled": 2},
        "partition": {"kind": "column", "column": "ward", "own_test": 0.3},
        "keep_checkpoints_every": 1,
    }
    experiment = toys.toy(**{**values, **changes})
    run(experiment, tmp_path / "run", owned_blobs())
    request = UnlearningRequest(clients=(3,))
    new = unlearn(tmp_path / "run", request, RETRAINING, tmp_path / "new", data=owned_blobs())
    configured = experiment.with_values({"unlearning.clients": [3]}, "test")
    reference = run(configured, tmp_path / "reference", owned_blobs())
    assert same_bits(new.result.model, reference.model)
    assert events(tmp_path / "new") == events(tmp_path / "reference")

    rounds = journal_events(tmp_path / "new", event="round")
    own_tests = [event["own_test_by_client"] for event in rounds if "own_test_by_client" in event]
    assert own_tests
    assert all("3" not in accuracies for accuracies in own_tests)


def test_a_second_request_forgets_both(original: Originals, tmp_path: Path) -> None:
    folder = original("parallel")
    retrained(folder, UnlearningRequest(clients=(3,)), tmp_path / "first")
    second = retrained(tmp_path / "first", UnlearningRequest(clients=(1,)), tmp_path / "second")
    both = retrained(folder, UnlearningRequest(clients=(1, 3)), tmp_path / "both")
    assert second.certificate["request"]["clients"] == [1, 3]
    assert same_bits(second.result.model, both.result.model)


@pytest.mark.parametrize("name", ["parallel", "drift"])
def test_a_killed_unlearning_continues(name: str, original: Originals, tmp_path: Path) -> None:
    """The last checkpoint and the files that end a run are missing."""
    folder = original(name)
    request = UnlearningRequest(clients=(3,))
    uninterrupted = retrained(folder, request, tmp_path / "uninterrupted").result
    killed = Path(shutil.copytree(uninterrupted.directory, tmp_path / "killed"))
    for file in ("summary.json", "model.safetensors", "certificate.json"):
        (killed / file).unlink()
    checkpoints = killed / "checkpoints"
    (checkpoints / "LATEST").unlink()
    sorted(checkpoints.glob("*.json"))[-1].unlink()

    result = retrained(folder, request, killed).result
    assert same_bits(result.model, uninterrupted.model)
    assert (killed / "certificate.json").is_file()


def test_a_run_that_forgets_nothing_has_the_config_that_it_always_had(tmp_path: Path) -> None:
    folder = trained(toys.toy("fedavg", rounds=1), tmp_path / "run")
    assert "unlearning" not in (folder / "config.toml").read_text(encoding="utf-8")


def test_the_census_does_without_the_client(original: Originals, tmp_path: Path) -> None:
    retrained(original("census"), UnlearningRequest(clients=(3,)), tmp_path / "new")
    census = [event for event in events(tmp_path / "new") if event.get("name") == "census"]
    assert [event["client"] for event in census] == [0, 1, 2, 4, 5]


def test_a_run_without_its_model_is_refused_before_training(
    original: Originals, tmp_path: Path
) -> None:
    run_folder = shutil.copytree(original("census"), tmp_path / "run")
    (run_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        retrained(run_folder, UnlearningRequest(clients=(3,)), tmp_path / "new")
    assert not (tmp_path / "new").exists()
