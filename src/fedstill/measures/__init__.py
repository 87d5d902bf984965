"""Measures: numbers that a run records in its journal in addition to accuracy and forgetting.

``base`` defines the interface of a measure, ``context`` the objects that it may use, and ``choice``
the selection of a run's measures. Each other module has one measure, or several of one kind.
"""
