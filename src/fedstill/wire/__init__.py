"""What crosses the seam between server and clients: its bytes, and the checks on what comes
back.
"""
