"""What the outer packages add to fedstill: their commands, config tables, sections of the report.

This is plain data. Nothing is imported before it is used, so a command starts fast, and a package
whose folder is deleted is simply absent: its commands, config tables and sections are not offered,
and everything else works. Inner packages know outer ones through this list only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Part:
    """One thing that a package adds: its name, one line of help, and where it is found.

    ``target``: ``"package.module:attribute"``.
    """

    name: str
    help: str
    target: str

    def load(self) -> Any:
        """The thing itself; its module is imported now."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class PlacedPart(Part):
    """A part that has a place among others. ``follows``: the name of the one that it follows."""

    follows: str


Entries = Literal["numbers", "numbers or null", "counts", "classes"]
"""The entries of a list; "classes" are numbers of classes."""


@dataclass(frozen=True)
class ListForm:
    """The form of a list that a measure records.

    ``axes``: the meaning of the entries, from the outer to the inner list; without axes, the value
    is a single number. "class": an entry for each class. A number: so many points. "point": any
    number of points. The name of another list of the same measurement, such as "clients": an entry
    for each of its entries. In brackets, "[clients]": a single entry may replace the list.
    """

    axes: tuple[str | int, ...]
    entries: Entries = "numbers"
    is_optional: bool = False


ListForms = Mapping[str, ListForm]
"""The lists of a measure by their path; ``*`` stands for any name in a table."""


@dataclass(frozen=True, kw_only=True)
class OuterPackage:
    """One outer package of fedstill, and everything that it adds.

    ``commands``: functions or cyclopts apps, for ``fedstill NAME``.
    ``config_tables``: subclasses of ``config.tables.PackageTable``, each of them a table of a
    config; ``follows`` is the table that it follows there.
    ``config_checks``: ``(settings)``, which raise ConfigError or IncompatibleMethod for what cannot
    be meant together, before any data are read.
    ``compatibility_rules``: sequences of ``running.compatibility.Rule``, what the package asks of a
    run that is ready to start.
    ``measures``: subclasses of ``measures.base.Measure``.
    ``list_forms``: by measure, the lists that it records. Journals are checked against them, and
    data frames have their numbers.
    ``explanations``: ``(console, prepared)``, which print the last part of ``fedstill explain``;
    ``split_explanations``: what it prints above the split of the data, if that is drawn.
    ``label_keys``: the dotted keys of settings that name a variant of a method, such as a strategy;
    the labels of runs show their values after the name of the method.
    ``report_sections``: ``(report)``, a ``report.page.Report``, which return a section of the
    HTML page (``report.blocks.Section``) or None; ``follows`` is the section that they follow.
    ``comparison_notes``: ``(runs by label)``, which return a sentence for below the table of a
    comparison, or "".
    ``world_extensions``: ``(settings, world, label_counts)``, which return a run's world with what
    the package adds to it; ``label_counts()`` gives (clients, C), or (0, C) where they are unknown.
    ``arrivals``: ``(settings)``, which return how the clients' data grow with the rounds
    (``data.views.Arrival``), or None.
    ``sums``: ``(settings, about, shape)``, which return what clients send of their sums
    (``running.standardisation.SumsWork``), or None for plain sums.
    ``run_extensions``: ``(prepared, folder)``, which return a run's hooks, middleware and observers
    (``running.extensions.Extensions``).
    ``client_extensions``: ``(settings, world, is_real_site)``, which return the hooks of a run's
    clients (``core.extensions.ClientHook``).
    ``site_guards``: ``(prepared, notebook)``, which return what protects a site
    (``core.extensions.SiteGuard``); a ``SiteNotebook`` says where to keep notes.
    ``engines``: for runs with this ``engine``, subclasses of ``running.driver.RemoteEngine``.
    ``client_removals``: what ``fedstill deploy unlearn`` does with the runs of a client that leaves
    (``core.extensions.ClientRemoval``).
    """

    name: str
    commands: tuple[Part, ...] = ()
    config_tables: tuple[PlacedPart, ...] = ()
    config_checks: tuple[Part, ...] = ()
    compatibility_rules: tuple[Part, ...] = ()
    measures: tuple[Part, ...] = ()
    list_forms: Mapping[str, ListForms] = field(default_factory=dict)
    explanations: tuple[Part, ...] = ()
    split_explanations: tuple[Part, ...] = ()
    label_keys: tuple[str, ...] = ()
    report_sections: tuple[PlacedPart, ...] = ()
    comparison_notes: tuple[Part, ...] = ()
    world_extensions: tuple[Part, ...] = ()
    arrivals: tuple[Part, ...] = ()
    sums: tuple[Part, ...] = ()
    run_extensions: tuple[Part, ...] = ()
    client_extensions: tuple[Part, ...] = ()
    site_guards: tuple[Part, ...] = ()
    engines: tuple[Part, ...] = ()
    client_removals: tuple[Part, ...] = ()

    @property
    def module(self) -> str:
        """The dotted name of the package."""
        return f"fedstill.{self.name}"

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False


