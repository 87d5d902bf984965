"""Retraining in a federation that a client leaves: the part of ``fedstill deploy unlearn`` that
trains the new model and certifies it.

Real sites keep their data, so a run at them can only be retrained, from its first round.
"""

from __future__ import annotations

from pathlib import Path

from fedstill.config.experiment import from_tree
from fedstill.core.errors import ConfigError
from fedstill.core.files import read_toml
from fedstill.running import runner
from fedstill.running.directory import settings_of
from fedstill.running.journal import read_journal
from fedstill.unlearning.certificate import write_certificate
from fedstill.unlearning.request import TABLE, UnlearningRequest, UnlearningTable
from fedstill.unlearning.retraining import Retraining
from fedstill.unlearning.strategy import OriginalRun


def retrain_in_federation(directory: Path, client: int) -> Path:
    """Run a finished run again without a client, where it ran (``core.extensions.ClientRemoval``).

    The new directory is beside the old one, with a certificate.
    """
    original = _original(directory, client)
    clients = tuple(sorted({*original.earlier_request.clients, client}))
    request = UnlearningRequest(clients=clients)
    numbers = "+".join(map(str, clients))
    folder = directory.with_name(f"{directory.name}-without-client{numbers}-retraining")
    if _is_begun(folder, request):
        runner.resume(folder)
    else:
        tree = read_toml(directory / "config.toml")
        tree[TABLE] = {"clients": list(clients), "strategy": "retraining"}
        runner.run(from_tree(tree, {}, directory), folder)
    write_certificate(original, folder, request, Retraining())
    return folder


def _original(directory: Path, client: int) -> OriginalRun:
    """The run in a directory. Raises ConfigError if it is not finished, has no such client, or has
    forgotten examples, too.
    """
    settings = settings_of(directory)
    if not (directory / "summary.json").is_file():
        raise ConfigError(f"{directory} is not finished; resume it first, then unlearn")
    if not 0 <= client < settings.clients:
        raise ConfigError(f"client {client}: {directory} has clients 0 to {settings.clients - 1}")
    original = OriginalRun(directory, settings, read_journal(directory / "journal.jsonl"))
    if original.earlier_request.classes or original.earlier_request.examples:
        raise ConfigError(
            f"{directory} has forgotten single examples; use fedstill unlearn --client {client}"
        )
    return original


def _is_begun(folder: Path, request: UnlearningRequest) -> bool:
    """Whether a directory holds this retraining, finished or not."""
    if not (folder / "config.toml").is_file():
        return False
    return settings_of(folder).table(UnlearningTable).request == request
