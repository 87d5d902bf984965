"""fedstill as a Flower app."""
