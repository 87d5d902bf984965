"""Measures of a run: what each looks at after a stage, and the plain numbers that it gives the
journal.

``base`` says what a measure is, ``context`` what it may use, ``choice`` which ones a run has. Each
other module is a measure, or several of one kind.
"""
