"""Its presence puts tests/ on the import path: the rooms share `ranks.py`."""

from hypothesis import settings

# How long an example takes says nothing about the code on a machine that others use too.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
