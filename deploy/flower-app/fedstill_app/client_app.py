"""The client_app of fedstill."""

from fedstill.experiment.flower_apps import client_app as app

__all__ = ["app"]
