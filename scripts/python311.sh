#!/usr/bin/env bash
# Print the path of a Python 3.11 that can make virtual environments, for inference servers; uv fetches one where there is none.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

for candidate in "$(command -v python3.11 || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin/python3.11; do
    # A shim of pyenv exists even where no such version is selected.
    if [[ -n "$candidate" ]] && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$candidate"
        exit 0
    fi
done
uv="$(bash "$here/uv.sh")"
echo "setup: no Python 3.11 here; uv fetches one for itself" >&2
"$uv" python install --quiet 3.11 >&2
"$uv" python find 3.11
