#!/usr/bin/env bash
# Sourced by check_sglang.sh and check_vllm.sh, which set `engine` and pass their arguments: makes ready what both need.
# Sets `env` (the environment of the engine) and `root` (a fresh folder for runs, removed at the end unless --keep).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

keep=no
env="$PWD/.tools/$engine"
while (($#)); do
    case "$1" in
        --keep) keep=yes ;;
        --env)
            env="$(realpath -m "${2:?--env needs a folder}")"
            shift
            ;;
        *)
            echo "usage: check_$engine.sh [--keep] [--env DIR]" >&2
            exit 2
            ;;
    esac
    shift
done
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1

bash scripts/setup.sh
bash "scripts/$engine/setup.sh" "$env"

root="runs/check_$engine"
rm -rf "$root"
mkdir -p "$root"
[[ "$keep" == yes ]] || trap 'rm -rf "$root"' EXIT
