"""What a site itself counts of its private training, whatever the server says."""

from __future__ import annotations

from collections import Counter

from fedstill.engines.flower.desk import Desk
from fedstill.engines.flower.requests import Request
from fedstill.engines.private import rate_and_steps
from fedstill.errors import Refused
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.wire.moments_accountant import training_epsilon


def private_visit(
    ready: Prepared, request: Request, examples: int | None = None
) -> tuple[float, int]:
    """With which probability a noised step takes an example in a stage, and how many steps it has.

    examples: on how many a kept answer was trained; the site may have more by now.
    """
    plan = ready.settings.plans.get(request.stage.name)
    if plan is None or request.stage.view != "private":
        return 0.0, 0
    own = (
        ready.sites.trains_on(request.client, request.stage.name) if examples is None else examples
    )
    return rate_and_steps(own, plan)


def demand_budget(ready: Prepared, request: Request, desk: Desk) -> None:
    """Raise Refused where private training costs the site more than its run allows, by its own
    notes.

    Each step counts with the probability that it had: data that grow make later steps cheaper, not
    earlier ones.
    """
    privacy, (rate, steps) = ready.settings.privacy, private_visit(ready, request)
    if privacy.epsilon is None or not steps:
        return
    taken = desk.noised_steps(steps) + Counter({rate: steps})
    after = training_epsilon(privacy.sigma, taken, privacy.delta)
    if after is None or after > privacy.epsilon:
        raise Refused(
            f"{steps} more steps would cost this site more than privacy.epsilon allows it"
        )
