"""One run from its beginning or its last checkpoint to its end: the loop over rounds, the journal,
the measuring.
"""
