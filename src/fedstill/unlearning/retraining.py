"""The strategies that only train without the forgotten data: retraining, which is exact, and
fine-tuning, which is the baseline.

Retraining is the run once more without the forgotten data.
Reading: "as if the data had never been used" is read as the run with the same config and the table
``[unlearning]``. Client ids, the split of all other data, samples of clients and all draws stay the
same; forgotten clients do not act. Training starts at the last kept checkpoint before a client with
forgotten data was scheduled, if there is one, because nothing before it depends on these data. With
tasks, queries, or test sets of the clients' own, the journal has numbers of these data from its
first rounds on, so training starts anew.

Fine-tuning adds rounds without the forgotten data to the run. It has no guarantee.
Source: a baseline of Golatkar, Achille and Soatto, "Eternal Sunshine of the Spotless Net: Selective
Forgetting in Deep Networks" (2020): it relies on catastrophic forgetting.
Reading: in a federation, the remaining clients continue with the run's method and plan. The
learning rate goes on falling. The number of rounds is an option.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstill.cli.app import number_or_name
from fedstill.config.experiment import from_tree
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import Event
from fedstill.core.fields import Count
from fedstill.core.files import in_shell, read_file, read_toml
from fedstill.core.rounds import Schedule
from fedstill.data.client_split import ClientSplit
from fedstill.running import runner
from fedstill.running.checkpoint import Restored
from fedstill.running.directory import settings_of
from fedstill.running.journal import CONFIG, JOURNAL, is_finished, read_journal
from fedstill.running.preparation import Prepared
from fedstill.running.replay import Without
from fedstill.running.runs import contributed, start_run
from fedstill.unlearning.certificate import write_certificate
from fedstill.unlearning.request import TABLE, UnlearningRequest, UnlearningTable
from fedstill.unlearning.strategy import (
    NewRounds,
    OriginalRun,
    StartPoint,
    Strategy,
    check_continues,
    continued,
)


@dataclass(frozen=True)
class Retraining(Strategy):
    """Train again without the forgotten data."""

    is_exact: ClassVar[bool] = True
    whole_clients_only: ClassVar[bool] = False

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """All rounds of the original run, none of them with the forgotten data."""
        return NewRounds(first=1, last=original.settings.rounds)

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint | None:
        """The last kept checkpoint that does not depend on the forgotten data."""
        if _depends_from_the_start(original, prepared):
            return None
        first = first_round_of(original, original.affected(request))
        restored = original.checkpoints.before(first)
        if restored is None:
            return None
        return StartPoint(
            state=restored.state,
            state_files=restored.state_files,
            events=_events_before(original, restored),
        )

    def changed_schedule(
        self, schedule: Schedule, request: UnlearningRequest, first_round: int
    ) -> Schedule:
        """The schedule without the forgotten clients, also before round 1."""
        return replace(schedule, change=Without(frozenset(request.clients), first=0))

    def changed_split(
        self, split: ClientSplit, labels: NDArray[np.int64], request: UnlearningRequest
    ) -> ClientSplit:
        """The split without all forgotten examples."""
        return request.remaining(split, labels)


def first_round_of(original: OriginalRun, clients: frozenset[int]) -> int:
    """The first round of which one of these clients is a part; behind the last one if none is.

    A client that was scheduled counts even if it had no work, or if its reply was refused: the
    method knew of it when the round began.
    """
    settings = original.settings
    world = original.prepared.world
    for round in range(settings.rounds + 1):
        for stage in settings.schedule(round, world):
            if clients.intersection(stage.clients):
                return round
    return settings.rounds + 1


def _depends_from_the_start(original: OriginalRun, prepared: Prepared) -> bool:
    """Whether the run depends on the forgotten data from round 1 on, before their clients train.

    This is so for the mean and standard deviation of all rows; for the round that was selected as
    the best one, because the new run needs its checkpoint; for the tests of a forgotten client; for
    public examples of a forgotten class; for queries, which depend on the data of all clients; and
    for numbers by task, which concern all clients.
    """
    before = original.prepared
    scales_differ = before.scaler != prepared.scaler
    tests_differ = before.sites.own_tests.keys() != prepared.sites.own_tests.keys()
    public_differs = len(before.sites.public or ()) != len(prepared.sites.public or ())
    data_differ = scales_differ or tests_differ or public_differs
    queries_differ = before.world.extensions != prepared.world.extensions
    has_tasks = original.settings.stream.tasks > 1
    return data_differ or queries_differ or has_tasks or original.settings.selects_round


def _events_before(original: OriginalRun, restored: Restored) -> Sequence[Event]:
    """The events of the original journal up to a checkpoint, without the event ``start``."""
    data = read_file(original.folder / JOURNAL)[: restored.journal.length]
    events: list[Event] = [json.loads(line) for line in data.splitlines()]
    return events[1:]


# ---- the baseline --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FineTuning(Strategy):
    """Train on without the forgotten data."""

    whole_clients_only: ClassVar[bool] = False

    repair_rounds: Count = 5
    """The number of further rounds."""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise IncompatibleMethod for a run that cannot go on."""
        check_continues(original, "fine_tuning")

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """The rounds after the last one."""
        last = original.last_round
        return NewRounds(first=last + 1, last=last + self.repair_rounds)

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint:
        """The end of the original run."""
        return continued(original, prepared)


# ---- in a federation -----------------------------------------------------------------------------

# Real sites keep their data, so a run at them can only be retrained, from its first round.


def retrain_in_federation(directory: Path, client: int) -> Path:
    """Run a finished run again without a client, where it ran (``core.extensions.ClientRemoval``).

    The new directory is beside the old one, with a certificate. If the run started from the model
    of a run to which the client contributed, that run is trained again first, and the new run
    starts from its new model.
    """
    original = _original(directory, client)
    clients = tuple(sorted({*original.earlier_request.clients, client}))
    request = UnlearningRequest(clients=clients)
    numbers = "+".join(map(str, clients))
    folder = directory.with_name(f"{directory.name}-without-client{numbers}-retraining")
    if _is_begun(folder, request):
        runner.resume(folder)
    else:
        tree = read_toml(directory / CONFIG)
        start = start_run(directory)
        if start is not None and contributed(start, client):
            tree["start_from"] = str(retrain_in_federation(start, client))
        tree[TABLE] = {"clients": list(clients), "strategy": "retraining"}
        runner.run(from_tree(tree, {}, directory), folder)
    write_certificate(original, folder, request, Retraining())
    return folder


def _original(directory: Path, client: int) -> OriginalRun:
    """The run in a directory. Raises ConfigError if it is not finished, has no such client, or has
    forgotten examples, too.
    """
    settings = settings_of(directory)
    if not is_finished(directory):
        raise ConfigError(f"{directory} is not finished; resume it first, then unlearn")
    if not 0 <= client < settings.clients:
        raise ConfigError(f"client {client}: {directory} has clients 0 to {settings.clients - 1}")
    original = OriginalRun(directory, settings, read_journal(directory / JOURNAL))
    if original.earlier_request.classes or original.earlier_request.examples:
        names = original.events[0].get("client_names", ())
        client_text = in_shell(number_or_name(client, names))
        raise ConfigError(
            f"{directory} has forgotten single examples; use fedstill unlearn --client "
            f"{client_text}"
        )
    return original


def _is_begun(folder: Path, request: UnlearningRequest) -> bool:
    """Whether a directory holds this retraining, finished or not."""
    if not (folder / CONFIG).is_file():
        return False
    return settings_of(folder).package_table(UnlearningTable).request == request
