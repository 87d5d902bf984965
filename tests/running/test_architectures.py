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


def client_networks(models: object, clients: int = 4) -> list[str]:
    """The network of each client of a run with this value of ``clients.models``."""
    experiment = toys.toy(
        "hiper_fedkd",
        data={"public": 20},
        topology={"clients": clients, "sampled": clients},
        clients={"models": models},
        model="logistic",
    )
    settings = resolve(experiment)
    resolved_again = resolve(from_tree(tomllib.loads(settings.toml), {}, None))
    assert resolved_again.toml == settings.toml, "a run's config.toml resolves to itself"

    world = prepare(settings, toys.blobs()).world
    assert str(world.model(SERVER)).startswith("logistic"), "[model] is the server's network"
    specs = [str(world.model(client)) for client in range(clients)]
    return [spec.replace(", projection=0", "") for spec in specs]


LOGISTIC = "logistic(hidden=())"
SMALL_MLP = "mlp(hidden=(3,))"


def test_clients_take_turns_at_the_networks_of_a_list() -> None:
    assert client_networks(["mlp", SMALL]) == ["mlp(hidden=(200, 200))", SMALL_MLP] * 2


def test_networks_are_spread_over_clients_by_their_shares() -> None:
    by_name = {"logistic": 0.75, "digits_cnn": 0.25}
    quarter = [LOGISTIC, LOGISTIC, "digits_cnn", LOGISTIC]
    assert client_networks(by_name, clients=8) == quarter * 2

    halves = [{**SMALL, "share": 0.5}, {"name": "digits_cnn", "share": 0.5}]
    assert client_networks(halves) == [SMALL_MLP, "digits_cnn"] * 2


@pytest.mark.parametrize("shares", [[0.5, 0.3, 0.2], [0.1, 0.9], [1 / 3] * 3, [1.0]])
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_numbers_of_clients_differ_from_shares_by_less_than_one(
    shares: list[float], clients: int
) -> None:
    positions = spread_by_share(shares, clients)
    assert len(positions) == clients
    for position, share in enumerate(shares):
        assert abs(positions.count(position) - share * clients) < 1


def test_clients_that_no_key_names_have_the_network_of_the_server() -> None:
    networks = client_networks({"1": "digits_cnn", "2-3": SMALL}, clients=5)
    assert networks == [LOGISTIC, "digits_cnn", SMALL_MLP, SMALL_MLP, LOGISTIC]


CONFIG = """
method = "hiper_fedkd"
[data]
public = 20
[clients.models]
"0-1" = "mlp"
"""


def test_the_command_line_adds_networks_to_those_of_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "networks.toml"
    path.write_text(CONFIG)
    settings = resolve(load(path, ("topology.clients=3", "clients.models.2=logistic")))
    names = [network.name for network in settings.client_networks if network]
    assert names == ["mlp", "mlp", "logistic"]


@pytest.mark.parametrize(
    ("models", "message"),
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
        ({"0": {"name": "mlp", "share": 0.5}}, r"clients.models.0.share"),
        ("mlp", "clients.models"),
    ],
)
def test_a_faulty_value_of_models_is_an_error_of_one_line(models: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(toys.toy("hiper_fedkd", topology={"clients": 4}, clients={"models": models}))
    assert "\n" not in str(caught.value)


def test_files_of_code_are_found_in_keys_lists_and_tables() -> None:
    models = {"0": {"name": "mine.py:Net", "hidden": [1]}, "1": "theirs.py"}
    assert {"mine.py:Net", "theirs.py"} <= set(texts_in(models))
    assert "mine.py" in set(texts_in(["mine.py", {"name": "mlp"}]))
    assert "mine.py" in set(texts_in({"mine.py": 0.5}))


def test_weights_of_networks_that_differ_are_not_averaged() -> None:
    settings = resolve(toys.toy("fedavg", clients={"models": {"1": "logistic"}}))
    with pytest.raises(ConfigError, match="averages weights"):
        prepare(settings, toys.blobs())
