"""Reads data sets from local files, system packages, the Hugging Face hub and Python objects."""

from fedstill.data.sources.in_memory import from_python
from fedstill.data.sources.load import load_dataset
from fedstill.data.sources.tensors import from_clients, from_tensors

__all__ = ["from_clients", "from_python", "from_tensors", "load_dataset"]
