#!/bin/sh
# Usage: setup.sh VENV EXTRAS. Creates the virtual environment and installs comfyfleet into it.
# PYTHON names the interpreter; by default the first on the PATH that is new enough.
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
echo "Installing comfyfleet[$extras] into $venv…"
if command -v uv >/dev/null 2>&1; then
    VIRTUAL_ENV=$venv uv pip install --quiet --constraint constraints.txt --editable ".[$extras]"
else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]"
fi
