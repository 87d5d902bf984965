"""Engines execute stages. The serial engine is the definition, and all others are tested against
it.

- Engines: ``serial``, ``pooled`` (clients in threads), ``vectorised`` (stacked clients).
- One client's work: ``loop``, ``clients``, ``step``, ``optimiser``; for stacked clients ``stack``,
  on a GPU ``cuda_graphs``.
- Measures at clients, and cached replies: ``client_measures``, ``reply_cache``.
- Passes over examples without training, and their cost: ``passes``.
- Cores, memory and precision: ``hardware``; the devices of a config: ``devices``.
"""
