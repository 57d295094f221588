"""Advantage estimators, policy losses, off-policy corrections, and the registry of named algorithms.

``registry``, ``advantages`` and ``aggregation`` are free of torch, so the controller may import them at no cost.
"""
