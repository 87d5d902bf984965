"""Engines: how a stage is carried out. The serial engine is the definition; every other is tested
against it.

- Engines: ``serial``, ``pooled`` (clients in threads), ``vectorised`` (stacked clients).
- One client's work: ``loop``, ``clients``, ``step``, ``optimiser``; for stacked clients ``stack``,
  on a GPU ``cuda_graphs``.
- What a client measures, and replies of other runs: ``client_measures``, ``reply_cache``.
- Passes over examples without training: ``passes``.
- Arithmetic and resources: ``precision``, ``cores``, ``footprint``.
- A user's functions: ``user_functions``.
"""
