#!/usr/bin/env bash
# Make an environment that holds a vLLM server for this machine's CPU: setup.sh DIR. Quick when nothing changed; nothing outside DIR.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
env="${1:?usage: setup.sh DIR}"
stamp="$env/.made-from"

made_from() {
    cat "$here/requirements.txt" "$here/setup.sh" | sha256sum | cut -d' ' -f1
}

install() {
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither' >&2)
}

if [[ -x "$env/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$(made_from)" ]]; then
    exit 0
fi
echo "vllm: making $env (2.5 GB, some minutes)" >&2
"$(bash "$here/../python311.sh")" -m venv --clear "$env"
# The list is whole, and vLLM's own would bring packages that a CPU does not need: nothing is resolved.
install --no-deps -r "$here/requirements.txt"
# pip, not uv: it takes the CPU build of torch where the machine offers one; another build brings its libraries with it.
# Its warnings name what vLLM's list has and a CPU does not need: sound, video, images.
install --no-warn-conflicts torch==2.13.0
VLLM_NO_USAGE_STATS=1 "$env/bin/python" -c 'import vllm.entrypoints.openai.api_server' >/dev/null
made_from >"$stamp"
echo "vllm: done" >&2
