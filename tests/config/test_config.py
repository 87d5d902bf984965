"""Configurations: what is written is what is resolved, with its origin, and what is resolved
resolves to itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import toys
from fedstill.cli import explain
from fedstill.config.experiment import Experiment, from_tree, load
from fedstill.config.overrides import parse_overrides
from fedstill.config.resolve import resolve
from fedstill.config.settings import Settings, as_toml
from fedstill.config.validation import WrongConfig
from fedstill.core.errors import ConfigError
from fedstill.methods.fedntd import FedNTD

FULL = """
seed = 3
rounds = 7
threads = [1, 2]
measure = []
[data]
name = "digits"
public = 50
augment = ["flip"]
[method]
name = "fedntd"
beta = 0.5
[model]
name = "mlp"
hidden = [16]
[partition]
kind = "sharding"
shards = 3
[topology]
clients = 12
sampled = 4
[plan]
epochs = 2
lr = 0.05
[plan.train]
batch = 25
[clients]
quorum = 0.75
"""


def resolved(text: str, folder: Path, *overrides: str) -> Settings:
    path = folder / "config.toml"
    path.write_text(text)
    return resolve(load(path, overrides))


def test_every_value_of_a_file_is_resolved(tmp_path: Path) -> None:
    settings = resolved(FULL, tmp_path)
    assert (settings.seed, settings.rounds, settings.threads, settings.measure) == (
        3,
        7,
        (1, 2),
        (),
    )
    assert settings.method == FedNTD(beta=0.5)
    assert (settings.clients, settings.named.topology.values["sampled"]) == (12, 4)
    plan = settings.plans["train"]
    assert (plan.epochs, plan.lr, plan.batch) == (2, 0.05, 25)
    assert plan.momentum == FedNTD.plans["train"].momentum, "unset, the method's own plan counts"
    assert settings.named.partition.table == {"kind": "sharding", "shards": 3, "seed": None}
    assert settings.rules.quorum == 0.75


def test_nothing_needs_to_be_said(tmp_path: Path) -> None:
    settings = resolved("", tmp_path)
    assert (settings.named.method.name, settings.data.name, settings.clients) == (
        "fedavg",
        "digits",
        20,
    )
    assert settings.named.partition.values["alpha"] == 0.1
    assert settings.tree == resolve(Experiment()).tree == resolve(load(None)).tree


@pytest.mark.parametrize(
    ("text", "weights"),
    [("none", "none"), ("balanced", "balanced"), ("1,2", (1, 2)), ("[1.0, 2.0]", (1.0, 2.0))],
)
def test_class_weights_can_be_overridden(text: str, weights: object, tmp_path: Path) -> None:
    settings = resolved("", tmp_path, f"plan.class_weights={text}")
    (plan,) = settings.plans.values()
    assert plan.class_weights == weights
    assert type(plan.class_weights) is type(weights)


def test_overrides_stand_above_the_file_and_the_file_above_defaults(tmp_path: Path) -> None:
    settings = resolved(
        FULL, tmp_path, "method.beta=0.25", "plan.train.lr=0.5", "seed=9", "data.name=blobs"
    )
    assert settings.method == FedNTD(beta=0.25)
    assert (settings.plans["train"].lr, settings.seed, settings.data.name) == (0.5, 9, "blobs")
    origins = {value.key: value.origin for value in explain.resolved_values(settings)}
    assert origins["method.beta"] == origins["seed"] == origins["plan.train.lr"] == "command line"
    assert (
        origins["rounds"]
        == origins["topology.clients"]
        == origins["plan.train.batch"]
        == "file config.toml"
    )
    assert origins["plan.train.epochs"] == "file config.toml", "it stands in [plan]"
    assert origins["clients.norm_limit"] == origins["plan.train.momentum"] == "default"


def test_another_engine_drops_the_reason_for_the_former_one(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('engine = "vectorised"\nengine_reason = "small steps"\n', encoding="utf-8")

    same_engine = resolve(load(config, ("rounds=3",)))
    assert same_engine.engine_reason == "small steps"
    overridden = resolve(load(config, ("engine=serial",)))
    assert overridden.engine_reason == ""
    assert "engine_reason" not in overridden.toml
    assert "engine_reason" not in overridden.origins


def test_an_override_of_the_plan_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    """A resolved config says every stage's own plan, which stands above the common one."""
    again = tmp_path / "resolved.toml"
    again.write_text(resolve(Experiment(method="fedntd", data={"name": "digits"})).toml)
    with pytest.raises(ConfigError, match=r"plan\.lr .*plan\.train\.lr"):
        resolve(load(again, ("plan.lr=0.3",)))
    assert resolve(load(again, ("plan.train.lr=0.3",))).plans["train"].lr == 0.3
    part = Experiment(
        rounds=1, method="qkt", topology={"kind": "peer_to_peer"}, plan={"transfer": {"lr": 0.2}}
    )
    assert resolve(part.with_values({"plan.lr": 0.3}, "command line")).plans["refine"].lr == 0.3


