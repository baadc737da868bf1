#!/bin/sh
# Installs Chromium by the system's package manager. Without it the tests of the editor are skipped; in CI they fail.
set -eu
as_root=""
[ "$(id -u)" -eq 0 ] || as_root=sudo
if command -v apt-get >/dev/null 2>&1; then
    $as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -qq -y --no-install-recommends chromium >/dev/null
else
    echo "Please install Chromium, and put it on the PATH" >&2
    exit 1
fi
command -v chromium
