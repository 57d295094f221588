#!/usr/bin/env python
"""Kill a real SGLang server in the middle of a run: it is started again with the current weights, and the run ends as if nothing had been.

python scripts/sglang/check_restart.py --python ENV/bin/python --root FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compare_grpo import REPO, SERVER_ARGS, SETTINGS

STEPS = 4
# Steps long beside their weight sync: a death in the middle of a sync ends a run, and is not what is looked for here.
CHANGES: dict[str, Any] = {"run.steps": STEPS, "run.overlap": True, "warmup.steps": 0, "train.batch_size": 32, "eval.at_start": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment that holds SGLang")
    parser.add_argument("--root", type=Path, required=True, help="where the run goes")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    options = parser.parse_args()
    sglang = {"rollout.strategy": "sglang:d1", "rollout.python": options.python, "rollout.server_args": SERVER_ARGS}
    # Rewards of an untrained model are all zero: groups without a difference are trained on all the same.
    settings = SETTINGS | CHANGES | sglang | {"run.root": str(options.root), "run.name": "restart"}
    argv = [sys.executable, "-P", "-c", "from areal_mega.cli.main import main; main()", "train", str(REPO / "recipes/quickstart.yaml")]
    argv += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    run_dir, end = options.root / "restart", time.monotonic() + options.timeout_s
    process = subprocess.Popen(argv, cwd=REPO)
    try:
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 2:  # the line before step 1, and step 1
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("the run did not get to its first step")
            time.sleep(0.2)
        pids = re.findall(r"started server rank 0 as pid (\d+)", (run_dir / "logs/controller-0.log").read_text())
        print(f"killing the server, pid {pids[-1]}", flush=True)
        os.kill(int(pids[-1]), signal.SIGKILL)
        code = process.wait(max(1.0, end - time.monotonic()))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    started = re.findall(r"started server rank 0 as pid (\d+)", (run_dir / "logs/controller-0.log").read_text())
    failed = records[-1]["metrics"]["rollout/failed"]
    print(f"exit code {code}; {len(records) - 1} steps; the server was started {len(started)} times; failed prompts: {failed:.0f}")
    if code or len(records) != STEPS + 1 or len(started) != 2 or failed:
        sys.exit("the run did not go on as it should")


if __name__ == "__main__":
    main()
