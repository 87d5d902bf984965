"""Data sets by name through one loader: local folders, what the system has, the Hugging Face hub,
tensors.
"""

from fedstill.data.sources.in_memory import from_python
from fedstill.data.sources.load import load_dataset
from fedstill.data.sources.tensors import from_clients, from_tensors

__all__ = ["from_clients", "from_python", "from_tensors", "load_dataset"]
