"""Hyper-parameters out of their range are refused before anything is read, in one line that names
the key.
"""

from __future__ import annotations

import pytest
from all_methods import METHODS

import toys
from fedstill.config.resolve import resolve
from fedstill.core import descriptions, registry
from fedstill.core.errors import ConfigError

HIPER = ["hiper_fedkd", "hiper_baseline", "hiper_temperature", "hiper_standardised"]
QKTS = ("qkt", "qkt_light", "qkt_light_volunteer", "qkt_light_server", "qkt_var_e")

NOT_BELOW_ZERO = {
    "fedprox": ["mu"],
    "fedlc": ["margin"],
    "fedrs": ["alpha"],
    "fedsam": ["rho"],
    "fedsol": ["rho"],
    "fedrod": ["gamma"],
    "feddbe": ["kappa"],
    "fedmlb": ["own", "branch", "agree"],
    "fml": ["alpha", "beta"],
    "metafed": ["strength", "keeps_above", "listens_below"],
    "feddc": ["alpha"],
    "ditto": ["strength"],
    "afl": ["ridge"],
    "fedtgp": ["strength", "largest_margin"],
    "fedgen": ["weight", "match", "diversity"],
    "fd": ["strength"],
    "fedproto": ["strength"],
    "fedgkd": ["weight"],
    "fedgkd_vote": ["weight"],
    "fedlmd": ["beta"],
    "fedlwf": ["weight"],
    "fedewc": ["weight", "gamma"],
    "analytic": ["ridge", "width", "groups"],
    "fot": ["keeps", "grows"],
    "glfc_local": ["size", "beta", "alpha"],
    "replay": ["size", "beta", "alpha"],
    "fedlmd_tf": ["beta"],
    "fedntd": ["beta"],
    "fedntd_mse": ["beta"],
    "feddkd": ["alpha", "beta"],
    "feddkd_groups": ["alpha", "alpha_first", "beta", "first"],
    "fedadkd": ["alpha", "beta"],
    "fedavg_asd": ["weight", "b1", "b2"],
    "fedntd_asd": ["weight", "b1", "b2"],
    "fedcurv": ["weight"],
    "moon": ["mu"],
    "fedavgm": ["momentum"],
    "fedbe": ["samples", "spread", "after"],
    "fedalign": ["mu"],
    "kd_ntd": ["mix"],
    "cwc": ["weight", "decay"],
    "sfedkd": ["gamma", "beta"],
    "aver": ["weight"],
    "ebkd": ["weight"],
    "camkd": ["weight", "feature_weight"],
    "naive_kd": ["alpha"],
    **{name: ["alpha", "threshold", "frozen"] for name in QKTS},
    **{name: ["decay", "subset"] for name in HIPER},
    "dsfl": ["subset"],
    "fedmd": ["subset"],
}
"""Fields that may be 0 but not less."""

ABOVE_ZERO = {
    "fedntd": ["temperature"],
    "kd": ["temperature"],
    "kd_ntd": ["temperature"],
    "feddkd": ["temperature"],
    "feddkd_groups": ["temperature"],
    "fedadkd": ["temperature", "delta"],
    "fedavg_asd": ["temperature"],
    "fedntd_asd": ["temperature"],
    "moon": ["temperature"],
    "feddf": ["temperature"],
    "fedbe": ["temperature", "concentration", "low"],
    "feddyn": ["alpha"],
    "fedavgm": ["server_lr"],
    "fedlmd": ["temperature"],
    "fedlwf": ["temperature"],
    "fedewc": ["samples"],
    "fedgen": ["decay", "noise", "hidden", "samples"],
    "fedgkd": ["temperature", "models", "from_round"],
    "fedgkd_vote": ["temperature", "models", "from_round", "vote_temperature"],
    "fedlmd_tf": ["temperature"],
    "fedsol": ["temperature"],
    "fedmlb": ["temperature"],
    "fedcurv": ["samples"],
    "fedalign": ["width", "iterations"],
    "cwc": ["epsilon"],
    "sfedkd": ["temperature", "smoothing"],
    "aver": ["temperature"],
    "ebkd": ["temperature"],
    "camkd": ["temperature"],
    "pfnm": ["most"],
    "clue": ["share", "samples"],
    "naive_kd": ["temperature"],
    **{name: ["temperature", "query_weight", "samples"] for name in QKTS},
    **{name: ["temperature", "low", "high"] for name in HIPER},
    "dsfl": ["temperature"],
}
"""Fields that must be more than 0."""

COUNTS = {
    **{name: ["k"] for name in ("sfedkd", "aver", "ebkd", "camkd")},
    "ensemble": ["participants"],
    "ccvr": ["samples"],
    "lg_fedavg": ["layers"],
    "fedbe": ["cycle"],
    "pfnm": ["passes"],
    "clue": ["participants"],
    "naive_kd": ["participants"],
    **{name: ["participants"] for name in QKTS},
}
"""Whole numbers that may be 0."""

