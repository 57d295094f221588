"""Checkpoints of one global zarr3 array per parameter, written by any strategy and read into any other; conversion from and to HF."""
