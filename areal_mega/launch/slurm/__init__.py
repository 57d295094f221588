"""Runs as Slurm arrays: the scripts, the array's tasks, and what Slurm knows of them."""
