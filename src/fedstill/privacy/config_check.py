"""What ``[privacy]`` excludes in the rest of a config, known before any data are read."""

from __future__ import annotations

from fedstill.config.settings import Settings
from fedstill.core.capabilities import Permit
from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.privacy.noise import Privacy


def check_config(settings: Settings) -> None:
    """Raises ConfigError for secure sums over tasks of sites, and IncompatibleMethod where logits
    are to be protected and none are sent.
    """
    privacy = settings.table(Privacy)
    if privacy.secure_sum and settings.on_tasks:
        raise ConfigError(
            "with privacy.secure_sum a site reports nothing of its own, and stream.kind = 'sites' "
            "is measured by what "
            "sites report; leave one of them out"
        )
    if privacy.protects_logits and Permit.NOISY_LOGITS not in settings.method.permits:
        raise IncompatibleMethod(
            f"[privacy] protects logits that clients upload, and method "
            f"{settings.named.method.label} uploads none; "
            "leave it out, or choose a method that exchanges logits (hiper_fedkd, fedmd, dsfl)"
        )
