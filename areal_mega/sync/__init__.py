"""Weight sync: the communicator between trainer and inference servers, digests, and what is sent over it."""
