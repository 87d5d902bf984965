"""Deployments: a federation's folder with its certificates and keys, and Flower's own programs,
started safely.
"""
