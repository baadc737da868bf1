#!/bin/sh
# Usage: setup.sh VENV EXTRAS. Creates the virtual environment and installs comfyfleet into it.
# PYTHON is the interpreter. The default is the first one on the PATH that is new enough.
set -eu
venv=$1 extras=$2

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if new_enough "$python"; then echo "$python"; return; fi
    done
    echo "comfyfleet needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    exit 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    echo "Creating $venv with $("$python" --version) (once)…"
    if command -v uv >/dev/null 2>&1; then uv venv --quiet --python "$(command -v "$python")" "$venv"
    else "$python" -m venv "$venv"; fi
fi
echo "Installing comfyfleet[$extras] into $venv (once)…"

# Writes the installer's output to a log, and shows only its current step.
log=$venv/install.log
install() {
    if command -v uv >/dev/null 2>&1; then
        VIRTUAL_ENV=$venv uv pip install --constraint constraints.txt --editable ".[$extras]"
    else
        # Skip compilation. Python compiles each module when it is first imported.
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile \
            --progress-bar off --constraint constraints.txt --editable ".[$extras]"
    fi
}

step() {
    collected=$(grep -c -E '^(Collecting|Processing)' "$log" || true)
    line=$(grep -E '^ *(Collecting|Processing|Downloading|Using cached|Building|Preparing|Installing|Prepared|Resolved)' "$log" \
        | tail -n 1 | sed -E 's/^ *//; s/ \(.*//; s/^(Installing collected packages).*/\1/' | cut -c 1-60)
    echo "$line${collected:+ ($collected packages so far)}"
}

install >"$log" 2>&1 &
installing=$!
trap 'kill $installing 2>/dev/null; exit 130' INT TERM
seconds=0
while kill -0 "$installing" 2>/dev/null; do
    sleep 1
    seconds=$((seconds + 1))
    if [ -t 1 ]; then printf '\r\033[K  %s s  %s' "$seconds" "$(step)"
    elif [ $((seconds % 10)) -eq 0 ]; then echo "  $seconds s  $(step)"; fi
done
[ ! -t 1 ] || printf '\r\033[K'
if ! wait "$installing"; then
    cat "$log" >&2
    exit 1
fi
echo "Installed in about $seconds s (log: $log)"
