"""Attribution of forgetting to clients: the changes of each class's accuracy by round, the clients'
contributions to them, and the effect of leaving out a client.
"""