def test_the_most_examples_are_written_only_where_they_are_said(tmp_path: Path) -> None:
    """Configs of before have no such key, and must resolve to their own bytes."""
    assert "max_examples" not in resolved(FULL, tmp_path).toml
    assert resolved(FULL, tmp_path).rules.max_examples == 10**7
    said = resolved(FULL, tmp_path, "clients.max_examples=500")
    assert said.rules.max_examples == said.tree["clients"]["max_examples"] == 500
    assert resolve(from_tree(said.tree, {}, None)).toml == said.toml
    with pytest.raises(ConfigError, match=r"clients\.max_examples = 0"):
        resolved(FULL, tmp_path, "clients.max_examples=0")


@pytest.mark.parametrize("name", ["fedprox", "fedavg"])
def test_a_table_may_be_replaced_by_a_name(name: str, tmp_path: Path) -> None:
    assert resolved(FULL, tmp_path, f"method={name}").named.method.name == name
    assert resolved(f'method = "{name}"', tmp_path).named.method.name == name
    assert resolve(Experiment(method=name)).named.method.name == name
    moved = resolved(FULL, tmp_path, "topology=sequential", "partition=iid")
    assert (moved.named.topology.name, moved.named.partition.name, moved.clients) == (
        "sequential",
        "iid",
        12,
    )


def test_a_name_for_a_table_can_be_overridden_inside(tmp_path: Path) -> None:
    settings = resolved(
        'data = "digits"\nmethod = "fedntd"', tmp_path, "data.public=50", "method.beta=2"
    )
    assert (settings.data.name, settings.data.public, settings.method) == (
        "digits",
        50,
        FedNTD(beta=2.0),
    )


def test_a_field_can_have_the_name_of_a_table(tmp_path: Path) -> None:
    settings = resolved('partition = "dirichlet"', tmp_path, "partition.stream=fast")
    assert settings.named.partition.values["stream"] == "fast"


def test_a_method_can_be_given_as_an_object() -> None:
    assert resolve(Experiment(method=FedNTD(beta=0.3))).tree["method"]["beta"] == 0.3


RELOADED = [
    "",
    FULL,
    'method = "fedprox"\n[topology]\nkind = "sequential"',
    '[topology]\nkind = "public_logits"\nsampled = 3',
    'rounds = 1\n[topology]\nkind = "peer_to_peer"\nstudents = [1, 2]\n[partition]\nkind = "iid"\n'
    "seed = 5",
    'seed = 9223372036854775807\n[data]\nname = "a\\"b\\\\c ü"\n[plan]\nlr = 1e-9\nweight_decay = '
    "0.1\nshuffle = false",
    '[data]\nmean = [0.5]\nstd = [1, 0.25, 0.5]\nheld_out = "last"',
]


