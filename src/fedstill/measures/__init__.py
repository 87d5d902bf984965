"""Measures of a run: what each looks at after a stage, and the plain numbers that it gives the
journal.
"""
