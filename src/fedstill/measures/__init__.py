"""Measures of a run, each in one file: what it looks at after a stage, and the plain numbers it
gives the journal.
"""
