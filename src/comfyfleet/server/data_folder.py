"""Locates the databases and the file store, and locks SQLite files so that only one process uses
them."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from comfyfleet.errors import InvalidInput, Refused
from comfyfleet.settings import DIRECT_URLS, POOL_URLS, Settings, parse_pools

CENTRAL_FILE, TENANTS_FILE, FILES_FOLDER = "central.sqlite3", "tenants.sqlite3", "files"
DEFAULT_POOL = "main"


@dataclass(frozen=True, slots=True)
class DatabaseLocation:
    """The location of a database. Embedded databases in the data folder are migrated
    automatically."""

    url: str
    is_embedded: bool = False
    # The URL of the PostgreSQL server if `url` points to a transaction pooler.
    direct_url: str | None = None

    @property
    def file(self) -> Path | None:
        """The path of the SQLite file, or None for other databases."""
        kind, separator, path = self.url.partition(":///")
        return Path(path) if separator and kind.startswith("sqlite") else None


@dataclass(frozen=True, slots=True)
class DataLocations:
    central: DatabaseLocation
    pools: Mapping[str, DatabaseLocation]
    storage_url: str

    def sqlite_files(self) -> list[Path]:
        """Returns the SQLite files without duplicates, because several pools can share a file."""
        places = (self.central, *self.pools.values())
        return sorted({place.file.resolve() for place in places if place.file is not None})


def locations_from(settings: Settings, data: Path) -> DataLocations:
    root = data.resolve()
    urls = parse_pools(settings.tenant_database_urls)
    direct = parse_pools(settings.tenant_database_direct_urls, DIRECT_URLS)
    if unknown := sorted(direct.keys() - urls.keys()):
        raise InvalidInput(
            f"{DIRECT_URLS} contains pools that {POOL_URLS} doesn't contain: {', '.join(unknown)}",
            field=DIRECT_URLS,
        )
    if settings.central_database_direct_url and not settings.central_database_url:
        raise InvalidInput(
            "COMFYFLEET_CENTRAL_DATABASE_DIRECT_URL requires COMFYFLEET_CENTRAL_DATABASE_URL, "
            "which must be the pooler's URL"
        )
    pools = {name: DatabaseLocation(url, direct_url=direct.get(name)) for name, url in urls.items()}
    central = _configured(settings.central_database_url, settings.central_database_direct_url)
    return DataLocations(
        central=central or _embedded(root / CENTRAL_FILE),
        pools=pools or {DEFAULT_POOL: _embedded(root / TENANTS_FILE)},
        storage_url=settings.storage_url or (root / FILES_FOLDER).as_uri(),
    )


def _configured(url: str, direct_url: str) -> DatabaseLocation | None:
    return DatabaseLocation(url, direct_url=direct_url or None) if url else None


def _embedded(file: Path) -> DatabaseLocation:
    return DatabaseLocation(f"sqlite:///{file}", is_embedded=True)


PID_CHARACTERS_MAX = 20
# On Windows, other processes can't read a locked byte. The lock therefore covers a byte well past
# the process id.
LOCKED_BYTE = 1024


@contextmanager
def single_process_lock(databases: Iterable[Path]) -> Iterator[None]:
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
        # The file isn't deleted at exit. Otherwise, two other processes could lock two different
        # files with the same name.
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _held(database: Path, file: IO[str]) -> Refused:
    file.seek(0)
    pid = file.read(PID_CHARACTERS_MAX).strip()
    holder = f"process {pid}" if pid.isdigit() else "another process"
    return Refused(
        f"{holder} already serves {database}; a SQLite database supports only one control plane",
        hint="Stop that process, use another --data folder, or use PostgreSQL databases "
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