TOO_LARGE = [
    ("fedavgm", "momentum", 1.0),
    ("fedalign", "width", 1.0),
    ("kd_ntd", "mix", 1.5),
    ("fedrs", "alpha", 1.5),
    ("fot", "keeps", 1.5),
    ("fedewc", "gamma", 1.5),
    ("fml", "alpha", 1.5),
    ("fml", "beta", 1.5),
    ("feddkd_groups", "first", 1.5),
    ("cwc", "decay", 1.5),
    ("fedbe", "low", 1.5),
    ("fedbe", "after", 1.5),
    ("sfedkd", "smoothing", 2.0),
    ("fedgen", "decay", 1.5),
    ("qkt", "threshold", 1.01),
    ("qkt", "frozen", 1.01),
    ("clue", "share", 1.01),
    ("hiper_fedkd", "low", 1.5),
    ("hiper_fedkd", "high", 2),
]
"""Values above the largest."""

UNKNOWN_CHOICES = [
    ("fedadkd", "tckd", "both"),
    ("fedadkd", "phi_timing", "late"),
    ("fedadkd", "phi_source", "g"),
    ("feddkd", "nckd_mode", "kept"),
    ("fednova", "ccvr", "on"),
    ("scaffold", "divide_by", "momentum"),
    ("fedcurv", "scope", "all"),
    ("feddyn", "aggregation", "mode"),
    ("cwc", "memory", "queue"),
    ("fedbe", "distribution", "laplace"),
    ("sfedkd", "teacher_choice", "best"),
    ("sfedkd", "distance", "cosine"),
    ("qkt", "phases", 3),
    ("qkt", "teachers", "some"),
    ("qkt", "classes", "queried"),
    ("qkt", "head", "auto"),
    ("qkt_light", "phase1", "server"),
    ("qkt_light_server", "start", "own"),
    ("hiper_fedkd", "temperatures", "cosine"),
    ("dsfl", "aggregation", "median"),
    ("fedlc", "denominator", "none"),
    ("analytic", "cosine", "yes"),
    ("replay", "choose", "all"),
    ("replay", "balance", "yes"),
    ("fedproto", "aggregation", "median"),
    ("fd", "average_weights", "some"),
    ("afl", "balanced", "yes"),
    ("ccvr", "covariance", "low_rank"),
    ("fedrs", "scaling", "all"),
    ("fedsol", "scale", "none"),
    ("fedsol", "part", "features"),
]
"""Values that are none of a field's choices."""


def cases(fields: dict[str, list[str]], values: list[object]) -> list[tuple[str, str, object]]:
    """Each field of a table with each of these values."""
    return [(method, field, value) for method, field in fields_of(fields) for value in values]


def fields_of(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    """The methods and fields of a table."""
    pairs = []
    for method, fields in table.items():
        pairs += [(method, field) for field in fields]
    return pairs


OUT_OF_RANGE = [
    *cases(NOT_BELOW_ZERO, [-0.001, float("nan"), "1"]),
    *cases(ABOVE_ZERO, [0, -1, float("inf")]),
    *cases(COUNTS, [-1, 1.5, "1"]),
    *TOO_LARGE,
    *UNKNOWN_CHOICES,
]

TABLES = (NOT_BELOW_ZERO, ABOVE_ZERO, COUNTS)

WHOLE_NUMBERS = ("samples", "subset", "size", "width", "groups")


@pytest.mark.parametrize(("method", "field", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_in_one_line(
    method: str, field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(toys.toy({"name": method, field: value}))

    message = str(caught.value)
    assert f"method.{field} = {value!r}" in message
    assert "\n" not in message
    assert "input should be" in message


def test_all_faults_of_a_method_are_reported_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"method\.alpha = -1.*; method\.delta = 0"):
        resolve(toys.toy({"name": "fedadkd", "alpha": -1, "delta": 0}))


@pytest.mark.parametrize(("method", "field"), fields_of(NOT_BELOW_ZERO))
def test_zero_is_accepted_where_values_may_be_zero(method: str, field: str) -> None:
    zero: float = 0.0
    if field in WHOLE_NUMBERS:
        zero = 0

    settings = resolve(toys.toy({"name": method, field: zero}, **toys.suited(method)))

    assert getattr(settings.method, field) == 0


@pytest.mark.parametrize(("method", "field"), fields_of(ABOVE_ZERO))
def test_a_method_made_in_python_is_checked_too(method: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        registry.lookup("method", method).build(**{field: 0})


def test_every_numeric_field_of_every_method_is_in_a_table() -> None:
    """But for ``mix`` of ``kd``, which has a single value."""
    for name in METHODS:
        in_tables = {field for table in TABLES for field in table.get(name, [])}
        for field, (hint, _) in descriptions.fields(registry.lookup("method", name)).items():
            is_number = getattr(hint, "__origin__", None) in (float, int)
            if is_number and (name, field) != ("kd", "mix"):
                assert field in in_tables, (name, field)
