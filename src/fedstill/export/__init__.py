"""A run's model, taken out of it: as a module, as plain code, as ONNX, as a folder to share."""
