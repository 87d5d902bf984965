"""Queries: clients ask peers for classes that they lack."""
