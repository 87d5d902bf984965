"""Rounds over Flower: messages, the server's engine, sites with their own data, and deployments."""
