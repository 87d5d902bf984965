"""The certificate of an unlearning, and its check.

The certificate is a file in the new run's directory. It names the request, the strategy, the rounds
that were trained anew, and the SHA-256 of config, journal and model of both runs. It proves that
these files belong together and have not changed since; it cannot prove that the original data are
deleted elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstill.core.errors import CorruptFile
from fedstill.core.fields import CountOrZero
from fedstill.core.files import digest, in_shell, read_file, write_whole
from fedstill.core.records import SERVER
from fedstill.core.reports import json_value
from fedstill.running.directory import settings_of
from fedstill.running.journal import CONFIG, JOURNAL, read_journal
from fedstill.running.model_files import FINAL
from fedstill.running.runs import contributed, start_run
from fedstill.unlearning.request import UnlearningRequest, UnlearningTable
from fedstill.unlearning.strategy import OriginalRun, Strategy
from fedstill.unlearning.verification import Backdoor, measurements, new_client_events
from fedstill.version import VERSION

CERTIFICATE = "certificate.json"
"""The file's name in the directory of the new run."""

CERTIFIED_FILES = {"config": CONFIG, "journal": JOURNAL, "model": FINAL}
"""The files of each run whose SHA-256 the certificate has, by their key there."""

CERTIFICATE_SHA256 = "sha256"
"""The key of the SHA-256 of everything else in the certificate."""


def write_certificate(
    original: OriginalRun,
    folder: Path,
    request: UnlearningRequest,
    strategy: Strategy,
    *,
    exact: Path | None = None,
    backdoor: Backdoor | None = None,
) -> Mapping[str, Any]:
    """Measure the new run in ``folder``, and write its certificate.

    exact: the directory of an exact result of the same request. Its distance to the new model is
    measured, too. backdoor: a backdoor in the forgotten data, which is tested.
    """
    table = settings_of(folder).package_table(UnlearningTable)
    certificate = {
        "fedstill": VERSION,
        "request": asdict(request),
        "strategy": {
            "name": table.strategy,
            "exact": strategy.is_exact,
            "options": dict(table.options),
            **strategy.statement(original, request),
        },
        "rounds": _rounds(original, folder, strategy.farewell_stage),
        "original": {"folder": str(original.folder.resolve()), **file_digests(original.folder)},
        "unlearned": file_digests(folder),
        "measurements": measurements(original, folder, request, exact, backdoor),
    }
    complete: dict[str, Any] = json_value(certificate)
    complete[CERTIFICATE_SHA256] = digest(_canonical(complete))
    write_whole(folder / CERTIFICATE, file_bytes(complete))
    return complete


def file_bytes(certificate: Mapping[str, Any]) -> bytes:
    """The bytes of a certificate's file."""
    return json.dumps(certificate, indent=2).encode() + b"\n"


def file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of a run's config, journal and model."""
    return {key: digest(read_file(folder / name)) for key, name in CERTIFIED_FILES.items()}


def _canonical(certificate: Mapping[str, Any]) -> bytes:
    """The bytes of which a certificate has the SHA-256."""
    entries = {key: value for key, value in certificate.items() if key != CERTIFICATE_SHA256}
    return json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()


def _rounds(original: OriginalRun, folder: Path, farewell_stage: str) -> dict[str, int]:
    """The first and the last round in which clients trained without the forgotten data; the events
    before them are those of the original journal.

    In the stage ``farewell_stage``, a forgotten client trains on its data a last time.
    """
    trained = [
        event["round"]
        for event in new_client_events(original.folder, folder)
        if event["name"] != farewell_stage
    ]
    events = read_journal(folder / JOURNAL)
    last = max(event["round"] for event in events if event["event"] == "round")
    return {"first": min(trained, default=last + 1), "last": last}


# ---- the check -----------------------------------------------------------------------------------


class RequestForm(BaseModel):
    """The entries of a certificate's request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    clients: list[CountOrZero]
    classes: list[CountOrZero]
    examples: list[CountOrZero]


class StrategyForm(BaseModel):
    """The entries of a certificate's strategy that are read."""

    model_config = ConfigDict(strict=True)

    name: str


class RoundsForm(BaseModel):
    """The rounds of a certificate."""

    model_config = ConfigDict(strict=True)

    first: CountOrZero
    last: CountOrZero


class CertificateForm(BaseModel):
    """The entries of a certificate that are read. A stranger may have written the file."""

    model_config = ConfigDict(strict=True)

    request: RequestForm
    strategy: StrategyForm
    rounds: RoundsForm
    original: Mapping[str, str]
    unlearned: Mapping[str, str]
    measurements: Mapping[str, Any]