@pytest.mark.parametrize("text", RELOADED)
def test_a_resolved_config_that_is_loaded_again_resolves_to_itself(
    text: str, tmp_path: Path
) -> None:
    first = resolved(text, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    again = resolved(as_toml(first.tree), tmp_path / "elsewhere")
    assert again.tree == first.tree
    assert as_toml(again.tree) == as_toml(first.tree)
    assert resolve(from_tree(first.tree, {}, None)).tree == first.tree
    assert again.method == first.method
    assert again.plans == first.plans
    assert again.schedule.topology == first.schedule.topology


def test_a_folder_of_data_is_relative_to_the_config(tmp_path: Path) -> None:
    settings = resolved("[data]\nname = 'mnist'\nfolder = 'sets'", tmp_path)
    assert settings.data.folder == str(tmp_path / "sets")


def test_an_override_is_toml_or_else_a_string() -> None:
    given = (
        "a=1",
        "b=x y",
        "c=[1, 2]",
        "d=true",
        "e='1'",
        "f=1\nseed=2",
        "g=" + "[" * 9999,
        "h=" + "9" * 9999,
    )
    values = parse_overrides(given)
    assert (values["a"], values["b"], values["c"], values["d"], values["e"]) == (
        1,
        "x y",
        [1, 2],
        True,
        "1",
    )
    assert values["f"] == "1\nseed=2", "one override sets one key"
    assert isinstance(values["g"], str)
    assert isinstance(values["h"], str)


def test_another_data_set_keeps_the_other_keys_of_data() -> None:
    experiment = Experiment(data={"name": "digits", "public": 50})
    changed = experiment.with_values({"data.name": "blobs"}, "Python")
    assert changed.table("data") == {"name": "blobs", "public": 50}


TABLES_AND_VALUES = {
    "plan": ["plan.lr=0.5", "plan={epochs=1}"],
    "a stage": ["plan.train.lr=0.5", "plan.train={epochs=1}"],
    "method": ["method.name=fedntd", "method={beta=0.5}"],
    "partition": ["partition.kind=hiper", "partition={alpha=0.5}"],
}


@pytest.mark.parametrize("name", TABLES_AND_VALUES)
def test_a_table_and_a_value_in_it_can_be_set_in_any_order(name: str) -> None:
    overrides = TABLES_AND_VALUES[name]
    first = resolve(load(None, tuple(overrides)))
    second = resolve(load(None, tuple(reversed(overrides))))
    assert first.toml == second.toml
    assert "= 0.5" in first.toml


def test_a_federation_is_not_ignored_in_silence() -> None:
    """Without engine = "flower", the run would train on parts of one data set in this process."""
    federation = {"flower": {"federation": "fed"}}
    for engine in ("auto", "pooled"):
        with pytest.raises(ConfigError, match=r"flower\.federation has no effect"):
            resolve(toys.toy("fedavg", engine=engine, **federation))
    assert resolve(toys.toy("fedavg", engine="flower", **federation)).is_deployed


NAMED_FIELDS = """
[method]
name = "fedntd"
beta = 0.5
aggregation = "examples"
[plan]
lr = 0.2
[plan.train]
epochs = 3
[data]
name = "digits"
train_size = 90
test_size = 60
"""


def in_file(text: str, folder: Path, *overrides: str) -> Experiment:
    path = folder / "my.toml"
    path.write_text(text)
    return load(path, overrides)


@pytest.mark.parametrize("name", ["method", "method.name"])
def test_fields_that_another_name_removes_have_no_origin(name: str, tmp_path: Path) -> None:
    settings = resolve(in_file(NAMED_FIELDS, tmp_path, f"{name}=fedavg", "method.suspected=0.1"))
    origins = {value.key: value.origin for value in explain.resolved_values(settings)}
    assert origins["method.aggregation"] == "default"
    assert origins["method.suspected"] == origins["method.name"] == "command line"
    assert "method.beta" not in settings.origins
    with pytest.raises(WrongConfig) as caught:
        resolve(in_file(NAMED_FIELDS, tmp_path, f"{name}=fedavg", "method.beta=1"))
    assert [problem.place for problem in caught.value.problems] == ["command line"]


def test_a_table_that_replaces_another_one_removes_its_origins(tmp_path: Path) -> None:
    experiment = in_file(NAMED_FIELDS, tmp_path, "plan={batch=7}")
    assert [key for key in experiment.origins if key.startswith("plan")] == ["plan.batch"]
    settings = resolve(experiment)
    origins = {value.key: value.origin for value in explain.resolved_values(settings)}
    assert origins["plan.train.lr"] == origins["plan.train.epochs"] == "default"
    assert origins["plan.train.batch"] == "command line"
    one_stage = in_file(NAMED_FIELDS, tmp_path, "plan.train={batch=7}").origins
    assert [key for key in one_stage if key.startswith("plan")] == ["plan.lr", "plan.train.batch"]


@pytest.mark.parametrize("name", ["data", "data.name"])
@pytest.mark.parametrize("text", [NAMED_FIELDS, 'data = "digits"'])
def test_another_data_set_keeps_the_other_keys_of_its_table(
    text: str, name: str, tmp_path: Path
) -> None:
    data = resolve(in_file(text, tmp_path, f"{name}=mnist", "data.public=8")).data
    assert (data.name, data.public) == ("mnist", 8)
    assert (data.train_size, data.test_size) == ((90, 60) if text == NAMED_FIELDS else (0, 0))


@pytest.mark.parametrize("key", ["grid", "deadline"])
def test_settings_of_flower_are_refused_for_other_engines(key: str) -> None:
    value = {"grid": "ray", "deadline": 9.0}[key]
    with pytest.raises(WrongConfig) as caught:
        resolve(toys.toy(engine="serial", flower={key: value}))
    assert [problem.key for problem in caught.value.problems] == [f"flower.{key}"]
    resolve(toys.toy(engine="flower", flower={"deadline": 9.0}))
    resolve(toys.toy(engine="serial", flower={"grid": "loopback", "deadline": 600.0}))