PACKAGES = (
    OuterPackage(
        name="attribution",
        commands=(
            Part(
                "why",
                "Show which clients caused forgetting: the loss of a class in a round by local "
                "training, by averaging, and by client.",
                "fedstill.attribution.commands:why_command",
            ),
        ),
        report_sections=(
            PlacedPart(
                "why",
                "The clients' contributions to changes in class accuracy.",
                "fedstill.attribution.report:contributors",
                follows="classes",
            ),
        ),
    ),
    OuterPackage(
        name="benchmark",
        commands=(
            Part(
                "rank",
                "The ranking: a benchmark of forgetting that anyone can run, extend and check.",
                "fedstill.benchmark.commands:rank",
            ),
            Part(
                "reproduce",
                "Reproduce a paper's table or figure, and print our numbers next to the paper's; "
                "without a name, list them.",
                "fedstill.benchmark.commands:reproduce",
            ),
        ),
        explanations=(
            Part(
                "maps",
                "The results of the ranking's maps near a run's setting.",
                "fedstill.benchmark.maps:explain_maps",
            ),
        ),
    ),
    OuterPackage(
        name="export",
        commands=(
            Part(
                "export",
                "Write a run's model, including normalisation, for use without fedstill; or its "
                "numbers as tables.",
                "fedstill.export.commands:export_command",
            ),
        ),
    ),
    OuterPackage(
        name="flower",
        commands=(
            Part(
                "deploy",
                "Run experiments on machines that do not trust each other: Flower, with TLS and a "
                "list of keys.",
                "fedstill.flower.commands:deploy",
            ),
        ),
        engines=(
            Part(
                "flower",
                "Clients are nodes of Flower: in this process, in Ray, or on other machines.",
                "fedstill.flower.remote_runs:FlowerRuns",
            ),
        ),
    ),
    OuterPackage(
        name="privacy",
        config_tables=(
            PlacedPart(
                "privacy",
                "Protection of logits, private training and secure sums.",
                "fedstill.privacy.noise:Privacy",
                follows="clients",
            ),
        ),
        config_checks=(
            Part(
                "privacy",
                "Refuses a config without anything to protect, or whose protection is impossible.",
                "fedstill.privacy.noise:check_config",
            ),
        ),
        compatibility_rules=(
            Part(
                "privacy",
                "The requirements of private training and secure sums.",
                "fedstill.privacy.compatibility:RULES",
            ),
        ),
        measures=(
            Part(
                "leakage",
                "How well a server can tell which examples a client trained on.",
                "fedstill.privacy.leakage:Leakage",
            ),
        ),
        list_forms={
            "leakage": {
                "client_auc": ListForm(("clients",), is_optional=True),
                "*/*/auc": ListForm(()),
                "*/*/auc_interval": ListForm((2,)),
                "*/*/tpr_at_0.001": ListForm(()),
                "*/*/tpr_at_0.001_interval": ListForm((2,)),
                "*/*/tpr_at_0.01": ListForm(()),
                "*/*/tpr_at_0.01_interval": ListForm((2,)),
                # A true-positive rate for each entry of metrics.membership.GRID.
                "*/*/roc": ListForm((25,)),
            },
        },
        sums=(
            Part(
                "privacy",
                "Sums of clipped values, with noise.",
                "fedstill.privacy.extensions:noised_sums",
            ),
        ),
        run_extensions=(
            Part(
                "secure sums",
                "Secure sums of models.",
                "fedstill.privacy.extensions:secure_sums",
            ),
            Part(
                "privacy",
                "Budgets of training and of uploads.",
                "fedstill.privacy.extensions:budgets",
            ),
        ),
        client_extensions=(
            Part(
                "privacy",
                "Private training, and noise on logits.",
                "fedstill.privacy.extensions:client_extensions",
            ),
        ),
        site_guards=(
            Part(
                "privacy",
                "A site's own count of its noise.",
                "fedstill.privacy.site_guards:noise_guards",
            ),
            Part(
                "secure sums",
                "A site's answers in secure sums.",
                "fedstill.privacy.site_guards:sum_guards",
            ),
        ),
    ),
    OuterPackage(
        name="querying",
        commands=(
            Part(
                "query",
                "Let a client of a finished local run query its peers for classes, and show what "
                "it gains and forgets.",
                "fedstill.querying.terminal:query",
            ),
        ),
        config_tables=(
            PlacedPart(
                "query",
                "The classes for which clients ask, and when.",
                "fedstill.querying.queries:QueryTable",
                follows="flower",
            ),
        ),
        config_checks=(
            Part(
                "query",
                "Refuses rounds, topologies and methods with which clients cannot ask again.",
                "fedstill.querying.queries:check_config",
            ),
        ),
        compatibility_rules=(
            Part(
                "queries",
                "The requirements of queries.",
                "fedstill.querying.rules:RULES",
            ),
        ),
        split_explanations=(
            Part(
                "queries",
                "The planned queries of clients, and their reasons.",
                "fedstill.querying.terminal:explain_queries",
            ),
        ),
        report_sections=(
            PlacedPart(
                "asked",
                "The gain and forgetting of querying clients.",
                "fedstill.querying.report:asked",
                follows="results",
            ),
            PlacedPart(
                "probe",
                "Predictions of models on noise, next to the label shares of their clients.",
                "fedstill.querying.report:noise_probes",
                follows="split",
            ),
        ),
        comparison_notes=(
            Part(
                "untaught",
                "The number of queries without a teacher.",
                "fedstill.querying.report:untaught",
            ),
        ),
        world_extensions=(
            Part(
                "queries",
                "The queries of clients, or the rule by which clients raise them.",
                "fedstill.querying.rules:with_queries",
            ),
        ),
        arrivals=(
            Part(
                "queries",
                "The growing data of clients that ask again in every round.",
                "fedstill.querying.rules:arrival_of",
            ),
        ),
        run_extensions=(
            Part(
                "queries",
                "The queries of clients, and their gain and forgetting.",
                "fedstill.querying.hooks:run_extensions",
            ),
        ),
        client_extensions=(
            Part(
                "queries",
                "A client raises its query, and sees it later.",
                "fedstill.querying.hooks:client_extensions",
            ),
        ),
    ),
    OuterPackage(
        name="unlearning",
        commands=(
            Part(
                "unlearn",
                "Make a finished run forget a client, examples or a class, and write a new run "
                "with a certificate.",
                "fedstill.unlearning.commands:unlearn_command",
            ),
        ),
        config_tables=(
            PlacedPart(
                "unlearning",
                "Clients, classes and examples that are excluded from a run.",
                "fedstill.unlearning.request:UnlearningTable",
                follows="flower",
            ),
        ),
        explanations=(
            Part(
                "unlearning",
                "The storage that strategies of unlearning need, in bytes.",
                "fedstill.unlearning.commands:explain_kept",
            ),
        ),
        config_checks=(
            Part(
                "unlearning",
                "Refuses a request that a run cannot fulfil.",
                "fedstill.unlearning.request:check_config",
            ),
        ),
        label_keys=("unlearning.strategy",),
        report_sections=(
            PlacedPart(
                "unlearning",
                "Measurements of unlearned models.",
                "fedstill.unlearning.report:forgetting_on_request",
                follows="results",
            ),
        ),
        client_removals=(
            Part(
                "unlearning",
                "Retraining with the clients that remain, and a certificate.",
                "fedstill.unlearning.retraining:retrain_in_federation",
            ),
        ),
    ),
)
"""The outer packages. They import inner packages, and never each other."""


