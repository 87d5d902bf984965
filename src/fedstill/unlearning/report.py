"""The table of how well models have forgotten: for the terminal, and as a section of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstill.metrics.ranks import paired_difference
from fedstill.report.blocks import Cell, Paragraph, Section, Table, group_label
from fedstill.report.page import Report
from fedstill.report.summary import NONE
from fedstill.running.runs import Group
from fedstill.unlearning.certificate import CERTIFICATE, read_certificate

EXPLANATION = (
    "The original model, the model that has forgotten, and an exact result, which never had the "
    "data. Numbers of the model that has forgotten should be those of the exact result; accuracy "
    "on forgotten data need not be low, because other clients may have similar data. Mean over "
    "seeds, and the 95 % interval of the mean (Student's t)."
)
ATTACKS = (
    "Membership: how well an attack by the loss tells forgotten examples from unseen ones; 50 % is "
    "a guess at random. Calibrated: the same by how much more certain the model is than the exact "
    "one. Backdoor: how often a trigger that was planted in the forgotten data still works. These "
    "attacks cannot show that nothing is left: a stronger one may find more."
)


LARGEST = 1e15
"""The largest absolute value of a number in the table."""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    ``path``: the keys of a number in the measurements of a certificate. ``MODEL`` in it stands for
    the name of a model; without it, the number belongs to the model that has forgotten.
    ``scale``: the number is multiplied by it. ``digits``: after the decimal point.
    """

    title: str
    path: tuple[str, ...]
    scale: float = 100.0
    digits: int = 2

    def number(self, certificate: Mapping[str, Any], model: str) -> float | None:
        """The scaled number of a model; None if it was not measured, or is no measurement."""
        if MODEL not in self.path and model != UNLEARNED:
            return None
        value: Any = certificate["measurements"]
        for key in self.path:
            if key == MODEL:
                key = model
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        # A stranger may have written the certificate; NaN is not within the limit.
        if isinstance(value, (int, float)) and abs(value) <= LARGEST:
            return self.scale * value
        return None

    def text(self, numbers: Sequence[float]) -> str:
        """The mean, and its interval if there are several numbers; a dash for none."""
        by_seed = dict(enumerate(numbers))
        mean = paired_difference(by_seed, dict.fromkeys(by_seed, 0.0))
        if mean is None:
            return NONE
        text = f"{mean.mean:.{self.digits}f}"
        if mean.pairs > 1:
            text += f" ({mean.low:.{self.digits}f} to {mean.high:.{self.digits}f})"
        return text


MODEL = "MODEL"
UNLEARNED = "unlearned"
MODELS = ("original", UNLEARNED, "exact")
"""The models that are measured, by their names in a certificate."""

COLUMNS = (
    Column("accuracy on forgotten data [%]", ("accuracy", MODEL, "forgotten")),
    Column("on remaining data [%]", ("accuracy", MODEL, "remaining")),
    Column("on the test set [%]", ("accuracy", MODEL, "test")),
    Column("at remaining sites [%]", ("accuracy", MODEL, "sites")),
    Column("membership, AUC [%]", ("membership", MODEL, "auc")),
    Column("calibrated, AUC [%]", ("membership", MODEL, "calibrated_auc")),
    Column("backdoor [%]", ("backdoor", MODEL)),
    Column("distance to exact: weights", ("distance_to_exact", MODEL, "weights"), 1.0, 4),
    Column("other predictions [%]", ("distance_to_exact", MODEL, "predictions")),
    Column("probabilities", ("distance_to_exact", MODEL, "probabilities"), 1.0, 4),
    Column("time [% of retraining]", ("cost", "relative_to_exact", "seconds_clients"), digits=0),
    Column("traffic [% of retraining]", ("cost", "relative_to_exact", "bytes"), digits=0),
)


@dataclass(frozen=True)
class VerificationTable:
    """What was measured in the certificates of one unlearning with several seeds.

    ``head``: of the columns with any number, without that of the model's name. ``rows``: the texts
    of these columns, by the name of the model.
    """

    head: Sequence[str]
    rows: Mapping[str, Sequence[str]]


def verification_table(
    certificates: Sequence[Mapping[str, Any]], columns: Sequence[Column] = ()
) -> VerificationTable:
    """The table of certificates that differ in the seed only.

    columns: by default, those in which any model has a number.
    """
    columns = columns or measured_columns(certificates)
    rows = {}
    for model in MODELS:
        numbers = [
            [column.number(certificate, model) for certificate in certificates]
            for column in columns
        ]
        known = [[value for value in values if value is not None] for values in numbers]
        if any(known):
            rows[_label(certificates[0], model)] = [
                column.text(values) for column, values in zip(columns, known, strict=True)
            ]
    return VerificationTable([column.title for column in columns], rows)


def measured_columns(certificates: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns in which any certificate has a number of any model."""
    return [
        column
        for column in COLUMNS
        if any(
            column.number(certificate, model) is not None
            for certificate in certificates
            for model in MODELS
        )
    ]


def _label(certificate: Mapping[str, Any], model: str) -> str:
    """The name of a model for readers: that of the strategy, if it has forgotten."""
    if model == UNLEARNED:
        return str(certificate["strategy"]["name"])
    return model


def certificates_of(group: Group) -> list[Mapping[str, Any]]:
    """The certificates in the directories of a group's runs."""
    return [
        read_certificate(run.folder)
        for run in group.started
        if (run.folder / CERTIFICATE).is_file()
    ]


def forgetting_on_request(report: Report) -> Section | None:
    """The section; None if no run has a certificate."""
    certificates = {group.label: certificates_of(group) for group in report.groups}
    columns = measured_columns([one for some in certificates.values() for one in some])
    if not columns:
        return None
    rows: list[list[Cell]] = []
    for group in report.groups:
        if not certificates[group.label]:
            continue
        table = verification_table(certificates[group.label], columns)
        for name, texts in table.rows.items():
            rows.append([group_label(group, report.style), name, *texts])
    head = ["", "model", *(column.title for column in columns)]
    blocks = [Paragraph(EXPLANATION), Paragraph(ATTACKS), Table(head, rows, "numbers wide")]
    return Section("unlearning", "How well models have forgotten on request", blocks)
