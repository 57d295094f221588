#!/usr/bin/env bash
# Print the path of uv, installing it into .tools/ (of this checkout, nothing else) where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if command -v uv >/dev/null 2>&1; then
    command -v uv
    exit 0
fi
uv="$PWD/.tools/uv/bin/uv"
if [[ ! -x "$uv" ]] || ! "$uv" --version >/dev/null 2>&1; then
    echo "setup: uv is not installed; putting it into .tools/uv" >&2
    rm -rf .tools/uv
    mkdir -p .tools
    if ! python3 -m venv .tools/uv >&2 || ! .tools/uv/bin/python -m pip install --quiet 'uv>=0.5' >&2; then
        # Some systems ship Python without venv's pip.
        rm -rf .tools/uv
        if ! python3 -m pip install --quiet --no-warn-script-location --prefix "$PWD/.tools/uv" 'uv>=0.5' >&2; then
            echo "setup: python3 has neither venv nor pip here; install uv (https://docs.astral.sh/uv) and run this again" >&2
            exit 1
        fi
    fi
fi
echo "$uv"
