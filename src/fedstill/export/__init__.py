"""Exports the model of a run: as a module, as plain code, as ONNX, and as a folder to share."""
