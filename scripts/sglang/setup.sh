#!/usr/bin/env bash
# Make an environment that holds a SGLang server for this machine's CPU: setup.sh DIR. Quick when nothing changed; nothing outside DIR.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
env="${1:?usage: setup.sh DIR}"
stamp="$env/.made-from"

made_from() {
    cat "$here"/requirements.txt "$here"/requirements-nodeps.txt "$here"/areal_mega_cpu_stand_ins.py "$here"/setup.sh | sha256sum | cut -d' ' -f1
}

if [[ -x "$env/bin/python" && -f "$stamp" && "$(cat "$stamp")" == "$(made_from)" ]]; then
    exit 0
fi
echo "sglang: making $env (2.8 GB, some minutes)" >&2
"$(bash "$here/../python311.sh")" -m venv --clear "$env"
# pip, not uv: it takes the CPU build of torch where the machine offers one.
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt" 2> >(grep -v 'is ignored: it is neither' >&2)
"$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements-nodeps.txt" \
    2> >(grep -v 'is ignored: it is neither' >&2)
site="$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
cp "$here/areal_mega_cpu_stand_ins.py" "$site/"
echo 'import areal_mega_cpu_stand_ins' >"$site/zz_areal_mega_cpu_stand_ins.pth"
"$env/bin/python" -c 'import sglang.srt.server_args' >/dev/null
made_from >"$stamp"
echo "sglang: done" >&2
