"""Removes what a client, examples or a class have taught a model (``fedstill unlearn``), measures
how well that worked, and certifies it.

The result is a run of its own. The table ``[unlearning]`` of its config names what it does without,
so it can be resumed, compared and reported as any other run.
"""
