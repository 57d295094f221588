#!/usr/bin/env bash
# Set-up, then train a small model from scratch on this machine's CPU and show that it learned. Arguments are settings: run.seed=2 …
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/areal-mega train recipes/quickstart.yaml run.root=runs run.name=quickstart "$@"

# Not the program's own word for it: what the run's log says.
.venv/bin/python - runs/quickstart/metrics.jsonl <<'PY'
import json
import sys

accuracy = [m["eval/accuracy"] for line in open(sys.argv[1]) if "eval/accuracy" in (m := json.loads(line)["metrics"])]
learned = accuracy[0] <= 0.5 and accuracy[-1] >= 0.9
print(f"held-out accuracy: {accuracy[0]:.3f} before, {accuracy[-1]:.3f} after")
print("the model has learned; look at the report: runs/quickstart/report.html" if learned else "the model has not learned what it should")
sys.exit(not learned)
PY
