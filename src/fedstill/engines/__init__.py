"""Engines: how a stage is carried out. The serial engine is the definition; every other is tested
against it.
"""
