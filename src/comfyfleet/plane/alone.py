"""SQLite means one control-plane process: wake-ups and the order of writers live in its memory.

A lock on a file beside the database, which the system takes back however the process ends.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from comfyfleet.kernel.errors import InvalidInput, Refused

PID_CHARACTERS_MAX = 20
# Windows locks bytes, and what is locked can't be read by others: so one far behind the pid.
LOCKED_BYTE = 1024


@contextmanager
def alone(databases: Iterable[Path]) -> Iterator[None]:
    with ExitStack() as stack:
        for database in databases:
            stack.enter_context(_only_one(database))
        yield


@contextmanager
def _only_one(database: Path) -> Iterator[None]:
    path = database.with_name(f"{database.name}.lock")
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="ascii")
    except OSError as error:
        raise InvalidInput(f"{database} can't be used: {error.strerror or error}") from error
    with file:
        if not _locked(file):
            raise _held(database, file)
        # The file stays when we go: to remove it would let two others lock two different ones.
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _held(database: Path, file: IO[str]) -> Refused:
    file.seek(0)
    pid = file.read(PID_CHARACTERS_MAX).strip()
    holder = f"process {pid}" if pid.isdigit() else "another process"
    return Refused(
        f"{holder} already serves {database}, and on SQLite there can be only one control plane",
        hint="Stop that process, use another --data folder, or put the databases on PostgreSQL "
        "(COMFYFLEET_CENTRAL_DATABASE_URL, COMFYFLEET_TENANT_DATABASE_URLS).",
        pid=int(pid) if pid.isdigit() else None,
    )


if sys.platform == "win32":
    import msvcrt

    def _locked(file: IO[str]) -> bool:
        file.seek(LOCKED_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _locked(file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
