"""The configuration of a run: its keys, their resolution and checks, and error messages."""

from fedstill.config.experiment import Experiment, load

__all__ = ["Experiment", "load"]
