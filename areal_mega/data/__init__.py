"""Datasets in one normal form, the resumable prompt stream, and supervised examples.

A row is a plain ``dict``: ``id`` (stable over runs), ``messages`` (a chat) or ``prompt`` (a raw string, used verbatim, without a
template), ``answer`` (a string), optionally ``response`` (a worked answer, for the supervised warm-up), and whatever else the
workflow and the reward read.
"""
