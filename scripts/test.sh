#!/usr/bin/env bash
# Everything that must pass: set-up, lint, format, types, imports, tests. Arguments go to pytest. All steps run; any failure fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

bash scripts/setup.sh

bin=.venv/bin
failed=()
times=()

step() {
    local name="$1" start=$SECONDS
    shift
    echo "== $name"
    "$@" || failed+=("$name")
    times+=("$name $((SECONDS - start)) s")
}

step "ruff check" "$bin/ruff" check .
step "ruff format" "$bin/ruff" format --check .
step "mypy" "$bin/mypy"
step "lint-imports" "$bin/lint-imports" --no-logo --no-cache
# Two at a time: much of the suite waits for Slurm, for processes that start, or for deadlines.
step "pytest" "$bin/python" -m pytest --numprocesses 2 "$@"

printf '== %s\n' "${times[@]}"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed"
