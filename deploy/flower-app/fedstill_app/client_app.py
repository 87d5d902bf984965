"""The client_app of fedstill."""

from fedstill.flower.apps import client_app as app

__all__ = ["app"]
