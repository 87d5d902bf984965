"""Speed and memory, against the machine's limit, a plain loop, and peers: ``make bench``,
``make bench-peers``.
"""
