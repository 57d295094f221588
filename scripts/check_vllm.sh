#!/usr/bin/env bash
# Check the product against a real vLLM server on this machine's CPU: check_vllm.sh [--keep] [--env DIR].
# Sets its environment up from package registries (.tools/vllm unless --env), runs the client's suite on servers of three tiny models, then
# two short GRPO runs with two train ranks. --keep leaves the runs in runs/check_vllm.
set -euo pipefail
engine=vllm
source "$(dirname "${BASH_SOURCE[0]}")/server_env.sh"

echo "== client, log-probabilities, pauses, aborts, weights of a tied, an untied and a sparse model"
AREAL_MEGA_VLLM_ENV="$env" timeout 3000 .venv/bin/python -m pytest -q --timeout 900 -k '[vllm' tests/rollout/test_vllm_server.py
echo "== GRPO"
timeout 3000 .venv/bin/python scripts/vllm/grpo.py --python "$env/bin/python" --root "$PWD/$root"
echo "all passed"
