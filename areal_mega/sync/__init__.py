"""Weight sync: the communicator between trainer and inference servers, digests, and what is sent over it."""

GRACE_S = 15.0
"""Whoever takes part in a sync waits so much longer than the controller, which sees all members and can say which of them is silent."""
