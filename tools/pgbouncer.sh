#!/bin/sh
# Installs PgBouncer with the system's package manager. Without PgBouncer, its tests are skipped. In
# CI, they fail.
set -eu
as_root=""
[ "$(id -u)" -eq 0 ] || as_root=sudo
if command -v apt-get >/dev/null 2>&1; then
    $as_root apt-get update -qq
    # Don't start the service, because the tests start their own processes.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 $as_root apt-get install -qq -y --no-install-recommends pgbouncer >/dev/null
else
    echo "PgBouncer can't be installed automatically. Install it and add it to the PATH." >&2
    exit 1
fi
PATH="$PATH:/usr/sbin" command -v pgbouncer
