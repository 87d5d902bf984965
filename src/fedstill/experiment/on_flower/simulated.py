"""A run on Flower's simulation: clients are virtual nodes, which Ray spreads over a machine's cores
or a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedstill.data.examples import Dataset
from fedstill.engines.cores import cores
from fedstill.engines.flower.messages import require_flower
from fedstill.errors import ConfigError, DeployFailed
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.on_flower.carried import trial_app

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Driven = TypeVar("Driven")

CLIENTS_ON_CARD = 4
"""Clients that share a card; without a share Ray may hide the card from them."""


def simulate(
    settings: Settings, data: Dataset | None, folder: Path, drive: Callable[[Grid], Driven]
) -> Driven:
    """What ``drive`` gives for a grid of ``settings.clients`` virtual nodes.

    ``folder``: the run's directory; clients keep what they remember in its ``sites``, which all
    machines must see. Raises ConfigError if Ray is not installed, DeployFailed if it does not
    start, and whatever ``drive`` raises.
    """
    require_flower()
    try:
        import ray  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'fedstill[flower-simulation]'"
        raise ConfigError(f"flower.grid = 'ray' needs Ray: {remedy} ({error})") from error
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    given: list[Driven] = []
    raised: list[BaseException] = []
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        try:
            given.append(drive(grid))
        except BaseException as error:
            raised.append(error)

    share = 1 / min(cores(), CLIENTS_ON_CARD) if settings.device == "cuda" else 0.0
    one_core = {"client_resources": {"num_cpus": 1, "num_gpus": share}}
    clients = trial_app(settings, data, (folder / "sites").resolve())
    try:
        run_simulation(app, clients, num_supernodes=settings.clients, backend_config=one_core)
    except Exception as error:
        raise DeployFailed(
            f"Ray could not carry the run out: {' '.join(str(error).split())[:300]}"
        ) from error
    if raised:
        raise raised[0]
    if not given:
        raise DeployFailed("Ray ended before the run did; its log says why")
    return given[0]
