"""The table of rules for runs: when a rule applies, the order of rules, and the rules of a site."""

from __future__ import annotations

import pytest
import torch

import toys
from fedstill import manifest
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, FedstillError, IncompatibleMethod
from fedstill.data.sources import from_tensors
from fedstill.running.compatibility import Rule, all_rules, check_at_site, check_data, check_run
from fedstill.running.preparation import Prepared, prepare


def ready(**changes: object) -> Prepared:
    return prepare(resolve(toys.toy("fedavg", **changes)), toys.blobs())


def test_a_row_is_an_error_if_it_applies_and_is_not_met() -> None:
    def problem(text: str) -> str:
        return text.removeprefix("fine")

    rule = Rule(bool, problem, ConfigError)
    rule.check("")
    rule.check("fine")
    with pytest.raises(ConfigError, match=r"^wrong$"):
        rule.check("wrong")


@pytest.mark.parametrize(
    ("method", "clients", "error", "word"),
    [
        ("fednova", {}, IncompatibleMethod, "privacy.secure_sum with method fednova"),
        ("feddf", {}, IncompatibleMethod, "method feddf needs public data"),
        ("fednova", {"attackers": 0.2}, ConfigError, "clients.attackers needs clients.attack"),
    ],
    ids=["an outer package's row", "a need of the method", "a setting"],
)
def test_the_first_row_that_fails_is_the_error(
    method: str, clients: dict[str, object], error: type[FedstillError], word: str
) -> None:
    run = ready()
    settings = resolve(toys.toy(method, clients=clients, privacy={"secure_sum": True}))
    with pytest.raises(error, match=word):
        check_run(settings, run.world, run.sites)


def test_a_robust_mean_needs_several_clients_in_the_methods_own_stage() -> None:
    """The stage that fits all clients first has more of them."""
    topology = {"clients": 10, "sampled": 2, "first": "fit"}
    experiment = toys.toy({"name": "fedavg", "aggregation": "median"}, topology=topology)

    with pytest.raises(IncompatibleMethod, match="needs at least 3 clients side by side"):
        prepare(resolve(experiment), toys.blobs())


def test_rows_of_a_package_that_is_absent_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready()
    settings = resolve(toys.toy("fednova", privacy={"secure_sum": True}))
    count = len(list(all_rules()))
    monkeypatch.setattr(manifest, "installed", tuple)
    check_run(settings, run.world, run.sites)
    assert len(list(all_rules())) < count


def test_a_site_checks_the_rules_that_protect_it() -> None:
    run = ready()
    check_at_site(resolve(toys.toy("feddf")), run.world, run.sites)
    hostile = resolve(toys.toy("fednova", privacy={"secure_sum": True}))
    with pytest.raises(IncompatibleMethod, match="secure_sum"):
        check_at_site(hostile, run.world, run.sites)


def test_data_are_checked_before_they_are_split() -> None:
    rows = torch.rand(20, 3), torch.arange(20) % 2
    table = from_tensors("rows", rows, rows, kind="table")
    settings = resolve(toys.toy(data={"public_resize": True}))
    check_data(settings, toys.blobs())
    with pytest.raises(ConfigError, match=r"data\.public_resize"):
        check_data(settings, table)
