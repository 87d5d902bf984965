"""A commit and the working tree, timed in alternation."""