@dataclass(frozen=True)
class CheckedCertificate:
    """A certificate that was checked.

    ``original_checked``: whether the files of the original run were there to be checked, too.
    """

    content: Mapping[str, Any]
    original_checked: bool


def check_certificate(folder: Path) -> CheckedCertificate:
    """Check the certificate in a run's directory, and the files that it names.

    Raises CorruptFile, naming the file, if the certificate is missing or has changed, if a file is
    not the one that it names, if its request or its strategy is not that of the run's config, or if
    a forgotten client acts in the new rounds.
    """
    certificate = read_certificate(folder)
    path = folder / CERTIFICATE
    try:
        _check_files(folder, certificate["unlearned"])
        original = Path(certificate["original"]["folder"])
        is_there = (original / CONFIG).is_file()
        if is_there:
            _check_files(original, certificate["original"])
    except KeyError as error:
        raise CorruptFile(f"{path} lacks {error}; unlearn again") from error
    _check_request(folder, certificate)
    _check_events(folder, certificate)
    return CheckedCertificate(certificate, original_checked=is_there)


def read_certificate(folder: Path) -> Mapping[str, Any]:
    """The certificate in a run's directory; raises CorruptFile if it is missing, has changed, or
    lacks an entry of ``CertificateForm``.
    """
    path = folder / CERTIFICATE
    try:
        data = read_file(path)
        certificate = json.loads(data)
    except FileNotFoundError as error:
        raise CorruptFile(
            f"{folder} holds no certificate; `fedstill unlearn` writes one, "
            f"{in_shell(CERTIFICATE)}, into the new run's directory"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}; unlearn again") from error
    if not isinstance(certificate, dict) or certificate.get(CERTIFICATE_SHA256) != digest(
        _canonical(certificate)
    ):
        raise CorruptFile(
            f"{path} has changed: its content does not match its SHA-256; unlearn again"
        )
    # The SHA-256 is of the entries. Spaces, escapes and repeated keys can change without them.
    if data != file_bytes(certificate):
        raise CorruptFile(
            f"{path} has changed: fedstill writes these entries in another form; unlearn again"
        )
    try:
        CertificateForm.model_validate(certificate)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        key = ".".join(map(str, first["loc"]))
        raise CorruptFile(f"{path}, {key}: {first['msg']}; unlearn again") from error
    return certificate


def _check_files(folder: Path, digests: Mapping[str, str]) -> None:
    for key, name in CERTIFIED_FILES.items():
        path = folder / name
        try:
            data = read_file(path)
        except OSError as error:
            raise CorruptFile(f"{path} cannot be read: {error.strerror}; restore it") from error
        if digest(data) != digests[key]:
            raise CorruptFile(
                f"{path} is not the file that the certificate names: its SHA-256 differs; restore "
                "it, or unlearn again"
            )


def _check_request(folder: Path, certificate: Mapping[str, Any]) -> None:
    """Raise CorruptFile if the run's config forgets something else, or in another way."""
    table = settings_of(folder).package_table(UnlearningTable)
    request = {key: list(ids) for key, ids in asdict(table.request).items()}
    if certificate["request"] != request:
        raise CorruptFile(
            f"{folder / CERTIFICATE}: its request is not that of config.toml; unlearn again"
        )
    if certificate["strategy"]["name"] != table.strategy:
        raise CorruptFile(
            f"{folder / CERTIFICATE}: its strategy is not that of config.toml; unlearn again"
        )


def _check_events(folder: Path, certificate: Mapping[str, Any]) -> None:
    """Raise CorruptFile if a forgotten client acts in a round that was trained without it, or, in a
    federation, contributed to the model from which the run started.
    """
    forgotten = set(certificate["request"]["clients"]) - {SERVER}
    table = settings_of(folder).package_table(UnlearningTable)
    allowed = (table.first_round, table.rule.farewell_stage)
    for event in read_journal(folder / JOURNAL):
        acts = event["event"] == "client" and event["round"] >= table.first_round
        if not acts or (event["round"], event["name"]) == allowed:
            continue
        if event["client"] in forgotten:
            raise CorruptFile(
                f"{folder}: client {event['client']} is to be forgotten, and acts in round "
                f"{event['round']}; unlearn again"
            )
    start = start_run(folder)
    for client in forgotten:
        if start is not None and contributed(start, client):
            raise CorruptFile(
                f"{folder} started from the model of {start}, to which client {client} "
                "contributed; unlearn again"
            )
