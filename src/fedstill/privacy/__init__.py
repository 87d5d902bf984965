"""Secure sums: the server learns the sum of what clients send, and nothing of a single one."""