@functools.cache
def installed() -> Sequence[OuterPackage]:
    """The outer packages that are there."""
    return [package for package in PACKAGES if package.installed]


def commands() -> list[Part]:
    """The commands of all packages."""
    return list(chain.from_iterable(package.commands for package in installed()))


def config_tables() -> list[PlacedPart]:
    """The config tables of all packages."""
    return list(chain.from_iterable(package.config_tables for package in installed()))


def config_checks() -> list[Part]:
    """The checks of a config of all packages."""
    return list(chain.from_iterable(package.config_checks for package in installed()))


def compatibility_rules() -> list[Part]:
    """What all packages ask of a run that is ready to start."""
    return list(chain.from_iterable(package.compatibility_rules for package in installed()))


def measures() -> list[Part]:
    """The measures of all packages."""
    return list(chain.from_iterable(package.measures for package in installed()))


def list_forms() -> dict[str, ListForms]:
    """The lists that the measures of all packages record, by measure."""
    return {
        measure: forms for package in installed() for measure, forms in package.list_forms.items()
    }


def explanations() -> list[Part]:
    """What all packages say at the end of ``fedstill explain``."""
    return list(chain.from_iterable(package.explanations for package in installed()))


def split_explanations() -> list[Part]:
    """What all packages say of the split in ``fedstill explain``."""
    return list(chain.from_iterable(package.split_explanations for package in installed()))


