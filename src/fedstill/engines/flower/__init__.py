"""Stages carried by Flower: requests and answers, the messages they travel in, who is where, and a grid in this process."""
