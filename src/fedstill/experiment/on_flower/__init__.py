"""Runs whose clients are reached over Flower: the client's side, and the server's."""
