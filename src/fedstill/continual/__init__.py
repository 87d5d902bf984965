"""Streams: how the training set is cut into tasks. A kind is one pure function that gives a
``fedstill.core.stream.Cut``.
"""
