"""Frozen data classes that every room shares. No I/O, no torch, nothing of ours imported."""
