"""The configuration of a run: the keys, how they are resolved and checked, and one clear line for
what is wrong.
"""

from fedstill.config.experiment import Experiment, load

__all__ = ["Experiment", "load"]
