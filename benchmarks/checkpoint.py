"""A recover checkpoint against raw writes of the same bytes, in one run: how long it stops the training loop, and how fast it is written.

One process trains a model of some hundred MB and saves it as a run does: copies (the stall), then a thread that writes while training goes
on. The other side writes the same number of bytes with plain ``write`` calls from as many threads, and syncs the file system. Rounds
alternate; medians are printed.

    python benchmarks/checkpoint.py [--rounds 5] [--layers 12] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import train_step

WRITERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="of a model of SmolLM2's shape")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where to write; a disk shows the disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> None:
    model = train_step.make_model("dense", folder, args.layers)
    threads = len(os.sched_getaffinity(0))
    options = argparse.Namespace(folder=model, dtype="fp32", threads=threads, samples=4, microbatch_tokens=512)
    engine = train_step.make_engine(options)
    step, _, _ = train_step.engine_step(engine, options)
    from areal_mega.launch.roles.recovering import Recovering

    recovering = Recovering(engine)
    step()
    alone = statistics.median(timed(step) for _ in range(3))
    rows: list[dict[str, float]] = []
    for number in range(args.rounds):
        rows.append(one_round(recovering, step, folder, number))
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    size, total = middle["bytes"] / 1e6, middle["stall"] + middle["write"]
    print(f"{size:.0f} MB of weights and moments; a train step alone: {alone:.2f} s; medians of {args.rounds} rounds")
    print(
        f"  stall of the loop      {middle['stall']:.3f} s ({size / middle['stall']:.0f} MB/s), {middle['stall'] / total:.2f} of the whole"
    )
    print(f"  written alone          {middle['write']:.2f} s ({size / middle['write']:.0f} MB/s)")
    print(f"  written beside steps   {middle['beside']:.2f} s ({size / middle['beside']:.0f} MB/s), of {middle['step']:.2f} s each")
    print(f"  raw writes             {middle['raw']:.2f} s ({size / middle['raw']:.0f} MB/s)")
    print(f"  ratio to raw writes    {middle['raw'] / middle['write']:.2f}")


def one_round(recovering: Any, step: train_step.Step, folder: Path, number: int) -> dict[str, float]:
    begun = timed_save(recovering, folder / f"alone-{number}", None)
    beside = timed_save(recovering, folder / f"beside-{number}", step)
    raw = raw_writes(folder / f"raw-{number}", int(begun["bytes"]))
    for path in (*folder.glob("alone-*"), *folder.glob("beside-*"), folder / f"raw-{number}"):
        shutil.rmtree(path)
    return {**begun, "beside": beside["write"], "step": beside["step"], "raw": raw}


def timed_save(recovering: Any, place: Path, step: train_step.Step | None) -> dict[str, float]:
    clock = time.perf_counter()
    nbytes = recovering.recover_begin(str(place))["nbytes"]
    stall = time.perf_counter() - clock
    saving, steps = recovering._saving, []
    while not saving.done():
        if step is None:
            time.sleep(0.002)
        else:
            steps.append(timed(step))
    recovering.recover_commit("{}")
    return {"bytes": nbytes, "stall": stall, "write": saving.write_s, "step": statistics.median(steps) if steps else 0.0}


def raw_writes(place: Path, nbytes: int) -> float:
    place.mkdir()
    block = os.urandom(1 << 22)

    def write(number: int) -> None:
        with open(place / str(number), "wb", buffering=0) as file:
            for _ in range(nbytes // WRITERS // len(block) + 1):
                file.write(block)

    clock = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    os.sync()
    return time.perf_counter() - clock


def timed(step: train_step.Step) -> float:
    clock = time.perf_counter()
    step()
    return time.perf_counter() - clock


if __name__ == "__main__":
    main()
