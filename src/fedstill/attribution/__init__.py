"""Finds out which clients caused forgetting: which class lost accuracy in which round, how much
each client contributed to it, and what would have happened without a client.
"""
