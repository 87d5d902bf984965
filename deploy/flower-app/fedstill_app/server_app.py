"""The server_app of fedstill."""

from fedstill.experiment.flower_apps import server_app as app

__all__ = ["app"]
