#!/bin/sh
# Installs PgBouncer by the system's package manager. Without it its tests are skipped; in CI they fail.
set -eu
as_root=""
[ "$(id -u)" -eq 0 ] || as_root=sudo
if command -v apt-get >/dev/null 2>&1; then
    $as_root apt-get update -qq
    # Without its service: the tests start their own.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 $as_root apt-get install -qq -y --no-install-recommends pgbouncer >/dev/null
else
    echo "Please install PgBouncer, and put it on the PATH" >&2
    exit 1
fi
PATH="$PATH:/usr/sbin" command -v pgbouncer
