#!/usr/bin/env bash
# Write requirements.lock anew from pyproject.toml: pinned, hashed, no registry address. Arguments go to uv (e.g. --upgrade).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv="$(bash scripts/uv.sh)"
"$uv" pip compile pyproject.toml --quiet --python-version 3.12 --extra dev --generate-hashes --no-emit-index-url --no-emit-find-links \
    --no-header --output-file requirements.lock "$@"
