"""The federated loop.

- The loop: ``rounds``, ``stages``, ``stage_results``, ``extensions``, ``topology``,
  ``label_counts``.
- Methods: ``method``, ``capabilities``, ``aggregation``, ``robust_means``.
- Records: ``records``, ``payload``, ``stream``, ``trees``, ``codec``.
- Checks of replies and of a user's code: ``screen``, ``reports``, ``checks``, ``user_code``.
- Shared by all packages: ``errors``, ``fields``, ``files``, ``keys``, ``process_settings``,
  ``registry``, ``user_modules``, ``descriptions``.

Nothing here knows how a config is read, what a run directory holds, Flower or reports.
"""
