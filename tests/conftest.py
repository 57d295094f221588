"""Its presence puts tests/ on the import path: the rooms share `ranks.py`."""
