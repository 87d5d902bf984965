"""The federated loop: records, methods, clients' work, topologies, rounds and the screen.

It knows nothing of files, configs, Flower or reports; everything else is built on it.

"""
