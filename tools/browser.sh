#!/bin/sh
# Installs Chromium with the system's package manager. Without Chromium, the browser tests are
# skipped. In CI, they fail.
set -eu
as_root=""
[ "$(id -u)" -eq 0 ] || as_root=sudo
if command -v apt-get >/dev/null 2>&1; then
    $as_root apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -qq -y --no-install-recommends chromium >/dev/null
else
    echo "Chromium can't be installed automatically. Install it and add it to the PATH." >&2
    exit 1
fi
command -v chromium
