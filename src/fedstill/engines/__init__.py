"""Engines: how a stage is carried out. The serial engine is the definition; every other is tested
against it.

- Engines: ``serial``, ``pooled`` (clients in threads), ``vectorised`` (stacked clients).
- One client's work: ``loop``, ``clients``, ``batches``, ``step``, ``optimiser``,
  ``frozen_teachers``; for stacked clients ``stack``, on a GPU ``cuda_graphs``.
- What a client measures, remembers and reuses: ``at_client``, ``client_measures``,
  ``client_memory``, ``reply_cache``.
- Passes over examples without training: ``passes``.
- Arithmetic and resources: ``precision``, ``cores``, ``footprint``.
- A user's functions: ``user_functions``.
"""
