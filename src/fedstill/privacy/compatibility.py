"""The rules for private training and secure sums: which runs they are compatible with.

Every run is compared with these rules. The code of private training and of secure sums is imported
only if a config asks for it.
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
from fedstill.core.checks import in_hook, place
from fedstill.core.errors import ConfigError, IncompatibleMethod, on_one_line
from fedstill.core.files import counted
from fedstill.core.label_counts import CENSUS
from fedstill.core.method import ClientWork
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
    """Whether the run trains with DP-SGD."""
    return run.settings.package_table(Privacy).trains


def missing_opacus(run: PlannedRun) -> str:
    """Opacus is not installed."""
    from fedstill.privacy.private_training import require_opacus

    require_opacus()
    return ""


def forbidden_private_training(run: PlannedRun) -> str:
    """The method's clients use their data in ways that DP-SGD does not protect."""
    if Permit.PRIVATE_TRAINING in run.method.permits:
        return ""
    return (
        f"privacy.gradient_clip with method {run.method_name}: its clients use more of their data "
        "than the gradients of single examples, or send more than a model; choose fedavg, fedprox, "
        "fedntd or another method that permits private_training"
    )


def perturbed_gradients(run: PlannedRun) -> str:
    """The gradient is computed at other parameters, which a pass without noise chooses."""
    for stage in run.first_round:
        if stage.name not in run.method.stages:
            continue
        with in_hook(run.method, "work", place(stage)):
            work_type = type(run.method.work(stage))
        if work_type.perturb is not ClientWork.perturb:
            return (
                f"privacy.gradient_clip with method {run.method_name}: "
                f"{work_type.__name__}.perturb would use the examples without noise; choose a "
                "method without perturb"
            )
    return ""


def stage_without_noise(run: PlannedRun) -> str:
    """A further stage sends something other than a trained model.

    Test stages are allowed: there, sites report accuracies on test data, which epsilon does not
    cover.
    """
    further_stages = sorted(run.stage_names - run.method.stages - {FIT} - TEST_STAGES)
    if not further_stages:
        return ""
    return (
        f"privacy.gradient_clip: stage {further_stages[0]!r} sends values without noise; leave it "
        "out"
    )


def changing_data(run: PlannedRun) -> str:
    """The data grow or change, and epsilon is not defined for such data."""
    if run.settings.stream.tasks == 1 and not run.settings.exchange_each_round:
        return ""
    return (
        "privacy.gradient_clip: epsilon is only counted for data that do not change; leave out "
        "[stream] and query.again"
    )


def low_precision(run: PlannedRun) -> str:
    """The precision rounds gradients after they are clipped."""
    if run.settings.precision == "fp32":
        return ""
    return (
        f"privacy.gradient_clip: precision = {run.settings.precision!r} rounds clipped gradients; "
        "set precision = 'fp32'"
    )


def stacked_clients(run: PlannedRun) -> str:
    """The engine stacks clients, but private training already stacks the examples of a batch."""
    if run.settings.engine != "vectorised":
        return ""
    return (
        "privacy.gradient_clip: engine = 'vectorised' stacks clients, but private training stacks "
        "the examples of a batch; set engine = 'pooled'"
    )


def joint_gradients(run: PlannedRun) -> str:
    """In the network, the gradient of an example depends on the rest of its batch."""
    networks = dict.fromkeys(run.world.model(client) for client in range(run.world.clients))
    for spec in networks:
        for plan in run.settings.plans.values():
            reason = stacking_obstacle(spec, plan)
            if reason:
                return f"privacy.gradient_clip needs each example's gradient, and {reason}"
    return ""


def weights_from_labels(run: PlannedRun) -> str:
    """Class weights come from label counts.

    DP-SGD's guarantee assumes that one more example adds one clipped gradient to a step's sum and
    leaves all others unchanged. With such weights, it changes the weights of all examples and so
    every clipped gradient, and the sum could change by more than the noise covers. Weights from
    noised counts would be another mechanism, with an epsilon of its own.
    """
    for stage, plan in run.world.plans.items():
        setting = plan.class_weights
        if isinstance(setting, str) and setting != "none":
            return (
                f"privacy.gradient_clip: plan.{stage}.class_weights = {setting!r} depends on label "
                "counts, so one more example changes the gradients of all others, which epsilon "
                "does not cover; set a list with one weight per class"
            )
    return ""


def held_out_examples(run: PlannedRun) -> str:
    """Clients hold out examples.

    Which examples a client holds out depends on their number, so one more example would change the
    training set by many.
    """
    for stage, plan in run.world.plans.items():
        if plan.validation > 0:
            return (
                f"privacy.gradient_clip: with plan.{stage}.validation = {plan.validation:g}, one "
                "more example changes which examples are held out, which epsilon does not cover; "
                "set plan.validation = 0"
            )
    return ""


# ---- secure sums --------------------------------------------------------------------------------


OF_SINGLE_MODELS = frozenset({"local_models", "uploads", "chain", "queries"})
"""The needs of measures that require the models or reports of single clients."""

LINEARITY_TOLERANCE = 1e-4
"""The largest difference between the aggregate of single models and the aggregate of their mean,
relative to the largest number.
"""


def sums_securely(run: PlannedRun) -> bool:
    """Whether the run uses secure sums."""
    return bool(run.settings.package_table(Privacy).secure_sum)


def missing_ciphers(run: PlannedRun) -> str:
    """The cryptographic libraries are not installed."""
    require_secure()
    return ""


