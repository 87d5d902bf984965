"""Experiments: from a configuration to a finished run, with everything written down on the way."""
