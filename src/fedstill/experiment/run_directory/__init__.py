"""What a run leaves on disk: journal, checkpoints, result; and the lock that keeps two processes
apart.
"""
