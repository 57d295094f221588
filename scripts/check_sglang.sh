#!/usr/bin/env bash
# Check the product against a real SGLang server on this machine's CPU: check_sglang.sh [--keep] [--env DIR].
# Sets its environment up from package registries (.tools/sglang unless --env), runs the client's suite on a server of a tiny model, then a
# short GRPO run on SGLang and on the embedded server from the same start, and one whose server is killed. --keep leaves the runs in runs/check_sglang.
set -euo pipefail
engine=sglang
source "$(dirname "${BASH_SOURCE[0]}")/server_env.sh"

echo "== client, sync, pauses, aborts, log-probabilities, routed experts"
AREAL_MEGA_SGLANG_ENV="$env" timeout 1500 .venv/bin/python -m pytest -q --timeout 900 -k '[sglang' tests/rollout/test_inference_server.py
echo "== GRPO"
timeout 3100 .venv/bin/python scripts/sglang/compare_grpo.py --python "$env/bin/python" --root "$PWD/$root"
echo "== a killed server"
timeout 1000 .venv/bin/python scripts/sglang/check_restart.py --python "$env/bin/python" --root "$PWD/$root"
echo "all passed"
