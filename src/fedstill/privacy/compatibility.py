"""What private training and secure sums ask of a run.

The rules are read for every run; what carries them out is imported only where a config asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedstill.continual.task_test import TEST_STAGES
from fedstill.core import keys, trees
from fedstill.core.aggregation import ROBUST
from fedstill.core.capabilities import Permit
from fedstill.core.errors import ConfigError, IncompatibleMethod, on_one_line
from fedstill.core.label_counts import CENSUS
from fedstill.core.records import SERVER, Payload, Reply, Stage, State, Tensors
from fedstill.engines.vectorised import stacking_obstacle
from fedstill.measures.base import Measure
from fedstill.methods.fit import FIT
from fedstill.privacy.noise import Privacy
from fedstill.privacy.protocol import require_secure
from fedstill.running.compatibility import PlannedRun, Rule
from fedstill.running.extensions import FACTORS

# ---- private training ---------------------------------------------------------------------------


def trains_privately(run: PlannedRun) -> bool:
    """Whether single examples' gradients are clipped, so that epsilon is counted."""
    return run.settings.table(Privacy).trains


def missing_opacus(run: PlannedRun) -> str:
    """No Opacus on this machine."""
    from fedstill.privacy.private_training import require_opacus

    require_opacus()
    return ""


def forbidden_private_training(run: PlannedRun) -> str:
    """A method whose clients do more with their data than DP-SGD protects."""
    if Permit.PRIVATE_TRAINING in run.method.permits:
        return ""
    return (
        f"privacy.gradient_clip with method {run.method_name}: its clients read more of their data "
        "than single examples' gradients, or send more than a model; choose fedavg, fedprox, "
        "fedntd or another that permits private_training"
    )


def stage_without_noise(run: PlannedRun) -> str:
    """A stage beside the method's own, which sends something else than a trained model.

    In stages of tests, sites report accuracies on test data, which epsilon does not cover.
    """
    others = sorted(run.stage_names - run.method.stages - {FIT} - TEST_STAGES)
    if not others:
        return ""
    return f"privacy.gradient_clip: stage {others[0]!r} sends what has no noise; leave it out"


def changing_data(run: PlannedRun) -> str:
    """Data that grow or change, of which epsilon is not counted."""
    if run.settings.stream.tasks == 1 and not run.settings.exchange_each_round:
        return ""
    return (
        "privacy.gradient_clip: epsilon counts on data that stay the same; leave [stream] or "
        "query.again out"
    )


def low_precision(run: PlannedRun) -> str:
    """Numbers that are rounded after they were clipped."""
    if run.settings.precision == "fp32":
        return ""
    return (
        f"privacy.gradient_clip: precision = {run.settings.precision!r} rounds what is clipped; "
        "set fp32"
    )


def stacked_clients(run: PlannedRun) -> str:
    """An engine that stacks clients, where the examples of a batch are stacked already."""
    if run.settings.engine != "vectorised":
        return ""
    return (
        "privacy.gradient_clip: engine = 'vectorised' stacks clients, and here examples are "
        "stacked; set engine = 'pooled'"
    )


def joint_gradients(run: PlannedRun) -> str:
    """A network in which the gradient of an example depends on the others of its batch."""
    networks = dict.fromkeys(run.world.model(client) for client in range(run.world.clients))
    for spec in networks:
        for plan in run.settings.plans.values():
            reason = stacking_obstacle(spec, plan)
            if reason:
                return f"privacy.gradient_clip needs each example's gradient, and {reason}"
    return ""


def weights_from_labels(run: PlannedRun) -> str:
    """Class weights from label counts.

    DP-SGD's guarantee supposes that one example more adds one clipped gradient to a step's sum and
    leaves the others as they are. It would change the weights of all examples, and so every
    clipped gradient: the sum could change by more than the noise is made for. Weights from noised
    counts would be a further mechanism, with an epsilon of its own.
    """
    for stage, plan in run.world.plans.items():
        setting = plan.class_weights
        if isinstance(setting, str) and setting != "none":
            return (
                f"privacy.gradient_clip: plan.{stage}.class_weights = {setting!r} comes from label "
                "counts, so one example more changes the gradients of all others, which epsilon "
                "does not cover; give a list, one weight per class"
            )
    return ""


