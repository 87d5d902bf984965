"""The measure ``leakage`` on every registered method: attacked in each stage in which its clients
send a model.
"""

from __future__ import annotations

from pathlib import Path

import plain
import pytest

import toys
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.running.runner import run

METHODS = [n for n in registry.names("method") if not n.startswith("toy_")]
TRAIN, FIT = ("train",), ("fit",)
ASKED, REFINED = (*FIT, "transfer"), (*FIT, "transfer", "refine")
BY_LOGITS = {
    "dsfl": "local",
    "fedmd": "transfer",
    **dict.fromkeys(
        ("hiper_baseline", "hiper_fedkd", "hiper_standardised", "hiper_temperature"), "local"
    ),
}
"""Methods whose clients send logits, and the stage in which they do; they are attacked through what
planted images would have given.
"""
STAGES = {
    "ft_fedavg": (*TRAIN, "finetune"),
    **dict.fromkeys(("aver", "camkd", "cwc", "ebkd", "fedseq", "metafed", "sfedkd"), 4 * TRAIN),
    **dict.fromkeys(("ensemble", "fedavg_once", "local_only", "pfnm"), FIT),
    **dict.fromkeys(("clue", "naive_kd"), ASKED),
    **dict.fromkeys(("qkt", "qkt_light", "qkt_light_volunteer", "qkt_var_e"), REFINED),
    "qkt_light_server": (*FIT, "refine"),
    **{name: (stage,) for name, stage in BY_LOGITS.items()},
}
"""The stages of a round in which clients' uploads are attacked, where they are not the one stage
``train``.
"""
SEND_A_PART = {
    **dict.fromkeys(("fedbabu", "fedrep", "fedrod", "fml", "lg_fedavg"), "shared"),
    "feddbe": "mean, shared",
    "afl": "cross, gram",
    **dict.fromkeys(("fd", "fedproto", "fedtgp"), "counts, means"),
}
"""What these send is no model that could be asked about an image: the measure is refused, in one
line.
"""
NO_SERVER_MODEL = {name for name, stages in STAGES.items() if "fit" in stages} - {
    "fedavg_once",
    "pfnm",
}


@pytest.mark.parametrize("name", SEND_A_PART)
def test_a_part_of_a_model_is_not_attacked_and_the_refusal_says_so(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"clients of method {name} send neither models nor logits but {SEND_A_PART[name]}",
    ):
        run(toys.toy(name, measure=("leakage",), **toys.suited(name)), None, toys.blobs())


@pytest.mark.parametrize("name", [n for n in METHODS if n not in SEND_A_PART])
def test_every_method_that_there_is_can_be_attacked(name: str, tmp_path: Path) -> None:
    slim = {"model": plain.toy_slim.__name__} if name == "fedalign" else {}
    few = {**toys.suited(name), "rounds": 1, "plan": {"epochs": 1, "batch": 20, "lr": 0.05}, **slim}
    events = run(
        toys.toy(name, measure=("leakage",), **few), tmp_path / "run", toys.blobs()
    ).measures
    attacked = [e for e in events if "seen" in e]
    assert tuple(e["name"] for e in attacked) == STAGES.get(name, TRAIN)
    for event in attacked:
        assert event["members"] > 0
        assert 0 <= event["seen"]["loss"]["auc"] <= 1
        assert ("likelihood_ratio" in event["seen"]) == (len(event["clients"]) > 3), (
            "three others, and more"
        )
    assert ("global" in events[-1]) == (name not in NO_SERVER_MODEL)
