"""Data: the sources of examples, their partition over clients, and the inputs of networks."""
