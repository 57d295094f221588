"""Freed memory is kept: what is allocated next has its pages already."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from areal_mega.core.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(8 << 20, np.uint8) for _ in range(8)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc can be told")
def test_what_was_freed_is_used_again() -> None:
    """Eight arrays of 8 MiB at once, after eight others: by themselves thousands of page faults, where pages are of 4 KiB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 100
