"""Calls between the processes of a run: msgpack over HTTP with a token per run. Never pickle."""
