"""Networks that differ: by list, by share, by client; and what is refused, in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import toys
from fedstill.config.experiment import from_tree, load
from fedstill.config.named_tables import spread_by_share, texts_in
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.records import SERVER
from fedstill.running.preparation import prepare

SMALL = {"name": "mlp", "hidden": [3]}


def specs(models: object, clients: int = 4, sampled: int = 4) -> list[str]:
    experiment = toys.toy(
        "hiper_fedkd",
        data={"public": 20},
        topology={"clients": clients, "sampled": sampled},
        clients={"models": models},
        model="logistic",
    )
    settings = resolve(experiment)
    again = resolve(from_tree(tomllib.loads(settings.toml), {}, None))
    assert again.toml == settings.toml, "a run's config.toml resolves to itself"
    world = prepare(settings, toys.blobs()).world
    assert str(world.model(SERVER)).startswith("logistic"), "the server's is [model]"
    return [str(world.model(c)).replace(", projection=0", "") for c in range(clients)]


def test_a_list_is_dealt_out_in_turn() -> None:
    assert specs(["mlp", SMALL]) == ["mlp(hidden=(200, 200))", "mlp(hidden=(3,))"] * 2


def test_by_share() -> None:
    found = specs({"logistic": 0.75, "digits_cnn": 0.25}, clients=8, sampled=8)
    assert found == (["logistic(hidden=())"] * 2 + ["digits_cnn"] + ["logistic(hidden=())"]) * 2
    assert (
        specs([{**SMALL, "share": 0.5}, {"name": "digits_cnn", "share": 0.5}])
        == [
            "mlp(hidden=(3,))",
            "digits_cnn",
        ]
        * 2
    )


@pytest.mark.parametrize("shares", [[0.5, 0.3, 0.2], [0.1, 0.9], [1 / 3] * 3, [1.0]])
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_shares_are_kept_to_within_one_client(shares: list[float], clients: int) -> None:
    found = spread_by_share(shares, clients)
    assert len(found) == clients
    for i, share in enumerate(shares):
        assert abs(found.count(i) - share * clients) < 1


def test_by_client_and_the_servers_for_the_others() -> None:
    found = specs({"1": "digits_cnn", "2-3": SMALL}, clients=5)
    assert found == [
        "logistic(hidden=())",
        "digits_cnn",
        "mlp(hidden=(3,))",
        "mlp(hidden=(3,))",
        "logistic(hidden=())",
    ]


def test_in_a_config_file_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'method = "hiper_fedkd"\n[data]\npublic = 20\n[clients.models]\n"0-1" = "mlp"\n'
    )
    settings = resolve(load(path, ("topology.clients=3", "clients.models.2=logistic")))
    assert [network.name for network in settings.client_networks if network] == [
        "mlp",
        "mlp",
        "logistic",
    ]


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (["mpl"], "mlp"),
        ([3], "clients.models"),
        ([{"hidden": [3]}], r"clients.models\[0\].*name"),
        ([{"name": "mlp", "hiden": [3]}], r"clients.models\[0\].hiden.*hidden"),
        ([{"name": "mlp", "hidden": [0]}], r"clients.models\[0\].hidden"),
        ({"mlp": 0.5, "logistic": 0.6}, "1\\.1"),
        ({"mlp": 1.5, "logistic": -0.5}, "share above 0"),
        ([{"name": "mlp", "share": 0.5}, "logistic"], "clients.models.*share"),
        ({"0": "mlp", "0-2": "logistic"}, r"clients.models\.0-2.*client 0"),
        ({"9": "mlp"}, r"clients.models\..*from 0 to 3"),
        ({"2-1": "mlp"}, r"clients.models\..*from 0 to 3"),
        ({"first": "mlp"}, "clients.models.first"),
        ({"0": "mlp", "1": 0.5}, r"clients.models.1"),
        ("mlp", "clients.models"),
    ],
)
def test_what_is_no_network_of_anybody_is_one_clear_line(models: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(toys.toy("hiper_fedkd", topology={"clients": 4}, clients={"models": models}))
    assert "\n" not in str(caught.value)


def test_code_is_found_wherever_it_is_named() -> None:
    said = {"0": {"name": "mine.py:Net", "hidden": [1]}, "1": "theirs.py"}
    assert {"mine.py:Net", "theirs.py"} <= set(texts_in(said))
    assert "mine.py" in set(texts_in(["mine.py", {"name": "mlp"}]))
    assert "mine.py" in set(texts_in({"mine.py": 0.5}))


def test_weights_of_networks_that_differ_are_not_averaged() -> None:
    with pytest.raises(ConfigError, match="averages weights"):
        prepare(resolve(toys.toy("fedavg", clients={"models": {"1": "logistic"}})), toys.blobs())
