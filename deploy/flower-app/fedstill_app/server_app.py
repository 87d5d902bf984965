"""The server_app of fedstill."""

from fedstill.flower.apps import server_app as app

__all__ = ["app"]
