"""From settings to a run that can start: data read and split, models known, the engine built,
conflicts refused.
"""
