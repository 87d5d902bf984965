"""The configuration of a run: what may be written, what it comes to, and one clear line for what is wrong."""

from fedstill.experiment.config.experiment import Experiment, load

__all__ = ["Experiment", "load"]
