"""The ranking: suites of fixed settings, the choice of fields, entries, their check and their
replay, and maps.
"""