# ---- secure sums --------------------------------------------------------------------------------


OF_SINGLE_MODELS = frozenset({"local_models", "uploads", "chain", "queries"})
"""The needs of measures that only single models or reports of clients meet."""

LINEARITY_TOLERANCE = 1e-4
"""How near an aggregate of single models must come to that of their mean, relative to the largest
number.
"""


def sums_securely(run: PlannedRun) -> bool:
    """Whether the server learns sums of models only."""
    return bool(run.settings.table(Privacy).secure_sum)


def missing_ciphers(run: PlannedRun) -> str:
    """No ciphers on this machine."""
    require_secure()
    return ""


def forbidden_sums(run: PlannedRun) -> str:
    """A method whose server does more with replies than a mean of models."""
    if Permit.LINEAR_AGGREGATE in run.method.permits:
        return ""
    return (
        f"privacy.secure_sum with method {run.method_name}: its server does more with replies than "
        "a mean of models; choose fedavg, fedprox, fedntd or another that permits linear_aggregate"
    )


def robust_mean(run: PlannedRun) -> str:
    """A mean that needs single models."""
    if run.aggregation not in ROBUST:
        return ""
    return (
        f"privacy.secure_sum with method.aggregation = {run.aggregation!r}: a robust mean compares "
        "single models, which a secure sum hides; choose 'examples' or 'uniform', or leave "
        "secure_sum out"
    )


def masked_attack(run: PlannedRun) -> str:
    """Hostile clients that would change their replies after these are masked."""
    if run.settings.engine != "flower" or run.settings.clients_table.attack not in FACTORS:
        return ""
    return (
        "privacy.secure_sum: over Flower clients mask their replies before clients.attack could "
        "change them; choose another engine"
    )


def unsummed_stage(run: PlannedRun) -> str:
    """A stage whose replies are not summed, or have too few clients to hide among."""
    from fedstill.privacy.masking import FEWEST_SUMMED

    for stage in run.stages:
        if SERVER in stage.clients or stage.name == CENSUS:
            continue
        if stage.name not in run.method.stages:
            return (
                f"privacy.secure_sum: stage {stage.name!r} sends what is not summed; leave it out"
            )
        if stage.sequential or len(stage.clients) < FEWEST_SUMMED:
            return (
                f"privacy.secure_sum: stage {stage.name!r} has {len(stage.clients)} client(s) side "
                f"by side, and a sum hides one among {FEWEST_SUMMED} or more; set topology.kind = "
                "'parallel', and topology.sampled"
            )
    return ""


def single_reports(run: PlannedRun) -> str:
    """Clients that report for themselves why they ask again."""
    if not run.settings.exchange_each_round:
        return ""
    return (
        "privacy.secure_sum: clients that ask again report why, each for itself; leave "
        "query.again out"
    )


def uncounted_epsilon(run: PlannedRun) -> str:
    """Private training at real sites, whose numbers of examples stay unknown."""
    if not (run.settings.table(Privacy).trains and run.settings.on_sites):
        return ""
    return (
        "privacy.secure_sum: at real sites with gradient_clip the server could not count each "
        "client's epsilon, because it learns no number of examples; leave one of them out"
    )


def measured_models(run: PlannedRun) -> str:
    """A measure of single models."""
    for name, measure in run.measures.items():
        needs_single_models = bool(measure.needs & OF_SINGLE_MODELS)
        looks_at_clients = type(measure).at_client is not Measure.at_client
        if needs_single_models or looks_at_clients or name == "contributions":
            return (
                f"privacy.secure_sum: measure {name!r} looks at single clients' models; leave it "
                "out of measure (measure = [])"
            )
    return ""


def nonlinear_aggregate(run: PlannedRun) -> str:
    """An aggregate that gives another result for single models than for their mean.

    A user's method may permit secure sums although its aggregate is not linear. The result would be
    wrong without a sign of it, so drawn models tell.
    """
    for stage in run.first_round:
        if SERVER in stage.clients or stage.name == CENSUS:
            continue
        try:
            is_linear = _is_linear(run, stage)
        except Exception as error:
            raise IncompatibleMethod(
                f"privacy.secure_sum with method {run.method_name}: its aggregate of stage "
                f"{stage.name!r} needs more than models' mean: {on_one_line(error)}"
            ) from error
        if not is_linear:
            return (
                f"privacy.secure_sum with method {run.method_name}: as it is set, its aggregate of "
                f"stage {stage.name!r} gives another result for single models than for their mean; "
                "with method.aggregation = 'uniform' it may, or choose fedavg"
            )
    return ""


