"""The measure ``leakage`` on every registered method: attacked in each stage in which its clients
send a model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from all_methods import METHODS, needs, network_for

import toys
from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.running.runner import run

SENDS_NO_MODEL = {
    "fedbabu": "shared",
    "fedrep": "shared",
    "fedrod": "shared",
    "fml": "shared",
    "lg_fedavg": "shared",
    "feddbe": "mean, shared",
    "afl": "cross, gram",
    "fd": "counts, means",
    "fedproto": "counts, means",
    "fedtgp": "counts, means",
}
"""What these send could not be asked about an image: the measure is refused, in one line."""

ATTACKED_STAGES = {
    "ft_fedavg": ["train", "finetune"],
    # Every link of a chain is a stage.
    "aver": ["train"] * 4,
    "camkd": ["train"] * 4,
    "cwc": ["train"] * 4,
    "ebkd": ["train"] * 4,
    "fedseq": ["train"] * 4,
    "metafed": ["train"] * 4,
    "sfedkd": ["train"] * 4,
    "ensemble": ["fit"],
    "fedavg_once": ["fit"],
    "local_only": ["fit"],
    "pfnm": ["fit"],
    "clue": ["fit", "transfer"],
    "naive_kd": ["fit", "transfer"],
    "qkt": ["fit", "transfer", "refine"],
    "qkt_light": ["fit", "transfer", "refine"],
    "qkt_light_volunteer": ["fit", "transfer", "refine"],
    "qkt_var_e": ["fit", "transfer", "refine"],
    "qkt_light_server": ["fit", "refine"],
    # Clients send logits: they are attacked through what planted images would have given.
    "dsfl": ["local"],
    "fedmd": ["transfer"],
    "hiper_baseline": ["local"],
    "hiper_fedkd": ["local"],
    "hiper_standardised": ["local"],
    "hiper_temperature": ["local"],
}
"""The stages of a round in which what clients send is attacked, where it is not the one stage
``train``.
"""

HAS_SERVER_MODEL = {"fedavg_once", "pfnm"}
"""Methods whose clients first fit alone, and whose server then has a model."""


@pytest.mark.parametrize("name", SENDS_NO_MODEL)
def test_a_method_that_sends_parts_of_models_is_refused_with_their_names(name: str) -> None:
    toy = toys.toy(name, measure=("leakage",), **toys.suited(name))
    groups = SENDS_NO_MODEL[name]
    message = f"clients of method {name} send neither models nor logits but {groups}"
    with pytest.raises(ConfigError, match=message):
        run(toy, None, toys.blobs())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SENDS_NO_MODEL])
def test_every_other_method_is_attacked_in_each_stage_that_sends_a_model(
    name: str, tmp_path: Path
) -> None:
    """The likelihood ratio needs three other clients, and more."""
    values = {
        **toys.suited(name),
        "measure": ("leakage",),
        "rounds": 1,
        "plan": {"epochs": 1, "batch": 20, "lr": 0.05},
    }
    if needs(name, Need.SLIM):
        values |= network_for(name)

    events = run(toys.toy(name, **values), tmp_path / "run", toys.blobs()).measures

    attacks = [event for event in events if "seen" in event]
    stages = ATTACKED_STAGES.get(name, ["train"])
    assert [event["name"] for event in attacks] == stages
    for event in attacks:
        assert event["members"] > 0
        assert 0 <= event["seen"]["loss"]["auc"] <= 1
        has_ratio = "likelihood_ratio" in event["seen"]
        assert has_ratio == (len(event["clients"]) > 3)
    has_server_model = "fit" not in stages or name in HAS_SERVER_MODEL
    assert ("global" in events[-1]) == has_server_model
