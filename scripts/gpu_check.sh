#!/usr/bin/env bash
# Parity and speed of the training engine on one GPU, in at most 8 minutes and without a network.
#
#     bash scripts/gpu_check.sh [--wheels DIR] [--python PYTHON] [--device cuda|cpu] [--model dense|moe] [--peak-tflops N]
#
# Needs an interpreter with torch. What else the engine imports may lie in DIR as wheels (megatron-core, pydantic, pydantic-core,
# annotated-types, typing-inspection, typing-extensions, pyyaml, safetensors, numpy, packaging); they are unpacked, not installed.
# --device cpu runs everything with small shapes. Exit code 1: parity failed; 2: something is missing.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="" wheels="" rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels | --python)
            [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
            if [ "$1" = --wheels ]; then wheels="$2"; else python="$2"; fi
            shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
if [ -z "$python" ]; then
    python="$here/../.venv/bin/python"
    [ -x "$python" ] || python="$(command -v python3)" || { echo "no python3 found; name one with --python" >&2; exit 2; }
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
path="$here/.."
if [ -n "$wheels" ]; then
    shopt -s nullglob
    found=("$wheels"/*.whl)
    [ ${#found[@]} -gt 0 ] || { echo "$wheels holds no wheel" >&2; exit 2; }
    for wheel in "${found[@]}"; do "$python" -m zipfile -e "$wheel" "$work/wheels"; done
    path="$path:$work/wheels"
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TMPDIR="$work" PYTHONWARNINGS=ignore
code=0
timeout --signal=INT --kill-after=10 480 "$python" "$here/gpu_check.py" ${rest[@]+"${rest[@]}"} || code=$?
case $code in 124 | 137) echo "not done within 8 minutes" >&2 ;; esac
exit $code
