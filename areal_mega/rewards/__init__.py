"""Verifiers, run in isolated processes with time-outs that fire.

A reward function is a plain function ``(prompt: str, completion: str, row: dict, **kwargs)`` that returns a number, or a mapping
with ``reward`` and any named scores beside it. A score named ``parsed`` that is false marks an answer in which nothing could be
read: it counts with the reward given, and apart.
"""
