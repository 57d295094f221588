#!/usr/bin/env bash
# Make .venv from requirements.lock, and nothing outside this checkout. Quick when nothing changed; safe to run at the same time twice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
stamp=.venv/.made-from

made_from() {
    cat requirements.lock pyproject.toml scripts/setup.sh | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d' ' -f1
    # A moved checkout holds a venv that points to the old place.
    pwd
}

is_current() {
    [[ -x "$python" && -f "$stamp" && "$(cat "$stamp")" == "$(made_from)" ]] && "$python" -P -c 'import areal_mega' 2>/dev/null
}

find_python() {
    # uv looks on PATH; pyenv's versions are not there unless selected.
    local found candidate
    if found="$("$uv" python find --no-python-downloads 3.12 2>/dev/null)"; then
        echo "$found"
        return
    fi
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
        if [[ -x "$candidate" ]]; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.12 here; uv fetches one for itself" >&2
    "$uv" python install --quiet 3.12 >&2
    "$uv" python find 3.12
}

is_current && exit 0

mkdir -p .tools
exec 9>.tools/setup.lock
if command -v flock >/dev/null 2>&1; then
    flock 9
    is_current && exit 0
fi

uv="$(bash scripts/uv.sh)"
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    base="$(find_python)"
    echo "setup: making .venv with $base" >&2
    "$uv" venv --quiet --clear --python "$base" .venv
fi
echo "setup: installing what requirements.lock lists (some GB the first time)" >&2
quiet=(--quiet)
[[ -t 2 ]] && quiet=()
# Compiled once: where PYTHONDONTWRITEBYTECODE is set, every process of a run would compile torch and the rest anew, for 10 s.
"$uv" pip sync ${quiet[@]+"${quiet[@]}"} --compile-bytecode --python "$python" --require-hashes requirements.lock
# Its own build back end is in the lock, so nothing else is fetched.
"$uv" pip install --quiet --python "$python" --no-deps --no-build-isolation --editable .
made_from >"$stamp"
echo "setup: done" >&2
