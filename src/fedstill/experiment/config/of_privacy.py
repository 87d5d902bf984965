"""The table ``[privacy]``: read, and what it changes or excludes in the rest of a config."""

from __future__ import annotations

from dataclasses import replace

from fedstill.errors import IncompatibleMethod
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.tables import TopKeys
from fedstill.fields import read_record
from fedstill.method import Method
from fedstill.wire.privacy import Privacy


def read_privacy(experiment: Experiment, top: TopKeys) -> tuple[Privacy, TopKeys]:
    """The table, and the top keys: with secure sums, what is measured unless something is said is
    left out.
    """
    privacy = read_record(Privacy, experiment.table("privacy"), "privacy")
    unsaid = "measure" not in experiment.origins and top.measure == TopKeys().measure
    return privacy, replace(top, measure=()) if privacy.secure_sum and unsaid else top


def refuse_unprotected(privacy: Privacy, method: Method, label: str) -> None:
    """Raise IncompatibleMethod where logits are to be protected and none are sent."""
    if privacy.protects_logits and "noisy_logits" not in method.permits:
        raise IncompatibleMethod(
            f"[privacy] protects logits that clients upload, and method {label} uploads none; "
            "leave it out, or choose a method that exchanges logits (hiper_fedkd, fedmd, dsfl)"
        )
