"""An experiment on data in memory: what the data say of model, clients and split, where the
experiment says nothing.
"""

from __future__ import annotations

from typing import Any

from fedstill.data.examples import Dataset
from fedstill.errors import ConfigError
from fedstill.experiment.config.experiment import Experiment, refuse_no_experiment
from fedstill.experiment.config.settle import DEFAULT_MODELS
from fedstill.origin import of_kind

OWNER = "client"
"""What the column of owners is called in data that were made of clients' own."""


def refuse_other_data(data: object) -> None:
    """Raise ConfigError for data in memory that are no data set."""
    if not isinstance(data, Dataset):
        make = "fedstill.from_tensors(NAME, train=(values, labels), test=(values, labels))"
        raise ConfigError(f"data is {of_kind(data)}, not a data set: make one with {make}")


def with_data(experiment: Experiment, data: Dataset) -> Experiment:
    """The experiment with the data's name; if unset, a model for their kind, and their owners as
    clients.
    """
    refuse_no_experiment(experiment)
    refuse_other_data(data)
    said: dict[str, Any] = {"data.name": data.name}
    if data.about.kind != "image" and "name" not in experiment.table("model"):
        said["model.name"] = DEFAULT_MODELS[data.about.kind]
    if data.about.owners and "kind" not in experiment.table("partition"):
        said |= {"partition.kind": "column", "partition.column": OWNER}
        said |= {"partition.own_test": "column"} if data.test.owners is not None else {}
        if "clients" not in experiment.table("topology"):
            said["topology.clients"] = len(data.about.owners)
    return experiment.with_values(said, "Python")
