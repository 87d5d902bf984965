"""Streams divide the training set into tasks. Each kind of stream is a pure function that returns
a ``fedstill.core.stream.Cut``.
"""