def _is_linear(run: PlannedRun, stage: Stage) -> bool:
    """Whether an aggregate of drawn models is that of their mean."""
    method = run.method
    state = method.begin_round(method.initial_state(run.world), [stage], run.world)
    replies = _drawn_replies(stage, state.params, run.settings.seed)

    weights = [1.0] * len(replies)
    if run.aggregation in ("", "examples"):
        weights = [float(reply.examples) for reply in replies]
    mean = Payload(params=trees.mean([reply.content.params for reply in replies], weights))
    summed = [replace(reply, content=mean, examples=0) for reply in replies]

    return _are_near(
        method.aggregate(state, replies, stage, run.world),
        method.aggregate(state, summed, stage, run.world),
    )


def _drawn_replies(stage: Stage, params: Tensors, seed: int) -> list[Reply]:
    """Three replies that could have come: models near the first, of clients with 1, 2 and 3
    examples.
    """
    generator = keys.generator(keys.seed_for(seed, 0, 0, SERVER, "is the fold linear"))
    replies = []
    for examples, client in enumerate(stage.clients[:3], 1):
        moved = {
            name: value + 0.1 * torch.randn(value.shape, generator=generator).to(value)
            for name, value in trees.floats(params).items()
        }
        content = Payload(params={**params, **moved})
        reply = Reply(
            client=client,
            content=content,
            examples=examples,
            round=stage.round,
            stage=stage.index,
        )
        replies.append(reply)
    return replies


def _are_near(state: State, expected: State) -> bool:
    """Whether two states have the same groups, and nearly the same numbers in them."""
    if state.extra.keys() != expected.extra.keys():
        return False
    pairs = [(state.params, expected.params)]
    pairs += [(_tensors(state.extra[k]), _tensors(expected.extra[k])) for k in state.extra]
    return all(
        _is_near(values[name].double(), expected_values[name].double())
        for values, expected_values in pairs
        for name in values
    )


def _is_near(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by rounding only."""
    if not value.numel():
        return True
    tolerance = LINEARITY_TOLERANCE * max(1.0, float(value.abs().max()))
    return torch.allclose(value, expected, rtol=0, atol=tolerance)


def _tensors(group: object) -> Tensors:
    """A group of a state as tensors by name."""
    if isinstance(group, Mapping):
        return group
    if isinstance(group, Tensor):
        return {"": group}
    return {"": torch.tensor([hash(group) % 2**31])}


RULES: tuple[Rule[PlannedRun], ...] = (
    Rule(trains_privately, missing_opacus, ConfigError, at_sites=True),
    Rule(trains_privately, forbidden_private_training, at_sites=True),
    Rule(trains_privately, stage_without_noise, ConfigError, at_sites=True),
    Rule(trains_privately, changing_data, ConfigError, at_sites=True),
    Rule(trains_privately, low_precision, ConfigError, at_sites=True),
    Rule(trains_privately, stacked_clients, ConfigError, at_sites=True),
    Rule(trains_privately, joint_gradients, ConfigError, at_sites=True),
    Rule(trains_privately, weights_from_labels, ConfigError, at_sites=True),
    Rule(sums_securely, missing_ciphers, ConfigError, at_sites=True),
    Rule(sums_securely, forbidden_sums, at_sites=True),
    Rule(sums_securely, robust_mean, at_sites=True),
    Rule(sums_securely, masked_attack, ConfigError, at_sites=True),
    Rule(sums_securely, unsummed_stage, ConfigError, at_sites=True),
    Rule(sums_securely, single_reports, ConfigError, at_sites=True),
    Rule(sums_securely, uncounted_epsilon, ConfigError, at_sites=True),
    Rule(sums_securely, measured_models, ConfigError, at_sites=True),
    Rule(sums_securely, nonlinear_aggregate, at_sites=True),
)
"""What private training and secure sums ask of a run. A site checks all of it for itself: what they
promise is promised to the site.
"""
