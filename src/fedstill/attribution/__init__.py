"""Why the model forgot: which moment, who contributed, and what would have been without a
client.
"""