def label_keys() -> list[str]:
    """The keys of settings that name a variant of a method in the labels of runs."""
    return list(chain.from_iterable(package.label_keys for package in installed()))


def report_sections() -> list[PlacedPart]:
    """The sections of the HTML page of all packages."""
    return list(chain.from_iterable(package.report_sections for package in installed()))


def comparison_notes() -> list[Part]:
    """The notes on a comparison of all packages."""
    return list(chain.from_iterable(package.comparison_notes for package in installed()))


def world_extensions() -> list[Part]:
    """What all packages add to a run's world."""
    return list(chain.from_iterable(package.world_extensions for package in installed()))


def arrivals() -> list[Part]:
    """How the clients' data may grow, of all packages."""
    return list(chain.from_iterable(package.arrivals for package in installed()))


def sums() -> list[Part]:
    """How packages change the sums that standardise data."""
    return list(chain.from_iterable(package.sums for package in installed()))


def run_extensions() -> list[Part]:
    """What all packages add to a run at the server."""
    return list(chain.from_iterable(package.run_extensions for package in installed()))


def client_extensions() -> list[Part]:
    """What all packages add to a run's clients."""
    return list(chain.from_iterable(package.client_extensions for package in installed()))


def site_guards() -> list[Part]:
    """How all packages protect a site."""
    return list(chain.from_iterable(package.site_guards for package in installed()))


def engines() -> dict[str, Part]:
    """The engines of all packages, by their value of the config's key ``engine``."""
    parts = chain.from_iterable(package.engines for package in installed())
    return {part.name: part for part in parts}


def client_removals() -> list[Part]:
    """How all packages make a run forget a client that leaves a federation."""
    return list(chain.from_iterable(package.client_removals for package in installed()))


def missing_package(table: str) -> str:
    """The package to which a config table belongs, if it is not installed; else empty."""
    for package in PACKAGES:
        tables = [part.name for part in package.config_tables]
        if table in tables and not package.installed:
            return package.module
    return ""


def placed(
    inner: Mapping[str, Value], outer: Iterable[tuple[PlacedPart, Value]]
) -> dict[str, Value]:
    """Named values, with those of packages' parts behind the ones that the parts follow.

    >>> part = PlacedPart("middle", "", "", follows="first")
    >>> placed({"first": 1, "last": 3}, [(part, 2)])
    {'first': 1, 'middle': 2, 'last': 3}
    """
    parts = list(outer)
    result: dict[str, Value] = {}
    for name, value in inner.items():
        result[name] = value
        result.update({part.name: added for part, added in parts if part.follows == name})
    return result
