"""The harness that runs functions on several ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import RankFailed, run_ranks


def echo(rank: int, world_size: int, *, array: np.ndarray, text: str) -> dict:
    import torch

    t = torch.full((2,), float(rank + 1))
    torch.distributed.all_reduce(t)
    return {"sum": t, "half": t.bfloat16(), "array": array * rank, "text": text, "rank": rank, "pair": (1, None), 3: b"ab"}


def fail_on_one(rank: int, world_size: int) -> None:
    import torch

    if rank == 1:
        raise ValueError("rank one does not like it")
    torch.distributed.barrier()


def sleep(rank: int, world_size: int, *, pid_file: str) -> None:
    with open(f"{pid_file}.{rank}", "w") as f:
        f.write(str(os.getpid()))
    time.sleep(60)


def test_results_by_rank() -> None:
    results = run_ranks(3, echo, array=np.arange(3.0), text="x")
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["text"] == "x"
        assert result["pair"] == [1, None]
        assert result[3] == b"ab"
        np.testing.assert_array_equal(result["sum"], [6.0, 6.0])
        np.testing.assert_array_equal(result["half"], [6.0, 6.0])
        np.testing.assert_array_equal(result["array"], np.arange(3.0) * rank)


def test_first_failure_is_reported() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised[\s\S]*rank one does not like it"):
        run_ranks(2, fail_on_one)
    run_ranks(1, echo, array=np.zeros(1), text="the pool goes on")


def test_deadline_kills_the_ranks(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="not done within 5 s"):
        run_ranks(2, sleep, timeout_s=5.0, distributed=False, pid_file=str(tmp_path / "pid"))
    for file in tmp_path.glob("pid.*"):  # on a busy machine a rank may not have come so far
        if pid := file.read_text():
            assert not os.path.exists(f"/proc/{pid}")


class Interrupted(Exception):
    pass


def test_an_interrupted_case_leaves_no_answer_to_the_next(tmp_path: Path) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Interrupted):
            run_ranks(1, sleep, timeout_s=100.0, distributed=False, pid_file=str(tmp_path / "pid"))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert run_ranks(1, echo, array=np.zeros(1), text="the next one's own")[0]["text"] == "the next one's own"