def forbidden_sums(run: PlannedRun) -> str:
    """The method's server needs more than the mean of the models."""
    if Permit.LINEAR_AGGREGATE in run.method.permits:
        return ""
    return (
        f"privacy.secure_sum with method {run.method_name}: its server needs more than the mean of "
        "the models; choose fedavg, fedprox, fedntd or another method that permits "
        "linear_aggregate"
    )


def robust_mean(run: PlannedRun) -> str:
    """A robust mean needs single models."""
    if run.aggregation not in ROBUST:
        return ""
    return (
        f"privacy.secure_sum with method.aggregation = {run.aggregation!r}: a robust mean compares "
        "single models, which a secure sum hides; choose 'examples' or 'uniform', or leave out "
        "secure_sum"
    )


def masked_attack(run: PlannedRun) -> str:
    """Simulated attackers would change their replies after masking."""
    if run.settings.engine != "flower" or run.settings.clients_table.attack not in FACTORS:
        return ""
    return (
        "privacy.secure_sum: over Flower, clients mask their replies before clients.attack can "
        "change them; choose another engine"
    )


def unsummed_stage(run: PlannedRun) -> str:
    """A stage has replies that cannot be summed, or too few clients to hide one among."""
    from fedstill.privacy.masking import FEWEST_SUMMED

    for stage in run.stages:
        if SERVER in stage.clients or stage.name == CENSUS:
            continue
        if stage.name not in run.method.stages:
            return (
                f"privacy.secure_sum: the replies of stage {stage.name!r} cannot be summed; leave "
                "it out"
            )
        if stage.sequential or len(stage.clients) < FEWEST_SUMMED:
            return (
                f"privacy.secure_sum: stage {stage.name!r} has "
                f"{counted(len(stage.clients), 'client')} in parallel, and a secure sum needs at "
                f"least {FEWEST_SUMMED}; {_remedy(stage, run)}"
            )
    return ""


def _remedy(stage: Stage, run: PlannedRun) -> str:
    """What to change so that a stage has enough clients for a secure sum."""
    from fedstill.privacy.masking import FEWEST_SUMMED

    if run.world.clients < FEWEST_SUMMED:
        return f"raise topology.clients to {FEWEST_SUMMED} or more"
    if stage.sequential:
        return "set topology.kind = 'parallel'"
    return f"raise topology.sampled to {FEWEST_SUMMED} or more"


def single_reports(run: PlannedRun) -> str:
    """Clients report their own reasons for further queries."""
    if not run.settings.exchange_each_round:
        return ""
    return (
        "privacy.secure_sum: with query.again, each client reports its own reasons for further "
        "queries; leave out query.again"
    )


def uncounted_epsilon(run: PlannedRun) -> str:
    """Private training at real sites needs numbers of examples, which secure sums hide."""
    if not (run.settings.package_table(Privacy).trains and run.settings.on_sites):
        return ""
    return (
        "privacy.secure_sum: at real sites with gradient_clip, the server cannot count each "
        "client's epsilon, because secure sums hide the numbers of examples; leave out one of "
        "them"
    )


def measured_models(run: PlannedRun) -> str:
    """A measure needs single models."""
    for name, measure in run.measures.items():
        needs_single_models = bool(measure.needs & OF_SINGLE_MODELS)
        looks_at_clients = type(measure).at_client is not Measure.at_client
        if needs_single_models or looks_at_clients or name == "contributions":
            return (
                f"privacy.secure_sum: measure {name!r} needs the models of single clients; remove "
                "it from measure (measure = [])"
            )
    return ""


def nonlinear_aggregate(run: PlannedRun) -> str:
    """The method's aggregate of single models differs from the aggregate of their mean.

    A user's method may permit secure sums although its aggregate is not linear. Its results would
    then be silently wrong. Therefore both aggregates are computed on random models and compared.
    """
    for stage in run.first_round:
        if SERVER in stage.clients or stage.name == CENSUS:
            continue
        try:
            is_linear = _is_linear(run, stage)
        except Exception as error:
            raise IncompatibleMethod(
                f"privacy.secure_sum with method {run.method_name}: its aggregate of stage "
                f"{stage.name!r} needs more than the mean of the models: {on_one_line(error)}"
            ) from error
        if not is_linear:
            return (
                f"privacy.secure_sum with method {run.method_name}: with these settings, its "
                f"aggregate of stage {stage.name!r} is not linear in the models; try "
                "method.aggregation = 'uniform', or choose fedavg"
            )
    return ""


def _is_linear(run: PlannedRun, stage: Stage) -> bool:
    """Whether the aggregate of random models equals the aggregate of their mean."""
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
    """Replies of three clients with 1, 2 and 3 examples: random models near the initial one."""
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
    Rule(trains_privately, perturbed_gradients, at_sites=True),
    Rule(trains_privately, stage_without_noise, ConfigError, at_sites=True),
    Rule(trains_privately, changing_data, ConfigError, at_sites=True),
    Rule(trains_privately, low_precision, ConfigError, at_sites=True),
    Rule(trains_privately, stacked_clients, ConfigError, at_sites=True),
    Rule(trains_privately, joint_gradients, ConfigError, at_sites=True),
    Rule(trains_privately, weights_from_labels, ConfigError, at_sites=True),
    Rule(trains_privately, held_out_examples, ConfigError, at_sites=True),
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
"""The rules for private training and secure sums. Each site also checks them itself, because their
guarantees are given to the site.
"""
