"""Flower's server behind the gate: ``python -m fedstill.flower.deployment.superlink``,
with Flower's own options.

Flower's application is made by Flower's own function, and served here, inside the gate. It starts
none of the programs that would run an app's code: those who ask for work must know the operator's
key, and ours do what is installed.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from fedstill.core.errors import ConfigError, FedstillError
from fedstill.flower.deployment.gate import Gate, check_paths
from fedstill.flower.deployment.processes import end_with_parent
from fedstill.flower.messages import require_flower

OTHER_PORTS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
"""Settings by which Flower would open ports that have no gate."""


def gated() -> tuple[Gate, Any]:
    """Flower's application behind the gate, and what its options came to.

    Raises ConfigError if Flower's paths are not as the gate knows them, or the options would leave
    it.
    """
    require_flower()
    for name in OTHER_PORTS:
        os.environ.pop(name, None)
    try:
        from fastapi.routing import iter_route_contexts
        from flwr.common.constant import ISOLATION_MODE_PROCESS
        from flwr.superlink.main import create_app

        # its package has a function of that name
        flower = import_module("flwr.superlink.cli.flower_superlink")
        config = flower._parse_superlink_lifespan_config()
        app = create_app(config, flower.SuperLinkLifespan)
        check_paths(str(route.path) for route in iter_route_contexts(app.routes))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this version of Flower starts its server otherwise than fedstill knows: {error}"
        ) from error
    if config.isolation != ISOLATION_MODE_PROCESS or config.simulation:
        raise ConfigError("the server does not start: its options let it run the code of an app")
    return Gate(
        app, config.superexec_auth_secret or b"", listed=config.enable_supernode_auth
    ), config


def serve() -> int:
    """Serve until a signal ends it; the exit status."""
    try:
        gate, config = gated()
    except FedstillError as error:
        print(f"fedstill: {error}", file=sys.stderr)
        return 1
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler

    uvicorn.run(
        gate,
        host=config.host,
        port=config.port,
        log_config=get_uvicorn_log_config(console_handler.level),
        access_log=False,
        proxy_headers=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    return 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(serve())
