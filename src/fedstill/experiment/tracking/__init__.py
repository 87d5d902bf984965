"""Trackers: other tools that are told what a run does, round by round: TensorBoard, MLflow, Weights
& Biases.
"""
