"""Runs: preparation, the loop over rounds, journal, checkpoints, results, comparisons."""
