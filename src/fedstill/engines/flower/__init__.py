"""Stages carried by Flower: requests and answers, messages, who is where, and a grid inside this
process.
"""
